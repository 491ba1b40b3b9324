"""Links, sessions and tokens: once, in time, revocable, and only as hashes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpukeeper.ledger.logins import LINK_LASTS, MOST_EACH, LoginKind, Logins, open_logins
from gpukeeper.model.errors import LedgerError

NOW = datetime(2026, 5, 1, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
def logins(tmp_path: Path) -> Iterator[Logins]:
    made = open_logins(tmp_path / "state" / "ledger.db")
    yield made
    made.close()


def test_a_link_becomes_one_session(logins: Logins) -> None:
    async def do() -> None:
        link = await logins.create(LoginKind.LINK, "ann", 1000, NOW, LINK_LASTS)
        assert await logins.find(link.secret, NOW, "a") is None, "a link is no session"
        tries = await asyncio.gather(*(logins.redeem(link.secret, NOW, DAY, "a") for _ in range(5)))
        (session,) = [one for one in tries if one is not None]
        found = await logins.find(session.secret, NOW, "b")
        assert found is not None
        assert (found.person, found.uid, found.kind) == ("ann", 1000, LoginKind.SESSION)

    asyncio.run(do())


def test_what_expired_or_was_revoked_is_nobody(logins: Logins) -> None:
    async def do() -> None:
        link = await logins.create(LoginKind.LINK, "ann", 1000, NOW, LINK_LASTS)
        assert await logins.redeem(link.secret, NOW + LINK_LASTS, DAY, "a") is None
        token = await logins.create(LoginKind.TOKEN, "ann", 1000, NOW, DAY, "ci")
        assert await logins.find(token.secret, NOW + DAY, "a") is None
        assert await logins.revoke(token.login.id, "bob") == 0
        assert await logins.find(token.secret, NOW, "a") is not None
        assert await logins.revoke(token.login.id, "ann") == 1
        assert await logins.find(token.secret, NOW, "a") is None

    asyncio.run(do())


def test_no_secret_is_stored_and_others_cannot_read_the_file(logins: Logins) -> None:
    token = asyncio.run(logins.create(LoginKind.TOKEN, "ann", 1000, NOW, DAY, "ci"))
    for path in logins.path.parent.glob(f"{logins.path.name}*"):
        assert token.secret.encode() not in path.read_bytes()
    assert logins.path.stat().st_mode & 0o077 == 0


def test_the_number_of_one_person_is_bounded(logins: Logins) -> None:
    async def do() -> None:
        first = await logins.create(LoginKind.SESSION, "ann", 1000, NOW, DAY)
        for number in range(MOST_EACH):
            await logins.create(LoginKind.SESSION, "ann", 1000, NOW + timedelta(seconds=number + 1), DAY)
        assert await logins.find(first.secret, NOW, "a") is None
        for _ in range(MOST_EACH):
            await logins.create(LoginKind.TOKEN, "ann", 1000, NOW, DAY, "ci")
        with pytest.raises(LedgerError, match="Revoke one first"):
            await logins.create(LoginKind.TOKEN, "ann", 1000, NOW, DAY, "ci")
        await logins.create(LoginKind.TOKEN, "bob", 1001, NOW, DAY, "ci")

    asyncio.run(do())


def test_the_key_stays_the_same(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        logins = open_logins(tmp_path / "ledger.db")
        keys.append(asyncio.run(logins.key("cookies")))
        logins.close()
    assert keys[0] == keys[1]
    assert len(keys[0]) == 32
