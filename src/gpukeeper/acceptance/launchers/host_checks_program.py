"""Checks on a host before a run, sent with a request (host_program.py executes it). Writes nothing there.

Python 3.8, standard library, Linux; imports nothing of gpukeeper.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import selectors
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VERSION_S = 30.0  # for `gpukeeper --version`: Python from a cold disk
CONNECT_S = 5.0
RETRY_S = 0.2
WORDS_MAX = 300


def check(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`folder`: where runs of this user are kept."""
    return CHECKS[request["check"]](request, folder)


def look(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What every launch needs."""
    return {"gpus": gpus(), "program": shutil.which(request["program"]), "root": str(folder)}


def facts(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """None: not there, or not known."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "folder": str(folder), "time": time.time()}
    found.update(gpus=gpus(), driver=driver(), **program(request["program"]))
    found.update(shm=space("/dev/shm")[0], free=space(nearest(folder))[1], refused=refused(folder))  # noqa: S108
    return found


def gpus() -> int:
    return sum(1 for one in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", one.name))


def driver() -> str:
    """Empty: none is loaded."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()[:40]
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([0-9.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found.group(1) if found else ""
    return ""


def program(name: str) -> dict[str, Any]:
    """Where gpukeeper is, and what it says about its version; `broken`: why it does not run."""
    path = shutil.which(name)
    if path is None:
        return {"program": None, "version": "", "broken": ""}
    try:
        ran = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_S)  # noqa: PLW1510 - read below
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"program": path, "version": "", "broken": str(error)[:WORDS_MAX]}
    said = (ran.stdout if ran.returncode == 0 else ran.stderr or ran.stdout).decode("utf-8", "replace").strip()
    last = said.splitlines()[-1][:WORDS_MAX] if said else f"exit code {ran.returncode}"
    return {"program": path, "version": last if ran.returncode == 0 else "", "broken": last if ran.returncode else ""}


def space(path: str | Path) -> tuple[int | None, int | None]:
    """Bytes: all, and those that this user may use."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def nearest(folder: Path) -> Path:
    """The first directory above it that exists: what a run would create is created there."""
    for one in (folder, *folder.parents):
        if one.is_dir():
            return one
    return Path("/")


def refused(folder: Path) -> str:
    """Why a run could not be created there, with the command that changes it."""
    there = nearest(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written; change it: sudo chown {os.geteuid()} {there}"
    if there == folder and stat.S_IMODE(folder.lstat().st_mode) & 0o077:
        return f"other users may open {folder}; change it: chmod 700 {folder}"
    return ""


# Where the nodes of one run meet. The first one listens as the run will do, the others connect.


def listen(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """At the port, and at another that is free, as ranks use them. Until every other node has said goodbye."""
    try:
        meeting, other = server(request["port"]), server(0)
    except OSError as error:
        return {"problem": f"port {request['port']} cannot be used there: {error.strerror}"}
    hello = f"{request['token']} {other.getsockname()[1]}\n".encode()
    late, left = time.monotonic() + request["within_s"], request["peers"]
    with selectors.DefaultSelector() as waiting, meeting, other, contextlib.ExitStack() as open_:
        for one in (meeting, other):
            waiting.register(one, selectors.EVENT_READ)
        while left > 0 and time.monotonic() < late and not is_alone():
            for key, _ in waiting.select(RETRY_S):
                with contextlib.suppress(OSError):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj in (meeting, other):
                        peer = open_.enter_context(key.fileobj.accept()[0])
                        peer.setblocking(False)
                        peer.send(hello)
                        if key.fileobj is meeting:
                            waiting.register(peer, selectors.EVENT_READ)
                    else:
                        waiting.unregister(key.fileobj)
                        left -= key.fileobj.recv(64) == hello
    # The launcher waits for the others first: this one ends before them only if they are too many for the time.
    return {"problem": f"{left} hosts had not connected after {request['within_s']:.0f} s" if left > 0 else ""}


def is_alone() -> bool:
    """Nobody reads the reply any more: the launcher has gone, or knows enough."""
    reader = select.poll()
    reader.register(1, 0)  # errors are always reported
    return bool(reader.poll(0))


def server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=128)


def reach(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Tried again until the first node listens."""
    address, late = request["address"], time.monotonic() + request["within_s"]
    while True:
        try:
            return {"problem": met(address, request["port"], request["token"])}
        except socket.gaierror as error:
            return {"problem": f'the name "{address}" does not resolve there: {error.strerror}'}
        except OSError as error:
            words = "no reply" if isinstance(error, socket.timeout) else error.strerror or str(error)
            if time.monotonic() > late or error.errno == errno.ENETUNREACH or is_alone():
                return {"problem": f"{address} port {request['port']} cannot be reached from there: {words}"}
        time.sleep(RETRY_S)


def met(address: str, port: int, token: str) -> str:
    """Why it is not the first node, or not with every port; empty: it is."""
    with socket.create_connection((address, port), timeout=CONNECT_S) as meeting:
        hello = line(meeting)
        if hello[:1] != [token]:
            return f"at {address} port {port} another program replies, not the first node of the run"
        try:
            with socket.create_connection((address, int(hello[1])), timeout=CONNECT_S) as other:
                found = line(other)
        except OSError as error:
            words = "no reply" if isinstance(error, socket.timeout) else error.strerror or str(error)
            return f"{address} port {port} is open, but not port {hello[1]}: {words}. Ranks use ports that are free"
        finally:
            meeting.sendall(" ".join(hello).encode() + b"\n")
        return "" if found == hello else f"at {address} port {hello[1]} another program replies"


def line(peer: socket.socket) -> list[str]:
    found = b""
    while not found.endswith(b"\n") and len(found) < 200:
        more = peer.recv(64)
        if not more:
            break
        found += more
    return found.decode("ascii", "replace").split()


CHECKS = {one.__name__: one for one in (look, facts, listen, reach)}
