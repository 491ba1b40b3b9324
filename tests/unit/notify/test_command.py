"""A program that gets messages: what it is given, and what becomes of it when it fails, hangs or is not trusted."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpukeeper.model.ports import Delivered, Message, MessageKind, NotDelivered
from gpukeeper.notify.command import STDERR_MAX, Command, CommandKind, StderrTail
from gpukeeper.processes import KEPT
from tests.patience import PATIENCE

MESSAGE = Message(
    kind=MessageKind.BREAKER,
    about="docker/node-3",
    text="41 of 60 \x1b[2J would stop\nall at once",
    at=datetime(2026, 5, 1, tzinfo=UTC),
)


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{text}\n")
    path.chmod(0o755)
    return str(path)


def sent(*words: str) -> Delivered | NotDelivered:
    return asyncio.run(Command(words).send(MESSAGE))


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def why(answer: Delivered | NotDelivered) -> str:
    assert isinstance(answer, NotDelivered)
    return answer.why


def test_it_gets_the_message_on_stdin_and_its_words_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere")
    out = tmp_path / "out"
    text = f"open({str(out)!r}, 'w').write(repr([sys.argv[1:], sys.stdin.read(), sorted(os.environ), os.getcwd()]))"
    assert sent(program(tmp_path, text), "$(reboot)", "; ls") == Delivered()
    words, said, environ, folder = eval(out.read_text())
    assert words == ["$(reboot)", "; ls"]
    assert said == "41 of 60 \N{REPLACEMENT CHARACTER}[2J would stop\N{REPLACEMENT CHARACTER}all at once\n"
    assert {"GPUKEEPER_KIND", "GPUKEEPER_ABOUT", "PATH"} <= set(environ)
    assert "DOCKER_HOST" not in environ
    assert folder == "/"


def test_a_program_that_fails_shows_how(tmp_path: Path) -> None:
    failing = program(tmp_path, "sys.exit('first\\nthe server refused it')")
    assert why(sent(failing)) == "it ended with 1: the server refused it"
    assert why(sent(program(tmp_path, "os.kill(os.getpid(), 9)"))) == "it ended with -9: no message"


def test_a_program_that_does_not_read_is_no_failure_of_ours(tmp_path: Path) -> None:
    assert sent(program(tmp_path, "os.close(0)")) == Delivered()


def test_a_program_that_is_not_there_or_cannot_be_run(tmp_path: Path) -> None:
    assert why(sent(str(tmp_path / "none"))) == f"it cannot be started: {os.strerror(2)}"
    (tmp_path / "text").write_text("hello")
    assert why(sent(str(tmp_path / "text"))) == f"it cannot be started: {os.strerror(13)}"


def test_a_program_that_others_could_change_is_not_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = Path(program(tmp_path, f"open({str(out)!r}, 'w')"))
    path.chmod(0o777)
    assert "it was not run" in why(sent(str(path)))
    assert not out.exists()


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    text = f"child = os.fork()\nif child: open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child}}')\ntime.sleep(600)"
    command = Command([program(tmp_path, text)])

    async def late() -> list[int]:
        sending = asyncio.create_task(command.send(MESSAGE))
        begun = [os.pidfd_open(int(pid)) for pid in (await asyncio.to_thread(pids.read_text)).split()]
        sending.cancel()
        await asyncio.wait([sending])
        return begun

    ended = asyncio.run(late())
    assert len(ended) == 2
    for fd in ended:
        assert select.select([fd], [], [], PATIENCE)[0], "it still runs"
        os.close(fd)


def test_a_program_that_writes_to_stderr_without_end_is_ended_at_once(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = f"open({str(pid)!r}, 'w').write(str(os.getpid()))\nwhile True: os.write(2, b'no server\\n' * 1000)"
    command = Command([program(tmp_path, text)])
    before = open_files()
    kept = 0

    async def send() -> Delivered | NotDelivered:
        return await asyncio.wait_for(command.send(MESSAGE), PATIENCE)

    tail = StderrTail._take

    def taken(self: StderrTail, end: Callable[[], None]) -> bool:
        nonlocal kept
        found = tail(self, end)
        kept = max(kept, len(self.kept))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StderrTail, "_take", taken)
        answer = asyncio.run(send())
    assert why(answer) == "it was ended, because it wrote more than 1024 KiB to stderr"
    assert kept == KEPT
    assert not Path(f"/proc/{pid.read_text()}").exists()
    assert open_files() == before


@pytest.mark.parametrize("size", [KEPT // 2, STDERR_MAX - 100])
def test_a_program_that_writes_much_and_delivers_has_delivered(tmp_path: Path, size: int) -> None:
    """More than a pipe holds: it does not wait for us."""
    much = f"for _ in range({size} // 50): sys.stderr.write('x' * 49 + '\\n')\n"
    assert sent(program(tmp_path, much)) == Delivered()
    assert why(sent(program(tmp_path, f"{much}sys.exit('the last line')"))) == "it ended with 1: the last line"


def test_a_child_that_keeps_stderr_open_is_not_waited_for(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    text = f"child = os.fork()\nif child: open({str(pids)!r}, 'w').write(str(child)); sys.exit('gone')\ntime.sleep(600)"
    answer = asyncio.run(asyncio.wait_for(Command([program(tmp_path, text)]).send(MESSAGE), PATIENCE))
    os.kill(int(pids.read_text()), signal.SIGKILL)
    assert why(answer) == "it ended with 1: gone"


@pytest.mark.parametrize("words", [[], ["mail"], ["./mail"], ["/usr/../bin/mail"], [""]])
def test_a_command_is_named_by_its_whole_path(words: list[str]) -> None:
    problem = CommandKind().problem(words)
    assert problem is not None
    assert "absolute path" in problem


def test_its_arguments_are_not_shown() -> None:
    kind = CommandKind()
    assert kind.problem(["/usr/bin/curl", "https://chat/hush"]) is None
    assert kind.shown(["/usr/bin/curl", "-d", "https://chat/hush"]) == "/usr/bin/curl (2 arguments not shown)"
    assert kind.shown(["/usr/bin/page"]) == "/usr/bin/page"
