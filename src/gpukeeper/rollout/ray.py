"""Passes on the nodes of a Ray cluster that only Ray can reach: one job of its Jobs API, whose driver runs a short task
on each idle node (ray_pass_program.py). Ray is not needed here.

Which nodes work was asked before the job: its driver and tasks are work themselves. A node that is busy, or of which it
is not known, gets no task. The job is removed afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import msgspec

from gpukeeper.clients.ray import (
    METADATA_MAX,
    OVER_JOB,
    PLAN,
    PROGRAM,
    Pauses,
    RayJob,
    RayJobsApi,
    RayNode,
    check_python,
    entrypoint,
    named_nodes,
    packed,
    remove_job,
)
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.rollout import ray_pass_program
from gpukeeper.rollout.execute import Outcome, ServerPass, ServerResult, why_not_all

KIND, TOKEN = "gpukeeper.io/pass", "gpukeeper.io/token"
DEADLINE: Final = timedelta(minutes=10)
AGAIN: Final = timedelta(days=1)
START: Final = timedelta(minutes=2)  # for the driver of the job
POLL_S = 1.0

Busy = Callable[[Sequence[str]], Awaitable[Mapping[str, str | Unknown | None]]]


class RayPassSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`python`: interpreter with Ray, on the head; `program`: gpukeeper on the nodes. `again`: a node on which nothing
    ran since its last pass is visited again after this time."""

    token: str  # random: it tells two jobs of one name apart
    python: str = "python3"
    program: str = "gpukeeper"
    deadline: timedelta = DEADLINE
    again: timedelta = AGAIN
    pauses: Pauses = Pauses()


class _Record(msgspec.Struct, frozen=True):
    token: str
    begin: str | None = None
    end: bool = False
    node: str = ""
    skipped: str = ""
    reply: ServerPass | None = None


class RayPasses:
    def __init__(self, api: RayJobsApi, busy: Busy, settings: RayPassSettings) -> None:
        check_python(settings.python)
        self._api, self._busy, self._settings = api, busy, settings

    async def run(self, policy: str, only: Sequence[str], *, act: bool) -> list[ServerResult]:
        """A row for each node that is alive, or was named."""
        nodes = self._chosen(named_nodes(await self._api.nodes()), only)
        work = await self._busy([node.node_id for node in nodes.values() if node.alive])
        rows = {name: _kept(name, node, work) for name, node in nodes.items()}
        idle = {name: nodes[name].node_id for name, row in rows.items() if row is None}
        found = await self._visited(policy, idle, act=act) if idle else {}
        return [row or found[name] for name, row in rows.items()]

    def _chosen(self, named: Mapping[str, RayNode], only: Sequence[str]) -> dict[str, RayNode]:
        missing = [name for name in only if name not in named]
        if missing:
            near = get_close_matches(missing[0], named, 1)
            hint = f" Did you mean {near[0]}?" if near else f" Nodes: {', '.join(list(named)[:10])}."
            raise UsageError(f"Ray has no node {', '.join(missing)}.{hint} Nothing was done.")
        return {name: node for name, node in named.items() if (name in only if only else node.alive)}

    async def _visited(self, policy: str, nodes: Mapping[str, str], *, act: bool) -> dict[str, ServerResult]:
        name = f"gpukeeper-pass-{self._settings.token}"
        await self._api.submit(name, entrypoint(self._settings.python), self._metadata(name, policy, nodes, act=act))
        try:
            records, job = await self._followed(name)
        finally:
            left = await self._removed(name)
        found = {}
        for node, node_id in nodes.items():
            record = next((one for one in reversed(records) if one.node == node_id), None)
            found[node] = _row(node, record, job, left, act=act)
        return found

    def _metadata(self, name: str, policy: str, nodes: Mapping[str, str], *, act: bool) -> dict[str, str]:
        settings = self._settings
        plan = {
            "token": settings.token,
            "submission": name,
            "program": [settings.program],
            "policy": policy,
            "act": act,
            "nodes": list(nodes.values()),
            "deadline_s": settings.deadline.total_seconds(),
            "again_s": settings.again.total_seconds(),
        }
        made = {
            KIND: "apply" if act else "plan",
            TOKEN: settings.token,
            PROGRAM: packed(Path(ray_pass_program.__file__).read_bytes()),
            PLAN: packed(msgspec.json.encode(plan)),
        }
        size = sum(map(len, made.values()))
        if size > METADATA_MAX:
            raise UsageError(
                f"the policy and {len(nodes)} nodes are too large for a Ray job ({size} of {METADATA_MAX} bytes). "
                "Nothing was done. Name some of the nodes: --nodes NODE,NODE."
            )
        return made

    async def _followed(self, name: str) -> tuple[list[_Record], RayJob | None]:
        """Until its driver has reported its end, or the job is over."""
        loop = asyncio.get_running_loop()
        late = loop.time() + (START + self._settings.deadline).total_seconds() + ray_pass_program.LATE_S
        while True:
            job = await self._api.job(name)
            records = self._records(await self._api.log(name) or "")
            if job is None or job.status in OVER_JOB or any(one.end for one in records):
                return records, job
            if loop.time() > late:
                raise PlatformError(f"the job {name} of Ray at {self._api.address} did not end in time; it is stopped")
            await asyncio.sleep(POLL_S)

    def _records(self, log: str) -> list[_Record]:
        lines = [
            line[len(ray_pass_program.MARK) :] for line in log.split("\n") if line.startswith(ray_pass_program.MARK)
        ]
        found = []
        for line in lines:
            try:
                found.append(reading.decode(line.encode("utf-8", "replace"), type=_Record))
            except msgspec.DecodeError:  # cut off: the rest comes with the next read
                continue
        return [one for one in found if one.token == self._settings.token]

    async def _removed(self, name: str) -> str:
        job = await self._api.job(name)
        if job is None:
            return ""
        token = self._settings.token
        return await remove_job(self._api, job, lambda now: now.metadata.get(TOKEN) == token, self._settings.pauses)


