"""Ending real processes by pidfd: exactly the one that was seen, or nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from gpukeeper.devices.holders import parse_container, parse_stat
from gpukeeper.devices.signals import EndedProcesses, Target, end, kill, terminate
from gpukeeper.model.decision import Accepted, Changed, Refused

LONG = timedelta(minutes=1)
A_BLINK = timedelta(milliseconds=50)
PLAIN = "import sys; print('ready', flush=True); sys.stdin.read()"
DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + PLAIN
SAVING = (
    "import os, signal, sys\n"
    "def save(*_):\n"
    "    open(sys.argv[1], 'w').write('saved')\n"
    "    os._exit(0)\n"
    "signal.signal(signal.SIGTERM, save)\n"
) + PLAIN


@contextmanager
def running(program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def seen(pid: int) -> Target:
    home = Path("/proc", str(pid))
    return Target(
        pid, parse_stat((home / "stat").read_text()).starttime, parse_container((home / "cgroup").read_text())
    )


def alive(child: subprocess.Popen[str]) -> bool:
    return child.poll() is None


def test_a_signal_handler_gets_its_grace(tmp_path: Path) -> None:
    with running(SAVING, str(tmp_path / "work")) as child:
        target = seen(child.pid)
        assert asyncio.run(terminate([target], LONG)) == EndedProcesses(gone=(target,))
    assert (tmp_path / "work").read_text() == "saved"


def test_who_ignores_the_signal_is_left_after_the_grace() -> None:
    with running(DEAF) as child, running(PLAIN) as other:
        deaf, plain = seen(child.pid), seen(other.pid)
        assert asyncio.run(terminate([deaf, plain], timedelta(seconds=2))) == EndedProcesses(
            gone=(plain,), left=(deaf,)
        )
        assert alive(child)
        assert asyncio.run(kill([deaf], LONG)) == EndedProcesses(gone=(deaf,))


def test_a_stopped_process_dies_by_sigkill() -> None:
    with running(PLAIN) as child:
        target = seen(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert asyncio.run(terminate([target], A_BLINK)) == EndedProcesses(left=(target,))
        assert isinstance(asyncio.run(end(target, A_BLINK * 20)), Accepted)
        assert child.wait() == -signal.SIGKILL


def test_another_process_under_the_same_pid_is_never_signalled() -> None:
    with running(PLAIN) as child:
        target = seen(child.pid)
        earlier = Target(target.pid, target.starttime - 1, target.workload_id)
        for send in (terminate, kill):
            done = asyncio.run(send([earlier], A_BLINK))
            assert [one.target for one in done.changed] == [earlier]
            assert not done.gone
            assert not done.left
        assert isinstance(asyncio.run(end(earlier, A_BLINK)), Changed)
        assert alive(child)


def test_a_process_of_another_workload_is_never_signalled() -> None:
    with running(PLAIN) as child:
        target = seen(child.pid)
        moved = Target(target.pid, target.starttime, "a" * 64)
        answer = asyncio.run(end(moved, A_BLINK))
        assert answer == Changed(f"pid {child.pid} belongs to another workload now")
        assert alive(child)


def fake_proc(
    folder: Path, target: Target, comm: str = "python3", cgroup: str = "0::/user.slice\n", state: str = "S"
) -> str:
    home = folder / str(target.pid)
    home.mkdir()
    fields = [state, "1", *["0"] * 17, str(target.starttime), "0", "0"]
    (home / "stat").write_text(f"{target.pid} ({comm}) {' '.join(fields)}\n")
    (home / "cgroup").write_text(cgroup)
    return str(folder)


def test_a_process_that_left_its_workload_for_the_bare_host_is_never_signalled(tmp_path: Path) -> None:
    with running(PLAIN) as child:
        target = Target(child.pid, 77, "a" * 64)
        answer = asyncio.run(end(target, A_BLINK, proc=fake_proc(tmp_path, target)))
        assert isinstance(answer, Changed)
        assert alive(child)


def test_a_bare_process_that_is_in_a_workload_now_is_never_signalled(tmp_path: Path) -> None:
    with running(PLAIN) as child:
        target = Target(child.pid, 77)
        proc = fake_proc(tmp_path, target, cgroup=f"0::/docker/{'a' * 64}\n")
        assert isinstance(asyncio.run(end(target, A_BLINK, proc=proc)), Changed)
        assert alive(child)


def test_a_nested_workload_is_known_by_any_of_its_ids(tmp_path: Path) -> None:
    with running(PLAIN) as child:
        target = Target(child.pid, 77, "b" * 64)
        proc = fake_proc(tmp_path, target, cgroup=f"0::/docker/{'a' * 64}/docker/{'b' * 64}\n")
        assert asyncio.run(end(target, LONG, proc=proc)) == Accepted()


def test_the_exporter_is_requested_to_end_and_never_killed(tmp_path: Path) -> None:
    with running(DEAF) as child:
        target = Target(child.pid, 77)
        answer = asyncio.run(end(target, A_BLINK, proc=fake_proc(tmp_path, target, comm="dcgm-exporter")))
        assert isinstance(answer, Refused)
        assert "never killed" in answer.why
        assert alive(child)


@pytest.mark.parametrize("pid", [-1, 0, 1, None])
def test_pid_1_groups_and_ourselves_are_never_ended(pid: int | None) -> None:
    """0 and -1 would be every process of a group, or of the machine; None stands for ourselves."""
    target = Target(os.getpid() if pid is None else pid, 1)
    assert isinstance(asyncio.run(end(target, A_BLINK)), Refused)


def test_what_is_gone_already_is_success() -> None:
    with running(PLAIN) as child:
        target = seen(child.pid)
    assert asyncio.run(end(target, A_BLINK)) == Accepted()


def test_a_zombie_is_gone() -> None:
    with running(PLAIN) as child:
        target = seen(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert asyncio.run(terminate([target], A_BLINK)) == EndedProcesses(gone=(target,))


def test_what_has_ended_is_gone_whatever_cgroup_it_fell_into(tmp_path: Path) -> None:
    with running(PLAIN) as child:
        target = Target(child.pid, 77, "a" * 64)
        proc = fake_proc(tmp_path, target, cgroup="0::/\n", state="Z")
        assert asyncio.run(terminate([target], A_BLINK, proc=proc)) == EndedProcesses(gone=(target,))
        assert alive(child)


def test_what_cannot_be_compared_is_not_signalled(tmp_path: Path) -> None:
    with running(PLAIN) as child:
        target = Target(child.pid, 77)
        proc = fake_proc(tmp_path, target)
        (tmp_path / str(child.pid) / "stat").unlink()
        (tmp_path / str(child.pid) / "stat").mkdir()  # reading it fails, whoever reads
        assert isinstance(asyncio.run(end(target, A_BLINK, proc=proc)), Refused)
        assert alive(child)


def test_no_descriptor_is_left_open() -> None:
    with running(DEAF) as child:
        target = seen(child.pid)
        before = len(list(Path("/proc/self/fd").iterdir()))
        asyncio.run(terminate([target, Target(child.pid, 1)], A_BLINK))
        assert len(list(Path("/proc/self/fd").iterdir())) == before
