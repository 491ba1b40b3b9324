"""Completion as a shell asks for it: fast, silent, and without a query to any platform."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.fleet import Fleet
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

PROGRAM = (sys.executable, "-c", "from gpukeeper.__main__ import run; import sys; sys.argv[0] = 'gpukeeper'; run()")
HEAVY = ("rich", "pydantic", "ruamel.yaml", "gpukeeper.wiring", "gpukeeper.engine", "gpukeeper.platforms", "torch")


def asked(fleet: Fleet, line: str, shell: str = "bash", **env: str) -> tuple[list[str], str]:
    words = line.split(" ")
    told = {"_GPUKEEPER_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    told |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        PROGRAM, env=fleet.env(**told, **env), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return done.stdout.split(), done.stderr


@pytest.fixture
def seen(fleet: Fleet) -> Fleet:
    fleet.ended("train-1", days=0.1)
    fleet.ended("eval", days=0.1)
    assert fleet.run("apply", "--yes").code == 0
    return fleet


def test_workloads_sections_and_checks(seen: Fleet) -> None:
    assert asked(seen, "gpukeeper explain tr") == (["train-1"], "")
    assert asked(seen, "gpukeeper workload hold ") == (["eval", "train-1"], "")
    assert asked(seen, "gpukeeper policy show rete") == (["retention"], "")
    assert asked(seen, "gpukeeper setup host --preset d") == (["development", "ds01"], "")
    assert asked(seen, "gpukeeper check show mem") == (["memory_bandwidth", "memory_pattern"], "")
    assert asked(seen, "gpukeeper workload hold eval --suspends id") == (["idle"], "")
    assert asked(seen, "gpukeeper explain tr", shell="fish") == (["train-1"], "")


def test_no_platform_is_queried_and_no_file_is_needed(seen: Fleet) -> None:
    """The fleet is gone, the policy is broken: what the ledger knows is offered all the same."""
    seen.policy.write_text("nonsense: [")
    gone = {"GPUKEEPER_FLEET": "folder:/nonexistent", "DOCKER_HOST": "unix:///nonexistent"}
    assert asked(seen, "gpukeeper explain ev", **gone) == (["eval"], "")
    assert asked(seen, "gpukeeper explain ev", GPUKEEPER_STATE="/nonexistent") == ([], "")
    assert asked(seen, "gpukeeper accept show ", GPUKEEPER_STATE="/nonexistent") == ([], "")


def test_nothing_heavy_is_loaded(seen: Fleet) -> None:
    """Somebody waits at the prompt: what is loaded decides how long, on a quiet machine and on a crowded one."""
    program = (
        "import sys\n"
        "from gpukeeper import __main__\n"
        "from gpukeeper.interfaces.terminal import completion\n"
        "for name in ('workloads', 'runs', 'checks', 'sections', 'rules', 'line_types'):\n"
        "    getattr(completion, name)('')\n"
        "print(*sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=seen.env(), capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not [name for name in HEAVY if name in loaded]


def test_completion_can_be_installed(fleet: Fleet) -> None:
    assert "--install-completion" in fleet.run("--help").out
    shown = fleet.run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "COMPLETE=complete_bash" in shown.out
