"""Work on several processes of this machine, or as tasks on the cores of a Ray cluster that exists.

Processes inherit the environment: multiprocessing cannot give them another. They do what the command itself does,
as its user, in its directory, and as it was started (-I, -E). Ray is the one of this Python environment. A task and
not an actor: if its node dies, Ray runs it again on another one.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

from gpukeeper import __version__
from gpukeeper.model.errors import PlatformError, UsageError

SAFE_PATH = "PYTHONSAFEPATH"


@contextmanager
def process_pool(size: int, take: Callable[..., object], given: tuple[Any, ...]) -> Iterator[ProcessPoolExecutor]:
    """`take` gets `given` in each of the processes first. They, and one that cleans up after them, are started with
    `-c`, so that `multiprocessing.py` in the current directory would run; only a variable prevents that."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    pool = ProcessPoolExecutor(size, get_context("spawn"), initializer=take, initargs=given)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


ANSWERS_WITHIN = 8.0  # seconds
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # how every client of HTTP/2 begins
_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # a frame: no bytes follow, kind 4, no flags, stream 0
_PORTS = (
    "Write --on HOST:6379 with the port of the cluster, or --on ray://HOST:10001 with that of Ray Client; its "
    "dashboard (8265) is neither."
)
G = TypeVar("G")
T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[str, G, Sequence[T]], R]


class RayTasks(Generic[G, T, R]):
    """`work` is called on the cluster with a name for `given`, with `given` itself and with some of the input."""

    def __init__(self, ray: Any, address: str, work: Work[G, T, R], given: G, size: int) -> None:
        self._ray, self._address, self._work, self.size = ray, address, work, size
        self._shared = ray.put(given)
        self._name = self._shared.hex()
        self._task = ray.remote(num_cpus=1)(_run)

    def start(self, some: Sequence[T]) -> Callable[[], R]:
        """Begins the work on some of the input. The function that it returns waits for the result."""
        return partial(self._wait, self._task.remote(self._work, self._name, self._shared, some))

    def _wait(self, task: object) -> R:
        try:
            version, result = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            raise PlatformError(
                f"the Ray cluster at {self._address} could not run a task: {_last_line(error)} Its nodes need "
                f"gpukeeper {__version__} in Ray's Python; the task's log is in Ray's dashboard."
            ) from error
        if version != __version__:
            raise PlatformError(
                f"a node of the Ray cluster at {self._address} has gpukeeper {version}, and this is {__version__}: "
                "results could differ. Install the same version on all nodes."
            )
        found: R = result
        return found


@contextmanager
def ray_tasks(address: str, work: Work[G, T, R], given: G, most: int | None = None) -> Iterator[RayTasks[G, T, R]]:
    """At most `most` at a time; None: as many as the cluster has cores.

    Raises UsageError if there is no Ray here, PlatformError if the cluster does not answer or cannot run it.
    """
    endpoint = _endpoint(address)
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise UsageError(
            f"--on {address} needs Ray in the Python that runs gpukeeper ({sys.executable}), in the version of the "
            'cluster: pip install "ray==VERSION". Nothing was computed.'
        ) from error
    if endpoint is not None:
        _reach(endpoint)
    with redirect_stdout(sys.stderr):  # Ray prints there when a node dies, and standard output has our answer
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # each version of Ray has errors of its own for an address, a version and a timeout
            raise PlatformError(
                f"the Ray cluster at {address} cannot be used: {_last_line(error)} Check the address (auto, HOST:PORT "
                "or ray://HOST:PORT) and that Ray and Python have the versions of the cluster. Nothing was computed."
            ) from error
        try:
            cores = int(ray.cluster_resources().get("CPU", 0))
            yield RayTasks(ray, address, work, given, max(1, min(cores, most or cores)))
        finally:
            ray.shutdown()  # also ends the tasks that still run


def _endpoint(address: str) -> tuple[str, int] | None:
    """None: this machine is a node of the cluster. Raises UsageError."""
    if address == "auto":
        return None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f'--on "{address}": write auto, HOST:PORT or ray://HOST:PORT.')
    return host.strip("[]"), int(port)


def _reach(endpoint: tuple[str, int]) -> None:
    """Ray itself tries for many minutes, also where another service answers. All of Ray's ports speak gRPC, which is
    HTTP/2: the server's first frame has its settings."""
    where = f"{endpoint[0]}:{endpoint[1]}"
    try:
        with socket.create_connection(endpoint, timeout=ANSWERS_WITHIN) as connection:
            first = None if os.environ.get("RAY_USE_TLS", "0") not in ("", "0") else _first_frame(connection)
    except OSError as error:
        raise PlatformError(f"nothing answers at {where}: {error}. {_PORTS} Nothing was computed.") from error
    if first is not None and not (len(first) == len(_SETTINGS) and first[3] == _SETTINGS[3]):
        said = "it said nothing" if not first else "it does not speak gRPC"
        raise PlatformError(f"the service at {where} is not Ray: {said}. {_PORTS} Nothing was computed.")


def _first_frame(connection: socket.socket) -> bytes:
    """The head of it. Less: the other side ended, or said nothing in time."""
    late, found = time.monotonic() + ANSWERS_WITHIN, b""
    with suppress(OSError):
        connection.sendall(_HELLO + _SETTINGS)
        while len(found) < len(_SETTINGS) and (left := late - time.monotonic()) > 0:
            connection.settimeout(left)
            more = connection.recv(len(_SETTINGS) - len(found))
            if not more:
                break
            found += more
    return found


def _run(work: Work[G, T, R], name: str, given: G, some: Sequence[T]) -> tuple[str, R]:
    return __version__, work(name, given, some)


def _last_line(error: BaseException) -> str:
    """The last line of a task's error names what was raised there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = (lines or [type(error).__name__])[-1]
    return words if words.endswith(".") else f"{words}."
