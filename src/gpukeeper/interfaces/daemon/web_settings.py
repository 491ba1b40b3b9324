"""Settings of the dashboard while it is served: a change of the section `web` in the policy starts the web process
again; renewed certificates are sent to it as it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any

from gpukeeper.blocking import in_thread, real_seconds
from gpukeeper.interfaces.tls_files import read_tls, tls_stamp
from gpukeeper.interfaces.web_setup import Setup, is_loopback, read_setup
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.policy import Web

READ_WITHIN = timedelta(seconds=20)  # files and names of users
FOLLOW = 20.0  # seconds between two checks for changes
Send = Callable[[object], Awaitable[None]]


class WebSettings:
    """`current`: the section in effect. `address`: where the dashboard listens."""

    def __init__(self, current: Callable[[], Web], address: str, log: Callable[[str], None]) -> None:
        self._current, self._address, self._log = current, address, log
        self._problem = ""  # of renewed certificates
        self._setup: Setup | None = None

    @property
    def anonymous(self) -> bool:
        """Reading needs no login."""
        return is_loopback(self._address) and self._current().read_on_loopback

    @property
    def sessions(self) -> timedelta:
        return self._current().sessions

    @property
    def proxy_configured(self) -> bool:
        return self._setup is not None and self._setup.site.proxy is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        """For the health page."""
        lasting = self._setup.warnings if self._setup is not None else ()
        return (*lasting, self._problem) if self._problem else lasting

    async def setup(self) -> Setup:
        """Raises KeeperError with the reason if the dashboard must not be served like this."""
        web, warned = self._current(), self.warnings
        self._setup = await in_thread(lambda: read_setup(web, self._address), READ_WITHIN)
        self._problem = ""
        for words in self._setup.warnings:
            if words not in warned:
                self._log(f"WARNING: {words}")
        return self._setup

    async def serve(self, publishing: Coroutine[Any, Any, None], send: Send) -> None:
        """Publishes until the web process must be started again."""
        tasks = [asyncio.create_task(one) for one in (publishing, self.follow(send))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for one in tasks:
                one.cancel()

    async def follow(self, send: Send) -> None:
        """Sends renewed certificates; returns when the web process must be started again."""
        assert self._setup is not None
        web, pair = self._setup.web, self._setup.tls
        stamp = await in_thread(lambda: tls_stamp(web.tls), READ_WITHIN)
        while True:
            await asyncio.sleep(real_seconds(FOLLOW))
            if self._current() != web:
                self._log("the settings of the dashboard have changed")
                return
            if pair is None:
                continue
            try:
                now = await in_thread(lambda: tls_stamp(web.tls), READ_WITHIN)
                if now == stamp:
                    continue
                renewed = await in_thread(lambda: read_tls(web.tls), READ_WITHIN)
            except (KeeperError, TimeoutError) as problem:
                self._complain(str(problem) or "the files of the certificate could not be read in time")
                continue
            stamp, self._problem = now, ""
            if renewed is not None and renewed != pair:
                pair = renewed
                await send(renewed)
                self._log("loaded the renewed certificate of the dashboard")

    def _complain(self, words: str) -> None:
        words = f"the dashboard keeps its previous certificate: {words}"
        if words != self._problem:
            self._problem = words
            self._log(words)
