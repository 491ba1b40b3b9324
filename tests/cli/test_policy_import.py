"""`gpukeeper policy import`: what the user sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.fleet import Fleet

EXAMPLES = Path(__file__).parents[2] / "examples" / "policies" / "imports"
RULES = EXAMPLES / "kube-janitor-rules.yaml"
SIMPLE = "rules:\n  - {id: all, resources: ['*'], jmespath: '@', ttl: 2d}\n"


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_the_policy_is_printed_and_the_rest_is_listed(fleet: Fleet) -> None:
    ran = fleet.run("policy", "import", "--from", "kube-janitor", str(RULES))
    assert ran.code == 3
    assert "mode: plan" in ran.out
    assert "rule require-a-team" in ran.err
    assert "# Not translated:" in ran.out


def test_a_written_policy_is_valid_and_never_replaces_a_file(fleet: Fleet, tmp_path: Path) -> None:
    target = tmp_path / "imported.yaml"
    words = ("policy", "import", "--from", "kube-janitor", str(RULES), "--output", str(target))
    assert fleet.run(*words).code == 3
    assert fleet.run("policy", "check", str(target)).code == 0
    written = target.read_text()
    again = fleet.run(*words)
    assert again.code == 2
    assert "exists. Nothing was written." in again.err
    assert target.read_text() == written


def test_a_complete_translation_ends_with_0(fleet: Fleet, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(SIMPLE)
    ran = fleet.run("policy", "import", "--from", "kube-janitor", str(rules), "--running")
    assert (ran.code, ran.err) == (0, "")


def test_limits_of_ds01_become_classes_of_a_docker_host(fleet: Fleet, tmp_path: Path) -> None:
    limits = tmp_path / "resource-limits.yaml"
    limits.write_text("defaults: {idle_timeout: 0.5h, max_runtime: 24h, memory: 32g}\n")
    ran = fleet.run("policy", "import", "--from", "ds01", str(limits))
    assert ran.code == 3
    assert "idle: 30m  # defaults.idle_timeout" in ran.out
    assert "gpukeeper sets no quotas (memory)" in ran.err
    assert fleet.run("policy", "import", "--from", "ds01", str(limits), "--running").code == 2


def test_the_files_beside_the_limits_are_read_and_one_that_cannot_be_read_is_an_error(
    fleet: Fleet, tmp_path: Path
) -> None:
    limits = tmp_path / "resource-limits.yaml"
    limits.write_text("defaults: {idle_timeout_h: 0.5}\ngroups: {student: {}, faculty: {idle_timeout_h: 2}}\n")
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "faculty.members").write_text("ann  # professor\n")
    (tmp_path / "lifecycle-exemptions.yaml").write_text(
        "exemptions: [{username: bob, exempt_from: [idle_timeout_h], reason: thesis, expires_on: null}]\n"
    )
    ran = fleet.run("policy", "import", "--from", "ds01", str(limits))
    assert ran.code == 3
    assert "members: [ann]  # faculty" in ran.out
    assert "{owner: bob, rules: [idle], reason: thesis}  # lifecycle-exemptions.yaml" in ran.out
    assert "there is no user-overrides.yaml beside it" in ran.err
    (tmp_path / "user-overrides.yaml").mkdir()
    refused = fleet.run("policy", "import", "--from", "ds01", str(limits))
    assert (refused.code, refused.out) == (2, "")
    assert "user-overrides.yaml could not be read" in refused.err


def test_json_has_the_policy_and_the_list(fleet: Fleet) -> None:
    ran = fleet.run("policy", "import", "--from", "kube-janitor", str(RULES), "--json")
    document = json.loads(ran.out)
    assert (ran.code, ran.err) == (3, "")
    assert document["policy"].startswith("# Imported from the rules of kube-janitor")
    assert {"where", "what", "why", "todo"} == set(document["not_translated"][0])


def test_its_flags_are_options(fleet: Fleet, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(SIMPLE)
    flags = ("--include-namespaces", "lab,temp", "--exclude-namespaces", "temp", "--exclude-resources", "jobs")
    ran = fleet.run("policy", "import", "--from", "kube-janitor", str(rules), *flags)
    assert "namespaces: [lab, temp]" in ran.out
    assert "{platform: kubernetes, namespace: temp, class: janitor-excluded}" in ran.out
    assert "{platform: kubernetes, kind: job, class: janitor-excluded}" in ran.out


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"rules:\n  - id: A\n", ":2: rule 1:"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"x" * (1024 * 1024 + 1), "is larger than 1024 KiB"),
        (None, "could not be read: No such file"),
    ],
)
def test_a_bad_file_is_refused(fleet: Fleet, tmp_path: Path, content: bytes | None, expected: str) -> None:
    rules = tmp_path / "rules.yaml"
    if content is not None:
        rules.write_bytes(content)
    ran = fleet.run("policy", "import", "--from", "kube-janitor", str(rules))
    assert (ran.code, ran.out) == (2, "")
    assert expected in ran.err


def test_an_empty_selection_is_refused(fleet: Fleet) -> None:
    ran = fleet.run("policy", "import", "--from", "kube-janitor", str(RULES), "--include-namespaces", ",")
    assert ran.code == 2
    assert "--include-namespaces is empty" in ran.err


def test_an_unknown_tool_is_refused(fleet: Fleet) -> None:
    assert fleet.run("policy", "import", "--from", "cron", str(RULES)).code == 2


def test_a_place_that_cannot_be_written_is_reported(fleet: Fleet, tmp_path: Path) -> None:
    words = ("policy", "import", "--from", "kube-janitor", str(RULES), "--output", str(tmp_path / "no" / "x.yaml"))
    ran = fleet.run(*words)
    assert ran.code == 1
    assert "could not be written" in ran.err
