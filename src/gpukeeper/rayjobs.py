"""Jobs of a Ray cluster, over its Jobs API: what acceptance runs and passes on nodes share. Ray is not needed here.

A program of ours gets to the head of a cluster in the metadata of its job. The entrypoint of the job is constant but
for the name of an interpreter; no text of a user reaches a shell. Removed: stopped, ended, deleted, read again.
"""

from __future__ import annotations

import asyncio
import base64
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final, Protocol

import msgspec

from gpukeeper.model.errors import UsageError

OVER: Final = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A row of its state API; `name` is not unique."""

    node_id: str
    ip: str = msgspec.field(name="node_ip")
    name: str = msgspec.field(name="node_name", default="")
    state: str
    message: str | None = msgspec.field(name="state_message", default=None)
    resources: Mapping[str, float] = msgspec.field(name="resources_total", default_factory=dict)
    labels: Mapping[str, str] | None = None

    @property
    def alive(self) -> bool:
        return self.state == "ALIVE"

    @property
    def gpus(self) -> float:
        return self.resources.get("GPU", 0.0)


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: its submission id; `job_id`: Ray's own, once its driver runs."""

    name: str
    status: str
    message: str = ""
    job_id: str = ""
    metadata: Mapping[str, str] = {}


class RayApi(Protocol):
    """A cluster that does not reply raises PlatformError."""

    address: str

    async def nodes(self) -> tuple[RayNode, ...]: ...

    async def submit(self, name: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        """A name that exists is left as it is."""
        ...

    async def jobs(self) -> tuple[RayJob, ...]: ...

    async def job(self, name: str) -> RayJob | None: ...

    async def log(self, name: str) -> str | None:
        """None: there is no such job."""
        ...

    async def stop(self, name: str) -> None: ...

    async def delete(self, name: str) -> None:
        """Ray refuses if it has not ended. One that is gone is no error."""
        ...

    async def parts(self, name: str, job_id: str) -> tuple[str, ...]:
        """Actors and placement groups of a job that are not over, and the actor that supervises its driver."""
        ...

    async def close(self) -> None: ...


def named_nodes(nodes: Sequence[RayNode]) -> dict[str, RayNode]:
    """By the name that reports use: Ray's own, which usually is an address; with a part of its id if others have it.

    A dead node does not take the name of one that is alive: a machine that was restarted is a new node.
    """
    alive = Counter(node.name or node.ip for node in nodes if node.alive)
    found: dict[str, RayNode] = {}
    for node in sorted(nodes, key=lambda one: (not one.alive, one.name, one.ip, one.node_id)):
        name = node.name or node.ip
        if alive[name] > 1:
            name = f"{name}-{node.node_id[:8]}"
        found.setdefault(name, node)
    return found


PLAN: Final = "gpukeeper.io/plan"
PROGRAM: Final = "gpukeeper.io/program"
METADATA_MAX: Final = 100_000  # bytes; the kernel limits what Ray passes to the driver to 128 KiB
_ENTRY: Final = (
    "import sys; sys.path[:] = filter(None, sys.path); "  # not from its directory, also with a Python that has no -P
    'import base64, json, os, zlib; m = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]; '
    f'exec(zlib.decompress(base64.b64decode(m["{PROGRAM}"])))'
)
_PYTHON: Final = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_/.+-]*")


def entrypoint(python: str) -> str:
    return f"exec {python} -c '{_ENTRY}'"


def check_python(python: str) -> None:
    if not _PYTHON.fullmatch(python):
        raise UsageError(f'option python="{python}" is not the name or path of an interpreter')


def packed(what: bytes) -> str:
    return base64.b64encode(zlib.compress(what, 9)).decode()


STOPPING: Final = timedelta(seconds=40)  # Ray waits 3 s, then kills


class Pauses(msgspec.Struct, frozen=True):
    sleep: float = 0.3  # seconds between two looks at a job that is to end
    settle: timedelta = timedelta(seconds=2)  # Ray looks at a job every second, and may not have noticed its end


async def remove_job(api: RayApi, job: RayJob, is_same: Callable[[RayJob], bool], pauses: Pauses) -> str:
    """Why it is still there; empty: it is gone. `is_same`: another job may have got its name meanwhile."""
    if job.status not in OVER:
        await api.stop(job.name)
    if left := await _last_left(api, job, pauses):
        return left
    await asyncio.sleep(pauses.settle.total_seconds())
    now = await api.job(job.name)
    if now is not None and is_same(now):
        await api.delete(job.name)
        if await _comes_back(api, job.name, pauses):
            return "still there after it was removed"
    return ""


async def _comes_back(api: RayApi, name: str, pauses: Pauses) -> bool:
    """Ray watches a job until its supervisor is gone, and writes a new, empty record if the job was deleted before it
    noticed. What has just been deleted and comes back without metadata is that."""
    for _ in range(2):
        await asyncio.sleep(pauses.settle.total_seconds() / 2)
        again = await api.job(name)
        if again is None:
            return False
        if again.metadata or again.status not in OVER:
            return True
        await api.delete(name)
    return await api.job(name) is not None


async def _last_left(api: RayApi, job: RayJob, pauses: Pauses) -> str:
    """Ray ends actors after their driver, in a moment."""
    late = asyncio.get_running_loop().time() + STOPPING.total_seconds()
    while True:
        left = await _left(api, job)
        if not left or asyncio.get_running_loop().time() > late:
            return left
        await asyncio.sleep(pauses.sleep)


async def _left(api: RayApi, job: RayJob) -> str:
    """Why its record may not be deleted yet; empty: nothing of it runs."""
    now = await api.job(job.name)
    if now is not None and now.status not in OVER:
        return f"it was stopped and is still {now.status.lower()}"
    parts = await api.parts(job.name, (now or job).job_id or job.job_id)
    return f"Ray has not ended {', '.join(parts[:5])}" if parts else ""
