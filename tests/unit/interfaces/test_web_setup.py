"""How the dashboard may be served on this machine, and what happens when its settings or files change."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gpukeeper.interfaces.daemon import web as web_module
from gpukeeper.interfaces.daemon.requests import identify
from gpukeeper.interfaces.daemon.web import WebSettings
from gpukeeper.interfaces.link import Credentials, TlsPair, TrustedProxy, Welcome
from gpukeeper.interfaces.web_setup import read_setup, ssl
from gpukeeper.ledger.logins import open_logins
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Web, WebProxy, WebTls
from tests.cli.fleet import ago
from tests.patience import PATIENCE

PROXY = WebProxy(header="X-Forwarded-User", from_=("10.0.0.2",))
PAIR = TlsPair(b"certificate", b"key")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WebTls:
    """Files whose content is not checked."""
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", lambda *words: None)
    for name in ("crt", "key"):
        (tmp_path / name).write_bytes(b"first")
        (tmp_path / name).chmod(0o600)
    return WebTls(certificate=str(tmp_path / "crt"), key=str(tmp_path / "key"))


def test_on_loopback_names_of_this_machine_and_the_url_are_accepted() -> None:
    site = read_setup(Web(url="https://gpu.example:8443"), "127.0.0.2").site
    assert site.hosts == ("localhost", "127.0.0.1", "::1", "127.0.0.2", "gpu.example")
    assert not site.only_proxy


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.1", "::"])
def test_other_machines_need_encryption_or_a_decision(address: str, pair: WebTls) -> None:
    with pytest.raises(UsageError, match=r"without encryption.*web\.plain_http: true"):
        read_setup(Web(), address)
    assert read_setup(Web(tls=pair), address).site.tls
    assert read_setup(Web(tls=pair), address).warnings == ()
    proxied = read_setup(Web(proxy=PROXY), address).site
    assert (proxied.only_proxy, proxied.proxy) == (True, TrustedProxy("x-forwarded-user", ("10.0.0.2",)))
    accepted = read_setup(Web(plain_http=True), address)
    assert not accepted.site.only_proxy
    assert "without TLS" in accepted.warnings[0]


def test_root_becomes_the_user_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    account = read_setup(Web(), "127.0.0.1").account
    assert account is not None
    assert account.uid != 0
    with pytest.raises(UsageError, match="is root"):
        read_setup(Web(user="root"), "127.0.0.1")
    with pytest.raises(UsageError, match='no user "no-such-user"'):
        read_setup(Web(user="no-such-user"), "127.0.0.1")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert read_setup(Web(), "127.0.0.1").account is None


def test_a_renewed_certificate_is_sent_and_a_bad_one_reported(pair: WebTls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_module, "FOLLOW", 0.01)
    log: list[str] = []
    settings = WebSettings(lambda: Web(tls=pair), "127.0.0.1", log.append)
    assert pair.key is not None
    key = Path(pair.key)

    def write(mode: int) -> None:
        key.write_bytes(b"second, longer")
        key.chmod(mode)

    async def story() -> None:
        assert (await settings.setup()).tls == TlsPair(b"first", b"first")
        sent: asyncio.Queue[object] = asyncio.Queue()
        following = asyncio.create_task(settings.follow(sent.put))
        async with asyncio.timeout(PATIENCE):
            while not settings.warnings:
                write(0o644)
                await asyncio.sleep(0.01)
            assert sent.empty()
            write(0o600)
            assert await sent.get() == TlsPair(b"first", b"second, longer")
        assert settings.warnings == ()
        following.cancel()

    asyncio.run(story())
    assert "keeps its previous certificate" in log[0]
    assert "can be read by others" in log[0]
    assert len(log) <= 3  # not every time


def test_changed_settings_end_the_web_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_module, "FOLLOW", 0.01)
    current = [Web()]
    settings = WebSettings(lambda: current[0], "127.0.0.1", lambda words: None)

    async def story() -> None:
        await settings.setup()
        current[0] = Web(url="https://gpu.example")
        async with asyncio.timeout(PATIENCE):
            await settings.serve(_forever(), _ignore)

    asyncio.run(story())


async def _forever() -> None:
    await asyncio.Event().wait()


async def _ignore(message: object) -> None:
    """Sent nowhere."""


def test_reading_without_a_login_can_be_switched_off() -> None:
    for web, address, anonymous in (
        (Web(), "127.0.0.1", True),
        (Web(read_on_loopback=False), "127.0.0.1", False),
        (Web(), "10.0.0.1", False),
    ):
        assert WebSettings(lambda web=web: web, address, print).anonymous is anonymous  # type: ignore[misc]


def test_the_key_is_in_no_text() -> None:
    welcome = Welcome(machine="m", version="0", key=b"", anonymous=True, session_seconds=1, tls=PAIR)
    assert "certificate" not in repr(welcome)


@pytest.mark.parametrize("name", ["ann bob", "\0", "a" * 500, "ann\n", "", "änn"])
def test_the_daemon_checks_names_and_addresses_of_its_web_process_again(tmp_path: Path, name: str) -> None:
    presented = Credentials(proxy_user=name, proxy="10.0.0.2", address="x\x1b[2J" * 100)

    async def story() -> None:
        logins = open_logins(tmp_path / "ledger.db")
        try:
            who = await identify(logins, presented, ago(), proxied=True)
            assert (who.name, who.uid, who.via) == ("", None, "")
            assert len(who.address) <= 64
            assert who.address.isprintable()
            known = await identify(logins, Credentials(proxy_user="ann", proxy="p", address="a"), ago(), proxied=True)
            assert (known.name, known.via) == ("ann", "web, proxy p, from a")
            assert (await identify(logins, Credentials(proxy_user="root"), ago())).name == ""
        finally:
            logins.close()

    asyncio.run(story())


def test_people_without_a_uid_take_turns_of_their_own(tmp_path: Path) -> None:
    async def turn(**given: str) -> int:
        logins = open_logins(tmp_path / "ledger.db")
        try:
            return (await identify(logins, Credentials(**given), ago(), proxied=True)).turn
        finally:
            logins.close()

    found = [
        asyncio.run(turn(**given))
        for given in ({"proxy_user": "x@a"}, {"proxy_user": "y@a"}, {"address": "10.0.0.1"}, {"address": "10.0.0.2"})
    ]
    assert len(set(found)) == 4
    assert max(found) < 0
