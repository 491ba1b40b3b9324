"""Programs on a leash: they end when we let go, when we are killed, and take everything they started with them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from gpukeeper.acceptance.bench import child_process
from gpukeeper.acceptance.bench.child_process import ChildProcess, ProcessEnded
from gpukeeper.processes import KEPT
from tests.patience import PATIENCE

# Starts a child in a session of its own, as torchrun does with ranks, says both pids, and waits for its input to end.
FAMILY = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; {how}; print('up', flush=True); signal.pause()"],
                         start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
{then}
"""
WAITS = FAMILY.format(how="", then="import signal; signal.pause()")
DEAF = FAMILY.format(how="signal.signal(signal.SIGTERM, signal.SIG_IGN)", then="import signal; signal.pause()")
LEAVES = FAMILY.format(how="", then="os._exit(7)")
OWNER = """
import asyncio, signal, sys
from gpukeeper.acceptance.bench.child_process import ChildProcess
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
async def main():
    held = await ChildProcess.start([sys.executable, "-c", sys.argv[1]])
    print((await held.line(30)).decode(), end="", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def held(program: str, use: Callable[[ChildProcess], Awaitable[object]]) -> object:
    async def run() -> object:
        process = await ChildProcess.start(python(program))
        try:
            return await use(process)
        finally:
            await process.end()

    return asyncio.run(run())


@contextmanager
def watched(*pids: int) -> Iterator[Callable[[], bool]]:
    """Tells whether all of them ended; whoever did not is killed in the end. One that is gone already has ended."""
    fds = []
    for pid in pids:
        with suppress(ProcessLookupError):
            fds.append(os.pidfd_open(pid))
    try:
        yield lambda: all(select.select([fd], [], [], PATIENCE)[0] for fd in fds)
    finally:
        for fd in fds:
            if not select.select([fd], [], [], 0)[0]:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)


def test_it_answers_line_by_line() -> None:
    async def talk(process: ChildProcess) -> list[bytes]:
        answers = []
        for word in (b"one", b"two"):
            await process.send(word)
            answers.append(await process.line(PATIENCE))
        return answers

    echo = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"
    assert held(echo, talk) == [b"eno\n", b"owt\n"]


def test_it_ends_with_its_own_exit_code_and_last_words() -> None:
    async def wait(process: ChildProcess) -> tuple[int, str]:
        return await process.wait(PATIENCE), await process.last_words()

    code, words = held("import sys; sys.stderr.write('no such thing'); sys.exit(5)", wait)  # type: ignore[misc]
    assert (code, words) == (5, "no such thing")


def test_a_signal_shows_in_the_exit_code() -> None:
    assert held("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", lambda one: one.wait(PATIENCE)) == 128 + 11


def test_a_program_that_is_not_there_is_one_that_ended() -> None:
    async def run() -> tuple[int, str]:
        process = await ChildProcess.start(["/nowhere/python"])
        try:
            return await process.wait(PATIENCE), await process.last_words()
        finally:
            await process.end()

    code, words = asyncio.run(run())
    assert code == 127
    assert "/nowhere/python could not be started: No such file" in words


def test_only_the_end_of_what_it_says_is_kept() -> None:
    async def wait(process: ChildProcess) -> str:
        await process.wait(PATIENCE)
        return await process.last_words()

    words = held("import sys; sys.stderr.write('x' * 1_000_000 + 'the end')", wait)
    assert isinstance(words, str)
    assert words.endswith("xthe end")
    assert len(words) == KEPT


def test_no_answer_in_time_and_no_answer_at_all_are_distinguished() -> None:
    async def late(process: ChildProcess) -> None:
        with pytest.raises(TimeoutError):
            await process.line(0.1)

    async def gone(process: ChildProcess) -> None:
        with pytest.raises(ProcessEnded):
            await process.line(PATIENCE)

    held("import time; time.sleep(600)", late)
    held("print('half a line', end='')", gone)


def test_who_lets_go_ends_everything_even_in_sessions_of_their_own() -> None:
    async def family(process: ChildProcess) -> list[int]:
        return [*map(int, (await process.line(PATIENCE)).split())]

    async def run() -> None:
        process = await ChildProcess.start(python(WAITS))
        with watched(*await family(process)) as all_ended:
            await process.end()
            assert all_ended()

    asyncio.run(run())


def test_who_does_not_hear_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "PATIENCE_S", 0.1)

    async def run() -> None:
        process = await ChildProcess.start(python(DEAF))
        with watched(*map(int, (await process.line(PATIENCE)).split())) as all_ended:
            await process.end()
            assert all_ended()

    asyncio.run(run())


def test_an_interruption_does_not_let_anybody_get_away() -> None:
    """Ctrl-C, and again while we tidy up."""

    async def run() -> None:
        process = await ChildProcess.start(python(DEAF))
        with watched(*map(int, (await process.line(PATIENCE)).split())) as all_ended:
            ending = asyncio.ensure_future(process.end())
            for _ in range(3):
                await asyncio.sleep(0)
                ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
            assert all_ended()

    asyncio.run(run())


def test_a_program_that_leaves_its_children_behind_takes_them_with_it() -> None:
    """torchrun that crashes: its ranks would go on computing."""

    async def run() -> int:
        process = await ChildProcess.start(python(LEAVES))
        _, child = map(int, (await process.line(PATIENCE)).split())
        try:
            with watched(child) as all_ended:
                code = await process.wait(PATIENCE)
                assert all_ended()
                return code
        finally:
            await process.end()

    assert asyncio.run(run()) == 7


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_whoever_started_it(how: signal.Signals) -> None:
    """Not even when we are killed without a chance to tidy up."""
    owner = subprocess.Popen([*python(OWNER), WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert owner.stdout is not None
    with watched(*map(int, owner.stdout.readline().split())) as all_ended:
        owner.send_signal(how)
        owner.wait(PATIENCE)
        owner.stdout.close()
        assert all_ended()
