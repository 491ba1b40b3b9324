"""A disk that is really full: what is under way is still recorded, nothing new begins, and it mends itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpukeeper.ledger import journal as reserves
from gpukeeper.ledger.journal import Reserve, open_ledger
from gpukeeper.ledger.signals import open_signals
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.series import Sample, Signal
from tests.small_reserve import USUAL
from tests.unit.ledger.examples import NOW, closed, intended, noticed, run


@pytest.fixture(autouse=True)
def usual_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has it."""
    monkeypatch.setattr(reserves, "RESERVE_BYTES", USUAL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small filesystem (root)")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def _fill(folder: Path) -> Path:
    """Until not one byte more fits."""
    ballast = folder / "ballast"
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (2**20, 4096, 1):
        with suppress(OSError):
            while os.write(fd, b"x" * size):
                pass
    os.close(fd)
    assert os.statvfs(folder).f_bavail == 0
    return ballast


def test_the_reserve_is_really_allocated(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path)
    assert reserve.ensure()
    assert reserve.path.stat().st_blocks * 512 >= USUAL == 8 * 2**20
    assert reserve.release()
    assert not reserve.is_there()
    assert not reserve.release()


def test_on_a_full_disk_outcomes_are_written_and_nothing_new_begins(small_disk: Path) -> None:
    """Promise 6 on a full disk."""

    async def story() -> None:
        path = small_disk / "ledger.db"
        ledger = open_ledger(path, write=True)
        reserve = Reserve(small_disk)
        assert reserve.is_there()
        await ledger.append([noticed(), intended("s0")])
        ballast = _fill(small_disk)

        number = 0
        while reserve.is_there():  # the -wal file may still have room in it
            number += 1
            assert number < 5000
            await ledger.append([closed(f"x{number}", reason="y" * 2000)])
        with pytest.raises(LedgerError, match=r"is full; no more actions until 32 MiB are free"):
            await ledger.append([intended("s1")])
        await ledger.append([closed("s0")])
        assert await ledger.open_intents("docker", "node-3") == []

        # Somebody else takes what the reserve gave: not even opening works, and says so. Reading does.
        ledger.close()
        _fill(small_disk)
        with pytest.raises(LedgerError, match="is full"):
            open_ledger(path, write=True)
        ledger = open_ledger(path, write=False)
        written = {line.step for _, line in await ledger.lines(LineFilter(last=None, types=("outcome",)))}  # type: ignore[union-attr]
        assert written == {"s0", *(f"x{n}" for n in range(1, number + 1))}

        ledger.close()

        ballast.unlink()
        ledger = open_ledger(path, write=True)
        await ledger.append([intended("s1")])
        assert reserve.is_there()
        assert [i.step for i in await ledger.open_intents("docker", "node-3")] == ["s1"]
        assert await ledger.damage() == []
        ledger.close()

    run(story())


def test_a_restart_on_a_full_disk_uses_the_reserve(small_disk: Path) -> None:
    async def story() -> None:
        path = small_disk / "ledger.db"
        ledger = open_ledger(path, write=True)
        await ledger.append([intended("s0")])
        ledger.close()
        ballast = _fill(small_disk)
        ledger = open_ledger(path, write=True)
        assert not Reserve(small_disk).is_there()
        await ledger.append([closed("s0")])
        with pytest.raises(LedgerError, match="is full"):
            await ledger.append([intended("s1")])
        ballast.unlink()
        await ledger.append([intended("s1")])  # no restart needed
        assert Reserve(small_disk).is_there()
        ledger.close()

    run(story())


def test_when_even_the_reserve_is_used_up_a_line_fails_as_a_whole_with_a_sentence(small_disk: Path) -> None:
    async def story() -> None:
        ledger = open_ledger(small_disk / "ledger.db", write=True)
        _fill(small_disk)
        written = 0

        async def write_on() -> None:
            nonlocal written
            while written < 5000:
                await ledger.append([closed(f"x{written}", reason="y" * 20000)] * 5)
                written += 1

        with pytest.raises(LedgerError, match="is full"):
            await write_on()
        assert len(await ledger.lines(LineFilter(last=None))) == written * 5
        assert await ledger.damage() == []
        ledger.close()

    run(story())


def test_samples_that_a_full_disk_does_not_take_are_not_measured_and_leave_the_reserve_alone(small_disk: Path) -> None:
    async def story() -> None:
        path = small_disk / "ledger.db"
        ledger, signals = open_ledger(path, write=True), open_signals(path, write=True)
        _fill(small_disk)
        samples = [Sample(f"docker/a/{n}", Signal.GPU, "0", NOW, 5.0) for n in range(60000)]
        await signals.add(samples)
        assert await signals.series(["docker/a/1"], NOW, NOW) == {}
        assert Reserve(small_disk).is_there()
        signals.close()
        ledger.close()

    run(story())
