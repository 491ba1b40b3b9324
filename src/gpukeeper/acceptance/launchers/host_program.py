"""Runs on a host, sent over ssh: starts a node's program, and finds, reads, stops and removes it afterwards.

Python 3.8, standard library, Linux; imports nothing of gpukeeper. One JSON request on stdin, one reply: a line with a
mark, a line of JSON, then `size` bytes. Everything of a run is below ROOT/RUN/NODE, with mode 0700:

    spec.json      the description of the run, as the launcher sent it; never read here
    request.json   the command, its environment, its deadline
    run.json       token, process and watchdog, each as pid, start time and boot: a pid alone may be another process
    log            what the program writes
    verdict        the termination message, if the program writes one
    exit.json      exit code and reason, once everything of the run has ended

The program runs in a session of its own below a watchdog. The watchdog ends it at its deadline, so that nothing keeps
running if the launcher has gone. Processes are found by a random token in their environment, which children inherit.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = b"gpukeeper-host-reply 1\n"
TOKEN = "GPUKEEPER_RUN_TOKEN"  # noqa: S105 - the name of a variable; what it holds is an identity, no secret
VERDICT_MAX = 4096  # bytes
GRACE_S = 10.0  # between SIGTERM and SIGKILL
LATE_S = 60.0  # after the deadline, before another process than the watchdog ends a run
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@%\[\]-]{0,200}")
TRASH = ".removing-"
STARTING = ".starting-"
PR_SET_PDEATHSIG = 1


class Refused(Exception):
    """The request cannot be carried out; a sentence."""


def main() -> None:
    try:
        request = json.loads(sys.stdin.buffer.read())
        subject, body = COMMANDS[request["do"]](request)
        reply = {"ok": True, "size": len(body), **subject}
    except Refused as refused:
        reply, body = {"ok": False, "error": str(refused), "size": 0}, b""
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        reply, body = {"ok": False, "error": f"{what}{error.strerror or error}", "size": 0}, b""
    except Exception:  # of this program: the launcher reports it with the host's name
        reply, body = {"ok": False, "error": traceback.format_exc(limit=-3), "size": 0}, b""
    sys.stdout.buffer.write(MARK + json.dumps(reply).encode() + b"\n" + body)
    sys.stdout.buffer.flush()


# Requests. Each returns the reply and the bytes that follow it.


def start(request: dict[str, Any]) -> Any:
    """Again for the same run and node: nothing is started, the reply is its state."""
    folder = folder_of(request)
    with locked():
        swept = sweep(time.time())
        if not folder.exists():
            create(folder, request)
        if not (folder / "run.json").exists():
            begin(folder)
    return {"state": state_of(folder), "swept": swept}, b""


def status(request: dict[str, Any]) -> Any:
    folder = folder_of(request)
    return {"state": state_of(folder) if folder.exists() else None}, b""


def listed(request: dict[str, Any]) -> Any:
    return {"states": [state_of(folder) for folder in folders()]}, b""


def output(request: dict[str, Any]) -> Any:
    """The log from `offset` on. `token`: of the start whose log the launcher has a part of; another: from its begin."""
    folder = folder_of(request)
    run = read(folder / "run.json")
    if run is None:
        return {"token": None}, b""
    offset = request["offset"] if request.get("token") == run["token"] else 0
    try:
        with (folder / "log").open("rb") as log:
            log.seek(offset)
            return {"token": run["token"], "offset": offset}, log.read(request["most"])
    except FileNotFoundError:
        return {"token": run["token"], "offset": 0}, b""


def remove(request: dict[str, Any]) -> Any:
    """Stop and delete; `left`: what is still there, from a read afterwards."""
    folder = folder_of(request)
    run = read(folder / "run.json")
    existed = folder.exists()
    if existed:
        end(folder)
        with locked():
            discard(folder)
    left = [f"process {pid}" for pid in processes(run)] if run else []
    if folder.exists():
        left.append(str(folder))
    return {"removed": str(folder) if existed else None, "left": left}, b""


def checks(request: dict[str, Any]) -> Any:
    """By a program that the request contains: host_checks.py."""
    exec(request["source"], scope := {"__name__": "checks"})  # noqa: S102 - from the launcher, as this program is
    return scope["check"](request, root()), b""  # type: ignore[operator]


COMMANDS = {one.__name__: one for one in (start, status, listed, output, remove, checks)}


# Directories.


def root() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or ""
    parent = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return parent / "gpukeeper-runs"


def folder_of(request: dict[str, Any]) -> Path:
    for name in (request["run"], request["node"]):
        if not NAME.fullmatch(name):
            raise Refused(f"{name!r} cannot be the name of a directory")
    return root().joinpath(request["run"], request["node"])


def folders() -> list[Path]:
    return sorted(one for one in root().glob("*/*") if one.is_dir() and NAME.fullmatch(one.name))


def private(folder: Path) -> None:
    """Create it with mode 0700, or refuse one that others may change."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise Refused(f"{folder} is no directory of this user; remove it")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise Refused(f"other users may open {folder}; change it: chmod 700 {folder}")


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One request at a time changes directories. The kernel releases the lock of a process that ends."""
    private(root())
    with (root() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def create(folder: Path, request: dict[str, Any]) -> None:
    """It appears complete, or not at all."""
    private(folder.parent)
    made = folder.parent / (STARTING + os.urandom(8).hex())
    made.mkdir(mode=0o700)
    write(made / "spec.json", request["spec"])
    kept = ("command", "environment", "deadline_s", "retention_s", "log_most", "nodes")
    holder = identity(os.getppid()) if request.get("holder") else None
    write(made / "request.json", {**{key: request[key] for key in kept}, "created": time.time(), "holder": holder})
    made.rename(folder)


def discard(folder: Path) -> None:
    """Renamed first: a directory that is deleted in part is never taken for a run."""
    away = folder.parent / (TRASH + os.urandom(8).hex())
    with contextlib.suppress(FileNotFoundError):
        folder.rename(away)
        shutil.rmtree(away)
    with contextlib.suppress(OSError):  # other nodes of the run are there
        folder.parent.rmdir()


def sweep(now: float) -> list[str]:
    """What interrupted requests left, runs whose watchdog died, and ended runs beyond their retention."""
    for rest in [*root().glob(f"*/{TRASH}*"), *root().glob(f"*/{STARTING}*")]:
        shutil.rmtree(rest, ignore_errors=True)
    swept = []
    for folder in folders():
        request = read(folder / "request.json")
        if request is None or not {"created", "deadline_s", "retention_s"} <= request.keys():
            continue  # when it is over is unknown: kept, also the report in its log
        state = state_of(folder)
        over = float(state["started"] or state["created"]) + request["deadline_s"]
        if state["state"] == "running" and now > over + LATE_S:
            end(folder, "deadline")
            state = state_of(folder)
        if state["state"] != "running" and now > max(over, state["ended"] or 0) + request["retention_s"]:
            discard(folder)
            swept.append(f"{folder.parent.name}/{folder.name}")
    for empty in root().iterdir():
        with contextlib.suppress(OSError):
            empty.rmdir()
    return swept


def write(path: Path, document: Any) -> None:
    made = path.with_name(f".{path.name}.new")
    with made.open("w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    made.rename(path)


def read(path: Path) -> dict[str, Any] | None:
    """None: not there, or not complete (a full disk)."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# State.


