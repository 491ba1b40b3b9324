"""Two and three nodes as separate processes of one machine, real ranks over gloo: healthy, slow, hanging, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import engines
from tests.real.torch import installation
from tests.real.torch.together import free_port

PROGRAM = Path(__file__).with_name("group_member.py")
TIMEOUT_S = 240


@pytest.fixture(autouse=True, scope="module")
def _torch() -> None:
    engines.require("torch", engines.has_torch())


@contextmanager
def nodes(count: int, **told: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """`told`: the settings of the group, and faults to inject."""
    inject = told.pop("inject", {})
    settings = {"stall_s": 30, "deadline_s": 60, "rendezvous_s": 60, "search": False, **told}
    wish = json.dumps({"params": {"group": settings}, "inject": inject})
    port = str(free_port())
    command = [sys.executable, str(PROGRAM), "run-1"]
    started = [
        subprocess.Popen(
            [*command, str(index), str(count), port, installation.python(), wish],
            stdout=subprocess.PIPE,
            text=True,
            env=installation.environment(),
        )
        for index in range(count)
    ]
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate()


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=TIMEOUT_S)
    found: dict[str, Any] = json.loads(out)
    return found


def codes(found: dict[str, Any], *verdicts: str) -> list[tuple[str, list[str]]]:
    return [
        (one["finding"]["code"], one["nodes"])
        for one in found["report"]["findings"]
        if one["finding"]["verdict"] in verdicts
    ]


def below(pid: int) -> list[int]:
    """All processes below one, by their parents."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [child for child, parent in parents.items() if parent == pid]
    return [*found, *(each for child in found for each in below(child))]


def rank_of(node: subprocess.Popen[str]) -> int:
    """The rank below a node, once it trains."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        for pid in below(node.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            # The supervisor has the same words behind its own; the rank begins with the interpreter.
            if len(command) > 4 and command[2] == b"ranks" and Path(os.fsdecode(command[3]), "rank-1.step").exists():
                return pid
        time.sleep(0.05)
    raise AssertionError("no rank began a step")


def test_three_healthy_nodes_pass_on_every_rank() -> None:
    """C1.2: collectives and training across nodes; every node has the same report."""
    with nodes(3, probes=["collectives", "ddp"]) as started:
        found = [result(one) for one in started]
    report = found[0]["report"]
    assert report["verdict"] == "PASS", report["reason"]
    assert [one["verdict"] for one in report["ranks"]] == ["PASS"] * 3
    assert [(one["probe"], len(one["nodes"])) for one in report["jobs"]] == [
        ("collectives", 2),
        ("collectives", 3),
        ("ddp", 3),
    ]
    assert found[1]["report"] == found[2]["report"] == report
    assert [one["records"] for one in found] == [3, 3, 2]


def test_a_slow_node_is_named_after_it_was_slow_twice() -> None:
    with nodes(2, probes=["ddp"], inject={"ddp": {"slow_rank": 1, "slow_s": 0.2}}) as started:
        found = result(started[0])
    assert codes(found, "FAIL") == [("group-slow-rank", ["node-1"])]
    assert [one["verdict"] for one in found["report"]["nodes"]] == ["PASS", "FAIL"]


def test_a_rank_that_is_stopped_ends_the_job_and_is_blamed() -> None:
    """It hangs in the middle of the training: the others wait for it."""
    slow = {"ddp": {"slow_rank": 0, "slow_s": 1.0}}  # leaves time to stop the other one
    with nodes(2, probes=["ddp"], stall_s=6, inject=slow) as started:
        os.kill(rank_of(started[1]), signal.SIGSTOP)
        found = result(started[0])
        other = result(started[1])
    assert codes(found, "FAIL") == [("group-hang-rank", ["node-1"])]
    assert "stopped by a signal" in found["report"]["reason"]
    assert other["report"] == found["report"]


def test_a_node_that_is_killed_is_named_and_the_others_end() -> None:
    slow = {"ddp": {"slow_rank": 0, "slow_s": 1.0}}
    with nodes(3, probes=["ddp"], inject=slow) as started:
        rank_of(started[1])
        started[2].kill()
        found, other = result(started[0]), result(started[1])
    assert codes(found, "INCONCLUSIVE") == [("group-member-lost", ["node-2"])]
    assert other["report"]["verdict"] == "INCONCLUSIVE"


def test_a_member_that_never_comes_is_named_with_advice() -> None:
    """C17.2: a rendezvous timeout is inconclusive, and says what to check."""
    with nodes(3, rendezvous_s=4) as started:
        started[2].kill()
        found = result(started[0])
    assert codes(found, "INCONCLUSIVE") == [("group-rendezvous", ["node 2"])]
    assert "29500" in found["report"]["reason"]
