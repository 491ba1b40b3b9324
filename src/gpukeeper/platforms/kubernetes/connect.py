"""How a cluster is reached: over HTTP and JSON. Every call has a deadline and waits for its turn; nothing here decides.

lightkube's client is not used: its delete sends no preconditions and its watch can hang. Answers are decoded with our
own structs, which skip what they do not name.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.platforms.kubernetes.errors import (
    FORBIDDEN,
    TOO_MANY,
    UNAUTHORIZED,
    ApiError,
    ClusterSilent,
    TooLarge,
    cannot_connect,
    refusal,
)
from gpukeeper.platforms.kubernetes.pace import Pace
from gpukeeper.platforms.kubernetes.wire import ListMeta, Meta, Wire

if TYPE_CHECKING:
    import httpx2

    from gpukeeper.platforms.kubernetes.auth import Login

T = TypeVar("T")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
QUICK, SLOW = timedelta(seconds=10), timedelta(seconds=60)
INACTIVE = timedelta(seconds=70)  # a living watch sends a bookmark about once a minute
WATCH = timedelta(minutes=8)  # then the server ends it, and we begin again
AT_ONCE = 16  # questions in flight
RETRIES = 3
PASSING = frozenset({429, 500, 502, 503, 504})  # a read is asked again
MOST = 64 * 1024 * 1024  # bytes of one answer
LONGEST_EVENT = 8 * 1024 * 1024  # bytes; an object has at most about 1.5 MB
LONGEST_REFUSAL = 64 * 1024
PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}


class ListPage(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    items: Sequence[T]
    version: str  # of the whole list: where a watch goes on
    problems: tuple[str, ...] = ()  # items that are there and could not be read
    inconsistent: bool = False  # pages of different times: what is missing here may still be there


class WatchEvent(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    type: str  # ADDED, MODIFIED, DELETED, BOOKMARK
    object: T
    version: str  # a later watch goes on from here


class Changed(Wire, frozen=True, gc=True):
    """What a watch that only wakes us needs of an object."""

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


class _Release(msgspec.Struct, rename="camel"):
    git_version: str


class _Coded(msgspec.Struct):
    code: int = 0


def find(environ: Mapping[str, str], account: Path = ACCOUNT) -> str | None:
    """Where a cluster is, or None. Looks for a kubeconfig or a service account, in kubectl's order; asks nothing."""
    files = kubeconfigs(environ)
    if files:
        return str(files[0])
    return "the cluster around us" if _is_inside(environ, account) else None


def kubeconfigs(environ: Mapping[str, str]) -> list[Path]:
    """The files that are there. Of those that KUBECONFIG names, some may not be."""
    named = environ.get("KUBECONFIG", "")
    home = environ.get("HOME")
    places = [Path(place) for place in named.split(":") if place]
    if not places and home:
        places = [Path(home) / ".kube" / "config"]
    return [place for place in places if _is_there(place)]


@dataclass
class _Watcher:
    """The connections of watches that began with one login."""

    client: httpx2.AsyncClient
    users: int = 0


