"""Connections of users of this machine: one with thousands of them must not make the dashboard slow for the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from gpukeeper.interfaces.link import UNKNOWN_UID
from gpukeeper.interfaces.web import connections
from gpukeeper.interfaces.web.connections import Connections

PROXY = 33
TRUSTED = (0, PROXY)


class Wire(asyncio.Transport):
    """A connection of that uid, or of that address."""

    def __init__(self, whose: int | str) -> None:
        super().__init__()
        self.whose, self.aborted = whose, False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        address = self.whose if isinstance(self.whose, str) else "127.0.0.1"
        return (address, 5) if name == "peername" else ("10.0.0.1", 80)

    def abort(self) -> None:
        self.aborted = True


class Server:
    def __init__(self, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._uid = 0
        monkeypatch.setattr(connections, "is_here", lambda host: host == "127.0.0.1")
        monkeypatch.setattr(connections, "is_quick", lambda: True)
        monkeypatch.setattr(connections, "socket_owner", lambda peer, own: self._uid if self._uid >= 0 else None)
        self.connections = Connections(most, PROXY)

    def connect(self, whose: int | str, *, busy: bool = False) -> Wire:
        """`busy`: with a request that is being answered."""
        made = Wire(whose)
        self._uid = whose if isinstance(whose, int) else 0
        if not self.connections.opened(made):
            made.abort()
        elif busy:
            self.connections.asked(made)
        return made

    def held(self, whose: int | str) -> int:
        return sum(cast(Wire, one).whose == whose for one in self.connections.open)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    (tmp_path / "subuid").write_text("ann:100000:65536\nbroken\nbob:x:y\nbob:165536:65536\n")
    monkeypatch.setattr(connections, "SUBUIDS", tmp_path / "subuid")
    return Server(2_000, monkeypatch)


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize(("uid", "most"), [(1001, 64), (65534, 64), (UNKNOWN_UID, 64), (999, 256)])
def test_a_user_has_a_share_and_no_more(server: Server, uid: int, most: int, busy: bool) -> None:
    others = [server.connect(whose, busy=busy) for whose in (1000, 0, PROXY, "10.0.0.9")]
    for _ in range(3_857):
        server.connect(uid, busy=busy)
    assert server.held(uid) == most
    assert not any(one.aborted for one in others)
    assert not server.connect(1000).aborted


def test_within_a_share_the_newest_connections_stay(server: Server) -> None:
    made = [server.connect(1001) for _ in range(65)]
    assert [one.aborted for one in made] == [True] + [False] * 64


@pytest.mark.parametrize("uid", TRUSTED)
def test_root_and_the_trusted_proxy_have_no_share_of_their_own(server: Server, uid: int) -> None:
    made = [server.connect(uid, busy=True) for _ in range(1_500)]
    assert not any(one.aborted for one in made)


def test_the_thousands_of_uids_that_a_user_namespace_gives_are_one_share(server: Server) -> None:
    for uid in range(100_000, 103_000):
        server.connect(uid, busy=True)
    assert len(server.connections.open) == 64
    assert not server.connect(165_536).aborted, "of another user"


def test_many_users_together_leave_room_for_root_and_the_proxy(server: Server) -> None:
    for uid in range(2_000, 2_100):
        for _ in range(64):
            server.connect(uid, busy=True)
    assert len(server.connections.open) == 2_000 - connections.RESERVE
    assert server.connect(1000).aborted
    assert not any(server.connect(uid).aborted for uid in TRUSTED)


def test_who_has_the_most_makes_room(server: Server) -> None:
    address = "10.0.0.66"
    for _ in range(3_000):
        server.connect(address)
    others = [server.connect(whose) for whose in (1000, 0, "10.0.0.9")]
    server.connect(address)
    assert not any(one.aborted for one in others)
    assert server.held(address) <= 2_000 - connections.RESERVE


def test_what_ended_counts_no_more(server: Server) -> None:
    for _ in range(1_000):
        made = server.connect(1001, busy=True)
        assert not made.aborted
        server.connections.lost(made)
    assert not server.connections._held


def test_where_the_kernel_does_not_answer_quickly_all_users_have_one_share(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the table of all connections for each new one would be an attack of its own."""
    monkeypatch.setattr(connections, "is_quick", lambda: False)
    for uid in (1000, 1001, 0):
        for _ in range(100):
            server.connect(uid, busy=True)
    assert len(server.connections.open) == 64
