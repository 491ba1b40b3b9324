"""Requests that come through the fleet database: a signed document. Pure: same document, key and time, same result.

The database is not trusted with requests. The web server and the daemons have a key that it does not have; what is
signed says for which machine, whose request it is, until when it counts, and has a number that is used once.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime, timedelta

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.reading import Moment

LASTS = timedelta(minutes=2)
LONGEST = timedelta(minutes=10)  # more is not accepted, whatever was signed
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


def sign(request: SignedRequest, key: str) -> tuple[str, str]:
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
    if request.issued > now + SKEW or request.expires - request.issued > LONGEST:
        return Rejected(
            "the request was issued in the future, or is valid for too long; nothing was done. "
            "Are the clocks of this machine and of the web server synchronized?"
        )
    if request.expires <= now:
        return Rejected("the request expired before this machine received it; nothing was done", expired=True)
    return request


def name_of(request: SignedRequest, machine: str, *, same_users: bool) -> str:
    """The person as the policy of this machine names them. Somebody who logged in elsewhere is another person, unless
    all machines have the same users."""
    if same_users or request.realm == machine:
        return request.person
    return f"{request.person}@{request.realm}"
