"""Pages that the checklist promises are there and say what they must."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from tests.docs import generate, markdown, shell
from tests.docs.commands import why_not_there, why_wrong
from tests.docs.markdown import ROOT
from tests.real.docker import fixtures as docker_fixtures
from tests.real.kube import fixtures as kube_fixtures

DOCS = ROOT / "docs"
RAY = DOCS / "explanation" / "what-ray-tidies.md"
WATCH = DOCS / "how-to" / "watch-disk-and-ray.md"


def rows(page: str) -> list[list[str]]:
    lines = re.findall(r"^\|(.+)\|$", (DOCS / page).read_text(), re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize(
    ("where", "limit"),
    [
        ("university HPC", "5 h at zero"),
        ("Kubernetes", "5–10 % over a window"),
        ("GitHub Codespaces", "30 min"),
        ("JupyterHub", "60–120 min"),
        ("gpukeeper", "5 h below 5 %"),
    ],
)
def test_idle_limits_of_others_are_given_for_comparison(where: str, limit: str) -> None:
    """C8.7"""
    assert [where, limit] in [row[:2] for row in rows("explanation/what-idle-means.md")]


def test_what_ray_tidies_and_what_not_is_reported_of_everything_it_writes() -> None:
    """C10.7: for each kind of file whether Ray tidies it, and what gpukeeper does."""
    found = [row for row in rows("explanation/what-ray-tidies.md") if len(row) == 3]
    told = " ".join(row[0] for row in found)
    for kind in ("session_*", "spilled objects", "runtime_resources", "logs of ended workers", "tmp*", "idle"):
        assert kind in told
    assert all(row[1] and row[2] for row in found), "both columns are filled"
    text = RAY.read_text()
    assert "above 10 GB per kind" in text, "what Ray evicts itself"
    assert "RAY_RUNTIME_ENV_<KIND>_CACHE_SIZE_GB" in text


@pytest.mark.parametrize(
    ("heading", "words"),
    [
        ("gpukeeperpassmissing", ["systemctl status gpukeeper", "gpukeeper doctor", "ledger list --errors"]),
        (
            "rayworkerlargetmpdirectory",
            ["gpukeeper plan --platform ray --verbose", "in use", "the policy's mode is plan"],
        ),
        ("no-alert-fires-although-it-should", ["Target", "Rules", "Metric", "Reload"]),
    ],
)
def test_there_is_help_when_it_goes_wrong(heading: str, words: list[str]) -> None:
    """C17.1: the pass does not run, temporary files still grow, alerts are silent."""
    assert heading in markdown.anchors(WATCH)
    sections = re.split(r"^### ", WATCH.read_text(), flags=re.MULTILINE)
    (section,) = [one for one in sections if one.splitlines()[0].lower().replace(" ", "-") == heading]
    assert [word for word in words if word not in section] == []


def test_what_an_empty_dashboard_says_is_explained() -> None:
    """C17.1: every sentence that a page shows instead of content, as the template has it."""
    page = (DOCS / "how-to" / "troubleshoot.md").read_text()
    templates = ROOT / "src/gpukeeper/interfaces/web/templates"
    pages = "".join((templates / f"{name}.html").read_text() for name in ("fleet", "workloads", "usage", "history"))
    said = re.findall(r"^\| ([A-Z][^|]+\.) \|", page, re.MULTILINE)
    assert len(said) == 6
    assert [one for one in said if one not in pages] == []
    assert "gpukeeper_info" in page


def test_the_ledger_is_listed_by_its_last_hundred_lines() -> None:
    """C15.3"""
    verb = dict(generate.verbs())["ledger list"]
    (last,) = [one.default for one in verb.params if "--last" in one.opts]
    assert last == 100


def test_every_command_of_every_page_is_one() -> None:
    """Parsed as the command line does; nothing is run. Words in capitals stand for a name."""
    found = [(path, words) for path in markdown.files() for words in markdown.commands(path)]
    assert len(found) > 100
    assert [f"{path.relative_to(ROOT)}: {why}" for path, words in found if (why := why_wrong(words))] == []
    named = [(path, words) for path in markdown.files() for words in markdown.named_commands(path)]
    assert len(named) > 300
    assert [f"{path.relative_to(ROOT)}: {why}" for path, words in named if (why := why_not_there(words))] == []


def test_the_guides_name_what_the_replaced_systems_have() -> None:
    """Labels, variables and flags that their users look for."""
    text = (DOCS / "how-to" / "migrate-from-other-tools.md").read_text()
    labels = ("gpu-acceptance-test", "gpu-cluster-test", "gpu-accept-daemon", "gpu-accept-ddp", "cleanup=auto")
    variables = ("QUICK", "VERBOSE", "REPORT_DIR", "TRAIN_SMOKE", "EPOCHS", "STEPS", "GPUS_PER_NODE", "DRY_RUN")
    names = ("ray_tmp_*", "summary.json", "ddp_tests_result.json", "ttlSecondsAfterFinished", "--skip-multinode")
    assert [one for one in (*labels, *variables, *names) if one not in text] == []


def test_the_examples_of_tests_on_engines_use_fixtures_and_helpers_that_exist() -> None:
    """Their imports are executed; the tests are not."""
    examples = shell.blocks(DOCS / "how-to" / "test-on-a-real-engine.md", "python")
    for text, fixtures in zip(examples, (docker_fixtures, kube_fixtures), strict=True):
        defined: dict[str, Any] = {}
        exec(compile(text, "test-on-a-real-engine.md", "exec"), defined)
        (test,) = [value for name, value in defined.items() if name.startswith("test_")]
        marked = [name for mark in getattr(test, "pytestmark", ()) for name in mark.args]
        assert [name for name in (*inspect.signature(test).parameters, *marked) if not hasattr(fixtures, name)] == []
