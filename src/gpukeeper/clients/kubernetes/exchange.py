"""One exchange with the API server: path and query, the request rate of all callers, the size limit of a response,
lists and watch events from bytes to values, and errors as sentences.

Only the API server's own response proves anything. An item that cannot be read does not invalidate its page.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from gpukeeper.clients.kubernetes.wire import ListMeta
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.words import in_words

if TYPE_CHECKING:
    import httpx2


UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, EXPIRED, INVALID, TOO_MANY = 401, 403, 404, 409, 410, 422, 429
# The message of the server when a JSON Patch no longer fits the object: the same for a failed `test` and for a missing
# path. An invalid value has causes and the name of the object instead.
_OF_ALL = "at the cluster scope"
_PATCH_DOES_NOT_FIT = "the server rejected our request due to an error in our request"


class ApiError(PlatformError):
    """The API server, or a proxy before it, answered with an error."""

    def __init__(
        self,
        status: int,
        reason: str,
        words: str,
        retry_after: float | None = None,
        continue_: str = "",
        *,
        name: str = "",
        causes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(f"the cluster answered {status}: {words}{_hint(status, reason, words)}")
        self.status, self.reason, self.words = status, reason, words
        self.retry_after, self.continue_ = retry_after, continue_
        self.name, self.causes = name, causes  # of the object the answer is about; why, one by one

    @property
    def is_not_found(self) -> bool:
        """The named object does not exist. A 404 of a proxy, or of a kind that is not installed, proves nothing."""
        return self.status == NOT_FOUND and self.reason == "NotFound" and bool(self.name)

    @property
    def is_conflict(self) -> bool:
        """The object changed: a precondition or the `test` of a JSON Patch failed."""
        if self.status == CONFLICT:
            return self.reason == "Conflict"
        return self.status == INVALID and not self.causes and _PATCH_DOES_NOT_FIT in self.words

    @property
    def is_name_taken(self) -> bool:
        """An object of that name exists already."""
        return self.reason == "AlreadyExists"

    @property
    def is_denied(self) -> bool:
        return self.status in {UNAUTHORIZED, FORBIDDEN}

    @property
    def is_disruption_budget(self) -> bool:
        """A PodDisruptionBudget refused an eviction: this concerns the pod, not the request rate."""
        return self.status == TOO_MANY and "DisruptionBudget" in self.causes

    @property
    def expired(self) -> bool:
        """The list or version to continue from is too old."""
        return self.status == EXPIRED


class ClusterUnavailable(PlatformError):
    """The cluster did not answer, or not in time. The request may have been executed."""


class ResponseTooLarge(ClusterUnavailable):
    """An endless response must not fill the memory."""


class _Cause(msgspec.Struct):
    reason: str = ""


class _Details(msgspec.Struct, rename="camel"):
    name: str = ""
    causes: list[_Cause] | None = None
    retry_after_seconds: int | None = None


class _StatusMeta(msgspec.Struct):
    continue_: str = msgspec.field(default="", name="continue")


class StatusObject(msgspec.Struct):
    """The Status object of the API: an error, or the response to some deletes."""

    kind: str = ""
    reason: str = ""
    message: str = ""
    code: int = 0
    details: _Details | None = None
    metadata: _StatusMeta | None = None


def refusal(status: int, body: bytes | msgspec.Raw, retry_after: float | None = None) -> ApiError:
    """The error of a response of 300 or more. A body that is not a Status is quoted and has no reason."""
    try:
        record = reading.decode(body, type=StatusObject)
    except msgspec.DecodeError:
        record = StatusObject()
    if record.kind != "Status":
        words = " ".join(bytes(body)[:200].decode("utf-8", "replace").split())
        return ApiError(status, "", words or "no message", retry_after)
    details, meta = record.details or _Details(), record.metadata or _StatusMeta()
    if retry_after is None and details.retry_after_seconds:
        retry_after = float(details.retry_after_seconds)
    causes = tuple(one.reason for one in details.causes or ())
    words = record.message or record.reason or "no message"
    return ApiError(status, record.reason, words, retry_after, meta.continue_, name=details.name, causes=causes)


def cannot_connect(place: str, address: str, why: str) -> ClusterUnavailable:
    hint = ""
    message = why.lower()
    if "certificate" in message:
        hint = "; check the certificate-authority in the kubeconfig"
    elif "refused" in message or "timed out" in message or "no route" in message or "unreachable" in message:
        hint = "; check that it runs and is reachable from here: `kubectl version`"
    elif "name" in message and ("known" in message or "resolution" in message):
        hint = "; its host name cannot be resolved"
    return ClusterUnavailable(f"the cluster {place} at {address} cannot be reached: {why}{hint}")


def _hint(status: int, reason: str, words: str) -> str:
    if status == UNAUTHORIZED:
        return "; the credentials are invalid or expired: log in again, or fix the kubeconfig's user"
    if status == FORBIDDEN and reason == "Forbidden":
        only = (
            "; a scope that lists namespaces without patterns needs permissions in those only"
            if _OF_ALL in words
            else ""
        )
        return f"; `kubectl auth can-i --list` shows the permissions{only}"
    return ""


LONGEST_PAUSE = 300.0  # seconds; the maximum for a Retry-After


class RateLimiter:
    """One token bucket for all callers, and the pause that the server requests."""

    def __init__(
        self, rate: float, burst: int, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        assert rate > 0, "This is a bug in gpukeeper: a rate limit of 0."
        self._rate, self._burst, self._clock, self._sleep = rate, max(1, burst), clock, sleep
        self._tokens, self._at, self._until = float(self._burst), clock(), clock()

    async def acquire(self, patience: float) -> None:
        """Waits for a token, in order of arrival. Raises if a pause lasts longer than `patience` seconds."""
        await self._wait_for_pause(patience)
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1
        if self._tokens < 0:
            await self._sleep(-self._tokens / self._rate)
            await self._wait_for_pause(patience)

    def pause(self, seconds: float) -> None:
        self._until = max(self._until, self._clock() + min(seconds, LONGEST_PAUSE))

    def remaining_pause(self) -> float:
        """Seconds until the pause ends."""
        return max(0.0, self._until - self._clock())

    async def _wait_for_pause(self, patience: float) -> None:
        while (left := self.remaining_pause()) > 0:
            if left > patience:
                words = in_words(timedelta(seconds=round(left) or 1))
                raise ClusterUnavailable(
                    f"the cluster asked for a pause of another {words} (Retry-After); no request was sent"
                )
            await self._sleep(left)


MOST = 64 * 1024 * 1024  # bytes of one response


class ConnectionFailed(ClusterUnavailable):
    """The connection failed or ended too early: a read may be retried."""


class ApiRequest(msgspec.Struct, frozen=True):
    method: str
    path: str
    query: Mapping[str, object]
    data: bytes | None = None
    content: str = "application/json"  # the type of the data
    accept: str = ""
    most: int = MOST
    cut: bool = False  # a longer response is cut, not refused

    @property
    def words(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def headers(self) -> dict[str, str]:
        content = {} if self.data is None else {"Content-Type": self.content}
        return content | ({"Accept": self.accept} if self.accept else {})


@contextmanager
def translated_errors(what: str, place: str, address: str) -> Iterator[None]:
    """Errors of the HTTP client and of the login, as ours. `what`: the request."""
    import httpx2
    from lightkube.core.exceptions import ConfigError

    try:
        yield
    except (httpx2.ConnectError, httpx2.ProxyError) as error:
        silent = cannot_connect(place, address, words_of(error))
        raise ConnectionFailed(str(silent)) from error
    except httpx2.TransportError as error:
        raise ConnectionFailed(f"the connection to the cluster failed during {what}: {words_of(error)}") from error
    except httpx2.HTTPError as error:
        raise ClusterUnavailable(f"the cluster's response to {what} is invalid: {words_of(error)}") from error
    except ConfigError as error:
        raise ClusterUnavailable(f"cannot log in to {place}: {error}") from error


def checked(path: str) -> str:
    """Names come from users and ledgers; they must not lead to another object."""
    if not path.startswith("/") or re.search(r"[?#%\s\\]|//|/\.{1,2}(/|$)", path):
        raise PlatformError(f"{path!r} is not a valid API path; no request was sent")
    return path


def as_text(query: Mapping[str, object]) -> dict[str, str]:
    return {
        name: (str(value).lower() if isinstance(value, bool) else str(value))
        for name, value in query.items()
        if value is not None
    }


async def read(answer: httpx2.Response, most: int, cut: bool, what: str) -> bytearray:
    """At most this much: an endless response must not fill the memory."""
    taken = bytearray()
    async for chunk in answer.aiter_bytes():
        taken += chunk
        if len(taken) > most:
            if not cut:
                raise ResponseTooLarge(f"the cluster's response to {what} is longer than {most} bytes; it was not read")
            del taken[most:]
            break
    return taken


def retry_after(answer: httpx2.Response, skew: timedelta | None, now: datetime) -> float | None:
    """Seconds, or a time by the server's clock."""
    value = answer.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
        return max(0.0, (at - now - (skew or timedelta())).total_seconds())
    except (ValueError, TypeError):
        return None


