"""What the shell offers after TAB: from what is known already, and nothing at all when something is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.config.show import SECTIONS
from gpukeeper.interfaces.terminal import completion
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.names import known_workloads
from gpukeeper.lifecycle.decide import RULES
from gpukeeper.model.event import Noticed
from gpukeeper.model.subject import Ref, State
from tests.unit.lifecycle.examples import NOW

REFS = (
    Ref("docker", "node-1", "container", "eval", "c1"),
    Ref("docker", "node-1", "container", "train", "c2"),
    Ref("docker", "node-2", "container", "train", "c3"),
    Ref("kubernetes", "prod", "trainjob", "tune", "u1", "lab"),
    Ref("host", "node-1", "gpu", "gpu-0", "GPU-0"),
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUKEEPER_STATE", str(tmp_path))
    monkeypatch.delenv("GPUKEEPER_SOCKET", raising=False)
    return tmp_path


async def _noticed(state: Path) -> None:
    ledger = open_ledger(state / "ledger.db", write=True)
    lines = [Noticed(at=NOW, ref=ref, incarnation="run-1", state=State.RUNNING) for ref in REFS]
    await ledger.append(lines)
    ledger.close()


@pytest.fixture
def known(state: Path) -> Path:
    asyncio.run(_noticed(state))
    return state


def test_workloads_by_name_where_that_is_enough_and_by_path_elsewhere(known: Path) -> None:
    assert completion.workloads("") == ["docker/node-1/train", "docker/node-2/train", "eval", "tune"]
    assert completion.workloads("tu") == ["tune"]
    assert completion.workloads("docker/node-1") == ["docker/node-1/eval", "docker/node-1/train"]
    assert completion.workloads("kube") == ["kubernetes/prod/lab/trainjob/tune"]
    assert completion.workloads("no-such") == []


def test_the_paths_are_those_that_refs_have(known: Path) -> None:
    assert set(known_workloads(known / "ledger.db")) == {ref.path for ref in REFS if ref.kind != "gpu"}


@pytest.mark.parametrize("damage", ["absent", "empty", "garbage", "folder"])
def test_a_ledger_that_cannot_be_read_offers_nothing(
    state: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = state / "ledger.db"
    if damage == "folder":
        path.mkdir()
    elif damage != "absent":
        path.write_bytes(b"" if damage == "empty" else os.urandom(5000))
    assert completion.workloads("") == []
    assert completion.runs("") == []
    assert capfd.readouterr() == ("", "")
    assert path.exists() is (damage != "absent"), "nothing is made"


def test_a_daemon_of_another_user_is_queried(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"ref": {"platform": "docker", "place": "node-1", "kind": "container", "name": "eval", "uid": "c1"}}
    answer = {"done": True, "words": "", "body": {"places": [{"decisions": [{"seen": seen, "action": "keep"}]}]}}
    monkeypatch.setattr(os, "geteuid", lambda: state.stat().st_uid + 1)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(state / "socket"))
        daemon.listen()

        def serve() -> None:
            connection, _ = daemon.accept()
            with connection:
                assert connection.recv(100) == b'{"verb":"plan"}\n'
                connection.sendall(json.dumps(answer).encode())

        thread = threading.Thread(target=serve)
        thread.start()
        assert completion.workloads("") == ["eval"]
        thread.join()


def test_a_daemon_that_is_gone_offers_nothing(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: state.stat().st_uid + 1)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(state / "socket"))
    assert completion.workloads("") == []


def test_acceptance_runs_newest_first(state: Path) -> None:
    for name in ("20260301T120000Z-a1", "20260302T120000Z-b2", ".partial"):
        (state / "reports" / name).mkdir(parents=True)
    assert completion.runs("") == ["20260302T120000Z-b2", "20260301T120000Z-a1"]
    assert completion.runs("20260301") == ["20260301T120000Z-a1"]


def test_checks_also_behind_a_comma() -> None:
    assert completion.checks("") == sorted(one.name for one in CHECKS)
    assert completion.checks("gemm,ex") == ["gemm,exact"]


def test_the_sections_are_those_of_a_policy() -> None:
    assert completion.SECTIONS == SECTIONS
    assert completion.sections("classes.m") == ["classes.managed"]
    assert completion.sections("ret") == ["retention"]


def test_the_rules_are_those_that_a_hold_can_suspend() -> None:
    assert completion.rules("") == sorted(rule.name for rule in RULES if rule.acts)
    assert completion.rules("max") == ["max_runtime"]


def test_words_that_are_few() -> None:
    assert completion.platforms("k") == ["kubernetes"]
    assert completion.outcomes("") == ["failed", "stopped", "succeeded"]
    assert "outcome" in completion.line_types("o")
