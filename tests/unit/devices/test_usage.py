"""Asking a child again and again. The children here are small programs that answer, hang, babble or die."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.clients.prometheus import ExportedGpu
from gpukeeper.devices.busy import GpuUse
from gpukeeper.devices.meter import GpuUsage
from gpukeeper.model.unknown import Unknown
from tests.unit.devices.driver.programs import program

SHORT = timedelta(milliseconds=200)
GPU = {
    "index": 0,
    "uuid": "GPU-1",
    "sliced": False,
    "activity": {
        "window_s": 1.0,
        "gpm": 12.5,
        "utilisation": 12.0,
        "utilisation_peak": 20.0,
        "utilisation_covered_s": 14.0,
        "energy_before_mj": 800,
    },
    "energy_mj": 900,
    "memory_used_mib": 615,
    "listed": [5],
    "slices": [],
}
ANSWER = {"state": "answered", "gpus": [GPU]}


class Now:
    def now(self) -> datetime:
        return datetime(2026, 3, 2, tzinfo=UTC)


class Ticks:
    """Time for the pauses between two children."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@contextmanager
def asking(text: str, ticks: Ticks | None = None, **options: Any) -> Iterator[GpuUsage]:
    options = {"deadline": timedelta(minutes=1), "driver": "/nowhere", **options}
    usage = GpuUsage(Now(), child=program(text), ticks=ticks or Ticks(), **options)
    try:
        yield usage
    finally:
        usage.close()


def read(usage: GpuUsage) -> Any:
    return asyncio.run(usage.read())


def answering(answer: dict[str, Any] = ANSWER) -> str:
    """Each answer tells in the first pid which question it was."""
    return f"""
for number, question in enumerate(asked()):
    assert question["about"] == "usage"
    answer = {answer!r}
    for gpu in answer.get("gpus", []):
        gpu["listed"] = [number]
        gpu["energy_mj"] += number
    give(question, answer)
"""


ANSWERS_ONCE = f"give(next(asked()), {ANSWER!r})"


def test_one_child_answers_again_and_again() -> None:
    with asking(answering()) as usage:
        assert read(usage)["GPU-1"] == GpuUse(
            uuid="GPU-1", slice=False, busy=12.5, memory_used_mib=615, pids=(0,), energy_mj=900
        )
        assert read(usage)["GPU-1"].pids == (1,)


def test_two_readings_at_once_are_two_questions() -> None:
    async def both(usage: GpuUsage) -> list[Any]:
        return await asyncio.gather(usage.read(), usage.read())

    with asking(answering()) as usage:
        assert {answer["GPU-1"].pids for answer in asyncio.run(both(usage))} == {(0,), (1,)}


def test_a_child_that_hangs_is_given_up_and_another_is_started_later() -> None:
    ticks = Ticks()
    with asking("import sys, time; sys.stdin.readline(); time.sleep(600)", ticks, deadline=SHORT) as usage:
        first = read(usage)
        assert isinstance(first, Unknown)
        assert "did not answer within" in first.why
        assert usage._client._child is None
        soon = read(usage)
        assert "retried in 5s" in soon.why
        ticks.at = 5.0
        assert "retried in" not in read(usage).why
        assert "retried in 10s" in read(usage).why


@pytest.mark.slow
def test_the_pause_grows_to_five_minutes_and_no_further() -> None:
    ticks = Ticks()
    with asking("raise SystemExit(1)", ticks) as usage:
        for _ in range(12):
            read(usage)
            ticks.at = usage._client._not_before
        before = ticks.at
        read(usage)
        assert usage._client._not_before - before == 300.0