def words_of(error: BaseException) -> str:
    """The error of the kernel if there is one: libraries hide it behind "All connection attempts failed"."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"certificate verify failed: {cause.verify_message}"
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0 and not isinstance(cause, ssl.SSLError):
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


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


async def lines_of_stream(chunks: AsyncIterator[bytes], seconds: float) -> AsyncGenerator[bytes, None]:
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


def watch_event(line: bytes, decoder: reading.Decoder[T]) -> WatchEvent[T]:
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


class Paging:
    def __init__(self, path: str, query: Mapping[str, object], limit: int) -> None:
        self._path, self._query, self._limit = path, query, limit
        self._token, self._expired = "", False
        self.inconsistent = False  # its pages are of different versions

    @property
    def query(self) -> dict[str, object]:
        return {**self._query, "limit": self._limit, "continue": self._token or None}

    @property
    def ended(self) -> bool:
        """After a page."""
        return not self._token

    def recovers_from(self, error: ApiError | ResponseTooLarge) -> bool:
        """Whether the same page can be requested again: a smaller one, or one of a later version, once."""
        if isinstance(error, ResponseTooLarge):
            smaller = self._limit > 1
            self._limit = max(1, self._limit // 4)
            return smaller
        if not (error.expired and self._token and error.continue_) or self._expired:
            return False
        self._token, self._expired, self.inconsistent = error.continue_, True, True
        return True

    def advance(self, following: str) -> None:
        """`following`: the token of the next page; empty: the list has ended."""
        if following and following == self._token:
            raise ClusterUnavailable(f"the cluster repeats the same page of {self._path}")
        self._token, self._expired = following, False
        # A token carries its version; naming one beside it is refused.
        self._query = {name: value for name, value in self._query.items() if not name.startswith("resourceVersion")}
