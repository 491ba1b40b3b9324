"""Real Ray clusters on this machine: a head and further nodes, drivers, and their end. Never `ray stop`: it ends every
Ray of the machine, also other people's.

Everything of a cluster lives in one folder with a short name (a socket's path ends at 107 letters). Its processes are
those that have that folder as working folder, in their arguments or open; they are ended with SIGKILL. A folder whose
test run was killed is not locked any more: the next run ends what is left there.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSIONS_FILE = Path(__file__).with_name("versions.txt")
VERSIONS = tuple(line.split()[0] for line in VERSIONS_FILE.read_text().splitlines() if line and line[0] != "#")
NEWEST = VERSIONS[0]
_STEM = "gkr-"
_STORE_BYTES = 80_000_000  # the least that Ray takes is 75 MB
# Below the range of which the kernel gives ports to clients, above that of the other beds.
_PORTS = range(26_000, 32_000)
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning on every worker
    "RAY_prestart_worker_first_driver": "0",  # a driver starts two workers otherwise, on two cores
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_PREAMBLE = """
import os, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init(address={address!r}, log_to_driver=False, namespace="engine")

def on(node_id):
    return NodeAffinitySchedulingStrategy(node_id, soft=False)

def say(*words):
    print("said:", *words, flush=True)

def wait_for_end():
    sys.stdin.read()

"""


def folder_of(version: str) -> Path:
    """Where build.sh puts it."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpukeeper/ray")
    return Path(os.environ.get("GPUKEEPER_RAY_CACHE") or usual) / version


def is_installed(version: str) -> bool:
    return (folder_of(version) / ".installed").exists()


@contextmanager
def ray_cluster(
    version: str = NEWEST, nodes: int = 1, env: Mapping[str, str] | None = None, gpus: int = 0
) -> Iterator[Cluster]:
    """A head and `nodes - 1` others, ready, with their dashboard. `gpus`: that each node announces."""
    _end_abandoned()
    root = Path(tempfile.mkdtemp(prefix=_STEM))
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = Cluster(version, root, dict(env or {}), gpus=gpus)
        try:
            cluster.start()
            for _ in range(nodes - 1):
                cluster.add_node()
            yield cluster
        finally:
            cluster.stop()


@dataclass
class Node:
    """One raylet and what belongs to it."""

    cluster: Cluster
    raylet: int
    argv: list[str]

    @property
    def node_id(self) -> str:
        return self._flag("--node_id")

    @property
    def session(self) -> str:
        return self._flag("--session-name")

    @property
    def session_dir(self) -> Path:
        return Path(self._flag("--session_dir"))

    @property
    def temp_dir(self) -> Path:
        return Path(self._flag("--temp_dir"))

    def titles(self) -> list[str]:
        """Of the raylet and of all that it started, as they are now."""
        found = {pid: title for pid, title in self.cluster.processes().items() if _parent(pid) == self.raylet}
        return [*found.values(), " ".join(self.argv)]

    def kill_raylet(self) -> None:
        os.kill(self.raylet, signal.SIGKILL)
        until(lambda: not _lives(self.raylet), "the raylet is gone")

    def _flag(self, name: str) -> str:
        return next(part.partition("=")[2] for part in self.argv if part.startswith(f"{name}="))


