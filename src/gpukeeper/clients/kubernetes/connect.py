"""Requests to a cluster, over HTTP and JSON, and the connections for them. Every call has a timeout and a rate limit;
nothing here decides.

lightkube's client is not used: its delete sends no preconditions and its watch can hang. Answers are decoded with
our own structs, which skip what they do not name.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from gpukeeper.clients.kubernetes.exchange import (
    FORBIDDEN,
    MOST,
    TOO_MANY,
    UNAUTHORIZED,
    ApiError,
    ApiRequest,
    ClusterUnavailable,
    ConnectionFailed,
    Decoders,
    ListPage,
    Paging,
    RateLimiter,
    ResponseTooLarge,
    WatchEvent,
    as_text,
    checked,
    lines_of_stream,
    read,
    refusal,
    retry_after,
    translated_errors,
    watch_event,
)
from gpukeeper.clients.kubernetes.wire import ChangedObject
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.words import in_words

if TYPE_CHECKING:
    import httpx2

    from gpukeeper.clients.kubernetes.auth import Login


@dataclass
class _Watcher:
    """The connections of watches that began with one login."""

    client: httpx2.AsyncClient
    users: int = 0


class Connections:
    def __init__(self, login: Login) -> None:
        self.login = login
        self.client: httpx2.AsyncClient | None = None
        self._users = 0
        self._old: httpx2.AsyncClient | None = None
        # Watches have their own connections: a pool checks all of its connections for each request.
        self._watcher: _Watcher | None = None
        self._watcher_of: httpx2.AsyncClient | None = None  # made together with this one
        self._old_watchers: list[_Watcher] = []  # of earlier logins, while something is watched over them
        self._logging_in = asyncio.Lock()

    @property
    def are_open(self) -> bool:
        return self._users > 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        if self._users == 0:
            self._logging_in = asyncio.Lock()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                watchers = [*self._old_watchers, *([self._watcher] if self._watcher else [])]
                clients = (self.client, self._old, *(one.client for one in watchers))
                self.client = self._old = self._watcher = self._watcher_of = None
                self._old_watchers = []
                for client in clients:
                    if client is not None:
                        await client.aclose()

    async def logged_in(self) -> int:
        """With credentials that are not over, over connections that carry them. Returns the number of logins."""
        async with self._logging_in:
            await self.login.ready()
            if self.client is None or self.login.certificate_changed:
                await self._connect()
            return self.login.count

    async def log_in_again(self, count: int) -> bool:
        """Where the cluster refused what we logged in with the last time. False: there is no other way."""
        async with self._logging_in:
            return await self.login.renew(count)

    @asynccontextmanager
    async def for_watches(self) -> AsyncIterator[httpx2.AsyncClient]:
        """A new one for every login; watches over an older one continue there, and the last to end closes it."""
        if self._watcher is None or self._watcher_of is not self.client:
            try:
                made = _Watcher(self.login.client())
            except UsageError as error:
                raise ClusterUnavailable(str(error)) from error  # files that are just being replaced
            old, self._watcher, self._watcher_of = self._watcher, made, self.client
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

    async def _connect(self) -> None:
        """What is in flight on the old connections ends there; the next change closes them."""
        assert self._users, "This is a bug in gpukeeper: the cluster was not opened."
        try:
            client = self.login.client()
        except UsageError as error:
            if self.client is not None:
                return  # files that are being replaced; they are read again before the next request
            raise ClusterUnavailable(str(error)) from error
        if self._old is not None:
            await self._old.aclose()
        self._old, self.client = self.client, client


T = TypeVar("T")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
QUICK, SLOW = timedelta(seconds=10), timedelta(seconds=60)
INACTIVE = timedelta(seconds=70)  # a living watch sends a bookmark about once a minute
WATCH = timedelta(minutes=8)  # then the server ends it, and we begin again
AT_ONCE = 16  # concurrent requests
RETRIES = 3
PASSING = frozenset({429, 500, 502, 503, 504})  # a read is retried
LONGEST_REFUSAL = 64 * 1024
PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}


def utc_now() -> datetime:
    return datetime.now(UTC)


class _Release(msgspec.Struct, rename="camel"):
    git_version: str


def find(environ: Mapping[str, str], account: Path = ACCOUNT) -> str | None:
    """Where a cluster is, or None. Searches a kubeconfig or a service account, in kubectl's order; sends no request."""
    files = kubeconfigs(environ)
    if files:
        return str(files[0])
    return "in-cluster service account" if _is_inside(environ, account) else None


def kubeconfigs(environ: Mapping[str, str]) -> list[Path]:
    """The files that are there. Of those that KUBECONFIG names, some may not be."""
    named = environ.get("KUBECONFIG", "")
    home = environ.get("HOME")
    places = [Path(place) for place in named.split(":") if place]
    if not places and home:
        places = [Path(home) / ".kube" / "config"]
    return [place for place in places if _exists(place)]