class Cluster:
    """One cluster. A connection is open while somebody is inside `opened()`. All callers share one pace."""

    def __init__(
        self,
        login: Login,
        requests: float = 20.0,
        burst: int = 30,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.place, self.namespace, self.address = login.place, login.namespace, login.address
        self.asked: Counter[str] = Counter()  # by method, every try
        self.skew: timedelta | None = None  # the server's clock minus ours, at the last answer
        self._login = login
        self._pace = Pace(requests, burst, clock, sleep)
        self._clock, self._sleep, self._chance = clock, sleep, chance
        self._users = 0
        self._client: httpx2.AsyncClient | None = None
        self._old: httpx2.AsyncClient | None = None
        # Watches have connections of their own: a pool looks at every one of its connections for each question.
        self._watcher: _Watcher | None = None
        self._watcher_of: httpx2.AsyncClient | None = None  # made together with this one
        self._old_watchers: list[_Watcher] = []  # of earlier logins, while something is watched over them
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._logging_in = asyncio.Lock()
        self._decoders: dict[Any, reading.Decoder[Any]] = {}

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] = os.environ,
        context: str | None = None,
        requests: float = 20.0,
        burst: int = 30,
        *,
        account: Path = ACCOUNT,
    ) -> Cluster:
        """As kubectl would find it: the kubeconfig, or else the cluster around us."""
        try:
            from gpukeeper.platforms.kubernetes import auth
        except ImportError as error:
            raise UsageError("looking at Kubernetes needs: pip install 'gpukeeper[kubernetes]'") from error
        files = kubeconfigs(environ)
        if files:
            return cls(auth.from_files(files, context, environ, auth.utc_now), requests, burst)
        if _is_inside(environ, account) and context is None:
            return cls(auth.from_service_account(account, environ), requests, burst)
        named = environ.get("KUBECONFIG")
        missing = f"KUBECONFIG names {named}, which is not there" if named else "there is no kubeconfig"
        raise UsageError(f"{missing}, and we are not inside a cluster; `kubectl config view` shows what kubectl sees")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The first to come opens, the last to go closes: a one-shot command leaves nothing behind."""
        if self._users == 0:
            self._limit, self._logging_in = asyncio.Semaphore(AT_ONCE), asyncio.Lock()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                watchers = [*self._old_watchers, *([self._watcher] if self._watcher else [])]
                clients = (self._client, self._old, *(one.client for one in watchers))
                self._client = self._old = self._watcher = self._watcher_of = None
                self._old_watchers = []
                for client in clients:
                    if client is not None:
                        await client.aclose()

    async def get(
        self, path: str, type_: type[T], *, deadline: timedelta = QUICK, accept: str = "", **query: object
    ) -> T:
        body = await self._ask("GET", path, query, deadline=deadline, accept=accept)
        try:
            with collector_off():
                return cast(T, self._decoder(type_).decode(body))
        except msgspec.DecodeError as error:
            raise ClusterSilent(f"the cluster's answer to {path} cannot be read: {error}") from error

    async def version(self) -> str:
        """Of its API server. Whoever is known to it may ask; where that was taken away, it answers all the same."""
        try:
            return f"Kubernetes {(await self.get('/version', _Release)).git_version}"
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            return "its version may not be read"

    async def raw(
        self, path: str, *, most: int = MOST, tail_ok: bool = False, deadline: timedelta = QUICK, **query: object
    ) -> bytes:
        """At most this many bytes; where there are more, the first ones if their tail may be missing."""
        return bytes(await self._ask("GET", path, query, deadline=deadline, most=most, cut=tail_ok))

    async def pages(
        self,
        path: str,
        type_: type[T],
        *,
        limit: int = 500,
        deadline: timedelta = SLOW,
        accept: str = "",
        **query: object,
    ) -> AsyncGenerator[ListPage[T], None]:
        """A whole list, page by page; the deadline is for one. What cannot be listed to its end raises: absence is
        proven only by a list that ended and is not `inconsistent`."""
        token, expired, inconsistent = "", False, False
        asked = dict(query)
        while True:
            try:
                body = await self._ask(
                    "GET",
                    path,
                    {**asked, "limit": limit, "continue": token or None},
                    deadline=deadline,
                    accept=accept,
                )
            except TooLarge:
                if limit <= 1:
                    raise
                limit = max(1, limit // 4)
                continue
            except ApiError as error:
                if not (error.expired and token and error.continue_) or expired:
                    raise
                token, expired, inconsistent = error.continue_, True, True
                continue
            page, problems = self._page(body, type_, path)
            del body  # not kept while the page is worked on
            following, expired = page.metadata.continue_, False
            if following and following == token:
                raise ClusterSilent(f"the cluster sends the same page of {path} again and again")
            token = following
            # A token carries its version; naming one beside it is refused.
            asked = {name: value for name, value in query.items() if not name.startswith("resourceVersion")}
            yield ListPage(
                items=page.items or (),
                version=page.metadata.resource_version,
                problems=problems,
                inconsistent=inconsistent,
            )
            del page
            if not token:
                return

    async def watch(
        self,
        path: str,
        version: str,
        type_: type[T] = Changed,  # type: ignore[assignment]
        *,
        inactive: timedelta = INACTIVE,
        accept: str = "",
        **query: object,
    ) -> AsyncGenerator[WatchEvent[T], None]:
        """What changes after this version, and bookmarks, until the server ends it. ApiError 410: list again."""
        asked = {
            "timeoutSeconds": int(WATCH.total_seconds() * (0.75 + self._chance() / 2)),
            **query,
            "watch": True,
            "allowWatchBookmarks": True,
            "resourceVersion": version,
        }
        decoder = self._decoder(type_)
        async with AsyncExitStack() as stack:
            answer = await self._watching(stack, path, asked, accept)
            try:
                async with aclosing(_lines(answer.aiter_bytes(), inactive.total_seconds())) as lines:
                    async for line in lines:
                        yield _event(line, decoder)
            except TimeoutError as error:
                raise ClusterSilent(f"the watch of {path} was silent for {in_words(inactive)}") from error
            except msgspec.DecodeError as error:
                raise ClusterSilent(f"the watch of {path} said what cannot be read: {error}") from error

    async def post(self, path: str, body: object, *, deadline: timedelta = SLOW, **query: object) -> bytes:
        return await self._write("POST", path, body, query, deadline)

    async def put(self, path: str, body: object, *, deadline: timedelta = SLOW, **query: object) -> bytes:
        return await self._write("PUT", path, body, query, deadline)

    async def patch(
        self,
        path: str,
        body: object,
        how: Literal["merge", "json", "strategic", "apply"],
        *,
        deadline: timedelta = SLOW,
        **query: object,
    ) -> bytes:
        return await self._write("PATCH", path, body, query, deadline, PATCHES[how])

    async def delete(self, path: str, body: object, *, deadline: timedelta = SLOW, **query: object) -> bytes:
        """Always with DeleteOptions: without preconditions it would hit whatever has the name by now."""
        assert body, "This is a bug in gpukeeper: a delete without options."
        data = msgspec.json.encode(body)
        return bytes(await self._ask("DELETE", path, query, data, deadline=deadline))

    async def _write(
        self,
        method: str,
        path: str,
        body: object,
        query: Mapping[str, object],
        deadline: timedelta,
        content: str = "application/json",
    ) -> bytes:
        asked = {"fieldManager": "gpukeeper", **query}
        return bytes(
            await self._ask(method, path, asked, msgspec.json.encode(body), content=content, deadline=deadline)
        )

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        data: bytes | None = None,
        *,
        content: str = "application/json",
        deadline: timedelta,
        most: int = MOST,
        cut: bool = False,
        accept: str = "",
    ) -> bytearray:
        """One question, with its tries. A write that got no answer is not repeated: it may have happened."""

        async def once(left: float) -> bytearray:
            async with asyncio.timeout(left), self._answer(method, path, query, data, content, accept=accept) as answer:
                return await _read(answer, most, cut, f"{method} {path}")

        begun: float | None = None
        tries, logged_in = 0, False
        while True:
            left = deadline.total_seconds() - (0 if begun is None else self._clock() - begun)
            await self._pace.turn(left)
            logins = await self._logged_in()
            async with self._limit:
                begun = self._clock() if begun is None else begun
                left = deadline.total_seconds() - (self._clock() - begun)
                try:
                    return await once(max(left, 0))
                except TimeoutError as error:
                    raise ClusterSilent(
                        f"the cluster did not answer {method} {path} within {in_words(deadline)}"
                    ) from error
                except PlatformError as error:
                    failed = error
            if not logged_in and isinstance(failed, ApiError) and failed.status == UNAUTHORIZED:
                logged_in = True
                if await self._log_in_again(logins):
                    continue
            wait = self._again(failed, method, tries)
            tries += 1
            left = deadline.total_seconds() - (self._clock() - begun)
            if wait is None or max(wait, self._pace.paused()) >= left:
                raise failed
            if wait:
                await self._sleep(wait)

    async def _watching(
        self, stack: AsyncExitStack, path: str, query: Mapping[str, object], accept: str
    ) -> httpx2.Response:
        """A stream that is open. Who watches begins again by himself; only a login that is over is renewed here."""
        for last in (False, True):
            await self._pace.turn(QUICK.total_seconds())
            logins = await self._logged_in()
            try:
                async with asyncio.timeout(QUICK.total_seconds()), AsyncExitStack() as begun:
                    client = await begun.enter_async_context(self._for_watches())
                    answer = await begun.enter_async_context(
                        self._answer("GET", path, query, accept=accept, client=client)
                    )
                    stack.push_async_exit(begun.pop_all())
                    return answer
            except TimeoutError as error:
                raise ClusterSilent(
                    f"the cluster did not begin the watch of {path} within {in_words(QUICK)}"
                ) from error
            except ApiError as failed:
                if last or failed.status != UNAUTHORIZED or not await self._log_in_again(logins):
                    self._again(failed, "GET", RETRIES)
                    raise
        raise AssertionError("This is a bug in gpukeeper: a watch neither began nor failed.")

    @asynccontextmanager
    async def _for_watches(self) -> AsyncIterator[httpx2.AsyncClient]:
        """Anew with every login; what is watched over an older one goes on there, and the last to end closes it."""
        if self._watcher is None or self._watcher_of is not self._client:
            try:
                made = _Watcher(self._login.client())
            except UsageError as error:
                raise ClusterSilent(str(error)) from error  # files that are just being replaced
            old, self._watcher, self._watcher_of = self._watcher, made, self._client
            if old is not None:
                self._old_watchers.append(old)
        mine = self._watcher
        mine.users += 1
        try:
            await self._close_unused()
            yield mine.client
        finally:
            mine.users -= 1
            await self._close_unused()

    async def _close_unused(self) -> None:
        unused = [one for one in self._old_watchers if not one.users]
        self._old_watchers = [one for one in self._old_watchers if one.users]
        for one in unused:
            await one.client.aclose()

    async def _logged_in(self) -> int:
        """With credentials that are not over, over connections that carry them. Says how often we logged in."""
        async with self._logging_in:
            await self._login.ready()
            if self._client is None or self._login.certificate_changed:
                await self._connect()
            return self._login.count

    async def _log_in_again(self, count: int) -> bool:
        """Where the cluster refused what we logged in with the last time. False: there is no other way."""
        async with self._logging_in:
            return await self._login.renew(count)

    async def _connect(self) -> None:
        """What is in flight on the old connections ends there; the next change closes them."""
        assert self._users, "This is a bug in gpukeeper: the cluster was not opened."
        try:
            client = self._login.client()
        except UsageError as error:
            if self._client is not None:
                return  # files that are just being replaced; they are looked at again before the next question
            raise ClusterSilent(str(error)) from error
        if self._old is not None:
            await self._old.aclose()
        self._old, self._client = self._client, client

    def _again(self, failed: PlatformError, method: str, tries: int) -> float | None:
        """Seconds until it is asked again; None: it is not. A Retry-After holds everybody up, not only this caller."""
        hint = 0.0
        if isinstance(failed, ApiError):
            if failed.says_budget:
                return None
            hint = failed.retry_after or 0.0
            throttled = failed.status in {TOO_MANY, 503} and hint > 0
            if throttled:
                self._pace.pause(hint)
            asks_again = failed.status in PASSING if method == "GET" else failed.status == TOO_MANY
            if not asks_again or tries >= RETRIES:
                return None
            if throttled:
                return 0.0
        elif not isinstance(failed, _Broken) or method != "GET" or tries >= RETRIES:
            return None
        return max(hint, 0.25 * float(2**tries) * (0.5 + self._chance()))

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        data: bytes | None = None,
        content: str = "",
        *,
        accept: str = "",
        client: httpx2.AsyncClient | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """Its headers, and that it is no refusal. The client's own errors become sentences."""
        import httpx2
        from lightkube.core.exceptions import ConfigError

        client = client or self._client
        assert client is not None, "This is a bug in gpukeeper: the cluster was not opened."
        self.asked[method] += 1
        try:
            async with client.stream(
                method,
                _checked(path),
                params=_query(query),
                content=data,
                headers=({} if data is None else {"Content-Type": content}) | ({"Accept": accept} if accept else {}),
                extensions=self._login.extensions,
            ) as answer:
                self._look_at_clock(answer)
                if answer.status_code >= 300:
                    read = await _read(answer, LONGEST_REFUSAL, True, path)
                    raise refusal(answer.status_code, bytes(read), _retry_after(answer, self.skew))
                yield answer
        except (httpx2.ConnectError, httpx2.ProxyError) as error:
            silent = cannot_connect(self.place, self.address, _words_of(error))
            raise _Broken(str(silent)) from error
        except httpx2.TransportError as error:
            raise _Broken(f"the cluster broke off {method} {path}: {_words_of(error)}") from error
        except httpx2.HTTPError as error:
            raise ClusterSilent(
                f"the cluster's answer to {method} {path} makes no sense: {_words_of(error)}"
            ) from error
        except ConfigError as error:
            raise ClusterSilent(f"cannot log in to {self.place}: {error}") from error

    def _look_at_clock(self, answer: httpx2.Response) -> None:
        try:
            self.skew = parsedate_to_datetime(answer.headers["Date"]) - datetime.now(UTC)
        except (KeyError, ValueError, TypeError):
            self.skew = None

    def _decoder(self, type_: Any) -> reading.Decoder[Any]:
        if type_ not in self._decoders:
            self._decoders[type_] = reading.Decoder(type_)
        return self._decoders[type_]

    def _page(self, body: bytearray, type_: type[T], path: str) -> tuple[_Typed[T], tuple[str, ...]]:
        """All items at once; one by one only where one of them cannot be read."""
        problems: tuple[str, ...] = ()
        try:
            with collector_off():
                try:
                    page = self._decoder(_Typed[type_]).decode(body)  # type: ignore[valid-type]
                except msgspec.ValidationError:
                    page, problems = self._one_by_one(body, type_)
        except msgspec.DecodeError as error:
            raise ClusterSilent(f"the cluster's list {path} cannot be read: {error}") from error
        # What is no list has no items either, and that would look like an empty cluster.
        if not page.kind.endswith("List") or not page.metadata.resource_version:
            raise ClusterSilent(f"the cluster's answer to {path} is no list")
        return page, problems

    def _one_by_one(self, body: bytearray, type_: type[T]) -> tuple[_Typed[T], tuple[str, ...]]:
        whole = self._decoder(_Raw).decode(body)
        items, problems, decoder = [], [], self._decoder(type_)
        for number, one in enumerate(whole.items or ()):
            try:
                items.append(decoder.decode(one))
            except msgspec.DecodeError as error:
                problems.append(f"{_name_of(one) or f'item {number}'}: {error}")
        return _Typed(items, whole.kind, whole.metadata), tuple(problems)


