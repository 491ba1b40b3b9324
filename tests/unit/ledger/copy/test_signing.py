"""Signed requests: what is accepted, and what each change to one leads to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.ledger.copy.inbox import REQUEST_LASTS, Rejected, SignedRequest, requester_of, sign_request, verify

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
KEY = "k" * 64


def request(**more: Any) -> SignedRequest:
    given: dict[str, Any] = {
        "machine": "node-1",
        "nonce": "n" * 32,
        "issued": NOW,
        "expires": NOW + REQUEST_LASTS,
        "person": "ann",
        "realm": "web-1",
        "request": msgspec.Raw(b'{"verb":"hold","workload":"train"}'),
    }
    return SignedRequest(**given | more)


def checked(one: SignedRequest, *, now: datetime = NOW, key: str = KEY, machine: str = "node-1") -> object:
    return verify(*sign_request(one, KEY), key, machine, now)


def test_a_signed_request_is_what_was_signed() -> None:
    found = checked(request(via="web session 3f2a"))
    assert isinstance(found, SignedRequest)
    assert (found.person, found.via, bytes(found.request)) == ("ann", "web session 3f2a", bytes(request().request))


@pytest.mark.parametrize("position", range(0, 200, 7))
def test_any_changed_byte_is_noticed(position: int) -> None:
    document, signature = sign_request(request(), KEY)
    changed = document[:position] + ("x" if document[position] != "x" else "y") + document[position + 1 :]
    assert isinstance(verify(changed, signature, KEY, "node-1", NOW), Rejected)


@pytest.mark.parametrize("signature", ["", "0" * 64, "é", "\udc80", "x" * 10_000])
def test_any_other_signature_is_refused(signature: str) -> None:
    found = verify(sign_request(request(), KEY)[0], signature, KEY, "node-1", NOW)
    assert isinstance(found, Rejected)
    assert "not signed" in found.why
    assert not found.expired


def test_another_key_is_refused() -> None:
    assert isinstance(checked(request(), key="l" * 64), Rejected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"machine": "node-2"}, "is for node-2"),
        ({"nonce": "short"}, "nonce"),
        ({"nonce": "n" * 200}, "nonce"),
        ({"person": ""}, "person"),
        ({"realm": ""}, "realm"),
        ({"expires": NOW + timedelta(minutes=11)}, "too long"),
        ({"issued": NOW + timedelta(minutes=2), "expires": NOW + timedelta(minutes=4)}, "future"),
    ],
)
def test_what_is_signed_must_make_sense(changes: dict[str, Any], words: str) -> None:
    found = checked(request(**changes))
    assert isinstance(found, Rejected)
    assert words in found.why
    assert not found.expired


def test_it_expires() -> None:
    assert isinstance(checked(request(), now=NOW + REQUEST_LASTS - timedelta(seconds=1)), SignedRequest)
    late = checked(request(), now=NOW + REQUEST_LASTS)
    assert isinstance(late, Rejected)
    assert late.expired


def test_clocks_may_differ_a_little() -> None:
    assert isinstance(checked(request(), now=NOW - timedelta(seconds=59)), SignedRequest)


def test_what_is_signed_and_no_request_is_refused() -> None:
    from gpukeeper.ledger.copy.inbox import signature_of

    for document in ("", "{", "null", "[]", '{"machine": "node-1"}', "\udc80", "9" * 5000):
        assert isinstance(verify(document, signature_of(document, KEY), KEY, "node-1", NOW), Rejected)


def test_a_person_of_another_realm_is_another_person_unless_all_machines_have_the_same_users() -> None:
    assert requester_of(request(), "node-1", same_users=False) == "ann@web-1"
    assert requester_of(request(realm="node-1"), "node-1", same_users=False) == "ann"
    assert requester_of(request(), "node-1", same_users=True) == "ann"
