"""A fleet of files, a ledger and a policy in a folder, and the real command run on them as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from gpukeeper.model.subject import Outcome, State
from gpukeeper.platforms.simulated.folder import Workload
from tests import forked

POLICY = """\
preset: development
mode: enforce
warnings: {require_delivery: false}
scope: {docker: {}}
admins: [root, ADMIN]
"""


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Fleet:
    def __init__(self, folder: Path, policy: str = POLICY) -> None:
        self.folder = folder / "node-1"
        self.second: Path | None = None
        self.folder.mkdir()
        self.state = folder / "state"
        self.policy = folder / "policy.yaml"
        self.write_policy(policy)

    def write_policy(self, text: str) -> None:
        self.policy.write_text(text.replace("ADMIN", _me()))

    def add(self, name: str, **facts: Any) -> None:
        facts = {"state": State.ENDED, "created": ago(days=9), "owner": "ann", **facts}
        (facts.pop("folder", self.folder) / f"{name}.json").write_bytes(msgspec.json.encode(Workload(**facts)))

    def ended(self, name: str, *, days: float, outcome: Outcome = Outcome.SUCCEEDED, **facts: Any) -> None:
        self.add(name, started=ago(days=days + 1), ended=ago(days=days), outcome=outcome, **facts)

    def with_second_place(self) -> Path:
        self.second = self.folder.parent / "node-2"
        self.second.mkdir()
        return self.second

    def lease_folder(self) -> Path:
        """As the command itself makes it."""
        self.run("pause")
        self.run("resume")
        return self.state / "leases"

    def state_of(self, name: str) -> str:
        return str(json.loads((self.folder / f"{name}.json").read_bytes())["state"])

    def names(self) -> set[str]:
        return {path.stem for path in self.folder.glob("*.json")}

    def env(self, **more: str) -> dict[str, str]:
        return forked.environment() | {
            "GPUKEEPER_FLEET": ":".join(["folder", str(self.folder), *([str(self.second)] if self.second else [])]),
            "GPUKEEPER_STATE": str(self.state),
            "GPUKEEPER_POLICY": str(self.policy),
            **more,
        }

    def run(self, *words: str, stdin: str | None = None, **env: str) -> Ran:
        return Ran(*forked.run("gpukeeper", words, self.env(**env), stdin))

    def run_cold(self, *words: str) -> Ran:
        """With only those modules of gpukeeper that the command imports."""
        return Ran(*forked.run("tests.cold", words, self.env()))

    def run_halting(self, point: str, name: str, *words: str, **env: str) -> Ran:
        """Killed at that point of the step on that workload."""
        return Ran(*forked.run("tests.halt", (point, name, *words), self.env(**env)))

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "gpukeeper", *words],
            env=self.env(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_ctrl_c,  # noqa: PLW1509 - one call, which takes no lock
        )

    def lines(self, *types: str) -> list[dict[str, Any]]:
        wanted = [word for kind in types for word in ("--type", kind)]
        found: list[dict[str, Any]] = self.run("ledger", "list", "--last", "1000", "--json", *wanted).json()["lines"]
        return found


def hear_ctrl_c() -> None:
    """Whoever runs the tests in the background of a shell has it ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ago(**span: float) -> datetime:
    return datetime.now(UTC) - timedelta(**span)


def _me() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
