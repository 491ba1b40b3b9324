"""Lists and watch events, from bytes to values. An item that cannot be read does not invalidate its page."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from gpukeeper.model import reading
from gpukeeper.platforms.kubernetes.errors import ClusterUnavailable, ResponseTooLarge, refusal
from gpukeeper.platforms.kubernetes.wire import ListMeta, Meta, Wire

T = TypeVar("T")
LONGEST_EVENT = 8 * 1024 * 1024  # bytes; an object has at most about 1.5 MB


class ListPage(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    items: Sequence[T]
    version: str  # of the whole list: where a watch continues
    problems: tuple[str, ...] = ()  # items that are there and could not be read
    inconsistent: bool = False  # pages of different times: what is missing here may still be there


class WatchEvent(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    type: str  # ADDED, MODIFIED, DELETED, BOOKMARK
    object: T
    version: str  # a later watch continues from here


class ChangedObject(Wire, frozen=True, gc=True):
    """What a watch that only triggers reads needs of an object."""

    kind: str = ""
    metadata: Meta = Meta()


class _Typed(msgspec.Struct, Generic[T]):
    items: list[T] | None
    kind: str
    metadata: ListMeta


class _Raw(msgspec.Struct):
    items: list[msgspec.Raw] | None
    kind: str
    metadata: ListMeta


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Version(msgspec.Struct, rename="camel"):
    resource_version: str


class _Versioned(msgspec.Struct):
    metadata: _Version


class _Names(msgspec.Struct):
    name: str = ""
    namespace: str = ""


class _OnlyNamed(msgspec.Struct):
    metadata: _Names


class _Coded(msgspec.Struct):
    code: int = 0


class Decoders:
    """Made once for each type."""

    def __init__(self) -> None:
        self._made: dict[Any, reading.Decoder[Any]] = {}

    def of(self, type_: Any) -> reading.Decoder[Any]:
        if type_ not in self._made:
            self._made[type_] = reading.Decoder(type_)
        return self._made[type_]

    def one(self, body: bytearray, type_: type[T], path: str) -> T:
        try:
            with collector_off():
                return cast(T, self.of(type_).decode(body))
        except msgspec.DecodeError as error:
            raise ClusterUnavailable(f"the cluster's response to {path} cannot be read: {error}") from error

    def page(self, body: bytearray, type_: type[T], path: str) -> tuple[_Typed[T], tuple[str, ...]]:
        """All items at once; one by one only where one of them cannot be read."""
        problems: tuple[str, ...] = ()
        try:
            with collector_off():
                try:
                    page = self.of(_Typed[type_]).decode(body)  # type: ignore[valid-type]
                except msgspec.ValidationError:
                    page, problems = self._one_by_one(body, type_)
        except msgspec.DecodeError as error:
            raise ClusterUnavailable(f"the cluster's list {path} cannot be read: {error}") from error
        # Without this check, a response that is not a list would look like an empty cluster.
        if not page.kind.endswith("List") or not page.metadata.resource_version:
            raise ClusterUnavailable(f"the cluster's response to {path} is not a list")
        return page, problems

    def _one_by_one(self, body: bytearray, type_: type[T]) -> tuple[_Typed[T], tuple[str, ...]]:
        whole = self.of(_Raw).decode(body)
        items, problems, decoder = [], [], self.of(type_)
        for number, one in enumerate(whole.items or ()):
            try:
                items.append(decoder.decode(one))
            except msgspec.DecodeError as error:
                problems.append(f"{_name_of(one) or f'item {number}'}: {error}")
        return _Typed(items, whole.kind, whole.metadata), tuple(problems)


class collector_off:  # noqa: N801  a context, used like a function
    """Decoding creates many objects and no garbage; garbage collection would be most of the cost."""

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            gc.enable()


async def lines(chunks: AsyncIterator[bytes], seconds: float) -> AsyncGenerator[bytes, None]:
    """Lines of a stream; TimeoutError when nothing at all comes for so long."""
    rest = bytearray()
    while True:
        try:
            async with asyncio.timeout(seconds):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            break
        rest += chunk
        if b"\n" in chunk:
            *whole, rest = rest.split(b"\n")
            for line in whole:
                if line.strip():
                    yield bytes(line)
        if len(rest) > LONGEST_EVENT:
            raise ResponseTooLarge(f"an event of a watch is longer than {LONGEST_EVENT} bytes; it was not read")
    if rest.strip():
        yield bytes(rest)


def event(line: bytes, decoder: reading.Decoder[T]) -> WatchEvent[T]:
    found = reading.decode(line, type=_Event)
    if found.type == "ERROR":
        raise refusal(reading.decode(found.object, type=_Coded).code or 500, found.object)
    version = reading.decode(found.object, type=_Versioned).metadata.resource_version
    return WatchEvent(type=found.type, object=decoder.decode(found.object), version=version)


def _name_of(item: msgspec.Raw) -> str:
    try:
        meta = reading.decode(item, type=_OnlyNamed).metadata
    except msgspec.DecodeError:
        return ""
    return "/".join(part for part in (meta.namespace, meta.name) if part)
