"""Runs on the nodes of a Ray cluster: one job of its Jobs API, whose driver starts the node programs and keeps what
they write in its log (ray_driver_program.py). Ray is not needed here.

The job has the description of the run in its metadata, so that any machine finds it. Records of the log carry the token
of the job; everything else in it, such as Ray's own messages, is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path

import msgspec

from gpukeeper.acceptance.fleet.launcher import (
    NodeStatus,
    Phase,
    Removal,
    RunSpec,
    RunSummary,
    Target,
    command,
    environment,
    group_environment,
)
from gpukeeper.acceptance.launchers import host_program, ray_driver_program
from gpukeeper.acceptance.launchers.ray_driver_program import MARK
from gpukeeper.acceptance.launchers.ssh import HostState, moment_of, status_of
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

BETWEEN_RECORDS = " | "  # the name of a node and its line


class LogRecord(msgspec.Struct, frozen=True):
    token: str
    at: float | None = None
    begin: str | None = None
    end: bool = False
    node: str = ""
    phase: Phase | None = None
    code: str = ""
    reason: str = ""
    state: HostState | None = None
    left: Sequence[str] = ()


@dataclass
class JobLog:
    """`begun`: its driver runs, or has run. `ended`: it came to its own end, and nothing of the run is on its nodes."""

    begun: bool = False
    ended: bool = False
    statuses: dict[str, NodeStatus] = field(default_factory=dict)
    outputs: dict[str, bytearray] = field(default_factory=dict)
    left: dict[str, tuple[str, ...]] = field(default_factory=dict)


def read_log(text: str, token: str, program: str) -> JobLog:
    """`program`: what gpukeeper is called on the nodes, for the reasons."""
    found = JobLog()
    for line in text.split("\n"):
        if line.startswith(MARK):
            record = _record(line)
            if record is None or record.token != token:
                found.begun = found.begun and record is None  # another job of that name writes from here on
            elif record.begin is not None:
                found = JobLog(begun=True)
            elif found.begun:
                _take(found, record, program)
        elif found.begun:
            node, between, words = line.partition(BETWEEN_RECORDS)
            if between:
                found.outputs.setdefault(node, bytearray()).extend(words.encode("utf-8", "replace") + b"\n")
    return found


def _record(line: str) -> LogRecord | None:
    try:
        return reading.decode(line[len(MARK) :].encode("utf-8", "replace"), type=LogRecord)
    except msgspec.DecodeError:  # cut off, or not ours
        return None


def _take(found: JobLog, record: LogRecord, program: str) -> None:
    found.ended = found.ended or record.end
    if record.left:
        found.left[record.node] = tuple(record.left)
    if record.state is not None:
        found.statuses[record.node] = status_of(record.state, program)
    elif record.node and record.phase is not None:
        found.statuses[record.node] = NodeStatus(
            node=record.node, phase=record.phase, code=record.code, reason=record.reason, since=moment_of(record.at)
        )


def statuses(found: JobLog, nodes: Sequence[str], over: NodeStatus | None) -> tuple[NodeStatus, ...]:
    """`over`: what became of nodes that had not ended when the job did; None: the job runs."""
    waiting = NodeStatus(node="", phase=Phase.WAITING, reason="Ray has not started it yet")
    return tuple(_status_of_node(found.statuses, node, over, waiting) for node in nodes)


def _status_of_node(
    known: Mapping[str, NodeStatus], node: str, over: NodeStatus | None, waiting: NodeStatus
) -> NodeStatus:
    status = known.get(node, msgspec.structs.replace(waiting, node=node))
    if over is None or status.phase in (Phase.ENDED, Phase.GONE):
        return status
    reason = over.reason if status.phase is Phase.RUNNING or not status.code else f"{over.reason}; {status.reason}"
    return msgspec.structs.replace(over, node=node, reason=reason, since=status.since)


RUN, KIND, OWNER, SPEC, TOKEN, NODES = (
    f"gpukeeper.io/{name}" for name in ("run", "acceptance", "owner", "spec", "token", "nodes")
)
WAIT = timedelta(minutes=5)  # for the GPUs of a node
LOG_MAX = 8 * 1024 * 1024  # bytes of one node; a program that writes more is ended
FRESH = 2.0  # seconds that a log counts as just read: a poll of many nodes reads it once
_NAME = host_program.NAME
PAUSES = Pauses()


@dataclass
class RaySettings:
    """`python`: interpreter with Ray, on the head; `program`: gpukeeper on the nodes; `gpus`: False requests none."""

    python: str = "python3"
    program: str = "gpukeeper"
    gpus: bool = True
    master: str = ""
    wait: timedelta = WAIT
    token: Callable[[], str] = field(default=lambda: "")  # random: it tells two jobs of one name apart
    pauses: Pauses = PAUSES


class RayLauncher:
    engine = "ray"

    def __init__(self, api: RayJobsApi, settings: RaySettings) -> None:
        check_python(settings.python)
        self._api, self._settings = api, settings
        self._driver = Path(ray_driver_program.__file__).read_bytes()
        self._logs: dict[str, tuple[float, JobLog]] = {}

    async def targets(self, spec: RunSpec) -> tuple[Target, ...]:
        named = named_nodes(await self._api.nodes())
        if spec.nodes and (missing := [name for name in spec.nodes if name not in named]):
            near = get_close_matches(missing[0], named, 1)
            hint = f" Did you mean {near[0]}?" if near else f" Nodes: {', '.join(list(named)[:10])}."
            raise UsageError(f"Ray has no node {', '.join(missing)}.{hint} Nothing was started.")
        wanted = _selector(spec.selector)
        chosen = {
            name: node
            for name, node in named.items()
            if (name in spec.nodes if spec.nodes else node.alive and (node.gpus > 0 or not self._settings.gpus))
            and all((node.labels or {}).get(key) == value for key, value in wanted.items())
        }
        return tuple(self._target(name, node, spec) for name, node in chosen.items())

    def _target(self, name: str, node: RayNode, spec: RunSpec) -> Target:
        wanted = self._gpus(node, spec)
        why = ""
        if not node.alive:
            why = f"its Ray node is dead{f': {node.message}' if node.message else ''}"
        elif not _NAME.fullmatch(name):
            why = f'"{name}" cannot be the name of a node of a run'
        elif self._settings.gpus and node.gpus <= 0:
            why = "it announces no GPU; start Ray there with --num-gpus, or test its CPU with --option gpus=none"
        elif wanted > node.gpus:
            why = f"it announces {node.gpus:g} GPUs, {wanted:g} are requested"
        return Target(node=name, gpus=int(wanted), excluded=why)

    def render(self, spec: RunSpec, targets: Sequence[Target]) -> str:
        parts = [f"# {one.node} is left out: {one.excluded}" for one in targets if one.excluded]
        started = [one.node for one in targets if not one.excluded]
        plan = self._plan(spec, {name: RayNode(node_id="", ip=name, name=name, state="ALIVE") for name in started}, "")
        shown = {key: value for key, value in plan.items() if key not in ("host", "token")}
        parts.append(f"# POST {self._api.address}/api/jobs/")
        parts.append(f"# {entrypoint(self._settings.python)}")
        parts.append(
            msgspec.json.format(msgspec.json.encode({"submission_id": _name(spec.run), "plan": shown})).decode()
        )
        return "\n".join(parts) + "\n"

    async def start(self, spec: RunSpec, targets: Sequence[Target]) -> None:
        """A job that has run is never started again."""
        name = _name(spec.run)
        found = await self._api.job(name)
        if found is None:
            metadata = await self._metadata(spec, [one.node for one in targets if not one.excluded])
            await self._api.submit(name, entrypoint(self._settings.python), metadata)
            found = await self._api.job(name)
        if found is None:
            raise PlatformError(f"Ray at {self._api.address} accepted the job {name}, but does not list it")
        if not _is_run(found, spec.run):
            raise UsageError(
                f"another job has the name {name}, and was not changed; choose another run id: ray job status {name}"
            )

    async def _metadata(self, spec: RunSpec, started: Sequence[str]) -> dict[str, str]:
        known = named_nodes(await self._api.nodes())
        lost = RayNode(node_id="", ip="", state="")
        nodes = {name: known.get(name, lost) for name in started}
        token = self._settings.token()
        made = {
            RUN: spec.run,
            KIND: "run",
            OWNER: spec.owner,
            SPEC: msgspec.json.encode(spec).decode(),
            TOKEN: token,
            NODES: ",".join(started),
            PROGRAM: packed(self._driver),
            PLAN: packed(msgspec.json.encode(self._plan(spec, nodes, token))),
        }
        size = sum(len(value) for value in made.values())
        if size > METADATA_MAX:
            raise UsageError(
                f"the description of {len(started)} nodes is too large for a Ray job ({size} of {METADATA_MAX} bytes). "
                "Nothing was started. Test the nodes in several runs: --nodes NODE,NODE."
            )
        return made

    def _plan(self, spec: RunSpec, nodes: Mapping[str, RayNode], token: str) -> dict[str, object]:
        master = self._settings.master or next((node.ip for node in nodes.values()), "")
        _, *rest = command(spec)
        return {
            "token": token,
            "run": spec.run,
            "command": [self._settings.program, *rest],
            "deadline_s": spec.deadline_s,
            "wait_s": min(self._settings.wait.total_seconds(), spec.deadline_s),
            "together": spec.together,
            "log_most": LOG_MAX,
            "host": Path(host_program.__file__).read_text(encoding="utf-8"),
            "nodes": [
                {
                    "node": name,
                    "id": node.node_id,
                    "ip": node.ip,
                    "gpus": self._gpus(node, spec),
                    "environment": {
                        **environment(spec, name),
                        **group_environment(spec, index, len(nodes), master),
                    },
                }
                for index, (name, node) in enumerate(nodes.items())
            ],
        }

    def _gpus(self, node: RayNode, spec: RunSpec) -> float:
        if not self._settings.gpus:
            return 0.0
        return node.gpus if spec.gpus_per_node is None else float(spec.gpus_per_node)

    async def runs(self) -> tuple[RunSummary, ...] | Unknown:
        found = [job for job in await self._api.jobs() if job.metadata.get(KIND) == "run"]
        summaries = [await self._summary(job) for job in found]
        return tuple(one for one in summaries if one is not None)

    async def run(self, run: str) -> RunSummary | None:
        job = await self._api.job(_name(run))
        return await self._summary(job) if job is not None and _is_run(job, run) else None

    async def _summary(self, job: RayJob) -> RunSummary | None:
        try:
            spec = reading.decode(job.metadata.get(SPEC, "").encode(), type=RunSpec)
        except msgspec.DecodeError:
            return None
        nodes = [name for name in job.metadata.get(NODES, "").split(",") if name]
        log = await self._read(job)
        return RunSummary(spec=spec, nodes=statuses(log, nodes, self._over(job, log)), objects=(f"job/{job.name}",))

    def _over(self, job: RayJob, log: JobLog) -> NodeStatus | None:
        """What became of nodes that had not ended with the job."""
        if job.status not in OVER_JOB:
            return None
        code, reason = "vanished", f"its Ray job ended ({job.status.lower()}) before it: {_first(job.message)}"
        if job.status == "STOPPED":
            code, reason = "stopped", "its Ray job was stopped"
        elif not log.begun:
            code = "driver"
            reason = (
                f"the driver of its Ray job did not start: {_first(job.message)}. It needs a Python with Ray on the "
                f"head; name it with --option python=PATH (now: {self._settings.python})"
            )
        return NodeStatus(node="", phase=Phase.GONE, code=code, reason=reason)

    async def _read(self, job: RayJob) -> JobLog:
        text = await self._api.log(job.name)
        found = read_log(text or "", job.metadata.get(TOKEN, ""), self._settings.program)
        self._logs[job.name] = asyncio.get_running_loop().time(), found
        return found

    async def output(self, spec: RunSpec, node: str) -> bytes | Unknown:
        """From the same read as the status just before: the log has everything of all nodes, and no way to read on."""
        name = _name(spec.run)
        at, log = self._logs.get(name, (0.0, None))
        if log is None or asyncio.get_running_loop().time() - at > FRESH:
            job = await self._api.job(name)
            if job is None or not _is_run(job, spec.run):
                return Unknown(f"Ray has no job of run {spec.run}")
            log = await self._read(job)
        if node not in log.outputs and not log.begun:
            return Unknown(f"{node} has not started: the log of its Ray job has nothing of it")
        return bytes(log.outputs.get(node, b""))

    async def remove(self, run: str) -> Removal:
        """Stop, wait until Ray has ended everything of the job, delete its record, read again."""
        name = _name(run)
        job = await self._api.job(name)
        if job is None or not _is_run(job, run):
            return Removal()
        token = job.metadata.get(TOKEN)
        left = await remove_job(self._api, job, lambda now: now.metadata.get(TOKEN) == token, self._settings.pauses)
        if left:
            return Removal(left=((f"job/{name}", left),))
        self._logs.pop(name, None)
        return Removal(removed=(f"job/{name}",))

    async def close(self) -> None:
        await self._api.close()


def _selector(words: str) -> dict[str, str]:
    found = {}
    for part in (part.strip() for part in words.split(",") if part.strip()):
        key, equals, value = part.partition("=")
        if not equals or key.endswith("!") or not key:
            raise UsageError(f'--nodes "{words}": labels of Ray nodes are selected as KEY=VALUE. Nothing was started.')
        found[key.strip()] = value.lstrip("=").strip()
    return found


def _name(run: str) -> str:
    return f"gpukeeper-{run}"


def _is_run(job: RayJob, run: str) -> bool:
    """The entry that says what it is counts as well: others may use the name of a run."""
    return job.metadata.get(KIND) == "run" and job.metadata.get(RUN) == run


def _first(words: str) -> str:
    """Ray's messages may contain a trace; its last line has the reason."""
    lines = [" ".join(line.split()) for line in words.splitlines() if line.strip()]
    said = "; ".join(dict.fromkeys((*lines[:1], *lines[-1:]))) or "Ray gives no reason"
    return "".join(letter for letter in said if letter.isprintable())[:400].rstrip(".")