def _kept(name: str, node: RayNode, work: Mapping[str, str | Unknown | None]) -> ServerResult | None:
    """None: it is idle."""
    if not node.alive:
        words = f"its Ray node is dead{f': {node.message}' if node.message else ''}"
        return ServerResult(host=name, outcome=Outcome.BLOCKED, words=(words,))
    busy = work.get(node.node_id, Unknown("Ray does not know it"))
    if isinstance(busy, Unknown):
        words = f"whether work runs there is not known: {busy.why}"
        return ServerResult(host=name, outcome=Outcome.BLOCKED, words=(words,))
    return None if busy is None else ServerResult(host=name, outcome=Outcome.SKIPPED, words=(f"busy: {busy}",))


def _row(name: str, record: _Record | None, job: RayJob | None, left: str, *, act: bool) -> ServerResult:
    more = (f"the job of this pass is not removed: {left}",) if left else ()
    if record is None or (record.reply is None and not record.skipped):
        words = (f"its task did not report: {_why(job)}", *more)
        return ServerResult(host=name, outcome=Outcome.FAILED, words=words)
    if record.reply is None:
        return ServerResult(host=name, outcome=Outcome.SKIPPED, words=(record.skipped, *more))
    words = (*why_not_all(record.reply), *more)
    complete = Outcome.APPLIED if act else Outcome.PLANNED
    outcome = Outcome.FAILED if record.reply.problem else Outcome.INCOMPLETE if words else complete
    return ServerResult(host=name, outcome=outcome, words=words, passed=record.reply)


def _why(job: RayJob | None) -> str:
    if job is None:
        return "the job was removed by another program"
    lines = [" ".join(line.split()) for line in job.message.splitlines() if line.strip()]
    said = "".join(letter for letter in "; ".join(lines[-1:]) if letter.isprintable())[:300].rstrip(".")
    advice = "the driver needs a Python with Ray on the head; name it with --option python=PATH"
    return f"the job is {job.status.lower()}{f' ({said})' if said else ''}; {advice}"
