"""What is reported as waste: GPUs that somebody holds and does not use. A report only (C8.11)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpukeeper.lifecycle.activity import Waste, wasted
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import View
from gpukeeper.model.policy import ClassSettings, Exemption, Policy
from gpukeeper.model.series import NOT_MEASURED, Series, Signal
from gpukeeper.model.subject import Hold, Memory, Ref, Seen, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
REF = Ref("docker", "node-3", "container", "eval", "uid-1")
RUNS = Subject(
    seen=Seen(REF, "run-1", "1", NOW),
    state=State.RUNNING,
    owner="ann",
    class_="managed",
    created=NOW - timedelta(days=1),
    started=NOW - timedelta(days=1),
    devices=("GPU-0",),
    size=0,
)
POLICY = Policy(
    classes={"managed": ClassSettings(), "infrastructure": ClassSettings(untouchable=True)},
    exemptions=(Exemption(reason="thesis", owner="bob"),),
)


def of(
    values: list[float], *, subject: Subject = RUNS, memory: Memory | None = None, busy_cpu: bool = False
) -> Waste | None:
    start = NOW - (len(values) - 1) * MINUTE
    devices = subject.devices if isinstance(subject.devices, tuple) else ("GPU-0",)
    series = [Series(Signal.GPU, device, start, tuple(values)) for device in devices]
    if busy_cpu:
        series.append(Series(Signal.CPU, "", start, (90.0,) * len(values)))
    return wasted(View(subject, tuple(series), memory or Memory()), Rulebook(POLICY), NOW)


def but(**facts: object) -> Subject:
    return msgspec.structs.replace(RUNS, **facts)


def test_below_five_per_cent_for_half_an_hour_is_waste() -> None:
    found = of([90.0] * 60 + [4.9] * 31)
    assert found is not None
    assert (found.ref, found.owner, found.class_, found.devices) == (REF, "ann", "managed", ("GPU-0",))
    assert (found.since, found.at_least) == (NOW - 30 * MINUTE, False)


@pytest.mark.parametrize(
    "values",
    [
        [90.0] * 60 + [4.9] * 30,  # a minute too short
        [0.0] * 80 + [5.0] + [0.0] * 10,
        [0.0] * 60 + [NOT_MEASURED] + [0.0] * 20,  # a gap is no proof
        [0.0] * 10,
    ],
    ids=["too short", "five per cent", "a gap", "measured for a moment"],
)
def test_what_is_used_or_was_not_measured_long_enough_is_no_waste(values: list[float]) -> None:
    assert of(values) is None


def test_what_never_worked_is_unused_for_at_least_as_long_as_it_was_measured() -> None:
    found = of([0.0] * 90)
    assert found is not None
    assert found.at_least
    assert found.since <= NOW - 88 * MINUTE


def test_it_asks_about_the_gpu_alone_and_about_held_and_exempt_work_too() -> None:
    """Waste is what others cannot use; whether somebody may do that is not asked."""
    idle = [0.0] * 90
    held = Memory(holds=(Hold(by="ann", at=NOW, until=NOW + timedelta(hours=2)),))
    assert of(idle, busy_cpu=True)
    assert of(idle, memory=held)
    assert of(idle, subject=but(owner="bob"))
    assert of(idle, subject=but(state=State.PAUSED))


@pytest.mark.parametrize(
    "facts",
    [
        {"state": State.ENDED},
        {"devices": ()},
        {"devices": Unknown("the driver is silent")},
        {"class_": "infrastructure"},
        {"root": "kubernetes/prod/lab/job/run"},
        {"shape": Shape.ORPHAN},
    ],
    ids=str,
)
def test_what_holds_nothing_or_is_never_touched_wastes_nothing(facts: dict[str, object]) -> None:
    assert of([0.0] * 90, subject=but(**facts)) is None
