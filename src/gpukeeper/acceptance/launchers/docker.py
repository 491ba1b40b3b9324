"""Runs on one Docker engine: a container with the run's labels. The engine is the node.

The deadline is kept inside the container by `timeout`, so that nothing keeps running if the launcher has gone. The log
stays with the engine, whatever its default driver is, until the container is removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta

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
from gpukeeper.clients.docker import (
    CONFLICT,
    NOT_FOUND,
    NOT_MODIFIED,
    SLOW,
    ContainerSummary,
    Engine,
    EngineError,
    Info,
    Inspected,
    part,
)
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.unknown import Unknown

RUN, KIND, OWNER, SPEC = (f"gpukeeper.io/{name}" for name in ("run", "acceptance", "owner", "spec"))
SHM = 1 << 30  # bytes of /dev/shm
GRACE_S = 10  # between SIGTERM and SIGKILL
ENDED_BY_TIMEOUT = (124, 137, 143)  # coreutils; SIGKILL; busybox, where the program itself gets SIGTERM
# Not as process 1: the kernel keeps that one from signals of its own container, and busybox makes it the program.
WATCHED = f'timeout -k {GRACE_S} "$0" "$@"; exit $?'
HEADER = 8  # bytes before each part of a log
LOG = timedelta(seconds=60)


class DockerApi:
    """Requests to one engine, which raise PlatformError if it does not reply. The first one opens the connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._opened: AsyncExitStack | None = None

    async def open(self) -> Engine:
        if self._opened is None:
            opened = AsyncExitStack()
            await opened.enter_async_context(self._engine.opened())
            self._opened = opened
        return self._engine

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.aclose()

    async def node(self) -> str:
        return (await (await self.open()).get("/info", Info)).name or self._engine.host

    async def has_image(self, image: str) -> bool:
        try:
            await (await self.open()).raw(f"/images/{image}/json")
        except EngineError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    async def containers(self, label: str) -> tuple[Inspected, ...]:
        """In any state."""
        engine = await self.open()
        filters = msgspec.json.encode({"label": [label]}).decode()
        listed = await engine.get("/containers/json", list[ContainerSummary], all=True, filters=filters)
        found = []
        for one in listed:
            try:
                inspected = await engine.get(f"/containers/{part(one.id)}/json", Inspected)
            except EngineError as error:
                if error.is_gone:
                    continue
                raise
            found.append(inspected)
        return tuple(found)

    async def create(self, name: str, body: Mapping[str, object]) -> None:
        """A name that exists is left as it is."""
        try:
            await (await self.open()).post("/containers/create", body, deadline=SLOW, name=name)
        except EngineError as error:
            if error.status != CONFLICT:
                raise

    async def start(self, uid: str) -> None:
        try:
            await (await self.open()).post(f"/containers/{part(uid)}/start", deadline=SLOW)
        except EngineError as error:
            if error.status != NOT_MODIFIED:
                raise

    async def log(self, uid: str) -> bytes | None:
        """As the engine sends it. None: the container is gone."""
        try:
            return await (await self.open()).raw(
                f"/containers/{part(uid)}/logs", deadline=LOG, stdout=True, stderr=True
            )
        except EngineError as error:
            if error.is_gone:
                return None
            raise

    async def remove(self, uid: str) -> None:
        """Running or not, with its anonymous volumes. One that is gone is no error."""
        try:
            await (await self.open()).delete(f"/containers/{part(uid)}", force=True, v=True)
        except EngineError as error:
            if not error.is_gone and error.status != CONFLICT:  # another request removes it; it is read again
                raise


