"""The pipelines in examples/ci: valid by the schemas of GitLab and GitHub, with commands that exist, and scripts that
fail when they must. The scripts run in a shell, with `gpukeeper` and `kubectl` that answer as told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from gpukeeper.__main__ import app
from tests.docs import commands
from tests.docs.markdown import ROOT

CI = ROOT / "examples" / "ci"
FILES = {
    "policy.gitlab-ci.yml": "vendor.gitlab-ci",
    "accept.gitlab-ci.yml": "vendor.gitlab-ci",
    "policy.github.yml": "vendor.github-workflows",
    "accept.github.yml": "vendor.github-workflows",
    "deploy.gitlab-ci.yml": "vendor.gitlab-ci",
    "deploy.github.yml": "vendor.github-workflows",
}
POLICIES = ["policy.gitlab-ci.yml", "policy.github.yml"]
ACCEPTS = ["accept.gitlab-ci.yml", "accept.github.yml"]
DEPLOYS = ["deploy.gitlab-ci.yml", "deploy.github.yml"]


@cache
def scripts(name: str) -> dict[str, str]:
    """Of every job or step that runs something, by its name or its id."""
    document: dict[str, Any] = YAML(typ="safe").load(CI / name)
    if "jobs" not in document:
        jobs = {job: one for job, one in document.items() if isinstance(one, dict) and "script" in one}
        # With `extends` or an anchor the same login stands before several scripts.
        return {job: "\n".join([*one.get("before_script", ()), *one["script"]]) for job, one in jobs.items()}
    steps = [(job, step) for job, one in document["jobs"].items() for step in one["steps"] if "run" in step]
    return {step.get("name", step.get("id", job)): step["run"] for job, step in steps}


def used(name: str) -> list[list[str]]:
    return [words for text in scripts(name).values() for words in commands.in_shell(text)]


def policy_commands() -> list[list[str]]:
    """Those that need no cluster, once each."""
    local = [words for name in POLICIES for words in used(name) if words[0] == "policy" and "/etc" not in words[-1]]
    return [words for place, words in enumerate(local) if words not in local[:place]]


def run(name: str, job: str, folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """As the runners do it: stop at the first failure. Nothing waits."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for program, body in {"sleep": "", **programs}.items():
        (bin_folder / program).write_text(f"#!/bin/sh\n{body}\n")
        (bin_folder / program).chmod(0o755)
    variables = {"NAMESPACE": "gpukeeper", "GPUS": "8", "WITHIN": "30m", "DIGEST": "abc123", "ONLY": "gpu01"}
    variables |= login_of(name, folder, key="a key", known_hosts="gpu01 ssh-ed25519 AAAA")
    files = {"GITHUB_OUTPUT": str(folder / "digest.env"), "GITHUB_STEP_SUMMARY": str(folder / "preview.txt")}
    environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}"} | variables | files
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", scripts(name)[job]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def login_of(name: str, folder: Path, *, key: str, known_hosts: str) -> dict[str, str]:
    """The variables with which a runner gives a login: files, or texts."""
    if "github" in name:
        return {"SSH_KEY": key, "KNOWN_HOSTS": known_hosts, "RUNNER_TEMP": str(folder)}
    files = {"SSH_KEY": folder / "key-of-the-runner", "KNOWN_HOSTS": folder / "hosts-of-the-runner"}
    for path, text in zip(files.values(), (key, known_hosts), strict=True):
        path.write_text(f"{text}\n")
    return {variable: str(path) for variable, path in files.items()}


def test_every_file_is_tested() -> None:
    assert {path.name for path in CI.glob("*.yml")} == set(FILES)


