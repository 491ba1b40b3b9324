"""A browser sends the cookie of the dashboard to every port of that host: another user of the machine who listens there
has it, and tries to use it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpukeeper.interfaces.link import SiteSettings
from gpukeeper.interfaces.web.security import Bucket
from gpukeeper.ledger.logins import LoginKind, open_logins
from tests.unit.interfaces.web.sites import Dashboard, dashboard

ANN, BOB, PROXY = 1000, 1001, 33
HERE = {"host": "localhost:8790"}
PLAIN, SECURE = "gk_session", "__Host-gk_session"


class Machine:
    """The dashboard on loopback; `uid`: whose process connects. None: the kernel does not tell."""

    def __init__(self, site: Dashboard) -> None:
        self.site, self.uid, self.log = site, ANN, list[str]()
        self.peers = site.app.state.site.peers
        self.peers._owner, self.peers._here = lambda peer, own: self.uid, lambda host: host.startswith("127.")
        site.logins.on_misuse = self.log.append
        site.client.cookies.clear()

    def redeem(self, link: str, **headers: str) -> Any:
        return self.site.client.post(f"/login/{link}", headers={**HERE, **headers}, follow_redirects=False)

    def log_in(self, person: str, **headers: str) -> str:
        """The cookie."""
        reply = self.redeem(self.site.token(person, LoginKind.LINK), **headers)
        assert reply.status_code == 303, reply.text
        self.site.client.cookies.clear()
        return str(reply.headers["set-cookie"].partition(";")[0])

    def get(self, path: str, cookie: str = "", **headers: str) -> Any:
        sent = {**HERE, **({"cookie": cookie} if cookie else {}), **headers}
        return self.site.client.get(path, headers=sent, follow_redirects=False)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with dashboard(tmp_path, anonymous=False, client_address="127.0.0.1") as site:
        yield Machine(site)


def is_in(reply: Any) -> bool:
    assert reply.status_code in (200, 303, 401), reply.text
    return bool(reply.status_code == 200)


PATHS = (
    "/",
    "/workloads",
    "/plan",
    "/history",
    "/policy",
    "/usage.csv",
    "/events",
    "/metrics",
    "/api/v1/gpus",
    "/api/v1/plan",
)


def test_a_stolen_cookie_is_worth_nothing_to_another_user(machine: Machine) -> None:
    cookie = machine.log_in("root")
    workload = machine.site.workload("train")
    assert is_in(machine.get("/api/v1/plan", cookie))
    machine.uid = BOB
    secret = cookie.partition("=")[2].rpartition(".")[0]
    for path in (*PATHS, f"/workload/{workload}", f"/api/v1/workloads/{workload}"):
        for sent in ({"cookie": cookie}, {"authorization": f"Bearer {secret}"}):
            reply = machine.get(path, **sent)
            assert not is_in(reply), path
            assert "train" not in reply.text
            assert "root" not in reply.text
    signer = machine.site.app.state.site.signer
    forms = {"cookie": cookie, "x-csrf-token": signer.csrf(secret)}, {"authorization": f"Bearer {secret}"}
    for sent in forms:
        for verb in ("hold", "stop", "remove"):
            path = f"/api/v1/workloads/{workload}/{verb}"
            assert machine.site.client.post(path, json={}, headers={**HERE, **sent}).status_code == 401
        assert machine.site.client.post("/logout", headers={**HERE, **sent}).status_code == 401
    machine.uid = ANN
    assert is_in(machine.get("/api/v1/plan", cookie)), "its owner goes on"
    (line,) = machine.log
    assert "of root: it came from processes of uid 1001 and belongs to processes of uid 1000" in line
    assert secret not in line


def test_a_session_that_another_user_planted_is_not_taken(machine: Machine) -> None:
    """Another port of the host can also set the cookie, so that what ann does would be done as bob."""
    machine.uid = BOB
    planted = machine.log_in("bob")
    machine.uid = ANN
    assert not is_in(machine.get("/api/v1/gpus", planted))


def test_who_is_refused_reads_why_and_logs_in_again(machine: Machine) -> None:
    cookie = machine.log_in("root")
    machine.uid = BOB
    assert machine.get("/", cookie).headers["location"] == "/login"
    page = machine.get("/login", cookie).text
    assert "not valid here" in page
    assert "root" not in page
    assert "not valid here" not in machine.get("/login").text
    again = machine.log_in("ann")
    assert is_in(machine.get("/api/v1/gpus", again))


def test_an_unknown_user_is_nobody_and_the_link_is_not_used_up(machine: Machine) -> None:
    cookie = machine.log_in("ann")
    link = machine.site.token("ann", LoginKind.LINK)
    machine.uid = None  # type: ignore[assignment]
    assert not is_in(machine.get("/api/v1/gpus", cookie))
    secret = cookie.partition("=")[2].rpartition(".")[0]
    assert not is_in(machine.get("/api/v1/gpus", authorization=f"Bearer {secret}"))
    reply = machine.redeem(link)
    assert reply.status_code == 403
    assert "The link was not used" in reply.text
    assert "set-cookie" not in reply.headers
    machine.uid = ANN
    assert machine.redeem(link).status_code == 303


def test_a_session_of_another_machine_does_not_work_here_nor_one_of_here_elsewhere(machine: Machine) -> None:
    here = machine.log_in("root")
    machine.peers._here = lambda host: False
    elsewhere = machine.log_in("root")
    assert is_in(machine.get("/api/v1/gpus", elsewhere))
    assert not is_in(machine.get("/api/v1/gpus", here))
    machine.peers._here = lambda host: True
    for uid in (ANN, BOB, None):
        machine.uid = uid  # type: ignore[assignment]
        assert not is_in(machine.get("/api/v1/gpus", elsewhere))
        secret = elsewhere.partition("=")[2].rpartition(".")[0]
        assert not is_in(machine.get("/api/v1/gpus", authorization=f"Bearer {secret}"))


def test_tokens_are_not_bound(machine: Machine) -> None:
    for uid in (ANN, BOB, None):
        machine.uid = uid  # type: ignore[assignment]
        assert is_in(machine.site.get("/api/v1/gpus", "ann", headers=HERE))


def test_behind_a_proxy_on_this_machine_a_session_works_through_the_proxy_only(tmp_path: Path) -> None:
    with dashboard(tmp_path, anonymous=False, client_address="127.0.0.1") as site:
        machine = Machine(site)
        machine.uid = PROXY
        cookie = machine.log_in("root", **{"x-forwarded-for": "10.9.9.9"})
        for address in ("10.9.9.9", "10.9.9.8"):
            assert is_in(machine.get("/api/v1/gpus", cookie, **{"x-forwarded-for": address}))
        machine.uid = BOB
        assert not is_in(machine.get("/api/v1/gpus", cookie))
        assert not is_in(machine.get("/api/v1/gpus", cookie, **{"x-forwarded-for": "10.9.9.9"}))


def test_one_user_without_a_login_does_not_use_up_the_share_of_another(tmp_path: Path) -> None:
    """All of them have the address 127.0.0.1."""
    with dashboard(tmp_path, client_address="127.0.0.1") as site:
        machine = Machine(site)
        cookie = machine.log_in("ann")
        site.app.state.site.reads = Bucket(rate=0.001, burst=20)
        machine.uid = BOB
        assert [machine.get("/healthz").status_code for _ in range(21)] == [200] * 20 + [429]
        machine.uid = ANN
        assert machine.get("/healthz").status_code == 200
        assert is_in(machine.get("/api/v1/gpus", cookie))


def test_noise_of_one_user_does_not_keep_the_logins_of_another_from_being_looked_up(machine: Machine) -> None:
    cookie = machine.log_in("ann")
    machine.site.app.state.site.unknown = Bucket(rate=0.001, burst=20)
    machine.uid = BOB
    seen = [machine.get("/api/v1/gpus", authorization=f"Bearer {number}").status_code for number in range(21)]
    assert seen == [401] * 20 + [429]
    machine.uid = ANN
    assert is_in(machine.get("/api/v1/gpus", cookie))


def test_over_https_the_cookie_belongs_to_this_host_alone(machine: Machine) -> None:
    machine.site.app.state.site.source.settings = _with_url(machine)
    over = {"host": "gpu.example"}
    reply = machine.redeem(machine.site.token("ann", LoginKind.LINK), **over)
    words = [one.strip().lower() for one in reply.headers["set-cookie"].split(";")]
    assert words[0].startswith(f"{SECURE.lower()}=")
    assert {"secure", "path=/", "httponly", "samesite=strict"} <= set(words)
    assert not any(one.startswith("domain") for one in words), "a browser refuses __Host- with a domain"
    machine.site.client.cookies.clear()
    value = reply.headers["set-cookie"].partition(";")[0].partition("=")[2]
    assert is_in(machine.get("/api/v1/gpus", f"{SECURE}={value}", **over))
    assert not is_in(machine.get("/api/v1/gpus", f"{PLAIN}={value}", **over)), "any page of this host may have set it"
    sent = {**over, "cookie": f"{SECURE}={value}"}
    csrf = machine.site.app.state.site.signer.csrf(value.rpartition(".")[0])
    out = machine.site.client.post("/logout", headers={**sent, "x-csrf-token": csrf}, follow_redirects=False)
    gone = [one.strip().lower() for one in out.headers["set-cookie"].split(";")]
    assert gone[0].startswith(f"{SECURE.lower()}=")
    assert {"secure", "path=/", "max-age=0"} <= set(gone), "or the browser keeps it"


def _with_url(machine: Machine) -> Any:
    return replace(machine.site.app.state.site.source.settings, site=SiteSettings(url="https://gpu.example"))


def test_sessions_from_before_they_were_bound_work_from_other_machines_only(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    with closing(sqlite3.connect(folder / "logins.db")) as old:
        old.execute(
            "CREATE TABLE logins (hash BLOB PRIMARY KEY, id TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, person TEXT NOT "
            "NULL, uid INTEGER, name TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL, used INTEGER, "
            "address TEXT NOT NULL) WITHOUT ROWID"
        )
        for kind in ("session", "token"):
            secret = sha256(kind.encode()).digest()
            row = (secret, kind, kind, "ann", 1000, "", 0, 2_000_000_000, None, "127.0.0.1")
            old.execute("INSERT INTO logins VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        old.execute("PRAGMA user_version = 1")
        old.commit()
    logins = open_logins(folder / "ledger.db")
    now = datetime(2026, 1, 1, tzinfo=UTC)

    async def found(kind: str, peer: int | None) -> bool:
        return await logins.find(kind, now, "127.0.0.1", peer) is not None

    async def do() -> list[bool]:
        return [await found(kind, peer) for kind in ("session", "token") for peer in (None, ANN, -1)]

    with closing(logins):
        assert asyncio.run(do()) == [True, False, False, True, True, True]
