"""Confirmations of people: what exactly would be done, and a token that lets it be done once.

The token is made here and never by the client. It is bound to the user, to the object that was read and to the action;
it works once and for a short time. Kept in memory: after a restart users must confirm again.
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from hashlib import blake2b

import msgspec

from gpukeeper.model.decision import Action
from gpukeeper.model.identity import Seen

LASTS = timedelta(minutes=2)
MOST_EACH = 16  # of one person; the oldest is forgotten
MOST = 1024


class Asker(msgspec.Struct, frozen=True):
    """The user of a request. `uid` comes from the kernel; None: unknown."""

    name: str
    uid: int | None = None


class Pending(msgspec.Struct, frozen=True):
    asker: Asker
    seen: Seen
    action: Action
    until: datetime


def revision_of(seen: Seen) -> str:
    """Which object it is, and which run of it: what a preview showed, for a request on that condition."""
    return blake2b(f"{seen.ref.key}\0{seen.incarnation}".encode(errors="surrogateescape"), digest_size=12).hexdigest()


class Confirmations:
    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}  # by token, oldest first

    def ask(self, asker: Asker, seen: Seen, action: Action, now: datetime) -> str:
        """The token with which this person confirms it."""
        self._forget(now)
        mine = [token for token, one in self._pending.items() if one.asker == asker]
        for token in mine[: len(mine) - MOST_EACH + 1] if len(mine) >= MOST_EACH else []:
            del self._pending[token]
        if len(self._pending) >= MOST:
            del self._pending[next(iter(self._pending))]
        token = secrets.token_urlsafe(24)
        self._pending[token] = Pending(asker, seen, action, now + LASTS)
        return token

    def take(self, token: str, asker: Asker, action: Action, now: datetime) -> Pending | None:
        """What was requested, once. A token of another user, or for another action, is not touched."""
        self._forget(now)
        found = self._pending.get(token)
        if found is None or (found.asker, found.action) != (asker, action):
            return None
        return self._pending.pop(token)

    def _forget(self, now: datetime) -> None:
        # A clock that was turned back must not make them last longer.
        old = [token for token, one in self._pending.items() if not one.until - LASTS <= now < one.until]
        for token in old:
            del self._pending[token]
