"""Views of machines from a copy: no machine can pass for another, and what is old is not shown as present."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given

from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.interfaces.daemon.fleet_copy import encoded
from gpukeeper.model.policy import Mode
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import GpuState, MachineView, aged, read_view
from tests.unit.views.test_live import views

SEEN = datetime(2026, 5, 1, 14, 2, tzinfo=UTC)


@given(views())
def test_a_view_survives_the_copy(view: MachineView) -> None:
    found = read_view("node-7", encoded(view).decode())
    assert found.machine == "node-7"
    names = {one.id for one in (*found.gpus, *found.workloads)}
    assert not names & {one.id for one in (*view.gpus, *view.workloads)}, "ids are those of the fleet"
    assert [one.name for one in found.gpus] == [one.name for one in view.gpus]
    assert [one.reason for one in found.workloads] == [one.reason for one in view.workloads]
    same = read_view("node-7", encoded(view).decode())
    assert same == found
    other = read_view("node-8", encoded(view).decode())
    assert not names & {one.id for one in (*other.gpus, *other.workloads)}


@given(views())
def test_what_is_old_is_unknown(view: MachineView) -> None:
    found = aged(view, SEEN)
    assert found.not_seen_since == found.at == SEEN
    for before, tile in zip(view.gpus, found.gpus, strict=True):
        assert (tile.state, tile.last_state, tile.as_of) == (GpuState.UNKNOWN, before.state, SEEN)
        assert isinstance(tile.use, Unknown)
        assert tile.steps == ()
    for line in found.workloads:
        assert (line.next, line.due, line.as_of) == ("unknown", None, SEEN)
        assert isinstance(line.state, Unknown)


@pytest.mark.parametrize("at", ["2026-05-01T00:00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59Z"])
@given(views())
def test_times_that_no_page_could_show_are_refused(at: str, view: MachineView) -> None:
    body = re.sub(r'"at":"[^"]*"', f'"at":"{at}"', encoded(view).decode(), count=1)
    with pytest.raises(ValueError, match="time"):
        read_view("node-1", body)


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"machine": 1}'])
def test_what_is_no_view_is_refused(body: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_view("node-1", body)


def test_names_that_are_no_text_can_be_copied() -> None:
    view = MachineView(
        machine="m",
        at=SEEN,
        version="1",
        policy=PolicyHead("file", "digest", "preset", Mode.PLAN),
        paused="by \udcff",
        places=(),
        gpus=(),
        workloads=(),
    )
    assert read_view("node-1", encoded(view).decode()).paused == "by \\udcff"


@given(views())
def test_a_view_that_is_too_large_loses_workloads_first(view: MachineView) -> None:
    whole = encoded(view)
    assert encoded(view, len(whole)) == whole
    smaller = msgspec.json.decode(encoded(view, len(whole) - 1), type=MachineView)
    assert len(smaller.workloads) + len(smaller.gpus) <= len(view.workloads) + len(view.gpus)
    assert "not in the copy" in smaller.notes[0]
