"""Requests in the fleet database: found, passed on, replied to. Whether one is genuine and allowed is not decided here.

A reply that could not be written, because the connection was lost, is written after the next one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection

AT_ONCE = 8  # requests in progress
PAGE = 50
_OPEN = """
SELECT r.id, r.document, r.signature FROM gpukeeper.requests r LEFT JOIN gpukeeper.replies p ON p.request = r.id
WHERE r.machine = %s AND p.request IS NULL AND r.created > now() - interval '1 day' ORDER BY r.id LIMIT %s
"""
_REPLY = """
INSERT INTO gpukeeper.replies (request, machine, state, body) VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING
"""


class Answer(msgspec.Struct, frozen=True):
    """`body`: the reply as JSON, as the socket of the daemon sends it."""

    state: Literal["answered", "refused", "expired"]
    body: bytes


class Inbox:
    def __init__(self, machine: str, on_request: Callable[[str, str], Future[Answer]]) -> None:
        self._machine, self._on_request = machine, on_request
        self._pending: dict[int, Future[Answer]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def turn(self, connection: Connection) -> None:
        self._reply(connection)
        found = connection.execute(_OPEN, (self._machine, PAGE)).fetchall()
        for number, document, signature in found:
            if number not in self._pending and len(self._pending) < AT_ONCE:
                self._pending[number] = self._on_request(document, signature)
        self._reply(connection)

    def _reply(self, connection: Connection) -> None:
        for number, answer in list(self._pending.items()):
            if not answer.done():
                continue
            if not answer.cancelled() and answer.exception() is None:
                done = answer.result()
                body = done.body.decode("utf-8", "replace").replace("\\u0000", "\\ufffd")
                connection.execute(_REPLY, (number, self._machine, done.state, body))
            del self._pending[number]


def ask(connection: Connection, machine: str, expires: object, document: str, signature: str) -> int:
    """For the web server: writes a request; its number."""
    made = connection.execute(
        "INSERT INTO gpukeeper.requests (machine, expires, document, signature) VALUES (%s, %s, %s, %s) RETURNING id",
        (machine, expires, document, signature),
    ).fetchone()
    assert made is not None
    return int(made[0])


def reply_to(connection: Connection, request: int) -> Answer | None:
    """For the web server: the reply, `expired` when its time is over without one; None: not yet."""
    found = connection.execute(
        "SELECT p.state, p.body::text, r.expires < now() - interval '15 seconds', r.machine, "
        "coalesce(m.seen < r.created - interval '45 seconds', true), m.seen "
        "FROM gpukeeper.requests r JOIN gpukeeper.machines m ON m.name = r.machine "
        "LEFT JOIN gpukeeper.replies p ON p.request = r.id WHERE r.id = %s",
        (request,),
    ).fetchone()
    if found is None:
        return None
    state, body, is_over, machine, was_away, seen = found
    if state is not None:
        return Answer(state, body.encode())
    return Answer("expired", _expired(machine, seen if was_away else None, was_away=was_away)) if is_over else None


def _expired(machine: str, seen: datetime | None, *, was_away: bool) -> bytes:
    """A machine reports every half a minute that it is connected: one that did not for longer has read nothing."""
    if was_away:
        since = "" if seen is None else f" since {seen.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        words = f"{machine} did not reply: it is not connected to the fleet database{since}; nothing was done"
    else:
        words = f"{machine} did not reply in time; whether it carried out the request before is in its history"
    return msgspec.json.encode({"done": False, "words": f"the request expired. {words}", "exit_code": 1})
