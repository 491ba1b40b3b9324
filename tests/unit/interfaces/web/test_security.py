"""Cookies, CSRF tokens, rate limits, and whose header counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import HTTPConnection

from gpukeeper.interfaces.link import Credentials, SiteSettings, TrustedProxy
from gpukeeper.interfaces.web.peers import CONNECTION, Peers
from gpukeeper.interfaces.web.security import COOKIE, Bucket, ProxyProblem, Signer, credentials_of, is_secure

KEY = b"k" * 32
PROXY = TrustedProxy("x-forwarded-user", ("10.0.0.2", "192.168.0.0/24", "fd00::2"))
LOCAL = TrustedProxy("x-forwarded-user", ("127.0.0.1", "10.0.0.2"), uid=33)


def connection(address: str, headers: list[tuple[str, str]], scheme: str = "http") -> HTTPConnection:
    return HTTPConnection(
        {
            "type": "http",
            "scheme": scheme,
            "headers": [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers],
            "client": (address, 1) if address else None,
            "server": ("10.0.0.1", 8790),
            "state": {CONNECTION: {}},
        }
    )


def peers(proxy: TrustedProxy | None, *, here: bool = False, uid: int | None = None) -> Peers:
    return Peers(proxy, owner=lambda peer, own: uid, here=lambda host: here)


def presented(address: str, proxy: TrustedProxy | None = None, **headers: str) -> tuple[Credentials, bool]:
    return credentials_of(connection(address, list(headers.items())), Signer(KEY), peers(proxy))


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
    [
        ("10.0.0.2", "ann"),
        ("192.168.0.77", "ann"),
        ("fd00::2", "ann"),
        ("::ffff:10.0.0.2", "ann"),
        ("10.0.0.3", ""),
        ("::ffff:10.0.0.3", ""),
        ("fd00::3", ""),
        ("127.0.0.1", ""),
        ("unix", ""),
        ("", ""),
    ],
)
def test_the_header_of_a_proxy_counts_from_named_addresses_only(address: str, name: str) -> None:
    found, _ = presented(address, PROXY, x_forwarded_user="ann", x_forwarded_for="1.2.3.4, 5.6.7.8")
    assert found.proxy_user == name
    assert found.address == ("5.6.7.8" if name else address.removeprefix("::ffff:"))
    assert found.proxy == (address.removeprefix("::ffff:") if name else "")


def test_an_address_written_as_ipv6_in_the_policy_is_the_same() -> None:
    proxy = TrustedProxy("x-forwarded-user", ("::ffff:10.0.0.2",))
    assert presented("10.0.0.2", proxy, x_forwarded_user="ann")[0].proxy_user == "ann"


def test_without_a_proxy_its_header_is_ignored() -> None:
    assert presented("10.0.0.2", None, x_forwarded_user="ann")[0].proxy_user == ""


@pytest.mark.parametrize(("uid", "name"), [(33, "ann"), (1000, ""), (0, ""), (None, "")])
def test_on_this_machine_the_header_counts_only_from_the_proxys_user(uid: int | None, name: str) -> None:
    """None: the connection was closed at once, so that nobody knows whose it was."""
    for address in ("127.0.0.1", "10.0.0.2"):
        asked = connection(address, [("x-forwarded-user", "ann")])
        found, _ = credentials_of(asked, Signer(KEY), peers(LOCAL, here=True, uid=uid))
        assert found.proxy_user == name


def test_without_a_user_no_process_of_this_machine_is_the_proxy() -> None:
    asked = connection("10.0.0.2", [("x-forwarded-user", "ann")])
    assert credentials_of(asked, Signer(KEY), peers(PROXY, here=True, uid=None))[0].proxy_user == ""


def test_who_has_the_other_end_is_asked_once_for_a_connection() -> None:
    """Later the kernel may know it no more, or have given the port to another user."""
    found, asked = iter((33, 1000)), connection("127.0.0.1", [("x-forwarded-user", "ann")])
    here = Peers(LOCAL, owner=lambda peer, own: next(found), here=lambda host: True)
    assert [credentials_of(asked, Signer(KEY), here)[0].proxy_user for _ in range(2)] == ["ann", "ann"]


@pytest.mark.parametrize(
    "name",
    ["ann\tbob", "ann\x00", "ann\x1b[2J", "ann bob", "../ann", "a" * 129, "änn", "ann,root", "-ann", "\x7f"],
)
def test_a_name_that_no_person_can_have_is_refused(name: str) -> None:
    headers = [("x-forwarded-user", name)]
    with pytest.raises(ProxyProblem, match="no person can have"):
        credentials_of(connection("10.0.0.2", headers), Signer(KEY), peers(PROXY))


@pytest.mark.parametrize("second", ["root", "ann", ""])
def test_a_name_that_was_sent_twice_is_refused(second: str) -> None:
    headers = [("x-forwarded-user", "ann"), ("X-Forwarded-User".lower(), second)]
    with pytest.raises(ProxyProblem, match="more than once"):
        credentials_of(connection("10.0.0.2", headers), Signer(KEY), peers(PROXY))


def test_a_proxy_that_reports_nobody_leaves_the_cookie() -> None:
    cookie = f"{COOKIE}={Signer(KEY).sign('session')}"
    for name in ("", "  "):
        found, by_cookie = presented("10.0.0.2", PROXY, cookie=cookie, x_forwarded_user=name, x_forwarded_for="1.2.3.4")
        assert found == Credentials(secret="session", address="1.2.3.4")
        assert by_cookie


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("1.2.3.4", "1.2.3.4"),
        ("9.9.9.9, 1.2.3.4", "1.2.3.4"),
        ("9.9.9.9, 1.2.3.4, 192.168.0.5", "1.2.3.4"),
        ("1.2.3.4:5678", "1.2.3.4"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("::ffff:1.2.3.4", "1.2.3.4"),
        ("", "10.0.0.2"),
        ("unknown", "10.0.0.2"),
        ("1.2.3.4, _hidden", "10.0.0.2"),
        ("x\x1b[2J", "10.0.0.2"),
        ("192.168.0.5", "192.168.0.5"),
    ],
)
def test_the_address_behind_a_proxy_is_the_last_one_that_is_no_proxy(words: str, address: str) -> None:
    assert presented("10.0.0.2", PROXY, x_forwarded_user="ann", x_forwarded_for=words)[0].address == address
    assert presented("10.9.9.9", PROXY, x_forwarded_for=words)[0].address == "10.9.9.9"


def test_a_bearer_token_needs_no_cookie_and_counts_before_one() -> None:
    cookie = f"{COOKIE}={Signer(KEY).sign('session')}"
    assert presented("1.1.1.1", None, cookie=cookie) == (Credentials(secret="session", address="1.1.1.1"), True)
    both = presented("1.1.1.1", None, cookie=cookie, authorization="Bearer token")
    assert both == (Credentials(secret="token", address="1.1.1.1"), False)


@pytest.mark.parametrize(
    ("address", "scheme", "headers", "secure"),
    [
        ("1.1.1.1", "https", {"host": "x"}, True),
        ("1.1.1.1", "http", {"host": "x"}, False),
        ("1.1.1.1", "http", {"host": "gpu.example:443"}, True),
        ("1.1.1.1", "http", {"host": "x", "x_forwarded_proto": "https"}, False),
        ("10.0.0.2", "http", {"host": "x", "x_forwarded_proto": "https"}, True),
        ("127.0.0.1", "http", {"host": "localhost:8790"}, False),
    ],
)
def test_a_cookie_is_secure_where_browsers_use_https(
    address: str, scheme: str, headers: dict[str, str], secure: bool
) -> None:
    asked = connection(address, list(headers.items()), scheme)
    assert is_secure(asked, SiteSettings(url="https://gpu.example"), peers(PROXY)) is secure


def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    bucket = Bucket(rate=0.5, burst=3)
    assert [bucket.take("ann", 0.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.take("bob", 0.0)
    assert bucket.wait("ann", 0.0) == 2.0
    assert bucket.wait("ann", 1.5) == 0.5
    assert [bucket.take("ann", 2.0), bucket.take("ann", 2.0)] == [True, False]


def test_who_was_away_for_long_has_one_burst_and_no_more() -> None:
    bucket = Bucket(rate=1, burst=3)
    assert bucket.take("ann", 0.0)
    assert [bucket.take("ann", 86_400.0) for _ in range(5)] == [True, True, True, False, False]


def test_a_bucket_is_bounded() -> None:
    bucket = Bucket(rate=1, burst=1, most=10)
    for number in range(100):
        bucket.take(f"address-{number}", 0.0)
    assert len(bucket._left) == 10
