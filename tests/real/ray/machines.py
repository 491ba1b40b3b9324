"""A Ray cluster over two machines: each has a network, processes and mounts of its own (namespaces), joined by a cable.

The head is started as its documentation says, without a word about its dashboard unless a test says one. On the second
machine `scratch` is a folder of its own, so that it sees other files than the head does. Needs root.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.real.ray.clusters import _STEM, _STORE_BYTES, Cluster, _end_abandoned, until

HEAD, WORKER = "10.213.7.1", "10.213.7.2"
_INSIDE = 'mount --bind "$0" "$1" && shift && exec "$@"'


@dataclass
class Machines:
    cluster: Cluster
    scratch: Path  # of the worker, as the worker names it
    worker_files: Path  # the same, as this machine does
    head: int  # pids of their raylets
    worker: int
    end_worker: Callable[[], None]  # as when its power fails


@contextmanager
def two_machines(version: str, *head_options: str, gpus: int = 0) -> Iterator[Machines]:
    _end_abandoned()
    root = Path(tempfile.mkdtemp(prefix=_STEM))
    scratch, worker_files = root / "scratch", root / "b"
    for folder in (scratch, worker_files, root / "a"):
        folder.mkdir()
    cluster = Cluster(version, root, {}, gpus=gpus)
    with ExitStack() as stack, (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stack.callback(cluster.stop)
        names = stack.enter_context(_cable())
        options = ["--head", "--port=6379", f"--node-ip-address={HEAD}", "--include-dashboard=true", *head_options]
        head, _ = _start(stack, cluster, names[0], root / "a", [*options, f"--temp-dir={root / 't'}"])
        join = [f"--address={HEAD}:6379", f"--node-ip-address={WORKER}"]
        # Before 2.55 a node takes the name of the head's folder for its own.
        own = [f"--temp-dir={root / 'u'}"] if version >= "2.55" else []
        worker, child = _start(stack, cluster, names[1], worker_files, [*join, *own], but=head)
        yield Machines(cluster, scratch, worker_files, head, worker, lambda: _end(child))


def network_of(address: str) -> str:
    """The name of the network namespace of one of them."""
    return f"gkr{os.getpid()}{'ab'[(HEAD, WORKER).index(address)]}"


@contextmanager
def _cable() -> Iterator[tuple[str, str]]:
    names = network_of(HEAD), network_of(WORKER)
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (HEAD, WORKER), strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "route", "add", "default", "dev", "cable")  # Ray asks which address leads outside
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def _start(
    stack: ExitStack, cluster: Cluster, network: str, files: Path, options: list[str], but: int | None = None
) -> tuple[int, subprocess.Popen[bytes]]:
    """Runs as long as the block; the pid of its raylet once it is there, and what ends the machine if it ends."""
    log = cluster.root / f"start-{network}.log"
    command = ["ip", "netns", "exec", network, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["sh", "-c", _INSIDE, str(files), str(cluster.root / "scratch")]
    command += [str(cluster.python), "-m", "ray.scripts.scripts", "start", "--block", *options]
    command += [
        "--num-cpus=1",
        f"--num-gpus={cluster.gpus}",
        f"--object-store-memory={_STORE_BYTES}",
        "--disable-usage-stats",
    ]
    out = stack.enter_context(log.open("wb"))
    child = subprocess.Popen(
        command, cwd=cluster.root, env=cluster.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
    )
    stack.callback(_end, child)

    def raylet() -> int | None:
        assert child.poll() is None, f"ray start ended with {child.returncode}:\n{log.read_text()[-3000:]}"
        if "Ray runtime started" not in log.read_text():
            return None
        found = [pid for pid in cluster.processes() if _comm(pid) == "raylet" and pid != but]
        return found[0] if found else None

    return int(until(raylet, f"Ray runs in {network}", lambda: log.read_text()[-3000:])), child


def _end(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        child.send_signal(signal.SIGKILL)
    child.wait(30)


def _comm(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