def test_a_child_that_dies_is_replaced_and_its_last_words_are_reported(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    text = f"""
import pathlib, sys
marker = pathlib.Path({str(marker)!r})
if not marker.exists():
    sys.stdin.readline()
    marker.touch()
    raise SystemExit("the GPU fell off the bus")
{answering()}"""
    ticks = Ticks()
    with asking(text, ticks) as usage:
        assert read(usage) == Unknown("querying the NVIDIA driver failed (exit 1): the GPU fell off the bus")
        ticks.at = 10.0
        assert read(usage)["GPU-1"].busy == 12.5
        ticks.at = 11.0
        assert read(usage)["GPU-1"].pids == (1,)


def test_a_child_that_ended_between_two_questions_is_noticed() -> None:
    with asking(ANSWERS_ONCE) as usage:
        assert read(usage)["GPU-1"].busy == 12.5
        assert "failed (exit 0)" in read(usage).why


def test_an_answer_makes_the_next_pause_short_again() -> None:
    ticks = Ticks()
    with asking(ANSWERS_ONCE, ticks) as usage:
        for _ in range(3):
            assert not isinstance(read(usage), Unknown)
            assert isinstance(read(usage), Unknown)
            assert "retried in 5s" in read(usage).why
            ticks.at += 5.0


def test_what_is_no_record_is_unknown() -> None:
    wrong = ('{"id": 1, "state": "answered", "gpus": [{"index": 0}]}', '{"id": 1, "state": "odd"}')
    for babble in ("hello", "{}", *wrong, "NaN"):
        with asking(answering_raw(babble)) as usage:
            assert "invalid reply" in read(usage).why


def answering_raw(line: str) -> str:
    return f"import sys\nfor _ in sys.stdin: print({line!r}, flush=True)"


def test_half_an_answer_is_none() -> None:
    text = "import sys, time; sys.stdin.readline(); print('{', end='', flush=True); time.sleep(600)"
    with asking(text, deadline=SHORT) as usage:
        assert "did not answer" in read(usage).why


def test_endless_talk_is_cut() -> None:
    text = "import sys; sys.stdin.readline()\nwhile True: sys.stdout.write('x' * 65536)"
    with asking(text) as usage:
        assert "its reply is too long" in read(usage).why


def test_a_child_that_cannot_be_started_is_unknown(tmp_path: Path) -> None:
    usage = GpuUsage(Now(), child=[str(tmp_path / "nothing")])
    assert "could not be started" in read(usage).why


def test_no_driver_is_no_gpus_unless_the_driver_is_loaded(tmp_path: Path) -> None:
    missing = answering({"state": "no driver", "why": "NVML Shared Library Not Found"})
    with asking(missing) as usage:
        assert read(usage) == {}
    with asking(missing, driver=str(tmp_path)) as usage:
        assert read(usage) == Unknown("NVML Shared Library Not Found")


def test_a_driver_that_fails_gets_a_new_child() -> None:
    with asking(answering({"state": "failed", "why": "Driver/library version mismatch"})) as usage:
        assert read(usage) == Unknown("Driver/library version mismatch")
        assert usage._client._child is None


def test_the_exporter_is_queried_and_counts() -> None:
    energy = iter((10, 20))

    async def fetch(url: str, deadline: timedelta) -> Any:
        assert url == "http://exporter:9400/metrics"
        return {("GPU-1", None): ExportedGpu(uuid="GPU-1", engine=70.0, energy_mj=next(energy))}

    with asking(answering(), exporter="http://exporter:9400/metrics", fetch=fetch) as usage:
        assert read(usage)["GPU-1"].busy == 12.5  # it has not been seen to move yet
        assert read(usage)["GPU-1"].busy == 70.0


def test_a_change_of_slices_makes_a_reading_unknown(tmp_path: Path) -> None:
    part = {"uuid": "MIG-1", "index": 0, "gpu_instance": 7, "compute_instance": 0, "activity": {"gpm": 0.0}}
    answers = [{"state": "answered", "gpus": [GPU | facts]} for facts in ({}, {"sliced": True, "slices": [part]})]
    with asking(f"for question, answer in zip(asked(), {answers!r}): give(question, answer)") as usage:
        read(usage)
        assert "changed" in read(usage)["MIG-1"].busy.why


def test_closing_ends_the_child_and_a_later_reading_starts_another() -> None:
    with asking(answering()) as usage:
        read(usage)
        child = usage._client._child
        usage.close()
        assert child is not None
        assert child._process.returncode is not None
        assert read(usage)["GPU-1"].pids == (0,)


def test_closing_while_it_is_queried_frees_whoever_waits() -> None:
    answers: list[Any] = []
    with asking("import sys, time; print(end=sys.stdin.readline() and ''); time.sleep(600)") as usage:
        waiting = threading.Thread(target=lambda: answers.append(read(usage)))
        waiting.start()
        while usage._client._child is None:
            pass
        usage.close()
        waiting.join()
    assert isinstance(answers[0], Unknown)