def state_of(folder: Path) -> dict[str, Any]:
    run, over, request = (read(folder / f"{name}.json") for name in ("run", "exit", "request"))
    state = "created" if run is None else "ended" if over else "running" if lives(run) else "vanished"
    if state == "vanished" and (over := read(folder / "exit.json")):  # written between the two reads
        state = "ended"
    if request:
        request.pop("environment", None)
    return {
        "run": folder.parent.name,
        "node": folder.name,
        "state": state,
        "exit_code": over["code"] if over else None,
        "why": over["why"] if over else "",
        "created": request["created"] if request else None,
        "started": run["started"] if run else None,
        "ended": over["ended"] if over else None,
        "request": request,
        "spec": read(folder / "spec.json"),
        "log": size(folder / "log"),
        "verdict": verdict(folder),
        "folder": str(folder),
    }


def verdict(folder: Path) -> str:
    with contextlib.suppress(OSError), (folder / "verdict").open("rb") as file:
        return file.read(VERDICT_MAX).decode("utf-8", "replace")
    return ""


def size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def lives(run: dict[str, Any]) -> bool:
    return is_same(run["watchdog"]) or bool(processes(run))


# Processes.


def identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "start": start_time(pid), "boot": boot()}


def is_same(process: dict[str, Any] | None) -> bool:
    """That process itself, and no zombie."""
    if process is None or process["boot"] != boot():
        return False
    try:
        return start_time(process["pid"]) == process["start"] and fields(process["pid"])[0] not in "ZX"
    except OSError:
        return False


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def fields(pid: int) -> list[str]:
    """Behind the name, which may contain spaces and brackets: state, parent, group, session, …"""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def start_time(pid: int) -> int:
    return int(fields(pid)[19])


def processes(run: dict[str, Any]) -> list[int]:
    """All that inherited the token, and the session of the program while its leader lives: a program may overwrite its
    environment."""
    token = f"{TOKEN}={run['token']}".encode()
    leader = run["process"]["pid"] if is_same(run["process"]) else None
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208 - only numbers are of interest
        with contextlib.suppress(OSError, ValueError):  # it ended, or belongs to another user
            state, _, _, session = fields(int(entry))[:4]
            if state not in "ZX" and (int(session) == leader or has(int(entry), token)):
                found.append(int(entry))
    return found