class DockerLauncher:
    """`memlock`: locked memory without a limit, as RDMA needs it; an engine without that right refuses to start.
    `gpus`: False requests none, for trials on the CPU."""

    engine = "docker"

    def __init__(self, api: DockerApi, *, shm: int = SHM, memlock: bool = False, gpus: bool = True) -> None:
        self._api, self._shm, self._memlock, self._gpus = api, shm, memlock, gpus

    async def targets(self, spec: RunSpec) -> tuple[Target, ...]:
        node = await self._api.node()
        _check(spec, node)
        if not await self._api.has_image(spec.image):
            return (Target(node=node, excluded=f"the engine has no image {spec.image}: docker pull {spec.image}"),)
        return (Target(node=node, gpus=spec.gpus_per_node),)

    def render(self, spec: RunSpec, targets: Sequence[Target]) -> str:
        parts = []
        for target in targets:
            if target.excluded:
                parts.append(f"# {target.node} is left out: {target.excluded}")
                continue
            sent = msgspec.json.encode(self._body(spec, target.node))
            parts.append(f"# POST /containers/create?name={_name(spec.run)}")
            parts.append(msgspec.json.format(sent, indent=2).decode())
        return "\n".join(parts) + "\n"

    async def start(self, spec: RunSpec, targets: Sequence[Target]) -> None:
        """A container that has run is never started again."""
        for target in targets:
            if target.excluded:
                continue
            found = await self._of(spec.run)
            if not found:
                await self._api.create(_name(spec.run), self._body(spec, target.node))
                found = await self._of(spec.run)
            if not found:
                raise UsageError(
                    f"another container has the name {_name(spec.run)}; remove it, or choose another run id. "
                    f"It was not changed: docker inspect {_name(spec.run)}"
                )
            for one in found:
                if one.state.status in {"created", "configured"}:  # Podman's word is the second
                    await self._api.start(one.id)

    async def runs(self) -> tuple[RunSummary, ...] | Unknown:
        node = await self._api.node()
        found = await self._api.containers(f"{KIND}=run")
        return tuple(_summary(one, node, spec) for one in found if (spec := _spec(one)) is not None)

    async def run(self, run: str) -> RunSummary | None:
        node = await self._api.node()
        for one in await self._of(run):
            if (spec := _spec(one)) is not None:
                return _summary(one, node, spec)
        return None

    async def output(self, spec: RunSpec, node: str) -> bytes | Unknown:
        for one in await self._of(spec.run):
            sent = await self._api.log(one.id)
            if sent is not None:
                return parts_of(sent)
        return Unknown(f"{node} has no container of run {spec.run}")

    async def remove(self, run: str) -> Removal:
        before = await self._of(run)
        for one in before:
            await self._api.remove(one.id)
        after = await self._labelled(run)
        left = {one.id for one in after if _spec(one) is not None}
        others = [one for one in after if _spec(one) is None]
        kept = f"it has the labels of run {run}, but not its name and description; it was kept"
        return Removal(
            removed=tuple(f"container/{one.plain_name}" for one in before if one.id not in left),
            left=(
                *((f"container/{uid[:12]}", "still there after it was removed") for uid in sorted(left)),
                *((f"container/{one.plain_name}", kept) for one in others),
            ),
        )

    async def close(self) -> None:
        await self._api.close()

    async def _of(self, run: str) -> tuple[Inspected, ...]:
        return tuple(one for one in await self._labelled(run) if _spec(one) is not None)

    async def _labelled(self, run: str) -> tuple[Inspected, ...]:
        """The label that says what it is counts as well: others may use the name of a run."""
        found = await self._api.containers(f"{RUN}={run}")
        return tuple(one for one in found if one.labels.get(KIND) == "run" and one.labels.get(RUN) == run)

    def _body(self, spec: RunSpec, node: str) -> dict[str, object]:
        given = {**environment(spec, node), **group_environment(spec, 0, 1, "127.0.0.1")}
        seconds = str(max(1, round(spec.deadline_s)))
        gpus = -1 if spec.gpus_per_node is None else spec.gpus_per_node
        requests = [{"Count": gpus, "Capabilities": [["gpu"]]}] if self._gpus and gpus else []
        return {
            "Image": spec.image,
            "Entrypoint": ["sh", "-c", WATCHED, seconds],
            "Cmd": list(command(spec)),
            "Env": [f"{name}={value}" for name, value in given.items()],
            "Labels": {
                RUN: spec.run,
                KIND: "run",
                OWNER: spec.owner,
                SPEC: msgspec.json.encode(spec).decode(),
            },
            "HostConfig": {
                "ShmSize": self._shm,
                "NetworkMode": "host" if spec.together else "default",
                "LogConfig": {"Type": "json-file", "Config": {}},
                "RestartPolicy": {"Name": "no"},
                "Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}] if self._memlock else [],
                "DeviceRequests": requests,
            },
        }


def parts_of(sent: bytes) -> bytes:
    """Standard output and error in their order. A part that was cut off is kept as far as it came."""
    found, at = bytearray(), 0
    while at + HEADER <= len(sent):
        size = int.from_bytes(sent[at + 4 : at + HEADER], "big")
        found += sent[at + HEADER : at + HEADER + size]
        at += HEADER + size
    return bytes(found)


def _check(spec: RunSpec, node: str) -> None:
    if not spec.image:
        raise UsageError("Docker needs an image; add --image IMAGE. Nothing was started.")
    if spec.selector:
        raise UsageError("a Docker engine is one node without labels; leave out the selector. Nothing was started.")
    missing = [name for name in spec.nodes if name != node]
    if missing:
        raise UsageError(f"this engine is {node}, not {', '.join(missing)}. Nothing was started.")


def _name(run: str) -> str:
    return f"gpukeeper-{run}"


def _spec(one: Inspected) -> RunSpec | None:
    """None: no launcher created it. Labels are not enough: a container of an image that was made from a run's container
    has them all. The name is: an engine gives it to one container only."""
    try:
        spec = reading.decode(one.labels.get(SPEC, "").encode(), type=RunSpec)
    except msgspec.DecodeError:
        return None
    return spec if spec.run == one.labels.get(RUN) and one.plain_name == _name(spec.run) else None


def _summary(one: Inspected, node: str, spec: RunSpec) -> RunSummary:
    return RunSummary(spec=spec, nodes=(status_of(one, node, spec),), objects=(f"container/{one.plain_name}",))


def status_of(one: Inspected, node: str, spec: RunSpec) -> NodeStatus:
    def status(phase: Phase, code: str = "", reason: str = "") -> NodeStatus:
        ended = one.state.exit_code if phase is Phase.ENDED else None
        return NodeStatus(node=node, phase=phase, code=code, reason=reason, exit_code=ended)

    if one.state.status in {"created", "configured"}:
        if one.state.error:
            return status(Phase.GONE, "refused", f"the engine did not start it: {one.state.error}")
        return status(Phase.GONE, "vanished", "its start was interrupted; start the run again, or remove it")
    if one.state.status in {"exited", "stopped", "dead"}:
        if one.state.oom_killed:
            return status(Phase.ENDED, "memory", "the kernel ended a process of it: out of memory")
        if one.state.exit_code in ENDED_BY_TIMEOUT and _lasted(one) >= spec.deadline_s:
            return status(Phase.ENDED, "deadline", f"it reached its deadline of {spec.deadline_s:.0f} s and was ended")
        return status(Phase.ENDED)
    return status(Phase.RUNNING)


def _lasted(one: Inspected) -> float:
    """Seconds from its start to its end; 0: not known."""
    try:
        return (reading.moment(one.state.finished_at) - reading.moment(one.state.started_at)).total_seconds()
    except ValueError:
        return 0.0
