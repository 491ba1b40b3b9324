"""Requests in the fleet database: signed documents, found, passed on, replied to. Whether one is allowed is not
decided here.

The database is not trusted with requests. The web server and the daemons have a key that it does not have; what is
signed says for which machine, whose request it is, until when it counts, and has a number that is used once.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.reading import Moment

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection


REQUEST_LASTS = timedelta(minutes=2)
LONGEST_REQUEST = timedelta(minutes=10)  # more is not accepted, whatever was signed
SKEW = timedelta(minutes=1)  # between the clocks of two machines
SHORTEST_KEY = 32  # characters
_CONTEXT = b"gpukeeper fleet request 1\n"  # the same key signs nothing else


class SignedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`realm`: the machine that knows this person. `via`: how they logged in, for the ledger. `request` is JSON."""

    machine: str
    nonce: str
    issued: Moment
    expires: Moment
    person: str
    realm: str
    via: str = ""
    request: msgspec.Raw


class Rejected(msgspec.Struct, frozen=True):
    """`expired`: it was genuine, and came too late."""

    why: str
    expired: bool = False


_DECODER = reading.Decoder(SignedRequest)


def sign_request(request: SignedRequest, key: str) -> tuple[str, str]:
    """The document and its signature, as the table `requests` stores them."""
    document = msgspec.json.encode(request).decode()
    return document, signature_of(document, key)


def signature_of(document: str, key: str) -> str:
    return hmac.new(key.encode(), _CONTEXT + document.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def verify(document: str, signature: str, key: str, machine: str, now: datetime) -> SignedRequest | Rejected:
    """Nothing of the document is read before its signature is known to be right."""
    if not hmac.compare_digest(signature_of(document, key).encode(), signature.encode("utf-8", "surrogatepass")):
        return Rejected("the request is not signed with the key of this fleet; nothing was done")
    try:
        request = _DECODER.decode(document)
    except (msgspec.MsgspecError, ValueError) as error:
        return Rejected(f"the request could not be read ({error}); nothing was done")
    if request.machine != machine:
        return Rejected(f"the request is for {request.machine}, not for {machine}; nothing was done")
    if not 16 <= len(request.nonce) <= 128 or not request.person or not request.realm:
        return Rejected("the request lacks a nonce, a person or a realm; nothing was done")
    if request.issued > now + SKEW or request.expires - request.issued > LONGEST_REQUEST:
        return Rejected(
            "the request was issued in the future, or is valid for too long; nothing was done. "
            "Are the clocks of this machine and of the web server synchronized?"
        )
    if request.expires <= now:
        return Rejected("the request expired before this machine received it; nothing was done", expired=True)
    return request


def requester_of(request: SignedRequest, machine: str, *, same_users: bool) -> str:
    """The person as the policy of this machine names them. Somebody who logged in elsewhere is another person, unless
    all machines have the same users."""
    if same_users or request.realm == machine:
        return request.person
    return f"{request.person}@{request.realm}"


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
    """A reply that could not be written, because the connection was lost, is written after the next one is made."""

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
