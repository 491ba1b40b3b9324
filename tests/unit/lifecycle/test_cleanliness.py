"""Did a GPU come back clean? Every kind of holder, the driver's list, memory, and what driver and kernel say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.lifecycle.cleanliness import (
    Cleanliness,
    CleanStatus,
    HolderKind,
    Life,
    ResetFacts,
    assess_gpu,
    holder_kind,
    new_baseline,
    why_no_reset,
)
from gpukeeper.model.gpu import Advice, CheckResult, Condition, GpuHolder, Xid
from gpukeeper.model.unknown import Unknown

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
ENDED, LIVE, STRANGER = "e" * 64, "1" * 64, "5" * 64
LIVES = {ENDED: Life.ENDED, LIVE: Life.LIVE, STRANGER: Life.STRANGER}
BASELINE = 615
FREE = Condition(
    uuid="GPU-1",
    at=NOW,
    memory_used_mib=615,
    advice=Advice.NONE,
    remap_pending=False,
    remap_failed=False,
    sliced=False,
    reset_alone=True,
)


def holder(workload_id: str | Unknown | None = None, **facts: Any) -> GpuHolder:
    known = {"pid": 41, "starttime": 7, "uid": 1001, "comm": "python", "workload_id": workload_id}
    return GpuHolder(**(known | facts))


def condition(**facts: Any) -> Condition:
    return msgspec.structs.replace(FREE, **facts)


def judged(baseline: int | None = BASELINE, **facts: Any) -> Cleanliness:
    return assess_gpu(condition(**facts), LIVES, baseline)


PERSISTENCED = holder(pid=9, uid=0, comm="nvidia-persiste")


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (holder(LIVE), HolderKind.FOREIGN),
        (holder(ENDED), HolderKind.ORPHAN),
        (holder(STRANGER), HolderKind.STRANGER),
        (holder("7" * 64), HolderKind.UNKNOWN),
        (holder(Unknown("its cgroup could not be read")), HolderKind.UNKNOWN),
        (holder(None), HolderKind.BARE),
        (PERSISTENCED, HolderKind.INFRASTRUCTURE),
        (holder(uid=0, comm="nvidia-cuda-mps"), HolderKind.INFRASTRUCTURE),
        (holder(uid=1001, comm="Xorg"), HolderKind.INFRASTRUCTURE),
        (holder(uid=1001, comm="nv-hostengine"), HolderKind.BARE),  # anybody can call a program that
        (holder(LIVE, uid=0, comm="dcgm-exporter"), HolderKind.INFRASTRUCTURE),
        (holder(LIVE, uid=0, comm="Xorg"), HolderKind.FOREIGN),
        (holder(ENDED, uid=0, comm="dcgm-exporter"), HolderKind.ORPHAN),
        (holder(ours=True), HolderKind.INFRASTRUCTURE),
    ],
)
def test_where_a_holder_stands(one: GpuHolder, expected: HolderKind) -> None:
    assert holder_kind(one, LIVES) is expected


def test_nobody_there_and_memory_back_is_clean() -> None:
    assert judged() == Cleanliness(CleanStatus.CLEAN, "no process holds it, 615 MiB in use, 615 MiB when free")
    assert judged(holders=(PERSISTENCED,)).status is CleanStatus.CLEAN


@pytest.mark.parametrize(("used", "word"), [(615 + 64, CleanStatus.CLEAN), (615 + 65, CleanStatus.DIRTY)])
def test_memory_may_be_64_mib_over_the_baseline(used: int, word: CleanStatus) -> None:
    found = judged(memory_used_mib=used)
    assert (found.status, found.residue) == (word, word is CleanStatus.DIRTY)


def test_a_dead_pid_that_the_driver_lists_is_residue_when_nobody_holds_it() -> None:
    found = judged(listed=(4711,))
    assert found.status is CleanStatus.DIRTY
    assert found.residue
    assert "4711" in found.reason


def test_the_forked_child_is_the_orphan_and_not_the_dead_parent_that_the_driver_lists() -> None:
    found = judged(listed=(4711,), holders=(holder(ENDED, pid=4712),), memory_used_mib=9455)
    assert found.status is CleanStatus.DIRTY
    assert not found.residue
    assert "pid 4712" in found.reason
    assert "4711" not in found.reason


def test_an_innocent_process_with_a_reused_pid_is_no_holder() -> None:
    """The driver lists a pid; that process exists and has nothing open, so it is not among the holders."""
    assert judged(listed=(41,)).residue


@pytest.mark.parametrize("other", [holder(LIVE, pid=50), holder(None, pid=50)])
def test_others_make_it_shared_whatever_the_memory(other: GpuHolder) -> None:
    found = judged(holders=(other,), listed=(50,), memory_used_mib=70000)
    assert found.status is CleanStatus.SHARED
    assert found.settled
    assert found.result is CheckResult.CLEANED
    assert "pid 50" in found.reason


@pytest.mark.parametrize("other", [holder(LIVE, pid=50), holder(None, pid=50), holder(STRANGER, pid=50)])
def test_an_orphan_beside_others_is_orphaned_shared(other: GpuHolder) -> None:
    found = judged(holders=(holder(ENDED), other))
    assert found.status is CleanStatus.ORPHANED_SHARED
    assert not found.settled
    assert found.result is CheckResult.ORPHANED_SHARED


def test_an_orphan_in_state_d_is_reported_to_be_stuck() -> None:
    assert "no signal ends it" in judged(holders=(holder(ENDED, state="D"),)).reason


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"advice": Advice.RESET}, "the driver advises: reset"),
        ({"advice": Advice.DRAIN_AND_RESET}, "drain and reset"),
        ({"remap_pending": True}, "wait for a reset"),
        ({"remap_failed": True}, "could not be replaced"),
        ({"xids": (Xid(79, "GPU has fallen off the bus."),)}, "Xid 79: GPU has fallen"),
    ],
)
def test_what_driver_or_kernel_complain_of_is_dirty(facts: dict[str, Any], words: str) -> None:
    found = judged(**facts)
    assert found.status is CleanStatus.DIRTY
    assert words in found.reason


@pytest.mark.parametrize("number", [13, 31, 43, 45])
def test_an_error_that_a_program_made_itself_does_not_dirty_the_gpu(number: int) -> None:
    assert judged(xids=(Xid(number, ""),)).status is CleanStatus.CLEAN


@pytest.mark.parametrize(
    "facts",
    [
        {"holders": (holder(STRANGER),)},
        {"holders": (holder("7" * 64),)},
        {"unread": 3},
        {"memory_used_mib": Unknown("GPU is lost")},
        {"listed": Unknown("GPU is lost")},
    ],
)
def test_what_is_unknown_is_neither_clean_nor_dirty(facts: dict[str, Any]) -> None:
    found = judged(**facts)
    assert found.status is CleanStatus.UNKNOWN
    assert not found.settled


def test_a_gpu_that_cannot_be_read_is_unknown() -> None:
    assert assess_gpu(Unknown("the driver did not answer"), LIVES, BASELINE).status is CleanStatus.UNKNOWN


def test_without_a_baseline_memory_says_nothing() -> None:
    assert judged(baseline=None, memory_used_mib=5000).status is CleanStatus.UNKNOWN


def test_what_a_model_cannot_say_is_named_and_does_not_count() -> None:
    found = judged(advice=Unknown("not supported", by_design=True), xids=Unknown("not permitted", by_design=True))
    assert found.status is CleanStatus.CLEAN
    assert found.reason.endswith("; unknown: advice, Xids")


@pytest.mark.parametrize(
    ("facts", "known", "expected"),
    [
        ({}, None, 615),
        ({}, 700, 615),
        ({}, 615, None),
        ({"memory_used_mib": 1025}, None, None),  # residue must not become the measure of itself
        ({"memory_used_mib": 900}, 615, None),
        ({"holders": (PERSISTENCED,)}, None, 615),
        ({"holders": (holder(None),)}, None, None),
        ({"unread": 1}, None, None),
        ({"listed": (4711,)}, None, None),
        ({"listed": Unknown("?")}, None, None),
        ({"memory_used_mib": Unknown("?")}, None, None),
    ],
)
def test_the_baseline_is_the_least_seen_while_nobody_held_it(
    facts: dict[str, Any], known: int | None, expected: int | None
) -> None:
    assert new_baseline(condition(**facts), LIVES, known) == expected


# The gate of a reset

OPEN = ResetFacts(
    enabled=True,
    root=True,
    condition=FREE,
    residue_for=timedelta(seconds=120),
    users=(),
    last_reset=None,
)


def test_the_gate_opens_when_every_condition_holds() -> None:
    assert why_no_reset(OPEN, NOW) == ()
    advised = msgspec.structs.replace(OPEN, residue_for=None, condition=condition(advice=Advice.RESET))
    assert why_no_reset(advised, NOW) == ()
    yesterday = msgspec.structs.replace(OPEN, last_reset=NOW - timedelta(days=1))
    assert why_no_reset(yesterday, NOW) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"enabled": False}, "off"),
        ({"root": False}, "root"),
        ({"last_reset": NOW - timedelta(hours=23)}, "once a day"),
        ({"users": ("docker/node-3/eval",)}, "docker/node-3/eval"),
        ({"users": Unknown("Docker did not answer")}, "Docker did not answer"),
        ({"residue_for": timedelta(seconds=119)}, "does not advise"),
        ({"residue_for": None}, "does not advise"),
        ({"condition": Unknown("silent")}, "silent"),
        ({"condition": condition(sliced=True)}, "slices"),
        ({"condition": condition(sliced=Unknown("silent"))}, "silent"),
        ({"condition": condition(reset_alone=False)}, "peers"),
        ({"condition": condition(reset_alone=Unknown("silent"))}, "silent"),
        ({"condition": condition(unread=2)}, "could not be read"),
        ({"condition": condition(holders=(PERSISTENCED,))}, "nvidia-persiste"),
        ({"condition": condition(holders=(holder(LIVE),))}, "pid 41"),
        ({"residue_for": None, "condition": condition(advice=Advice.REBOOT)}, "does not advise"),
    ],
)
def test_one_condition_that_does_not_hold_closes_the_gate(change: dict[str, Any], words: str) -> None:
    reasons = why_no_reset(msgspec.structs.replace(OPEN, **change), NOW)
    assert len(reasons) == 1
    assert words in reasons[0]


def test_a_service_that_has_it_open_is_named() -> None:
    """C11.2: a permanent exporter prevents every reset, so the admin is told that it is not a process to wait for."""
    exporter = holder(LIVE, comm="dcgm-exporter", uid=0, pid=812)
    posing = holder(comm="dcgm-exporter", pid=813)
    reasons = why_no_reset(msgspec.structs.replace(OPEN, condition=condition(holders=(exporter, posing))), NOW)
    assert reasons == (
        "pid 812 (dcgm-exporter) has it open, a service that gpukeeper does not stop",
        "pid 813 (dcgm-exporter) has it open",
    )


def test_we_ourselves_do_not_close_the_gate() -> None:
    """We let go of the GPU before the reset, which looks once more."""
    assert why_no_reset(msgspec.structs.replace(OPEN, condition=condition(holders=(holder(ours=True),))), NOW) == ()