def has(pid: int, variable: bytes) -> bool:
    with contextlib.suppress(OSError):
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def send(pid: int, run: dict[str, Any], number: int) -> None:
    """To that process only: a handle is opened, then its membership is read again, then the signal is sent."""
    with contextlib.suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):  # before Python 3.9
            if pid in processes(run):
                os.kill(pid, number)
            return
        handle = os.pidfd_open(pid)
        try:
            if pid in processes(run):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def end_all(run: dict[str, Any], grace_s: float) -> None:
    """SIGTERM, then SIGKILL until nothing is left: a process may start another one meanwhile."""
    late = time.monotonic() + grace_s
    for pid in processes(run):
        send(pid, run, signal.SIGTERM)
    while time.monotonic() < late and processes(run):
        time.sleep(0.05)
    late = time.monotonic() + grace_s
    while (left := processes(run)) and time.monotonic() < late:
        for pid in left:
            send(pid, run, signal.SIGKILL)
        time.sleep(0.05)


def end(folder: Path, why: str = "stopped") -> None:
    """By its watchdog; without one, here."""
    run = read(folder / "run.json")
    if run is None or not lives(run):
        return
    watchdog = run["watchdog"]
    if is_same(watchdog):
        with contextlib.suppress(ProcessLookupError):
            os.kill(watchdog["pid"], signal.SIGTERM)
        late = time.monotonic() + 3 * GRACE_S
        while is_same(watchdog) and time.monotonic() < late:
            time.sleep(0.02)
        if is_same(watchdog):
            with contextlib.suppress(ProcessLookupError):
                os.kill(watchdog["pid"], signal.SIGKILL)
    end_all(run, GRACE_S)
    if read(folder / "exit.json") is None and not processes(run):
        write(folder / "exit.json", {"code": None, "why": why, "ended": time.time()})


# The watchdog.


def begin(folder: Path) -> None:
    """Start the watchdog, detached, and wait until it has recorded what it started."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        detach(folder, writer)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        problem = pipe.read().decode("utf-8", "replace")
    if problem:
        raise Refused(problem)


def detach(folder: Path, writer: int) -> None:
    """In the child: never returns. A second fork, so that the watchdog is no leader of a session."""
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # sshd waits until the last process has closed its pipes
            os.dup2(null, fd)
        writer = os.dup2(writer, 3)
        os.closerange(4, 4096)  # the lock among them: it is held until its last descriptor is closed
        os.chdir(folder)
        watch(folder, writer)
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(writer, traceback.format_exc(limit=-3).encode())
    os._exit(0)


def watch(folder: Path, writer: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    request = read(folder / "request.json")
    assert request is not None, "request.json cannot be read"
    token = os.urandom(16).hex()
    run: dict[str, Any] = {"token": token, "watchdog": identity(os.getpid()), "process": None, "started": time.time()}
    write(folder / "run.json", run)
    began = time.monotonic()
    child = launch(folder, request, token)
    if child is not None:
        run["process"] = identity(child.pid)
        write(folder / "run.json", run)
    os.close(writer)
    code, why = wait(child, folder, began + request["deadline_s"], request) if child else (127, "command")
    end_all(run, GRACE_S)
    if child is not None and code is None:
        code = child.wait()
    write(folder / "exit.json", {"code": code, "why": why, "ended": time.time()})
    if request["holder"]:
        outlive(folder, request["holder"])


def outlive(folder: Path, holder: dict[str, Any]) -> None:
    """The holder reads the log and removes the run. If it ends before: here."""
    while is_same(holder):
        if not folder.exists() or signal.sigtimedwait(SIGNALS - {signal.SIGCHLD}, 1.0):
            return
    with locked():
        discard(folder)


SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}


def launch(folder: Path, request: dict[str, Any], token: str) -> subprocess.Popen[bytes] | None:
    """None: the program does not exist, or may not be executed; its log has the reason."""
    environment = {**os.environ, **request["environment"], TOKEN: token}
    environment["GPUKEEPER_TERMINATION_LOG"] = str(folder / "verdict")
    with (folder / "log").open("ab") as log:
        try:
            return subprocess.Popen(
                request["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
                preexec_fn=unblocked,  # noqa: PLW1509 - this process has one thread
            )
        except OSError as error:
            log.write(f"{request['command'][0]}: {error.strerror}\n".encode())
            return None


def unblocked() -> None:
    """In the child, before it executes the program. It ends with its watchdog."""
    import ctypes  # only a start needs it; it is slow to import

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def wait(child: subprocess.Popen[bytes], folder: Path, deadline: float, request: dict[str, Any]) -> Any:
    """Exit code and reason; the code is None while the program still runs."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return child.poll(), "deadline"
        got = signal.sigtimedwait(SIGNALS, min(left, 1.0))
        code = child.poll()
        if code is not None:
            return code, ""
        if (got and got.si_signo != signal.SIGCHLD) or (request["holder"] and not is_same(request["holder"])):
            return None, "stopped"
        if size(folder / "log") > request["log_most"]:
            return None, "log"


if __name__ == "__main__":
    main()
