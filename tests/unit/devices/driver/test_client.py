"""Asking the driver's program. The programs here are small ones that answer, hang, print garbage, are late or die."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from gpukeeper import processes
from gpukeeper.devices.driver import client as module
from gpukeeper.devices.driver.client import DriverClient, query_once
from gpukeeper.devices.driver.facts import DriverReply
from gpukeeper.model.unknown import Unknown
from gpukeeper.processes import ABANDONED_MAX, Abandoned
from tests.patience import PATIENCE, PATIENT
from tests.unit.devices.driver.programs import answering, program

SHORT = timedelta(milliseconds=200)
ANSWER = {"state": "answered", "why": "first"}
HANGS = "for question in asked(): import time; time.sleep(600)"


@contextmanager
def asking(command: list[str], deadline: timedelta = PATIENT, **options: Any) -> Iterator[DriverClient]:
    client = DriverClient(command, deadline, **options)
    try:
        yield client
    finally:
        client.close()


def why(answer: DriverReply | Unknown) -> str:
    assert isinstance(answer, Unknown), answer
    return answer.why


def test_one_program_answers_again_and_again() -> None:
    text = "for n, question in enumerate(asked()): give(question, {'state': 'answered', 'why': str(n)})"
    with asking(program(text)) as client:
        assert [client.query("usage").why for _ in range(3)] == ["0", "1", "2"]


# A hung driver.


def test_a_program_that_hangs_is_killed_after_the_deadline_and_the_next_question_starts_another() -> None:
    text = """
import os, time
for question in asked():
    if question["id"] == 2: time.sleep(600)
    give(question, {"state": "answered", "why": str(os.getpid())})
"""
    with asking(program(text)) as client:
        pid = int(client.query("inventory").why)
        client._deadline, began = SHORT, monotonic()
        assert "did not answer within" in why(client.query("inventory"))
        assert monotonic() - began < PATIENCE
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        client._deadline = PATIENT
        answer = client.query("inventory")
        assert isinstance(answer, DriverReply)
        assert answer.id == 3
        assert int(answer.why) != pid


def test_the_first_answer_of_a_program_may_take_longer() -> None:
    """No program starts within a millisecond."""
    with asking(answering(ANSWER), timedelta(milliseconds=1), to_open=60_000) as client:
        assert isinstance(client.query("usage"), DriverReply)


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Abandoned]:
    """Programs that SIGKILL does not end, as inside a kernel call that never returns."""
    kill = subprocess.Popen.kill
    left = Abandoned()
    monkeypatch.setattr(module, "_abandoned", left)
    monkeypatch.setattr(processes, "KILLED_WITHIN_S", 0.01)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    yield left
    for child in left._left:
        kill(child)
        child.wait()


def test_programs_that_cannot_be_killed_are_abandoned_and_bounded(unkillable: Abandoned) -> None:
    for number in range(ABANDONED_MAX):
        assert "did not answer" in why(query_once("inventory", timedelta(milliseconds=50), program(HANGS)))
        assert len(unkillable) == number + 1
    refused = why(query_once("inventory", PATIENT, answering(ANSWER)))
    assert refused == (
        "the process that queries the NVIDIA driver could not be started: "
        "4 earlier ones hang in the driver and cannot be killed"
    )
    assert len(unkillable) == ABANDONED_MAX
    os.kill(unkillable._left[0].pid, 9)  # the driver came back
    unkillable._left[0].wait()
    assert isinstance(query_once("inventory", PATIENT, answering(ANSWER)), DriverReply)
    assert len(unkillable) == ABANDONED_MAX - 1


# A program killed in the middle.


@pytest.mark.parametrize("before", ["", "print('{\"id\": 1, \"state\"', end='', flush=True)"])
def test_a_program_that_is_killed_in_the_middle_is_unknown_and_replaced(tmp_path: Path, before: str) -> None:
    seen = tmp_path / "seen"
    text = f"""
