"""The engine that acceptance runs use: its Protocol, over the same connection as the platform."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta

import msgspec

from gpukeeper.acceptance.launchers.docker import Container
from gpukeeper.model import reading
from gpukeeper.platforms.docker.connect import SLOW, Engine, part
from gpukeeper.platforms.docker.errors import CONFLICT, NOT_FOUND, NOT_MODIFIED, EngineError
from gpukeeper.platforms.docker.wire import ContainerSummary, Inspected

LOG = timedelta(seconds=60)


class _Info(msgspec.Struct, rename="pascal"):
    name: str = ""


class DockerEngineApi:
    """The connection opens at the first request."""

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
        return (await (await self.open()).get("/info", _Info)).name or self._engine.host

    async def has_image(self, image: str) -> bool:
        try:
            await (await self.open()).raw(f"/images/{image}/json")
        except EngineError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    async def containers(self, label: str) -> tuple[Container, ...]:
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
            found.append(_container(inspected))
        return tuple(found)

    async def create(self, name: str, body: Mapping[str, object]) -> None:
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
        try:
            return await (await self.open()).raw(
                f"/containers/{part(uid)}/logs", deadline=LOG, stdout=True, stderr=True
            )
        except EngineError as error:
            if error.is_gone:
                return None
            raise

    async def remove(self, uid: str) -> None:
        try:
            await (await self.open()).delete(f"/containers/{part(uid)}", force=True, v=True)
        except EngineError as error:
            if not error.is_gone and error.status != CONFLICT:  # another request removes it; it is read again
                raise


def _container(one: Inspected) -> Container:
    return Container(
        id=one.id,
        name=one.plain_name,
        state=one.state.status,
        labels=one.labels,
        exit_code=one.state.exit_code,
        error=one.state.error,
        oom=one.state.oom_killed,
        lasted_s=_lasted(one),
    )


def _lasted(one: Inspected) -> float | None:
    try:
        return (reading.moment(one.state.finished_at) - reading.moment(one.state.started_at)).total_seconds()
    except ValueError:
        return None