@pytest.mark.slow
@pytest.mark.parametrize("schema", sorted(set(FILES.values())))
def test_they_are_valid_by_the_schema_of_their_product(schema: str) -> None:
    files = [CI / name for name, of in FILES.items() if of == schema]
    program = Path(sys.executable).with_name("check-jsonschema")
    checked = subprocess.run([program, "--builtin-schema", schema, *files], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("name", FILES)
def test_every_command_exists_with_its_options(name: str) -> None:
    assert [wrong for words in used(name) if (wrong := commands.why_wrong(words))] == []


def test_a_command_or_an_option_that_does_not_exist_is_found() -> None:
    text = "kubectl exec deployment/gpukeeper -- gpukeeper plan --polcy x | cat\nif ! gpukeeper prune; then :; fi"
    first, second = (commands.why_wrong(words) for words in commands.in_shell(text))
    assert "--polcy" in first
    assert "no such command" in second


def test_they_use_what_a_pipeline_needs() -> None:
    for name in POLICIES:
        assert {"policy check", "policy try", "policy sentence"} <= {" ".join(words[:2]) for words in used(name)}
        assert "plan" in {words[0] for words in used(name)}
    assert [words[0] for name in ACCEPTS for words in used(name)] == ["accept", "accept"]
    for name in DEPLOYS:
        fleet = [(words[1], "--yes" in words, "--plan" in words) for words in used(name) if words[0] == "fleet"]
        assert fleet == [
            ("deploy", False, True),
            ("deploy", True, False),
            ("logs", False, False),
            ("status", False, False),
        ]


@pytest.mark.parametrize("words", policy_commands(), ids=" ".join)
def test_the_policy_commands_really_run(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples" / "policies" / "ci.yaml", "policy.yaml")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.stdout


@pytest.mark.parametrize("name", POLICIES)
def test_the_digest_of_the_policy_reaches_the_smoke_test(name: str, tmp_path: Path) -> None:
    policy = str(ROOT / "examples" / "policies" / "ci.yaml")
    shown = CliRunner().invoke(app, ["policy", "check", "--json", policy]).stdout
    (tmp_path / "shown.json").write_text(shown)
    done = run(name, "check", tmp_path, gpukeeper="cat shown.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "digest.env").read_text().lower() == f"digest={json.loads(shown)['digest']}\n"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("job", ["check", "preview"])
def test_an_invalid_policy_fails_the_job(name: str, job: str, tmp_path: Path) -> None:
    assert run(name, job, tmp_path, gpukeeper="exit 10").returncode == 10


@pytest.mark.parametrize("name", ACCEPTS)
@pytest.mark.parametrize("code", [0, 4, 5])
def test_the_job_has_the_result_of_the_verdict(name: str, code: int, tmp_path: Path) -> None:
    assert run(name, "accept", tmp_path, gpukeeper=f"exit {code}").returncode == code


@pytest.mark.parametrize("name", POLICIES)
def test_the_smoke_test_waits_for_the_policy_and_reads_the_plan(name: str, tmp_path: Path) -> None:
    kubectl = """printf '%s\\n' "$*" >> asked
case "$*" in *plan) exit 3 ;; esac
[ "$(wc -l < asked)" -lt 3 ] && echo "It is valid (digest old)." || echo "It is valid (digest abc123)." """
    done = run(name, "smoke", tmp_path, kubectl=kubectl)
    assert done.returncode == 3, "the code of the plan"
    assert len((tmp_path / "asked").read_text().splitlines()) == 4


@pytest.mark.parametrize("name", POLICIES)
def test_the_smoke_test_fails_if_the_policy_never_comes(name: str, tmp_path: Path) -> None:
    done = run(name, "smoke", tmp_path, kubectl='echo "policy.yaml is valid (digest old)."')
    assert done.returncode == 1
    assert "another policy than digest abc123" in done.stdout


@pytest.mark.parametrize("name", POLICIES)
def test_only_changes_of_the_policy_start_a_pipeline(name: str) -> None:
    document = YAML(typ="safe").load(CI / name)
    if name == "policy.github.yml":
        events = document.get("on", document.get(True))
        assert all("policy.yaml" in events[event]["paths"] for event in ("pull_request", "push"))
    else:
        jobs = [one for one in document.values() if isinstance(one, dict) and "script" in one]
        assert len(jobs) == 6
        assert all(rule["changes"] for one in jobs for rule in one["rules"])


@pytest.mark.parametrize("name", DEPLOYS)
def test_the_deployment_waits_for_a_person_and_for_the_plan(name: str) -> None:
    document = YAML(typ="safe").load(CI / name)
    job = document.get("jobs", document)["deploy"]
    assert job["needs"] in ("plan", ["plan"])
    assert job["environment"] == "production"
    if name == "deploy.gitlab-ci.yml":
        assert all(rule["when"] == "manual" and rule["changes"] for rule in job["rules"])
        return
    events = document.get("on", document.get(True))
    assert all("*.yaml" in events[event]["paths"] for event in ("pull_request", "push"))
    assert all(document["jobs"][one]["if"] == "github.event_name != 'pull_request'" for one in ("plan", "deploy"))


@pytest.mark.parametrize("name", DEPLOYS)
@pytest.mark.parametrize("code", [0, 3])
def test_a_server_that_is_not_deployed_fails_the_job_which_shows_the_logs(name: str, code: int, tmp_path: Path) -> None:
    answers = f'echo "$2 $*" >> asked; test "$2" = logs || exit {code}'
    assert run(name, "deploy", tmp_path, gpukeeper=answers).returncode == code
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["deploy", "logs"][: 1 if code == 0 else 2]
    assert all("--only gpu01" in line for line in asked)
    assert run(name, "verify", tmp_path, gpukeeper=f"exit {code}").returncode == code


@pytest.mark.parametrize("name", DEPLOYS)
@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_server_that_is_blocked_is_shown_and_does_not_end_the_pipeline(name: str, code: int, tmp_path: Path) -> None:
    done = run(name, "plan", tmp_path, gpukeeper=f"echo blocked; exit {code}")
    assert "blocked" in done.stdout
    allowed = YAML(typ="safe").load(CI / name)["plan"]["allow_failure"] if "gitlab" in name else {"exit_codes": 3}
    assert allowed == {"exit_codes": 3}
    assert done.returncode == (0 if code == 3 and "github" in name else code)


@pytest.mark.parametrize("name", DEPLOYS)
def test_every_policy_is_checked_and_one_that_is_invalid_fails_the_job(name: str, tmp_path: Path) -> None:
    for one in ("a.yaml", "b.yaml", "hosts.yaml"):
        (tmp_path / one).touch()
    assert run(name, "check", tmp_path, gpukeeper='echo "$3" >> asked').returncode == 0
    assert (tmp_path / "asked").read_text().split() == ["a.yaml", "b.yaml"]
    assert run(name, "check", tmp_path, gpukeeper='test "$3" = b.yaml || exit 10').returncode == 10