import os, pathlib, signal
seen = pathlib.Path({str(seen)!r})
for question in asked():
    if not seen.exists():
        seen.touch()
        {before or "pass"}
        os.kill(os.getpid(), signal.SIGKILL)
    give(question, {ANSWER!r})
"""
    with asking(program(text)) as client:
        assert why(client.query("health")) == "querying the NVIDIA driver failed (exit -9): no message"
        assert client.query("health") == DriverReply(id=2, **ANSWER)


def test_the_last_words_of_a_program_that_fails_are_reported() -> None:
    text = "next(asked()); sys.stderr.write('a\\nthe GPU fell off the bus\\n'); sys.exit(3)"
    assert why(query_once("inventory", PATIENT, program(text))) == (
        "querying the NVIDIA driver failed (exit 3): the GPU fell off the bus"
    )


def test_a_program_that_cannot_be_started_is_unknown(tmp_path: Path) -> None:
    assert "could not be started" in why(query_once("inventory", PATIENT, [str(tmp_path / "nothing")]))


# Garbage.


@pytest.mark.parametrize(
    "line",
    [
        *("hello", "", "{}", "NaN", "[]", '{"id": 1, "state": "odd"}', "\\udcff"),
        *('{"state": "answered"}', '{"id": 1, "state": "answered", "gpus": [{"index": 0}]}'),
        '{"id": 1, "state": "answered", "gpus": [{"index": 0, "uuid": "GPU-0", "memory_used_mib": "much"}]}',
    ],
)
def test_a_line_that_is_no_answer_is_unknown_and_the_program_is_replaced(line: str) -> None:
    text = f"""
sys.stdout.reconfigure(errors="surrogateescape")
for question in asked():
    if question["id"] == 1:
        print({line!r}, flush=True)
    give(question, {ANSWER!r})
"""
    with asking(program(text)) as client:
        assert "invalid reply" in why(client.query("usage"))
        assert client._child is None
        assert client.query("usage") == DriverReply(id=2, **ANSWER)


def test_endless_talk_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_MAX", 1024 * 1024)
    assert "its reply is too long" in why(
        query_once("inventory", PATIENT, program("while True: sys.stdout.write('x' * 65536)"))
    )


def test_an_answer_of_many_megabytes_is_read() -> None:
    """Three hours of readings of eight GPUs come in one line."""
    text = "for question in asked(): give(question, {'state': 'answered', 'why': 'x' * 30_000_000})"
    answer = query_once("readings", PATIENT, program(text))
    assert isinstance(answer, DriverReply)
    assert len(answer.why) == 30_000_000


def test_a_program_that_prints_much_on_stderr_is_not_stuck() -> None:
    text = f"""
for question in asked():
    sys.stderr.write("x" * 1_000_000 + "\\nno memory\\n")
    if question["id"] == 3: sys.exit(1)
    give(question, {ANSWER!r})
"""
    with asking(program(text)) as client:
        assert client.query("health") == DriverReply(id=1, **ANSWER)
        assert client.query("health") == DriverReply(id=2, **ANSWER)
        assert why(client.query("health")) == "querying the NVIDIA driver failed (exit 1): no memory"


def test_a_program_that_closes_its_stderr_is_still_asked() -> None:
    text = f"import os; os.close(2)\nfor question in asked(): give(question, {ANSWER!r})"
    with asking(program(text)) as client:
        assert [client.query("health").why for _ in range(3)] == ["first"] * 3


# Late answers.


def test_a_late_answer_to_an_earlier_question_is_not_taken_for_this_one() -> None:
    text = """
late = None
for question in asked():
    give(question, {"state": "answered", "why": "to " + str(question["id"])})
    if question["id"] == 1:
        late = question
        give(late, {"state": "answered", "why": "late"})
        give(late, {"state": "failed", "why": "later"})
