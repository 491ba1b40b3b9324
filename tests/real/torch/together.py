"""Ranks on this machine's CPU, started by torchrun or by hand; what each of them left behind."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.real.torch import installation

TIMEOUT_S = 200


class Left:
    """The folder that ranks wrote to, and how it ended."""

    def __init__(self, folder: Path, exit_code: int, words: str) -> None:
        self.folder, self.exit_code, self.words = folder, exit_code, words

    def record(self, rank: int) -> dict[str, Any] | None:
        path = self.folder / f"rank-{rank}.json"
        return json.loads(path.read_text(), parse_constant=_not_json) if path.exists() else None

    def done(self, rank: int) -> dict[str, Any]:
        record = self.record(rank)
        assert record is not None, f"rank {rank} left no record: {self.words[-2000:]}"
        assert "done" in record, record["broken"]["words"]
        result: dict[str, Any] = record["done"]
        return result

    def broken(self, rank: int) -> str:
        record = self.record(rank)
        assert record is not None, f"rank {rank} left no record: {self.words[-2000:]}"
        return str(record["broken"]["words"])

    def stage(self, rank: int) -> str | None:
        path = self.folder / f"rank-{rank}.stage"
        return path.read_text() if path.exists() else None


def torchrun(folder: Path, ranks: int, probe: str, **params: Any) -> Left:
    command = [installation.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(installation.MAIN), "ranks", str(folder), "cpu", job(probe, params)]
    return _left(folder, command, {})


def by_hand(folder: Path, ranks: int, probe: str, **params: Any) -> Left:
    """As somebody else's launcher does: every process is told who it is, nobody is torchrun."""
    port = str(free_port())
    command = [installation.python(), str(installation.MAIN), "ranks", str(folder), "cpu", job(probe, params)]
    told = [
        {"PET_NNODES": str(ranks), "PET_NODE_RANK": str(rank), "K8S_MASTER_ADDR": "127.0.0.1"} for rank in range(ranks)
    ]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(command, stderr=pipe, text=True, env=installation.environment(MASTER_PORT=port, **variables))
        for variables in told
    ]
    try:
        words = [process.communicate(timeout=TIMEOUT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return Left(folder, max(process.returncode for process in started), "".join(words))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def job(probe: str, params: dict[str, Any]) -> str:
    return json.dumps({"probe": probe, "params": params})


def _left(folder: Path, command: list[str], variables: dict[str, str]) -> Left:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=installation.environment(**variables),
        timeout=TIMEOUT_S,
        check=False,
    )
    return Left(folder, done.returncode, done.stderr)


def _not_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")
