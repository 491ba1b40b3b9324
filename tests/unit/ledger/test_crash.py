"""What was said to be durable is there after kill -9, and the file opens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.errors import LeaseHeld
from tests.unit.ledger.examples import run

_WRITER = """
import asyncio, sys
from pathlib import Path
from gpukeeper.ledger.journal import open_ledger
from tests.unit.ledger.examples import closed, intended

async def main():
    ledger = open_ledger(Path(sys.argv[1]), write=True)
    async with ledger.lease("docker", "node-3"):
        for number in range(10**6):
            await ledger.append([intended(f"s{number}")])
            print(number, flush=True)
            if number % 2:
                await ledger.append([closed(f"s{number}")])

asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [1, 50, 333])
def test_every_line_said_to_be_durable_survives_kill_9(tmp_path: Path, lines: int) -> None:
    """C15.3, and promise 6: the intent is written durably before acting."""
    path = tmp_path / "ledger.db"
    child = subprocess.Popen([sys.executable, "-c", _WRITER, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = [int(child.stdout.readline()) for _ in range(lines)]
    child.kill()
    said += [int(rest) for rest in child.stdout.read().splitlines()]
    child.wait()
    child.stdout.close()

    async def story() -> None:
        ledger = open_ledger(path, write=True)
        found = {line.step for _, line in await ledger.lines(LineFilter(last=None, types=("intent",)))}  # type: ignore[union-attr]
        assert {f"s{number}" for number in said} <= found
        assert await ledger.damage() == []
        still_open = {intent.step for intent in await ledger.open_intents("docker", "node-3")}
        await ledger.rebuild()
        assert still_open == {intent.step for intent in await ledger.open_intents("docker", "node-3")}
        # The kernel gave the lease back.
        async with ledger.lease("docker", "node-3"):
            pass
        ledger.close()

    run(story())


def test_a_lease_of_another_process_names_it_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    child = subprocess.Popen([sys.executable, "-c", _WRITER, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()

    async def story() -> None:
        ledger = open_ledger(path, write=True)
        with pytest.raises(LeaseHeld, match=rf"docker/node-3: pid {child.pid} \(.*since .*Nothing was touched"):
            async with ledger.lease("docker", "node-3"):
                pass
        async with ledger.lease("docker", "node-4"):
            pass
        child.kill()
        child.wait()
        async with ledger.lease("docker", "node-3"):
            pass
        ledger.close()

    run(story())
    child.stdout.close()
