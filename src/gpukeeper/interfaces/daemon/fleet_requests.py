"""Requests of people to machines of a fleet: signed, written to the fleet database, and the reply awaited.

Nothing is decided here: the daemon of that machine verifies the signature and decides by its own policy.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import msgspec

from gpukeeper.engine.requests import Reply, Request
from gpukeeper.interfaces.daemon.identity import Identity
from gpukeeper.ledger.copy import inbox
from gpukeeper.ledger.copy.reader import CopyReader, CopyUnavailable
from gpukeeper.ledger.copy.signing import LASTS, SignedRequest, sign
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError

POLL = 2.0  # seconds between two looks if no reply is announced
GRACE = timedelta(seconds=20)  # after a request expired, for the reply that says so
EACH, ALL = 4, 64  # requests in progress, of one person and of all


class FleetRequests:
    """`realm`: the machine where people log in to this web server. `key` None: no requests are sent."""

    def __init__(self, copy: CopyReader, realm: str, key: str | None, lasts: timedelta = LASTS) -> None:
        self._copy, self._realm, self._key, self._lasts = copy, realm, key, lasts
        self._replied: dict[int, asyncio.Event] = {}
        self._open: Counter[str] = Counter()  # by person

    def on_reply(self, number: int) -> None:
        """A reply to that request is there."""
        if number in self._replied:
            self._replied[number].set()

    async def send(self, who: Identity, machine: str, request: Request) -> Reply:
        """Every refusal is a sentence."""
        if self._key is None:
            return _failed("this web server has no key for requests (--key-file); nothing was done")
        if self._open[who.name] >= EACH or self._open.total() >= ALL:
            return _failed("too many requests are waiting for replies; nothing was done. Try again in a minute")
        self._open[who.name] += 1
        try:
            return await self._send(who, machine, request, self._key)
        except CopyUnavailable as problem:
            done = "whether the request was sent is not known; see the history" if problem.begun else "nothing was done"
            return _failed(f"the fleet database could not be used: {problem}; {done}")
        finally:
            self._open[who.name] -= 1
            self._open += Counter()  # without those that have none

    async def _send(self, who: Identity, machine: str, request: Request, key: str) -> Reply:
        now = datetime.now(UTC)
        expires = now + self._lasts
        signed = SignedRequest(
            machine=machine,
            nonce=secrets.token_hex(16),
            issued=now,
            expires=expires,
            person=who.name,
            realm=self._realm,
            via=f"{who.via}, at {self._realm}",
            request=msgspec.Raw(msgspec.json.encode(request)),
        )
        document, signature = sign(signed, key)
        number = await self._copy.ask(lambda c: inbox.ask(c, machine, expires, document, signature))
        self._replied[number] = asyncio.Event()
        try:
            return await self._wait(number, machine)
        finally:
            del self._replied[number]

    async def _wait(self, number: int, machine: str) -> Reply:
        """A database that goes away meanwhile may come back in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + (self._lasts + GRACE).total_seconds()
        while loop.time() < end:
            with suppress(CopyUnavailable):
                answer = await self._copy.ask(lambda c: inbox.reply_to(c, number))
                if answer is not None:
                    return read_answer(answer)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._replied[number].wait(), POLL)
            self._replied[number].clear()
        words = f"no reply of {machine} could be read before the request expired"
        return _failed(f"{words}; whether it was carried out is in the history of {machine}")


def read_answer(answer: inbox.Answer) -> Reply:
    try:
        return reading.decode(answer.body, type=Reply)
    except msgspec.MsgspecError as error:
        raise KeeperError(f"the reply could not be read ({error}); the history shows whether it was done") from error


def _failed(words: str) -> Reply:
    return Reply(done=False, words=words, exit_code=1)
