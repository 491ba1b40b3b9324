"""The program that calls the driver: its session, its lines, its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pynvml
import pytest

from gpukeeper.devices.driver import child
from gpukeeper.devices.driver.child import DriverSession, serve
from gpukeeper.devices.driver.client import CHILD
from gpukeeper.devices.driver.facts import NO_ID, SUBJECTS, DriverReply, DriverRequest
from tests.patience import PATIENCE
from tests.unit.devices.driver.fake_nvml import Nvml, Refuses

STATES = {"answered", "no driver", "failed"}


def ask(session: DriverSession, about: str, number: int = 1) -> DriverReply:
    return session.answer(msgspec.json.encode(DriverRequest(number, about)))


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "no driver"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no driver"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "failed"),
    ],
)
@pytest.mark.parametrize("call", ["Init", "Count"])
@pytest.mark.parametrize("about", ["inventory", "condition", "usage", "identity", "health"])
def test_after_a_failure_the_driver_is_opened_again(about: str, call: str, error: int, state: str) -> None:
    nvml = Nvml()
    session = DriverSession(nvml, sleep=lambda _: None)
    session.collect()
    nvml.says[call] = Refuses(error)
    assert ask(session, about).state == state
    assert nvml.opened == 0
    del nvml.says[call]
    assert ask(session, about).state == "answered"
    session.collect()
    assert ask(session, about).state == "answered"
    assert nvml.opened == 1
    session.close()
    assert nvml.opened == 0


def test_an_answer_carries_the_id_of_its_question() -> None:
    session = DriverSession(Nvml(), sleep=lambda _: None)
    assert [ask(session, about, number).id for number, about in enumerate(SUBJECTS, 5)] == [5, 6, 7, 8, 9, 10]
    session.close()


@pytest.mark.parametrize("line", [b"hello\n", b"{}\n", b'{"id": "x", "about": "usage"}\n', b"\xff\n", b"\n"])
def test_a_line_that_is_no_question_is_answered_and_opens_nothing(line: bytes) -> None:
    nvml = Nvml()
    answer = DriverSession(nvml).answer(line)
    assert (answer.id, answer.state, nvml.opened) == (NO_ID, "failed", 0)
    assert "could not be read" in answer.why


def test_a_question_of_a_newer_client_is_refused() -> None:
    nvml = Nvml()
    answer = ask(DriverSession(nvml), "weather", 7)
    assert (answer.id, answer.state, answer.why, nvml.opened) == (7, "failed", "'weather' is not a valid request", 0)


# The lines.


def test_each_line_is_answered_and_the_end_of_input_ends_it() -> None:
    reading, writing = os.pipe()
    answers: list[bytes] = []
    server = threading.Thread(target=serve, args=(reading, answers.append, lambda: None))
    server.start()
    for written in (b"a\nb", b"\n", b"half"):
        os.write(writing, written)
    os.close(writing)
    server.join()
    os.close(reading)
    assert answers == [b"a\n", b"b\n"]


def test_without_questions_it_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "COLLECT_EVERY_S", 0.0)
    reading, writing = os.pipe()
    collected: list[int] = []

    def collect() -> None:
        collected.append(1)
        if len(collected) == 3:
            os.close(writing)

    serve(reading, lambda _: None, collect)
    os.close(reading)
    assert len(collected) >= 3


# The program.


def test_the_real_child_answers_every_question_with_one_record_and_ends_with_its_input() -> None:
    with subprocess.Popen(CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        for number, about in enumerate(SUBJECTS, 1):
            running.stdin.write(json.dumps({"id": number, "about": about}) + "\n")
        running.stdin.flush()
        answers = [json.loads(running.stdout.readline()) for _ in SUBJECTS]
        running.stdin.close()
        assert running.stdout.read() == ""
    assert running.returncode == 0
    assert [one["id"] for one in answers] == [1, 2, 3, 4, 5, 6]
    assert {one["state"] for one in answers} <= STATES


def test_the_real_child_imports_nothing_from_the_directory_it_is_started_in(tmp_path: Path) -> None:
    for name in ("select", "json", "queue", "msgspec", "pynvml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken over')")
    assert subprocess.run(CHILD, cwd=tmp_path, input=b"", capture_output=True, check=False).returncode == 0


def test_the_real_child_starts_without_the_rest_of_gpukeeper() -> None:
    """It is started for every inventory: what it imports must stay small."""
    program = "import sys, gpukeeper.devices.driver.child; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in loaded if name.startswith("gpukeeper.")}
    assert {name for name in ours if not name.startswith(("gpukeeper.devices.driver", "gpukeeper.model"))} == {
        "gpukeeper.devices"
    }
    assert not {"asyncio", "pydantic", "typer", "gpukeeper.devices.driver.client"} & set(loaded)


def test_a_child_whose_parent_is_gone_ends_although_its_driver_hangs() -> None:
    program = """
import time
from gpukeeper.devices.driver import child
child.TO_END_S = 0.1
child.serve(0, lambda line: print(line.decode(), flush=True) or time.sleep(600), lambda: None, child._end_soon)
"""
    hanging = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert hanging.stdin is not None
    assert hanging.stdout is not None
    hanging.stdin.write(b"question\n")
    hanging.stdin.flush()
    assert hanging.stdout.readline() == b"question\n"
    hanging.stdin.close()
    assert hanging.wait(timeout=PATIENCE) == 1
    hanging.stdout.close()
