"""Headers of a reverse proxy on this machine that others sent: processes here, and clients through the proxy."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from starlette.requests import HTTPConnection

from tests.unit.interfaces.web.sites import POLICY, Dashboard, dashboard

BOB = 1001
NAME = "x-forwarded-user"
POLICY_PROXIED = (
    f"{POLICY}web: {{url: 'https://gpu.example', proxy: {{header: X-Forwarded-User, from: [127.0.0.1, 10.0.0.2], "
    "user: nobody}}\n"
)
PROXY = pwd.getpwnam("nobody").pw_uid
HOST = ("host", "gpu.example")
SPELLED = (NAME, "X-Forwarded-User", "x_forwarded_user", "X_Forwarded-User", "x-forwarded_user", "x-forwarded-user ")
FORWARDED = (
    *({"x-forwarded-for": words} for words in ("127.0.0.1", "::1", "10.0.0.2", "127.0.0.1, 10.0.0.2", "unknown", "")),
    *({"forwarded": words} for words in ("for=127.0.0.1;proto=https", 'for="[::1]"')),
    *({name: words} for name in ("x-forwarded-host", "x-real-ip") for words in ("localhost", "127.0.0.1")),
    *({"x-forwarded-proto": words} for words in ("https", "http", "https,http")),
    *({"x_forwarded_for": "127.0.0.1"}, {"x-forwarded-for": "127.0.0.1", "via": "1.1 x"}),
)


class Behind:
    """The dashboard on loopback behind a proxy; `uid`: whose process connects to it."""

    def __init__(self, site: Dashboard) -> None:
        self.site, self.uid = site, BOB
        self.peers = site.app.state.site.peers
        self.peers._owner, self.peers._here = lambda peer, own: self.uid, lambda host: host.startswith("127.")

    def status(self, *headers: tuple[str, str]) -> int:
        reply = self.site.client.get("/api/v1/policy", headers=[HOST, *headers])
        return int(reply.status_code)


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    with dashboard(tmp_path, anonymous=False, policy=POLICY_PROXIED, client_address="127.0.0.1") as site:
        site.app.state.site.reads = site.app.state.site.unknown = _Endless()
        yield Behind(site)


class _Endless:
    def take(self, who: str, now: float) -> bool:
        return True

    def wait(self, who: str, now: float) -> float:
        return 0.0


def test_no_header_of_another_process_of_this_machine_names_a_person(behind: Behind) -> None:
    tried = 0
    for uid, name, more in product((BOB, 0, 1000, None), SPELLED, FORWARDED):
        behind.uid = uid  # type: ignore[assignment]
        assert behind.status((name, "root"), *more.items()) == 401, (uid, name, more)
        tried += 1
    assert tried == len(FORWARDED) * 24


def test_through_the_proxy_only_the_header_in_its_own_spelling_counts(behind: Behind) -> None:
    """Others pass some proxies unchanged, so that a client can send them."""
    behind.uid = PROXY
    for name, more in product(SPELLED, FORWARDED):
        wanted = 200 if name.lower() == NAME else 401
        assert behind.status((name, "ann"), *more.items()) == wanted, (name, more)
    for forged in SPELLED[2:]:
        reply = behind.site.client.get("/", headers=[HOST, (NAME, "ann"), (forged, "root")])
        assert 'class="chip">admin' not in reply.text
    for twice in (NAME, "X-Forwarded-User", "X-FORWARDED-USER"):
        assert behind.status((NAME, "ann"), (twice, "root")) == 400


@pytest.mark.parametrize(
    ("headers", "address"),
    [
        (["127.0.0.1", "10.9.9.9"], "10.9.9.9"),
        (["127.0.0.1, ::1, 10.9.9.9"], "10.9.9.9"),
        (["10.9.9.9, 127.0.0.1"], "10.9.9.9"),
        (["10.9.9.9", "127.0.0.1, 10.0.0.2"], "10.9.9.9"),
        (["10.9.9.9, nonsense"], "127.0.0.1"),
        ([", ".join(["10.0.0.2"] * 10_000)], "10.0.0.2"),
    ],
)
def test_a_client_cannot_choose_its_address(behind: Behind, headers: list[str], address: str) -> None:
    """The proxy adds the real one at the end, or as another header."""
    behind.uid = PROXY
    sent = [(b"x-forwarded-for", words.encode()) for words in headers]
    asked = {"type": "http", "headers": sent, "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 80), "scheme": "http"}
    assert behind.peers.client(HTTPConnection(asked)) == address


def test_without_a_name_from_the_proxy_nobody_is_logged_in_by_what_else_it_forwards(behind: Behind) -> None:
    behind.uid = PROXY
    for more in FORWARDED:
        assert behind.status(*more.items()) == 401