class Cluster:
    """One cluster. A connection is open inside `opened()`. All callers share one rate limit."""

    def __init__(
        self,
        login: Login,
        requests: float = 20.0,
        burst: int = 30,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
        utc: Callable[[], datetime] = utc_now,
    ) -> None:
        self.place, self.namespace, self.address = login.place, login.namespace, login.address
        self.asked: Counter[str] = Counter()  # by method, every try
        self.skew: timedelta | None = None  # the server's clock minus ours, at the last response
        self._limiter = RateLimiter(requests, burst, clock, sleep)
        self._clock, self._sleep, self._chance, self._utc = clock, sleep, chance, utc
        self._connections = Connections(login)
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._decoders = Decoders()

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
        """As kubectl finds it: the kubeconfig, or else the service account of the pod."""
        try:
            from gpukeeper.clients.kubernetes import auth
        except ImportError as error:
            raise UsageError(
                "Kubernetes needs an extra. In a clone of gpukeeper: pip install '.[kubernetes]'"
            ) from error
        files = kubeconfigs(environ)
        if files:
            return cls(auth.from_files(files, context, environ, auth.utc_now), requests, burst)
        if _is_inside(environ, account) and context is None:
            return cls(auth.from_service_account(account, environ), requests, burst)
        named = environ.get("KUBECONFIG")
        missing = f"KUBECONFIG is {named}, which does not exist" if named else "no kubeconfig found"
        raise UsageError(f"{missing}, and gpukeeper does not run inside a cluster; check with `kubectl config view`")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The first user opens, the last one closes: a one-shot command leaves nothing open."""
        if not self._connections.are_open:
            self._limit = asyncio.Semaphore(AT_ONCE)
        async with self._connections.opened():
            yield

    async def get(
        self, path: str, type_: type[T], *, deadline: timedelta = QUICK, accept: str = "", **query: object
    ) -> T:
        body = await self._request(ApiRequest("GET", path, query, accept=accept), deadline)
        return self._decoders.one(body, type_, path)

    async def version(self) -> str:
        """Of its API server. Every login may read it by default; a 403 is no error."""
        try:
            return f"Kubernetes {(await self.get('/version', _Release)).git_version}"
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            return "its version may not be read (403)"

    async def raw(
        self, path: str, *, most: int = MOST, tail_ok: bool = False, deadline: timedelta = QUICK, **query: object
    ) -> bytes:
        """At most this many bytes; where there are more, the first ones if their tail may be missing."""
        return bytes(await self._request(ApiRequest("GET", path, query, most=most, cut=tail_ok), deadline))

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
        paging = Paging(path, query, limit)
        while True:
            try:
                body = await self._request(ApiRequest("GET", path, paging.query, accept=accept), deadline)
            except (ResponseTooLarge, ApiError) as error:
                if not paging.recovers_from(error):
                    raise
                continue
            page, problems = self._decoders.page(body, type_, path)
            del body  # not kept while the page is worked on
            paging.advance(page.metadata.continue_)
            yield ListPage(
                items=page.items or (),
                version=page.metadata.resource_version,
                problems=problems,
                inconsistent=paging.inconsistent,
            )
            del page
            if paging.ended:
                return

    async def watch(
        self,
        path: str,
        version: str,
        type_: type[T] = ChangedObject,  # type: ignore[assignment]
        *,
        inactive: timedelta = INACTIVE,
        accept: str = "",
        **query: object,
    ) -> AsyncGenerator[WatchEvent[T], None]:
        """What changes after this version, and bookmarks, until the server ends it. ApiError 410: list again."""
        parameters = {
            "timeoutSeconds": int(WATCH.total_seconds() * (0.75 + self._chance() / 2)),
            **query,
            "watch": True,
            "allowWatchBookmarks": True,
            "resourceVersion": version,
        }
        decoder = self._decoders.of(type_)
        async with AsyncExitStack() as stack:
            answer = await self._open_watch(stack, path, parameters, accept)
            try:
                async with aclosing(lines_of_stream(answer.aiter_bytes(), inactive.total_seconds())) as found:
                    async for line in found:
                        yield watch_event(line, decoder)
            except TimeoutError as error:
                raise ClusterUnavailable(
                    f"timeout: the watch of {path} sent nothing for {in_words(inactive)}"
                ) from error
            except msgspec.DecodeError as error:
                raise ClusterUnavailable(f"an event of the watch of {path} cannot be read: {error}") from error

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
        return bytes(await self._request(ApiRequest("DELETE", path, query, msgspec.json.encode(body)), deadline))

    async def _write(
        self,
        method: str,
        path: str,
        body: object,
        query: Mapping[str, object],
        deadline: timedelta,
        content: str = "application/json",
    ) -> bytes:
        parameters = {"fieldManager": "gpukeeper", **query}
        request = ApiRequest(method, path, parameters, msgspec.json.encode(body), content)
        return bytes(await self._request(request, deadline))

    async def _request(self, request: ApiRequest, deadline: timedelta) -> bytearray:
        """One request, with retries. A write without a response is not repeated: it may have been executed."""
        begun: float | None = None
        tries, logged_in = 0, False
        while True:
            left = deadline.total_seconds() - (0 if begun is None else self._clock() - begun)
            await self._limiter.acquire(left)
            logins = await self._connections.logged_in()
            async with self._limit:
                begun = self._clock() if begun is None else begun
                left = deadline.total_seconds() - (self._clock() - begun)
                try:
                    return await self._send(request, max(left, 0))
                except TimeoutError as error:
                    raise ClusterUnavailable(
                        f"timeout: the cluster did not answer {request.words} within {in_words(deadline)}"
                    ) from error
                except PlatformError as error:
                    failed = error
            if not logged_in and isinstance(failed, ApiError) and failed.status == UNAUTHORIZED:
                logged_in = True
                if await self._connections.log_in_again(logins):
                    continue
            wait = self._retry_delay(failed, request.method, tries)
            tries += 1
            left = deadline.total_seconds() - (self._clock() - begun)
            if wait is None or max(wait, self._limiter.remaining_pause()) >= left:
                raise failed
            if wait:
                await self._sleep(wait)

    async def _send(self, request: ApiRequest, left: float) -> bytearray:
        """Once. `left`: seconds until the timeout."""
        async with asyncio.timeout(left), self._response(request) as answer:
            return await read(answer, request.most, request.cut, request.words)

    async def _open_watch(
        self, stack: AsyncExitStack, path: str, query: Mapping[str, object], accept: str
    ) -> httpx2.Response:
        """An open stream. Callers restart watches themselves; only an expired login is renewed here."""
        for last in (False, True):
            await self._limiter.acquire(QUICK.total_seconds())
            logins = await self._connections.logged_in()
            try:
                async with asyncio.timeout(QUICK.total_seconds()), AsyncExitStack() as begun:
                    client = await begun.enter_async_context(self._connections.for_watches())
                    request = ApiRequest("GET", path, query, accept=accept)
                    answer = await begun.enter_async_context(self._response(request, client))
                    stack.push_async_exit(begun.pop_all())
                    return answer
            except TimeoutError as error:
                raise ClusterUnavailable(
                    f"timeout: the cluster did not start the watch of {path} within {in_words(QUICK)}"
                ) from error
            except ApiError as failed:
                if last or failed.status != UNAUTHORIZED or not await self._connections.log_in_again(logins):
                    self._retry_delay(failed, "GET", RETRIES)
                    raise
        raise AssertionError("This is a bug in gpukeeper: a watch neither began nor failed.")

    def _retry_delay(self, failed: PlatformError, method: str, tries: int) -> float | None:
        """Seconds until the retry; None: no retry. A Retry-After pauses all callers, not only this one."""
        hint = 0.0
        if isinstance(failed, ApiError):
            if failed.is_disruption_budget:
                return None
            hint = failed.retry_after or 0.0
            throttled = failed.status in {TOO_MANY, 503} and hint > 0
            if throttled:
                self._limiter.pause(hint)
            asks_again = failed.status in PASSING if method == "GET" else failed.status == TOO_MANY
            if not asks_again or tries >= RETRIES:
                return None
            if throttled:
                return 0.0
        elif not isinstance(failed, ConnectionFailed) or method != "GET" or tries >= RETRIES:
            return None
        return max(hint, 0.25 * float(2**tries) * (0.5 + self._chance()))

    @asynccontextmanager
    async def _response(
        self, request: ApiRequest, client: httpx2.AsyncClient | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """A response below 300. Errors of the HTTP client are translated."""
        client = client or self._connections.client
        assert client is not None, "This is a bug in gpukeeper: the cluster was not opened."
        self.asked[request.method] += 1
        with translated_errors(request.words, self.place, self.address):
            async with client.stream(
                request.method,
                checked(request.path),
                params=as_text(request.query),
                content=request.data,
                headers=request.headers,
                extensions=self._connections.login.extensions,
            ) as answer:
                self._update_skew(answer)
                if answer.status_code >= 300:
                    taken = await read(answer, LONGEST_REFUSAL, True, request.path)
                    raise refusal(answer.status_code, bytes(taken), retry_after(answer, self.skew, self._utc()))
                yield answer

    def _update_skew(self, answer: httpx2.Response) -> None:
        try:
            self.skew = parsedate_to_datetime(answer.headers["Date"]) - self._utc()
        except (KeyError, ValueError, TypeError):
            self.skew = None


def _is_inside(environ: Mapping[str, str], account: Path) -> bool:
    return bool(environ.get("KUBERNETES_SERVICE_HOST")) and _exists(account / "token")


def _exists(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:
        return True  # it may exist and be unreadable; reading it reports that
