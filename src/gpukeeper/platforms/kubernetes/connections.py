"""The connections to one cluster: opened by the first user, renewed with every login, closed by the last user."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukeeper.model.errors import UsageError
from gpukeeper.platforms.kubernetes.errors import ClusterUnavailable

if TYPE_CHECKING:
    import httpx2

    from gpukeeper.platforms.kubernetes.auth import Login


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
