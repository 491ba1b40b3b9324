"""One pass at a time on one place."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.ledger.journal import lease_name, open_ledger
from gpukeeper.model.errors import LeaseHeld
from tests.unit.ledger.examples import run


def test_a_place_has_one_pass_at_a_time_and_others_are_free(tmp_path: Path) -> None:
    async def story() -> None:
        ledger, other = (open_ledger(tmp_path / "ledger.db", write=True) for _ in range(2))
        async with ledger.lease("docker", "node-3"), other.lease("docker", "node-4"):
            for one in (ledger, other):
                with pytest.raises(LeaseHeld, match="docker/node-3") as raised:
                    async with one.lease("docker", "node-3"):
                        pass
                assert raised.value.exit_code == 11
        async with other.lease("docker", "node-3"):
            pass
        ledger.close()
        other.close()

    run(story())


def test_a_pass_that_fails_gives_its_lease_back(tmp_path: Path) -> None:
    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        with pytest.raises(ZeroDivisionError):
            async with ledger.lease("docker", "node-3"):
                raise ZeroDivisionError
        async with ledger.lease("docker", "node-3"):
            pass
        ledger.close()

    run(story())


def test_a_lease_that_nobody_waits_for_any_more_is_given_back(tmp_path: Path) -> None:
    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)

        async def wait() -> None:
            async with ledger.lease("docker", "node-3"):
                raise AssertionError("cancelled before")

        read, write = os.pipe()
        slow = asyncio.ensure_future(ledger.read(lambda _: os.read(read, 1)))
        waiting = asyncio.ensure_future(wait())
        for _ in range(3):
            await asyncio.sleep(0)
        waiting.cancel()
        os.write(write, b"x")
        await slow
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with ledger.lease("docker", "node-3"):
            pass
        os.close(read)
        os.close(write)
        ledger.close()

    run(story())


def test_the_holder_is_shown_without_its_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/gpukeeper", "apply", "--owner", "\x1b[2J\udcff"])

    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        async with ledger.lease("docker", "node-3"):
            with pytest.raises(LeaseHeld) as raised:
                async with ledger.lease("docker", "node-3"):
                    pass
        assert "(gpukeeper apply --owner ?[2J\\udcff)" in str(raised.value)
        ledger.close()

    run(story())


_names = st.text(st.characters(codec=None), max_size=300)


@given(_names, _names, _names, _names)
def test_no_two_places_share_a_lease_and_none_leaves_its_directory(a: str, b: str, c: str, d: str) -> None:
    first, second = lease_name(a, b), lease_name(c, d)
    assert "/" not in first
    assert "\0" not in first
    assert first not in {".", ".."}
    assert len(first.encode()) <= 255
    assert (first == second) == ((a, b) == (c, d))


def test_names_that_read_alike_have_leases_of_their_own() -> None:
    names = {lease_name(*pair) for pair in [("a~b", "c"), ("a", "b~c"), ("a/b", "c"), ("a", "b/c"), ("a%2Fb", "c")]}
    assert len(names) == 5
