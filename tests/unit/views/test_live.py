"""Views of a machine: what changed leads from one to the next, and readers get no more than they may see."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.engine.outlook import NOT_SHOWN, PolicyHead
from gpukeeper.lifecycle.claims import ClaimState
from gpukeeper.model.decision import Verdict
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import State
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import GpuState, GpuTile, MachineView, WorkloadLine, difference, for_reader, patched, row_id

AT = datetime(2026, 5, 1, tzinfo=UTC)
PEOPLE = ("ann", "bob", "eve")
SECRET = "reason of "
owners = st.sampled_from([*PEOPLE, None, Unknown("label unreadable")])


@st.composite
def tiles(draw: st.DrawFn) -> GpuTile:
    number, owner = draw(st.integers(0, 5)), draw(owners)
    held = draw(st.booleans())
    return GpuTile(
        id=row_id("m", "node", str(number)),
        key=f"key-{number}" if held else "",
        name=f"node/{number}",
        place="node",
        device=f"GPU-{number}",
        how=ClaimState.KEPT if held else ClaimState.FREE,
        platform="docker",
        state=draw(st.sampled_from(GpuState)),
        owner=owner if held else None,
        use=draw(st.none() | st.floats(0, 100)),
        reason=f"{SECRET}{owner}" if held else "",
    )


@st.composite
def lines(draw: st.DrawFn) -> WorkloadLine:
    number, owner = draw(st.integers(0, 5)), draw(owners)
    return WorkloadLine(
        id=row_id("m", f"w{number}"),
        key=f"key-{number}",
        path=f"docker/node/w{number}",
        platform="docker",
        place="node",
        kind="container",
        name=f"w{number}",
        state=State.RUNNING,
        owner=owner,
        owner_verified=True,
        class_="managed",
        gpus=1,
        since=AT,
        next=draw(st.sampled_from(["kept", "stop"])),
        due=None,
        rule="idle",
        verdict=Verdict.WAIT,
        reason=f"{SECRET}{owner}",
    )


@st.composite
def views(draw: st.DrawFn) -> MachineView:
    gpus = draw(st.lists(tiles(), max_size=6, unique_by=lambda one: one.id))
    workloads = draw(st.lists(lines(), max_size=6, unique_by=lambda one: one.id))
    return MachineView(
        machine="m",
        at=AT + timedelta(seconds=draw(st.integers(0, 1000))),
        version="1",
        policy=PolicyHead("file", "digest", "preset", Mode.PLAN),
        paused=draw(st.none() | st.just("moving")),
        places=(),
        gpus=tuple(sorted(gpus, key=lambda one: (one.place, one.platform, len(one.name), one.name))),
        workloads=tuple(sorted(workloads, key=lambda one: one.path)),
        notes=("two workloads claim GPU-1",),
    )


@given(st.none() | views(), views())
def test_the_difference_leads_from_one_view_to_the_next(before: MachineView | None, after: MachineView) -> None:
    assert patched(before, difference(before, after)) == after


@given(views())
def test_without_a_change_no_row_is_sent(view: MachineView) -> None:
    delta = difference(view, view)
    assert (delta.gpus, delta.workloads, delta.gone) == ((), (), ())


@given(views(), st.sampled_from([*PEOPLE, "\0"]))
def test_nobody_reads_the_reason_of_others(view: MachineView, who: str) -> None:
    seen = for_reader(view, who, admin=False)
    text = msgspec.json.encode(seen).decode()
    found = {text[at + len(SECRET) :].split('"')[0] for at in range(len(text)) if text.startswith(SECRET, at)}
    assert found <= {who}
    assert seen.notes == ()
    for one in (*seen.gpus, *seen.workloads):
        assert one.owner == who or one.reason in ("", NOT_SHOWN)


@given(views())
def test_an_admin_sees_everything(view: MachineView) -> None:
    assert for_reader(view, "root", admin=True) is view
