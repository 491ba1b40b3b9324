"""Cookies, CSRF tokens, rate limits, and whose header counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import HTTPConnection

from gpukeeper.interfaces.link import Credentials
from gpukeeper.interfaces.web.security import COOKIE, Bucket, Proxy, Signer, credentials_of

KEY = b"k" * 32
PROXY = Proxy("x-forwarded-user", ("10.0.0.2", "192.168.0.0/24"))


def presented(address: str, proxy: Proxy | None = None, **headers: str) -> tuple[Credentials, bool]:
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "headers": pairs, "client": (address, 1) if address else None}
    return credentials_of(HTTPConnection(scope), Signer(KEY), proxy)


@given(st.text(), st.text())
def test_only_what_was_signed_with_the_key_is_accepted(secret: str, noise: str) -> None:
    signed = Signer(KEY).sign(secret)
    assert Signer(KEY).unsign(signed) == secret
    assert Signer(b"other" * 8).unsign(signed) == ""
    assert Signer(KEY).unsign(noise) == ""
    assert Signer(KEY).unsign(f"{noise}{signed}") in ("", secret if not noise else "")


def test_a_csrf_token_belongs_to_its_session_and_is_no_signature_of_a_cookie() -> None:
    signer = Signer(KEY)
    assert signer.csrf("a") != signer.csrf("b")
    assert signer.unsign(f"a.{signer.csrf('a')}") == ""


@pytest.mark.parametrize(
    ("address", "name"),
    [("10.0.0.2", "ann"), ("192.168.0.77", "ann"), ("10.0.0.3", ""), ("127.0.0.1", ""), ("unix", ""), ("", "")],
)
def test_the_header_of_a_proxy_counts_from_named_addresses_only(address: str, name: str) -> None:
    found, _ = presented(address, PROXY, x_forwarded_user="ann", x_forwarded_for="1.2.3.4, 5.6.7.8")
    assert found.proxy_user == name
    assert found.address == ("5.6.7.8" if name else address)


def test_without_a_proxy_its_header_is_ignored() -> None:
    assert presented("10.0.0.2", None, x_forwarded_user="ann")[0].proxy_user == ""


def test_a_bearer_token_needs_no_cookie_and_counts_before_one() -> None:
    cookie = f"{COOKIE}={Signer(KEY).sign('session')}"
    assert presented("1.1.1.1", None, cookie=cookie) == (Credentials(secret="session", address="1.1.1.1"), True)
    both = presented("1.1.1.1", None, cookie=cookie, authorization="Bearer token")
    assert both == (Credentials(secret="token", address="1.1.1.1"), False)


def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    bucket = Bucket(rate=0.5, burst=3)
    assert [bucket.take("ann", 0.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.take("bob", 0.0)
    assert [bucket.take("ann", 2.0), bucket.take("ann", 2.0)] == [True, False]


def test_a_bucket_is_bounded() -> None:
    bucket = Bucket(rate=1, burst=1, most=10)
    for number in range(100):
        bucket.take(f"address-{number}", 0.0)
    assert len(bucket._left) == 10
