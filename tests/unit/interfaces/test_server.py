"""The socket of `serve`: who can reach it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukeeper.engine.requests import Reply, Request
from gpukeeper.interfaces.daemon.server import listening


class Nobody:
    admins = ()

    async def answer(self, who: str, uid: int, request: Request) -> Reply:
        return Reply(done=True, words="")


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """As in the unit."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def modes(path: Path) -> tuple[str, ...]:
    def read() -> tuple[str, ...]:
        return tuple(oct(one.stat().st_mode & 0o7777) for one in (path.parent, path))

    async def listened() -> tuple[str, ...]:
        async with listening(path, Nobody()):
            return read()

    return asyncio.run(listened())


def test_a_directory_that_the_daemon_makes_is_open_to_users_whatever_its_umask(tmp_path: Path) -> None:
    assert modes(tmp_path / "run" / "socket") == ("0o755", "0o666")
    assert modes(tmp_path / "run" / "socket") == ("0o755", "0o666")


def test_a_directory_that_was_there_is_left_as_it_is(tmp_path: Path) -> None:
    """Such as the state directory of a user, which has the socket of that user's daemon."""
    (tmp_path / "state").mkdir(mode=0o700)
    assert modes(tmp_path / "state" / "socket") == ("0o700", "0o666")
