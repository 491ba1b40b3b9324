"""kill -9 of the shipper at random moments: nothing lost, nothing twice."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from tests.architecture.tree import ROOT
from tests.kills import KILLS
from tests.real.postgres.fleet import FleetDatabase, Machine, a_shipper, wait_until_shipped

SEED = 11


def test_a_shipper_that_is_killed_again_and_again(database: FleetDatabase, tmp_path: Path) -> None:
    settings = database.add("node-1")
    machine = Machine.create(tmp_path, "node-1")
    chance = random.Random(SEED)
    command = [sys.executable, "-m", "tests.real.postgres.ship_and_die", str(machine.path)]
    for round_ in range(KILLS):
        machine.write(*[f"{round_} {n} {'x' * 400}" for n in range(3000)])
        child = subprocess.Popen(
            [*command, msgspec.json.encode(settings).decode()], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        time.sleep(chance.uniform(0, 0.6))
        child.kill()
        child.wait()
        child.stdout.close()
        found = database.lines("node-1")
        assert found == machine.written()[: len(found)], "what is there has no gap and nothing twice"
    shipper = a_shipper(settings, machine)
    wait_until_shipped(database, machine)
    shipper.stop()
    machine.close()