"""
    with asking(program(text)) as client:
        assert client.query("usage") == DriverReply(id=1, state="answered", why="to 1")
        assert client.query("usage") == DriverReply(id=2, state="answered", why="to 2")
        assert client.query("usage") == DriverReply(id=3, state="answered", why="to 3")


def test_an_answer_that_comes_after_its_deadline_is_never_read() -> None:
    """The program that was too late is not asked again, and its answer does not reach the next question."""
    text = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: None)
for question in asked():
    if question["id"] == 2: signal.pause()
    give(question, {"state": "answered", "why": "to " + str(question["id"])})
"""
    with asking(program(text)) as client:
        assert client.query("condition").why == "to 1"
        client._deadline, late = SHORT, client._child
        assert "did not answer" in why(client.query("condition"))
        client._deadline = PATIENT
        assert client._child is not late
        assert client.query("condition") == DriverReply(id=3, state="answered", why="to 3")


def test_only_answers_to_other_questions_are_no_answer() -> None:
    text = "for question in asked(): give({'id': 77}, {'state': 'answered'})"
    assert "did not answer" in why(query_once("inventory", timedelta(seconds=1), program(text)))


def test_a_program_that_could_not_read_the_question_reports_it() -> None:
    text = "for question in asked(): give({'id': 0}, {'state': 'failed', 'why': 'the request could not be read'})"
    answer = query_once("inventory", PATIENT, program(text))
    assert isinstance(answer, DriverReply)
    assert (answer.state, answer.why) == ("failed", "the request could not be read")


# How long the driver is open.


def test_a_single_question_has_let_go_of_the_driver_when_it_returns(tmp_path: Path) -> None:
    """A program that still has a GPU open would be found as its holder, and would forbid its reset."""
    ended = tmp_path / "ended"
    text = f"""
import pathlib
for question in asked(): give(question, {ANSWER!r})
pathlib.Path({str(ended)!r}).touch()
"""
    assert isinstance(query_once("condition", PATIENT, program(text)), DriverReply)
    assert ended.exists()


def test_a_driver_that_does_not_let_go_in_time_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"for question in asked(): give(question, {ANSWER!r})\nimport time; time.sleep(600)"
    with asking(program(text)) as client:
        client.query("condition")
        running = client._child
        assert running is not None
        assert client.finish(0.05) is False
        assert running._process.returncode == -9
    finish = DriverClient.finish
    monkeypatch.setattr(DriverClient, "finish", lambda self, within_s: finish(self, within_s) and False)
    assert "was not closed within 5m" in why(query_once("condition", PATIENT, answering(ANSWER)))


def test_closing_ends_the_program_and_a_later_question_starts_another() -> None:
    with asking(answering(ANSWER)) as client:
        client.query("usage")
        running = client._child
        assert running is not None
        client.close()
        assert running._process.returncode is not None
        assert isinstance(client.query("usage"), DriverReply)


def test_closing_while_it_is_queried_frees_the_caller() -> None:
    answers: list[Any] = []
    with asking(program(HANGS)) as client:
        waiting = threading.Thread(target=lambda: answers.append(client.query("usage")))
        waiting.start()
        while client._child is None:
            pass
        client.close()
        waiting.join()
    assert isinstance(answers[0], Unknown)


def test_a_question_that_has_to_wait_too_long_for_another_is_unknown() -> None:
    with asking(program(HANGS), SHORT, to_open=1000) as client:
        waiting = threading.Thread(target=lambda: client.query("usage"))
        waiting.start()
        while client._child is None:
            pass
        assert "still in progress" in why(client.query("usage"))
        client.close()
        waiting.join()


def test_a_driver_that_fails_gets_a_new_program() -> None:
    with asking(answering({"state": "failed", "why": "Driver/library version mismatch"})) as client:
        assert client.query("health") == DriverReply(id=1, state="failed", why="Driver/library version mismatch")
        assert client._child is None


def test_no_program_outlives_its_parent() -> None:
    text = """
import sys
from datetime import timedelta
from gpukeeper.devices.driver.client import CHILD, DriverClient
client = DriverClient(CHILD, timedelta(minutes=1))
client.query("inventory")
print(client._child._process.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    ends = os.pidfd_open(pid)
    parent.kill()
    parent.communicate()
    assert select.select([ends], [], [], 60)[0]
    os.close(ends)
