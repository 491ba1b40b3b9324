"""The page of JSON documents names every schema the code prints, and the fields they really have."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.model.subject import State
from tests.cli.fleet import Fleet, ago
from tests.docs.markdown import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "reference" / "json.md"
INTERFACES = ROOT / "src" / "gpukeeper" / "interfaces"
PRINTERS = {"as_json", "_print_json"}
RUN = "the report of a run"
LAUNCHED = "a run that an engine has"
NEW_FILE = "a file that does not exist"
MANIFEST = ROOT / "tests" / "unit" / "platforms" / "kubernetes" / "trainjob.yaml"
RULES = ROOT / "examples" / "policies" / "imports" / "kube-janitor-rules.yaml"
# How each document is made on a fleet in which one workload is due.
COMMANDS: dict[str, tuple[str, ...]] = {
    "observe": ("observe",),
    "observe-gpus": ("observe", "--gpus"),
    "observe-waste": ("observe", "--waste"),
    "plan": ("plan",),
    "explain": ("explain", "eval"),
    "explain-manifest": ("explain", "run-7", "--manifest", str(MANIFEST)),
    "workload-list": ("workload", "list"),
    "node-list": ("node", "list"),
    "node-may-use": ("node", "may-use", "GPU-7", "--user", "ann"),
    "node-register": ("node", "register"),
    "node-show": ("node", "show", "GPU-1"),
    "request": ("workload", "hold", "train", "--for", "1h"),
    "apply": ("apply", "--yes"),
    "stop-all": ("stop-all", "--yes"),
    "report": ("report",),
    "ledger-list": ("ledger", "list"),
    "ledger-show": ("ledger", "show", "1"),
    "ledger-totals": ("ledger", "totals"),
    "ledger-rotate": ("ledger", "rotate"),
    "ledger-status": ("ledger", "status"),
    "ledger-verify": ("ledger", "verify"),
    "ledger-backup": ("ledger", "backup", NEW_FILE),
    "policy-check": ("policy", "check"),
    "policy-show": ("policy", "show"),
    "policy-sentence": ("policy", "sentence"),
    "policy-try": ("policy", "try"),
    "policy-import": ("policy", "import", str(RULES), "--from", "kube-janitor"),
    "doctor": ("doctor",),
    "notify-test": ("notify", "test", "--admins"),
    "backtest": ("backtest", "synthetic:1/8/2", "--workers", "1"),
    "backtest-course": ("backtest", "synthetic:1/8/2", "--workload", "work-0001"),
    "backtest-decision": ("backtest", "synthetic:1/8/2", "--workload", "work-0001", "--at", "2026-01-05T11:00"),
    "advice": ("advise", "synthetic:1/8/2", "--workers", "1", "--horizon", "1h", "--sweep", "window=30m"),
    "demo": ("demo", "--days", "1", "--once"),
    "acceptance": ("accept", "--device", "simulated", "--check", "gemm"),
    "self-test": ("accept", "--self-test"),
    "accept-list": ("accept", "list"),
    "acceptance-run": ("accept", "--on", "simulated", "--option", "scripts=pass", "--option", "seconds=0"),
    "accept-runs": ("accept", "list", "--on", "simulated"),
    "accept-run-status": ("accept", "show", LAUNCHED, "--on", "simulated"),
    "accept-compare": ("accept", "compare", RUN, RUN),
    "accept-merge": ("accept", "merge", RUN),
    "preflight": ("accept", "preflight", "--on", "kubernetes"),
    "check-list": ("check", "list"),
    "check-show": ("check", "show", "gemm"),
}
# Tried out where their engine is: tests/real/postgres/test_cli.py.
NEEDS_POSTGRES = {"fleet-db-migrate", "fleet-db-machine", "fleet-db-status"}
# Tried out with a daemon that has a dashboard: tests/cli/test_login.py.
NEEDS_A_DASHBOARD = {"login", "logins"}
# Tried out on a real control plane: tests/real/kube/test_marks.py.
NEEDS_A_CLUSTER = {"accept-mark", "cluster-nodes", "node-quarantine", "node-return"}
# Tried out on a machine with systemd: tests/real/systemd/test_setup.py.
NEEDS_SYSTEMD = {"setup"}
# Tried out over ssh: tests/real/ssh/test_fleet.py.
NEEDS_SSH = {"fleet", "fleet-pass", "fleet-logs"}
NEEDS_A_LEDGER = {
    "ledger-status",
    "ledger-verify",
    "ledger-backup",
    "ledger-list",
    "ledger-show",
    "ledger-totals",
    "ledger-rotate",
}


def test_the_page_names_exactly_the_schemas_that_the_code_prints() -> None:
    assert set(_documented()) == _printed_by_the_code()


def test_every_schema_is_tried_out_below() -> None:
    elsewhere = NEEDS_POSTGRES | NEEDS_A_DASHBOARD | NEEDS_A_CLUSTER | NEEDS_SYSTEMD | NEEDS_SSH
    assert set(COMMANDS) | elsewhere == set(_documented())
    tried = (ROOT / "tests" / "real" / "postgres" / "test_cli.py").read_text()
    assert all(f"gpukeeper/{schema}/v1" in tried for schema in NEEDS_POSTGRES)
    tried = (ROOT / "tests" / "cli" / "test_login.py").read_text()
    assert all(f"gpukeeper/{schema}/v1" in tried for schema in NEEDS_A_DASHBOARD)
    tried = (ROOT / "tests/real/kube/test_marks.py").read_text()
    assert all(f"gpukeeper/{schema}/v1" in tried for schema in NEEDS_A_CLUSTER)
    tried = (ROOT / "tests/real/systemd/test_setup.py").read_text()
    assert all(f"gpukeeper/{schema}/v1" in tried for schema in NEEDS_SYSTEMD)
    tried = (ROOT / "tests/real/ssh/test_fleet.py").read_text()
    assert all(f"gpukeeper/{schema}/v1" in tried for schema in NEEDS_SSH)


@pytest.mark.parametrize("schema", COMMANDS)
def test_a_document_has_the_documented_fields(schema: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.ended("eval", days=2)
    fleet.ended("train", days=0.5)
    fleet.add("busy", state=State.RUNNING, started=ago(hours=1), devices=("GPU-7",))
    if schema in NEEDS_A_LEDGER:
        fleet.run("apply", "--yes")
    ran = fleet.run_cold(*_with_a_run(fleet, COMMANDS[schema]), "--json")  # each command once without shared imports
    assert ran.out, ran.err
    document = ran.json()
    assert document.pop("schema") == f"gpukeeper/{schema}/v1"
    assert _fields(document) == _documented()[schema]


def _with_a_run(fleet: Fleet, words: tuple[str, ...]) -> list[str]:
    """Where a report or a run is asked for, one is made first."""
    if LAUNCHED in words:
        run = fleet.run(*COMMANDS["acceptance-run"], "--keep-objects", "--json").json()["run"]
        return [run if word == LAUNCHED else word for word in words]
    if NEW_FILE in words:
        return [str(fleet.state.parent / "backup.tar") if word == NEW_FILE else word for word in words]
    if RUN not in words:
        return list(words)
    made = fleet.run(*COMMANDS["acceptance"], "--json").json()["report_folder"]
    return [made if word == RUN else word for word in words]


def _fields(document: dict[str, Any]) -> set[str]:
    """Top-level fields, and those of the entries of `places`."""
    found = set(document)
    if isinstance(document.get("places"), list):
        assert document["places"], "no place, so nothing to compare"
        found |= {f"places[].{name}" for name in document["places"][0]}
    return found


def _documented() -> dict[str, set[str]]:
    """By schema: the fields in its table."""
    sections = re.split(r"^## gpukeeper/([\w-]+)/v1$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    names, texts = sections[::2], sections[1::2]
    return {n: set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)) for n, text in zip(names, texts, strict=True)}


def _printed_by_the_code() -> set[str]:
    """The first argument of every call that prints a document."""
    return {
        node.args[0].value
        for path in INTERFACES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _called(node.func) in PRINTERS
        if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