class Driver:
    """A Python program that joined the cluster. It ends when told, or as a crash does."""

    def __init__(self, cluster: Cluster, number: int, body: str) -> None:
        self._script = cluster.root / f"driver-{number}.py"
        self._script.write_text(_PREAMBLE.format(address=cluster.address) + body)
        self._log = cluster.root / f"driver-{number}.log"
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [str(cluster.python), str(self._script)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=cluster.root,
                env=cluster.env,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def said(self, words: str = "ready") -> str:
        """What it says behind these words, as soon as it says them."""

        def found() -> str | None:
            match = re.search(rf"^said: {re.escape(words)} ?(.*)$", self.log, re.MULTILINE)
            assert match or self._child.poll() is None, f"the driver ended with {self._child.poll()}:\n{self.log}"
            return None if match is None else f" {match[1]}"

        return str(until(found, f"the driver says {words!r}", lambda: self.log)).strip()

    def end(self) -> None:
        """It comes to its own end."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        assert self._child.wait(60) == 0, self.log

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(10)

    def clear(self) -> None:
        with suppress(OSError):
            self.kill()
        if self._child.stdin is not None and not self._child.stdin.closed:
            self._child.stdin.close()


@dataclass
class Cluster:
    version: str
    root: Path
    settings: dict[str, str]
    nodes: list[Node] = field(default_factory=list)
    drivers: list[Driver] = field(default_factory=list)
    address: str = ""
    dashboard: str = ""
    start_seconds: float = 0.0
    gpus: int = 0
    _taken: set[int] = field(default_factory=set)

    @property
    def python(self) -> Path:
        return folder_of(self.version) / "bin/python"

    @property
    def env(self) -> dict[str, str]:
        """Nothing of a Ray that this machine may have, and no proxy."""
        left_out = ("RAY_", "GPUKEEPER_", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "PYTHONPATH")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
        return kept | {"HOME": str(self.root)} | _SETTINGS | self.settings

    @property
    def head(self) -> Node:
        return self.nodes[0]

    def start(self) -> None:
        port, dashboard = self._port(), self._port()
        self.dashboard = f"http://127.0.0.1:{dashboard}"
        began = time.monotonic()
        self._ray(
            "--head",
            f"--port={port}",
            f"--temp-dir={self.root / 't'}",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={self._port()}",
        )
        self.address = (self.root / "t/ray_current_cluster").read_text().strip()
        self.start_seconds = time.monotonic() - began

    def add_node(self) -> Node:
        """Of 2.55 and newer with a temporary folder of its own; before, a node took the head's."""
        own = [f"--temp-dir={self.root / f'u{len(self.nodes)}'}"] if _number(self.version) >= (2, 55) else []
        return self._ray(f"--address={self.address}", *own)

    def drive(self, body: str) -> Driver:
        """Starts a driver. `say(…)`, `on(node_id)` and `wait_for_end()` are there for it."""
        driver = Driver(self, len(self.drivers), body)
        self.drivers.append(driver)
        return driver

    def processes(self) -> dict[int, str]:
        """Title of every process of this cluster."""
        return dict(_processes_of(self.root))

    def logs(self) -> dict[str, str]:
        """The ends of what explains a failure."""
        names = ("raylet.out", "raylet.err", "gcs_server.out", "dashboard.log", "dashboard_agent.log")
        files = [file for name in names for file in self.root.glob(f"*/session_2*/logs/{name}")]
        files += [*self.root.glob("start-*.log"), *self.root.glob("driver-*.log")]
        return {str(file.relative_to(self.root)): file.read_text(errors="replace") for file in files}

    def stop(self) -> None:
        for driver in self.drivers:
            driver.clear()
        _end_all(self.root)

    def _ray(self, *options: str) -> Node:
        log = self.root / f"start-{len(self.nodes)}.log"
        command = [str(self.python), "-m", "ray.scripts.scripts", "start", *options]
        command += ["--num-cpus=1", f"--num-gpus={self.gpus}", f"--object-store-memory={_STORE_BYTES}"]
        # 0: any. Ray's usual ranges overlap between clusters, and 2.40 then crashes.
        command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        with log.open("wb") as out:
            done = subprocess.run(
                command,
                cwd=self.root,
                env=self.env,
                timeout=120,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        assert done.returncode == 0, f"ray start ended with {done.returncode}:\n{log.read_text()[-3000:]}"
        known = {node.raylet for node in self.nodes}
        raylet = next(pid for pid in self.processes() if _comm(pid) == "raylet" and pid not in known)
        self.nodes.append(Node(self, raylet, _argv(raylet)))
        return self.nodes[-1]

    def _port(self) -> int:
        while True:
            port = random.choice(_PORTS)
            if port not in self._taken and _is_free(port):
                self._taken.add(port)
                return port


def until(read: Callable[[], Any], what: str, more: Callable[[], str] = str, deadline: float = 90) -> Any:
    """What `look` gives once it is neither None nor False."""
    late = time.monotonic() + deadline
    while (found := read()) is None or found is False:
        assert time.monotonic() < late, f"waited {deadline:.0f} s until {what}\n{more()}"
        time.sleep(0.05)
    return found


def _end_abandoned() -> None:
    for root in Path(tempfile.gettempdir()).glob(f"{_STEM}*"):
        with suppress(OSError), (root / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _end_all(root)


def _end_all(root: Path) -> None:
    """Until nothing is left: a raylet that dies last may have started one more."""

    def gone() -> bool:
        left = [pid for pid, _ in _processes_of(root)]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    until(gone, f"nothing of {root} runs", deadline=120)
    shutil.rmtree(root, ignore_errors=True)


def _processes_of(root: Path) -> Iterator[tuple[int, str]]:
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with suppress(OSError):
            argv = _argv(pid)
            if pid != os.getpid() and _refers(pid, argv, root):
                yield pid, " ".join(argv)


def _refers(pid: int, argv: list[str], root: Path) -> bool:
    """By its arguments, its working folder or an open file. Our own parents and children do not look like that."""
    if any(f"{root}/" in part for part in argv):
        return True
    links = [Path(f"/proc/{pid}/cwd"), *Path(f"/proc/{pid}/fd").iterdir()]
    return any(_leads_into(link, root) for link in links)


def _leads_into(link: Path, root: Path) -> bool:
    with suppress(OSError):
        return link.readlink().is_relative_to(root)
    return False


def _argv(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def _comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _parent(pid: int) -> int | None:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
