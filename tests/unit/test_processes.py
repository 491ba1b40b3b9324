"""Child processes: what ends with them, and what is kept of their words. Those of our own Python: nothing that lies in
the current directory runs in them, and nothing that a variable names, unless it leads to what their parent has found by
it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import py_compile
import select
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest

import gpukeeper
from gpukeeper.clients import ray as rayjobs
from gpukeeper.devices.driver.client import CHILD, query_once
from gpukeeper.disk import worker_pool
from gpukeeper.interfaces import demo_web
from gpukeeper.interfaces.daemon import web
from gpukeeper.interfaces.link import Welcome, new_revocations
from gpukeeper.notify import apprise, apprise_child
from gpukeeper.processes import KEPT, Tail, environment, last_line, read_at_most, running
from tests.patience import PATIENCE, PATIENT

COMMANDS = {
    "driver": CHILD,
    "disk": worker_pool.CHILD,
    "web": web.CHILD,
    "apprise": apprise.CHILD,
    "demo": demo_web.CHILD,
}
HOSTILE = "import pathlib; pathlib.Path({mark!r}).touch(); raise SystemExit\n"


def start_driver(folder: Path) -> None:
    query_once("inventory", PATIENT)


def start_disk(folder: Path) -> None:
    (folder / "measured").mkdir()
    top = os.open(folder, os.O_RDONLY)
    settings = {"open": [], "depth_max": 9, "locking": False, "quantum": 9}
    try:
        with worker_pool.WorkerPool("measure", top, settings) as pool:
            pool.share_out([(b"measured", 1)], lambda answer: None, lambda: False)
    finally:
        os.close(top)


class NoBackend:
    def __init__(self) -> None:
        self.revocations = new_revocations()

    async def welcome(self) -> Welcome:
        return Welcome(machine="m", version="0", key=b"k", anonymous=True, session_seconds=1)

    async def publish(self, send: Any) -> None:
        await asyncio.Event().wait()


def start_web(folder: Path) -> None:
    async def answered(listener: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            await reader.readline()
        finally:
            writer.close()
            await writer.wait_closed()

    async def story(listener: socket.socket) -> None:
        child: Any = web.WebChild(NoBackend(), listener, lambda line: None)  # type: ignore[arg-type]
        both = [asyncio.create_task(child._run()), asyncio.create_task(answered(listener))]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(story(listener))


def start_apprise(folder: Path) -> None:
    async def story() -> None:
        service = apprise.ServiceProcess()
        found = await service._start()
        if not isinstance(found, apprise_child.Reply):
            found.kill()
            await found.wait()

    asyncio.run(story())


def start_demo(folder: Path) -> None:
    with demo_web._start("not a policy") as running:
        running.communicate()


STARTS: dict[str, Callable[[Path], None]] = {
    "driver": start_driver,
    "disk": start_disk,
    "web": start_web,
    "apprise": start_apprise,
    "demo": start_demo,
}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory where another user left modules that are imported early."""
    for name in ("json", "h11", "msgspec", "uvicorn", "multiprocessing", "base64"):
        (tmp_path / f"{name}.py").write_text(HOSTILE.format(mark=str(tmp_path / "taken over")))
    package = tmp_path / "gpukeeper"
    package.mkdir()
    (package / "__init__.py").write_text(HOSTILE.format(mark=str(tmp_path / "taken over")))
    return tmp_path


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with bytecode of gpukeeper that another user has made."""
    source = tmp_path / "hostile.py"
    source.write_text(HOSTILE.format(mark=str(tmp_path / "taken over")))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "pycache_prefix", str(tmp_path))
        place = cache_from_source(str(gpukeeper.__file__))
    py_compile.compile(str(source), place, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return tmp_path


def run_in(directory: Path, command: Sequence[str], **environ: str) -> str:
    """What it printed."""
    none, more = subprocess.DEVNULL, {**os.environ, **environ}
    done = subprocess.run(
        command, cwd=directory, stdin=none, capture_output=True, timeout=PATIENCE, check=False, env=more, text=True
    )
    return done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_modules_in_the_current_directory_are_not_imported(hostile: Path, name: str) -> None:
    run_in(hostile, COMMANDS[name])
    assert not (hostile / "taken over").exists()


def test_without_the_option_they_would_be(hostile: Path) -> None:
    """So that the test above can fail."""
    run_in(hostile, [word for word in COMMANDS["web"] if word != "-P"])
    assert (hostile / "taken over").exists()


@pytest.mark.parametrize("name", STARTS)
def test_no_code_is_run_that_only_a_variable_names(planted: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(planted))
    STARTS[name](planted)
    assert not (planted / "taken over").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_with_that_variable_it_would_be(planted: Path, name: str) -> None:
    """So that the test above can fail."""
    run_in(planted, COMMANDS[name], PYTHONPYCACHEPREFIX=str(planted))
    assert (planted / "taken over").exists()


@pytest.mark.parametrize("name", STARTS)
def test_packages_that_are_found_by_a_variable_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'found')!r}).touch()\n")
    monkeypatch.setenv("PYTHONPATH", f":{tmp_path}")
    STARTS[name](tmp_path)
    assert (tmp_path / "found").exists()


def test_what_is_not_needed_is_not_passed_on() -> None:
    needed = {"PATH": "/bin", "HOME": "/root", "LANG": "C.UTF-8", "LC_TIME": "de_DE", "TZ": "UTC", "PYTHONUTF8": "1"}
    libraries = ["LD_PRELOAD", "LD_AUDIT", "OPENSSL_CONF", "SSLKEYLOGFILE", "BASH_ENV"]
    python = ["PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONWARNINGS", "PYTHONBREAKPOINT", "PYTHONPYCACHEPREFIX"]
    secrets = ["GPUKEEPER_GROUP_SECRET", "RAY_AUTH_TOKEN", "KUBECONFIG", "SSH_AUTH_SOCK"]
    hostile = dict.fromkeys([*libraries, *python, *secrets], "/tmp/x")
    assert environment({**needed, **hostile}) == needed


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ("/opt/a:/opt/b", "/opt/a:/opt/b"),
        (":/opt/a", "/opt/a"),
        ("/opt/a:", "/opt/a"),
        ("src:/opt/a:.:../b", "/opt/a"),
        ("src", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("name", ["PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH"])
def test_of_directories_only_absolute_ones_are_passed_on(name: str, given: str, passed_on: str | None) -> None:
    assert environment({name: given}).get(name) == passed_on


@pytest.mark.parametrize("name", ["HOME", "PYTHONUSERBASE", "TMPDIR"])
def test_a_single_directory_is_passed_on_if_it_is_absolute(name: str) -> None:
    assert environment({name: "/opt/a:b"}) == {name: "/opt/a:b"}
    assert not environment({name: "a"})


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("-P", {"PYTHONPATH": "/opt/a", "PYTHONUTF8": "1"}),
        ("-E", {}),
        ("-s", {"PYTHONPATH": "/opt/a", "PYTHONUTF8": "1", "PYTHONNOUSERSITE": "1"}),
        ("-I", {"PYTHONNOUSERSITE": "1"}),
    ],
)
def test_what_a_process_ignores_its_children_ignore(option: str, expected: dict[str, str]) -> None:
    ask = "import json; from gpukeeper.processes import environment; print(json.dumps(environment()))"
    environ = {"PYTHONPATH": "/opt/a", "PYTHONUTF8": "1"}
    printed = subprocess.check_output([sys.executable, option, "-c", ask], env=environ, timeout=PATIENCE)
    found = json.loads(printed)
    assert {name: value for name, value in found.items() if name.startswith("PYTHON")} == expected


def test_the_processes_of_a_backtest_do_not_import_them_either(hostile: Path) -> None:
    """multiprocessing starts its children with -c, which imports multiprocessing from the current directory."""
    program = str(Path(sys.executable).with_name("gpukeeper"))
    printed = run_in(hostile, [program, "backtest", "synthetic:1", "--workers", "2", "--json"])
    assert json.loads(printed)["schema"].startswith("gpukeeper/backtest/")
    assert not (hostile / "taken over").exists()


def test_nor_does_the_driver_of_a_ray_job(hostile: Path) -> None:
    program = base64.b64encode(zlib.compress(b"import json; print(json)")).decode()
    command = rayjobs.entrypoint(sys.executable)
    given = json.dumps({"metadata": {rayjobs.PROGRAM: program}})
    assert "json" in run_in(hostile, ["sh", "-c", command], RAY_JOB_CONFIG_JSON_ENV_VAR=given)
    assert not (hostile / "taken over").exists()


# How they end, and what is kept of their words.

FAMILY = "import os, time; child = os.fork(); print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize("alone", [False, True])
def test_a_program_ends_with_its_block_and_so_does_its_group(*, alone: bool) -> None:
    async def story() -> list[int]:
        pipe, command = asyncio.subprocess.PIPE, (sys.executable, "-I", "-c", FAMILY)
        async with running(*command, alone=alone, stdout=pipe) as child:
            assert child.stdout is not None
            begun = [os.pidfd_open(int(await child.stdout.readline())) for _ in range(2)]
            assert (os.getpgid(child.pid) == child.pid) is not alone
            if alone:
                for fd in begun:  # its child is no concern of the block, and must not outlive the test
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
        return begun

    for fd in asyncio.run(story()):
        assert select.select([fd], [], [], PATIENCE)[0], "it still runs"
        os.close(fd)


def test_a_program_whose_start_is_interrupted_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    create = asyncio.create_subprocess_exec

    async def slow(*command: str, **options: Any) -> asyncio.subprocess.Process:
        child = await create(*command, **options)
        begun.append(os.pidfd_open(child.pid))
        await asyncio.sleep(0.1)
        return child

    async def story() -> None:
        async with running(sys.executable, "-I", "-c", FAMILY, stdout=asyncio.subprocess.DEVNULL):
            raise AssertionError("the start was interrupted")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(story(), 0.05))
    assert select.select(begun, [], [], PATIENCE)[0], "it still runs"
    os.close(begun[0])


def fed(*parts: bytes) -> asyncio.StreamReader:
    stream = asyncio.StreamReader()
    for part in parts:
        stream.feed_data(part)
    stream.feed_eof()
    return stream


def test_of_much_output_the_end_is_kept() -> None:
    async def story() -> bytes:
        tail = Tail()
        await tail.read(fed(*[b"x" * 200_000] * 5, b"no route to host\n"))
        return tail.kept

    kept = asyncio.run(story())
    assert len(kept) == KEPT
    assert kept.endswith(b"xno route to host\n")


@pytest.mark.parametrize(("size", "read"), [(0, 0), (1000, 1000), (1001, 1001), (1_000_000, 64 * 1024)])
def test_output_without_end_is_not_read_any_further(size: int, read: int) -> None:
    async def story() -> bytes:
        return await read_at_most(fed(b"x" * size), 1000)

    assert len(asyncio.run(story())) == read


@pytest.mark.parametrize(
    ("output", "line"),
    [(b"", ""), (b"\n \n", ""), (b"a\n  why \n\n", "why"), (b"\xff\n", "\N{REPLACEMENT CHARACTER}")],
)
def test_the_last_line_with_words(output: bytes, line: str) -> None:
    assert last_line(output) == line
