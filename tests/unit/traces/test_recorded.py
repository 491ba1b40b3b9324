"""Our own ledger as a trace: runs from the journal, minutes from the signals."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import datetime, timedelta
from math import isnan
from pathlib import Path

import msgspec

from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.signals import open_signals
from gpukeeper.model.event import Checkpoint, Event, Held, Noticed, Released, Vanished
from gpukeeper.model.series import MINUTE, Sample, Signal, Trace
from gpukeeper.model.subject import Hold, Memory, Outcome, Ref, State
from gpukeeper.traces.recorded import RecordedTrace
from tests.unit.ledger.examples import EVAL, NOW, TRAIN, run

START = NOW - timedelta(minutes=30)


def runs_on(at: datetime = START, incarnation: str = "i1", ref: Ref = EVAL, **more: object) -> Noticed:
    values = {"started": START, "class_": "managed", "owner": "ann", **more}
    return Noticed(at=at, ref=ref, incarnation=incarnation, state=State.RUNNING, **values)  # type: ignore[arg-type]


def ended(at: datetime, incarnation: str = "i1", **more: object) -> Noticed:
    values = {"started": START, "ended": at, "outcome": Outcome.SUCCEEDED, **more}
    return Noticed(at=at, ref=EVAL, incarnation=incarnation, state=State.ENDED, **values)  # type: ignore[arg-type]


def use(minute: int, value: float, key: str = EVAL.key, signal: Signal = Signal.GPU, device: str = "GPU-1") -> Sample:
    return Sample(key, signal, device if signal is Signal.GPU else "", START + minute * MINUTE, value)


def ledger(folder: Path, lines: Sequence[Event], samples: Sequence[Sample]) -> Path:
    folder.chmod(0o700)
    path = folder / "ledger.db"

    async def write() -> None:
        written, signals = open_ledger(path, write=True), open_signals(path, write=True)
        await written.append(lines)
        await signals.add(samples)
        signals.close()
        written.close()

    run(write())
    return path


def test_a_workload_that_starts_again_has_two_runs(tmp_path: Path) -> None:
    again = START + 20 * MINUTE
    lines = (
        runs_on(),
        ended(START + 10 * MINUTE),
        runs_on(again, "i2", started=again, class_="docker", owner="bob"),
    )
    samples = [use(minute, 50) for minute in (0, 1, 3)] + [use(5, 10), use(5, 30)]
    samples += [use(minute, 7, device="GPU-2") for minute in (20, 29)] + [use(2, 80, signal=Signal.CPU)]
    path = ledger(tmp_path, lines, samples)
    before = path.read_bytes()
    trace: Trace = RecordedTrace(path)
    assert (trace.begin, trace.end) == (START, START + 30 * MINUTE)
    first, second = trace.runs()
    assert (first.name, first.owner, first.class_) == ("eval", "ann", "managed")
    assert (first.platform, first.place, first.kind) == ("docker", "node-3", "container")
    assert (first.started, first.ended, first.devices) == (START, START + 10 * MINUTE, ("GPU-1",))
    gpu, cpu = first.series
    assert [value for value in gpu.minutes if not isnan(value)] == [50, 50, 50, 20]
    assert (len(gpu.minutes), isnan(gpu.minutes[2]), cpu.minutes[2]) == (10, True, 80)
    assert (second.name, second.ended, second.devices, second.owner) == ("eval#2", None, ("GPU-2",), "bob")
    assert (second.first_start, second.class_) == (START, "docker")
    assert trace.rows == 7
    assert trace.signals == {Signal.GPU, Signal.CPU}
    assert path.read_bytes() == before, "it is only read"


def test_a_reading_that_is_no_number_is_not_measured(tmp_path: Path) -> None:
    path = ledger(tmp_path, [runs_on()], [use(0, 5), use(1, 5), use(1, float("nan"))])
    (found,) = RecordedTrace(path).runs()
    assert [isnan(value) for value in found.series[0].minutes] == [False, True]


def test_what_vanished_ended_and_what_is_seen_again_did_not(tmp_path: Path) -> None:
    gone = Vanished(at=START + 5 * MINUTE, ref=EVAL)
    samples = [use(minute, 1) for minute in range(12)]
    (found,) = RecordedTrace(ledger(tmp_path, [runs_on(), gone], samples)).runs()
    assert found.ended == START + 5 * MINUTE
    second = tmp_path / "second"
    second.mkdir()
    (found,) = RecordedTrace(ledger(second, [runs_on(), gone, runs_on(START + 7 * MINUTE)], samples)).runs()
    assert found.ended is None


def test_holds_end_with_their_release(tmp_path: Path) -> None:
    hold = Hold("ann", START + MINUTE, START + timedelta(hours=5), "results are not saved")
    lines = (
        runs_on(),
        Held(at=hold.at, ref=EVAL, hold=hold, by="ann"),
        Released(at=START + 9 * MINUTE, ref=EVAL, by="ann"),
    )
    (found,) = RecordedTrace(ledger(tmp_path, lines, [use(0, 1), use(20, 1)])).runs()
    assert found.holds == (msgspec.structs.replace(hold, until=START + 9 * MINUTE),)


def test_a_checkpoint_knows_the_start_whose_line_was_archived(tmp_path: Path) -> None:
    begun = START - timedelta(days=40)
    memory = Memory(first_start=begun, state="running", incarnation="i1", started=begun, class_="serving")
    line = Checkpoint(at=START, memories={TRAIN.key: memory}, present=(TRAIN,))
    path = ledger(tmp_path, [line], [use(0, 1, key=TRAIN.key), use(3, 1, key=EVAL.key)])
    with sqlite3.connect(path) as c:
        stored = msgspec.json.encode(TRAIN).decode()
        c.execute(
            "INSERT OR REPLACE INTO present VALUES (?, ?, ?, ?)", (TRAIN.platform, TRAIN.place, TRAIN.key, stored)
        )
    c.close()
    train, unknown = RecordedTrace(path).runs()
    assert (train.name, train.started, train.class_, train.namespace) == ("run-7", begun, "serving", "research")
    assert (unknown.name, unknown.started) == (EVAL.key, START + 3 * MINUTE), "its first measured minute"