class _Broken(ClusterSilent):
    """The connection failed or ended too early: a read may be asked again."""


class collector_off:  # noqa: N801  a context, used like a function
    """Decoding makes many objects and no garbage; looking for some between them is most of the cost."""

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            gc.enable()


def _is_inside(environ: Mapping[str, str], account: Path) -> bool:
    return bool(environ.get("KUBERNETES_SERVICE_HOST")) and _is_there(account / "token")


def _is_there(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:
        return True  # it may be there and hidden from us; reading it will say so


def _checked(path: str) -> str:
    """Names come from people and from ledgers; one must not lead to another object."""
    if not path.startswith("/") or re.search(r"[?#%\s\\]|//|/\.{1,2}(/|$)", path):
        raise PlatformError(f"{path!r} is no path of the API; nothing was asked")
    return path


def _query(query: Mapping[str, object]) -> dict[str, str]:
    return {
        name: (str(value).lower() if isinstance(value, bool) else str(value))
        for name, value in query.items()
        if value is not None
    }


async def _read(answer: httpx2.Response, most: int, cut: bool, what: str) -> bytearray:
    """At most this much: an answer without end must not fill the memory."""
    read = bytearray()
    async for chunk in answer.aiter_bytes():
        read += chunk
        if len(read) > most:
            if not cut:
                raise TooLarge(f"the cluster's answer to {what} is longer than {most} bytes; it was not read")
            del read[most:]
            break
    return read


async def _lines(chunks: AsyncIterator[bytes], seconds: float) -> AsyncGenerator[bytes, None]:
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
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if line.strip():
                    yield bytes(line)
        if len(rest) > LONGEST_EVENT:
            raise TooLarge(f"an event of a watch is longer than {LONGEST_EVENT} bytes; it was not read")
    if rest.strip():
        yield bytes(rest)


def _event(line: bytes, decoder: reading.Decoder[T]) -> WatchEvent[T]:
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


def _retry_after(answer: httpx2.Response, skew: timedelta | None) -> float | None:
    """Seconds, or a time by the server's clock."""
    said = answer.headers.get("Retry-After", "").strip()
    if said.isdecimal():
        return float(said)
    try:
        at = parsedate_to_datetime(said)
        return max(0.0, (at - datetime.now(UTC) - (skew or timedelta())).total_seconds())
    except (ValueError, TypeError):
        return None


def _words_of(error: BaseException) -> str:
    """The kernel's words where there are any: libraries put "All connection attempts failed" before them."""
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
