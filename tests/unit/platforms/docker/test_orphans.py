"""What ties a process to a container that ended, and what never does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.clients.docker import Inspected
from gpukeeper.devices.holders import Holder
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.acts import is_another_engines, proof_of_orphan
from tests.unit.platforms.docker.examples import ID, OTHER_ID, container, ended

HOLDER = Holder(pid=77, starttime=1, uid=1001, comm="python", stopped=False, minors=(0,), container=ID)
END = datetime(2026, 11, 15, 10, 0, 0, 250000, tzinfo=UTC)
BEFORE = END - timedelta(minutes=5)


def proof(one: Inspected | Unknown | None, began: datetime = BEFORE, once_had: Any = None) -> Any:
    return proof_of_orphan(HOLDER, began, one, once_had or {})


def test_a_process_of_an_ended_container_is_proven() -> None:
    assert "which ended at 2026-11-15 10:00:00" in proof(container(state=ended()))


def test_a_process_of_a_removed_container_is_proven() -> None:
    assert "which was removed" in proof(None, once_had={ID: container()})


@pytest.mark.parametrize("once_had", [{}, {OTHER_ID: container(id=OTHER_ID)}])
def test_a_container_this_engine_never_had_proves_nothing(once_had: dict[str, Inspected]) -> None:
    assert proof(None, once_had=once_had) is None


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"Status": "paused", "Paused": True},
        {"Status": "restarting", "Restarting": True, "Pid": 0},
        {"Status": "removing", "Running": False},
        ended(StartedAt="0001-01-01T00:00:00Z"),
        ended(Status="strange"),
        ended(FinishedAt="garbage"),
        ended(FinishedAt="0001-01-01T00:00:00Z"),
    ],
)
def test_a_container_that_did_not_surely_end_proves_nothing(state: dict[str, Any]) -> None:
    assert proof(container(state=state)) is None


def test_a_process_that_began_after_the_end_is_of_another_run() -> None:
    assert proof(container(state=ended()), END + timedelta(seconds=3)) is None


@pytest.mark.parametrize(("seconds", "proven"), [(1.9, True), (2.0, True), (2.1, False)])
def test_start_and_end_are_by_two_clocks_that_differ_by_up_to_two_seconds(seconds: float, proven: bool) -> None:
    assert isinstance(proof(container(state=ended()), END + timedelta(seconds=seconds)), str) is proven


def test_a_container_that_could_not_be_checked_leaves_it_unknown() -> None:
    assert isinstance(proof(Unknown("no answer"), once_had={ID: container()}), Unknown)


@pytest.mark.parametrize(
    ("cgroup", "others"),
    [
        (f"0::/kubepods/burstable/pod1/{ID}\n", True),
        (f"0::/machine.slice/libpod-{ID}.scope\n", True),
        (f"0::/docker/{ID}\n", False),
        (f"0::/system.slice/docker-{ID}.scope\n", False),
    ],
)
def test_pods_and_podman_are_shown_by_others(tmp_path: Path, cgroup: str, others: bool) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "77/cgroup").write_text(cgroup)
    assert is_another_engines(HOLDER, str(tmp_path)) is others


def test_a_process_that_left_is_nobodys(tmp_path: Path) -> None:
    assert is_another_engines(HOLDER, str(tmp_path))
