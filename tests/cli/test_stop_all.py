"""The emergency stop: everybody's or one person's running GPU work, each with an outcome of its own."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import msgspec

from gpukeeper.model.subject import State
from gpukeeper.platforms.simulated.folder import Workload
from tests.cli.fleet import POLICY, Fleet, ago
from tests.cli.test_people import daemon, wait_for
from tests.patience import PATIENCE


def running(fleet: Fleet, name: str, **facts: object) -> None:
    fleet.add(name, **{"state": State.RUNNING, "started": ago(hours=1), "devices": ("GPU-0",), **facts})


def still_running(fleet: Fleet) -> set[str]:
    found = {p.stem: msgspec.json.decode(p.read_bytes(), type=Workload) for p in fleet.folder.glob("*.json")}
    return {name for name, workload in found.items() if workload.state is State.RUNNING}


def test_all_running_gpu_work_is_stopped_and_recorded(fleet: Fleet) -> None:
    """C16.5"""
    running(fleet, "eval")
    running(fleet, "train", owner="bob", devices=("GPU-1", "GPU-2"))
    running(fleet, "web", devices=())
    fleet.ended("old", days=0.1)
    ran = fleet.run("stop-all", "--yes")
    assert ran.code == 0, ran.err
    assert "2 of 2 stopped, 0 skipped" in ran.err
    assert still_running(fleet) == {"web"}
    outcomes = fleet.lines("outcome")
    assert {(one["ref"]["name"], one["rule"], one["result"]) for one in outcomes} == {
        ("eval", "request", "reclaimed"),
        ("train", "request", "reclaimed"),
    }
    again = fleet.run("stop-all", "--yes")
    assert again.code == 0
    assert "0 of 0 stopped" in again.err


def test_one_persons_alone(fleet: Fleet) -> None:
    """C16.5"""
    running(fleet, "eval")
    running(fleet, "train", owner="bob")
    assert fleet.run("stop-all", "--owner", "bob", "--yes").code == 0
    assert still_running(fleet) == {"eval"}


def test_what_is_never_touched_and_what_is_exempt_is_left_and_listed(fleet: Fleet) -> None:
    fleet.write_policy(POLICY + "exemptions: [{workload: demo, reason: the fair}]\n")
    running(fleet, "eval")
    running(fleet, "exporter", class_="infrastructure", owner=None)
    running(fleet, "demo", owner="bob")
    ran = fleet.run("stop-all", "--yes")
    assert ran.code == 0, ran.err
    assert still_running(fleet) == {"exporter", "demo"}
    said = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert "skip docker/node-1/exporter - class infrastructure is never touched" in said
    assert "skip docker/node-1/demo bob exempt: the fair" in said


def test_one_that_fails_does_not_keep_the_others_and_exits_with_3(fleet: Fleet) -> None:
    fleet.write_policy(POLICY + "exemptions: []\n")
    running(fleet, "anns")
    running(fleet, "bobs", owner="bob")
    held = fleet.run("workload", "hold", "anns", "--for", "1h")
    assert held.code == 0, held.err
    _hold_by_somebody_else(fleet)
    ran = fleet.run("stop-all", "--yes", "--json")
    assert ran.code == 3
    document = json.loads(ran.out)
    done = {one["workload"]: one["reply"]["done"] for one in document["outcomes"]}
    assert done == {"docker/node-1/anns": False, "docker/node-1/bobs": True}
    assert still_running(fleet) == {"anns"}


def _hold_by_somebody_else(fleet: Fleet) -> None:
    """The same hold in the name of another admin: only its holder may pass over it."""
    import asyncio

    from gpukeeper.ledger.journal import open_ledger
    from gpukeeper.model.event import Held

    ledger = open_ledger(fleet.state / "ledger.db", write=True)
    (line,) = [one for one in asyncio.run(ledger.about("anns")) if isinstance(one, Held)]
    hold = msgspec.structs.replace(line.hold, by="zoe")
    asyncio.run(ledger.append([msgspec.structs.replace(line, by="zoe", hold=hold)]))
    ledger.close()


def test_a_running_daemon_does_the_stopping(fleet: Fleet) -> None:
    """It has the lease and the ledger; the request carries no name, the daemon sees who asks."""
    running(fleet, "eval")
    with daemon(fleet):
        wait_for(lambda: fleet.lines("pass"))  # a pass under way would hold the lease
        ran = fleet.run("stop-all", "--yes")
        assert ran.code == 0, ran.err
        assert "1 of 1 stopped" in ran.err
    assert still_running(fleet) == set()


def test_unattended_it_acts_only_in_mode_enforce(fleet: Fleet) -> None:
    running(fleet, "eval")
    unasked = fleet.run("stop-all")
    assert unasked.code == 2
    assert "stdin is not a terminal" in unasked.err
    fleet.write_policy(POLICY.replace("enforce", "plan"))
    planned = fleet.run("stop-all", "--yes")
    assert planned.code == 2
    assert "only mode: enforce acts unattended" in planned.err
    assert still_running(fleet) == {"eval"}


def test_only_an_admin_stops_everybodys(fleet: Fleet) -> None:
    """C16.5"""
    fleet.write_policy(POLICY.replace("root, ADMIN", "zoe"))
    running(fleet, "eval")
    ran = fleet.run("stop-all", "--yes")
    assert ran.code == 2
    assert "is not an admin of this policy" in ran.err
    assert still_running(fleet) == {"eval"}


def test_on_a_terminal_it_asks_and_a_no_is_a_no(fleet: Fleet) -> None:
    """In mode plan too: a person confirms."""
    fleet.write_policy(POLICY.replace("enforce", "plan"))
    running(fleet, "eval")
    assert "Stop 1 running workload of all owners now?" in _answered(fleet, "n")
    assert still_running(fleet) == {"eval"}
    assert "1 of 1 stopped" in _answered(fleet, "y")
    assert still_running(fleet) == set()


def _answered(fleet: Fleet, answer: str) -> str:
    """What it says to somebody who sits at a terminal and types that."""
    screen, device = pty.openpty()
    try:
        os.write(screen, f"{answer}\n".encode())
        done = subprocess.run(
            [sys.executable, "-m", "gpukeeper", "stop-all"],
            env=fleet.env(),
            stdin=device,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return done.stdout + done.stderr
    finally:
        os.close(screen)
        os.close(device)
