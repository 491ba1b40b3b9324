"""`gpukeeper policy`: what the user sees."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gpukeeper.interfaces.cli.policy import app
from gpukeeper.model.errors import PolicyError
from tests.cli.fleet import Fleet
from tests.docs.markdown import ROOT

GOOD = """\
preset: ds01
scope: {docker: {}}
groups: {researcher: {members: [ann]}}
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(GOOD)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_check_answers_a_valid_policy_with_its_sentence(policy: Path) -> None:
    result = run("check", policy)
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{policy} is valid (digest ")
    assert second.startswith("Dry run (mode plan): on docker everywhere; ")
    assert result.stderr == ""


def test_check_raises_every_problem_with_exit_code_10(policy: Path) -> None:
    policy.write_text("mod: plan\nscope: {docker: {}}\nloops: 0\n")
    result = run("check", policy)
    assert isinstance(result.exception, PolicyError)
    assert result.exception.exit_code == 10
    assert result.exception.problems == (
        f'{policy}:1: unknown setting "mod". Did you mean "mode"?',
        f"{policy}:3: loops: 0 is less than 1. Write 1 or more.",
    )


def test_check_gives_problems_to_programs(policy: Path) -> None:
    policy.write_text("scope: {docker: {}}\nloops: 0\n")
    result = run("check", policy, "--json")
    assert isinstance(result.exception, PolicyError)
    assert json.loads(result.stdout) == {
        "schema": "gpukeeper/policy-check/v1",
        "valid": False,
        "problems": [f"{policy}:2: loops: 0 is less than 1. Write 1 or more."],
    }


def test_warnings_are_talk_and_go_to_stderr(policy: Path) -> None:
    policy.write_text('mode: enforce\nscope: {kubernetes: {namespaces: ["*"]}}\n')
    result = run("check", policy)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: scope.kubernetes covers all namespaces")
    assert "warning:" not in result.stdout


def test_check_for_programs(policy: Path) -> None:
    answer = json.loads(run("check", "--policy", policy, "--json").stdout)
    assert (answer["schema"], answer["valid"], answer["problems"]) == ("gpukeeper/policy-check/v1", True, [])
    assert answer["source"] == str(policy)


def test_show_prints_plain_columns_when_nobody_watches(policy: Path) -> None:
    lines = run("show", "--policy", policy).stdout.splitlines()
    assert lines[0].split() == ["SETTING", "VALUE", "ORIGIN"]
    assert ["mode", "plan", "built-in"] in [line.split() for line in lines]
    assert ["groups.researcher.members", "ann", f"{policy}:3"] in [line.split() for line in lines]


def test_show_for_programs(policy: Path) -> None:
    answer = json.loads(run("show", "--policy", policy, "--json").stdout)
    assert answer["schema"] == "gpukeeper/policy-show/v1"
    assert {"setting": "loops", "value": 2, "origin": "built-in"} in answer["settings"]


def test_show_one_owner(policy: Path) -> None:
    """C8.10"""
    out = run("show", "--policy", policy, "--owner", "ann").stdout
    lines = [line.split() for line in out.splitlines()]
    assert out.startswith("ann is in researcher. A group's value replaces the class's, shorter or longer; of several")
    assert ["managed", "idle", "1h", "group", "researcher,", "preset", "ds01"] in lines
    assert ["managed", "idle_in_demand", "30m", "preset", "ds01"] in lines
    assert ["infrastructure", "untouchable", "true", "built-in"] in lines
    assert "No exemption applies to ann." in out
    assert ["demand.above", "80%", "built-in"] in lines
    assert ["holds.total", "1d", "built-in"] in lines


def test_show_one_owner_for_programs(policy: Path) -> None:
    answer = json.loads(run("show", "--policy", policy, "--owner", "ann", "--json").stdout)
    assert answer["schema"] == "gpukeeper/policy-show/v1"
    assert (answer["owner"], answer["groups"], answer["exemptions"]) == ("ann", ["researcher"], [])
    assert answer["classes"]["devcontainer"][0] == {"setting": "idle", "value": "none", "origin": "built-in"}


def test_show_one_section(policy: Path) -> None:
    lines = [line.split() for line in run("show", "retention", "--policy", policy).stdout.splitlines()]
    assert [line[0] for line in lines[1:]] == [
        f"retention.{name}" for name in ("succeeded", "failed", "stopped", "max")
    ]
    assert ["retention.max", "30d", "built-in"] in lines


def test_show_one_section_for_programs(policy: Path) -> None:
    answer = json.loads(run("show", "classes.managed", "--policy", policy, "--json").stdout)
    assert answer["section"] == "classes.managed"
    assert {row["setting"].rpartition(".")[0] for row in answer["settings"]} == {"classes.managed"}
    assert json.loads(run("show", "--policy", policy, "--json").stdout)["section"] is None


def test_show_one_section_of_one_owner(policy: Path) -> None:
    out = run("show", "classes.managed", "--policy", policy, "--owner", "ann").stdout
    assert {line.split()[0] for line in out.splitlines()[3:]} == {"managed"}
    assert "exemption" not in out
    answer = json.loads(run("show", "holds", "--policy", policy, "--owner", "ann", "--json").stdout)
    assert (answer["classes"], answer["demand"], len(answer["holds"])) == ({}, [], 3)
    assert "No exemption applies to ann.\n" in run("show", "exemptions", "--policy", policy, "--owner", "ann").stdout


def test_a_section_without_values_and_an_unknown_one(fleet: Fleet) -> None:
    empty = fleet.run("policy", "show", "exemptions")
    assert (empty.code, empty.out, empty.err) == (0, "", "exemptions is not set.\n")
    wrong = fleet.run("policy", "show", "retentoin")
    assert (wrong.code, wrong.out) == (2, "")
    assert 'unknown section "retentoin". Did you mean "retention"?\nSections: preset, mode, scope,' in wrong.err


def test_schema_is_json_for_editors() -> None:
    assert json.loads(run("schema").stdout)["title"] == "gpukeeper policy"


def test_sentence(policy: Path) -> None:
    out = run("sentence", "--policy", policy).stdout
    assert out.startswith("Dry run")
    answer = json.loads(run("sentence", "--policy", policy, "--json").stdout)
    assert answer["schema"] == "gpukeeper/policy-sentence/v1"
    assert answer["sentence"] + "\n" == out


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("__main__", {"pydantic", "ruamel.yaml", "msgspec"}), ("interfaces.cli.policy", {"pydantic", "ruamel.yaml"})],
)
def test_the_commands_are_listed_without_loading_what_they_need(module: str, heavy: set[str]) -> None:
    """`gpukeeper --help` must start fast, and so must the completion of options."""
    program = f"import sys, gpukeeper.{module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())


def test_an_expired_exemption_is_reported_by_check_show_and_plan(fleet: Fleet) -> None:
    fleet.policy.write_text("scope: {docker: {}}\nexemptions: [{owner: ann, reason: paper, until: 2020-09-01}]\n")
    said = f"{fleet.policy}:2: the exemption of ann (paper) ended "
    for words in (("policy", "check"), ("policy", "show"), ("plan",)):
        ran = fleet.run(*words)
        assert ran.code == 0
        assert said in ran.err, words
    assert said in fleet.run("policy", "check", "--json").json()["warnings"][0]


def test_try_prints_the_class_the_timeline_and_what_it_assumes(policy: Path) -> None:
    words = ("try", "--policy", policy, "--owner", "ann", "--running-for", "6h", "--idle-for", "20m")
    words = (*words, "--label", "ds01.managed=true")
    ran = run(*words)
    assert ran.exit_code == 0, ran.output
    rows = [line.split("  ") for line in ran.stdout.splitlines()]
    assert "class     managed (recognized by docker)" in ran.stdout
    assert "owner     ann (group researcher)" in ran.stdout
    assert "state     running for 6h, idle for 20m, 1 GPU" in ran.stdout
    (head,) = [n for n, row in enumerate(rows) if row[0].startswith("WHEN")]
    table = [" ".join(line.split()) for line in ran.stdout.splitlines()[head + 1 : head + 5]]
    assert table[0].startswith("in 28m warn 1 idle idle for 48m, allowed 1h; would be stopped at ")
    assert " UTC (in 12m), then deleted." in table[0]
    assert table[2].startswith("in 40m stop idle idle for 1h, allowed 1h")
    assert "The workload is then removed." in ran.stdout
    assert "  The workload stays idle from now on, by every signal." in ran.stdout
    assert ran.stderr == f"Policy: {policy} (ds01, mode plan).\n"
    answer = json.loads(run(*words, "--json").stdout)
    assert answer["schema"] == "gpukeeper/policy-try/v1"
    assert [one["action"] for one in answer["timeline"]] == ["warn", "warn", "stop", "remove"]
    assert (answer["class"], answer["groups"], answer["end"]) == (
        "managed",
        ["researcher"],
        "The workload is then removed.",
    )


def test_try_gives_the_reason_it_has_its_class(policy: Path) -> None:
    policy.write_text(GOOD + 'match: [{class: serving, image: "triton:*"}]\n')
    tried = ("try", "--policy", policy, "--owner", "ann")
    assert f"class     serving (by match[0], {policy}:4)" in run(*tried, "--image", "triton:24").stdout
    assert "class     docker (recognized by docker; no entry of match applies)" in run(*tried).stdout
    assert "class     managed (by --class)" in run(*tried, "--class", "managed").stdout


@pytest.mark.parametrize(
    ("environment", "minutes"), [("development", 10), ("staging", 60), ("production", 24 * 60), ("", 24 * 60)]
)
def test_the_example_has_a_ttl_for_each_environment(environment: str, minutes: int) -> None:
    """C5.6: 300 to 600 seconds, 3600 and 86400; what a minute before is kept is removed a minute later."""
    example = ROOT / "examples" / "policies" / "cluster-environments.yaml"
    words = ("--platform", "kubernetes", "--kind", "trainjob", "--outcome", "succeeded", "--environment", environment)
    for ended, action in ((minutes - 1, "keep"), (minutes + 1, "remove")):
        tried = run("try", "--policy", example, *words, "--ended-since", f"{ended}m", "--json")
        assert json.loads(tried.stdout)["decision"]["action"] == action, tried.stdout
    if environment:
        shown = run("show", f"environments.{environment}.succeeded", "--policy", example).stdout
        assert f"{example}:" in shown, "one source, with its line"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--state", "paused"), '--state "paused" is not one of: running, ended, created'),
        (("--outcome", "won"), '--outcome "won" is not one of: succeeded, failed, stopped'),
        (("--idle-for", "soon"), "--idle-for: "),
        (("--label", "=x"), '--label "=x" has no key'),
        (("--platform", "slurm"), "only docker and kubernetes have workloads"),
        (("--class", "managd"), 'Did you mean "managed"?'),
        (("--state", "running", "--outcome", "failed"), "describe ended work; this one is running"),
        (("--busy", "--idle-for", "2h"), "--busy and --idle-for cannot be combined"),
        (("--hold", "1h"), "--hold needs --owner"),
        (("--hold", "9d", "--owner", "bob"), "--hold: a hold may last 1d at most"),
    ],
)
def test_try_refuses_what_cannot_be(fleet: Fleet, words: tuple[str, ...], said: str) -> None:
    ran = fleet.run("policy", "try", *words)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_try_asks_no_platform_and_needs_no_ledger(fleet: Fleet) -> None:
    ran = fleet.run("policy", "try", "--outcome", "failed", GPUKEEPER_FLEET="folder:/nonexistent")
    assert ran.code == 0, ran.err
    assert "failed 0s ago, 1 GPU" in ran.out
    assert not fleet.state.exists()


def test_schedule_prints_a_file_for_each_program(policy: Path) -> None:
    policy.write_text(GOOD + 'schedule: {at: "0 2 * * *"}\n')
    line = run("schedule", "--policy", policy).stdout.splitlines()[-1]
    assert line == f"0 2 * * * root /usr/local/bin/gpukeeper apply --yes --policy {policy}"
    timer = run("schedule", "--policy", policy, "--format", "systemd", "--zone", "Europe/Berlin")
    assert "OnCalendar=*-*-* 02:00:00 Europe/Berlin\n" in timer.stdout
    assert "02:00 does not exist in Europe/Berlin" in timer.stderr
    job = run("schedule", "--policy", policy, "--format", "cronjob", "--zone", "Asia/Tokyo")
    assert "  timeZone: Asia/Tokyo\n" in job.stdout
    assert job.stderr == ""


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("--zone", "Europe/Berlin"), "crontab has no time zones"),
        (("--format", "systemd", "--zone", "Moon/Base"), '"Moon/Base" is not a time zone'),
        (("--format", "cronjob"), "schedule.every is 7m, which cronjob cannot express"),
    ],
)
def test_schedule_refuses_what_a_format_cannot_express(policy: Path, words: tuple[str, ...], refusal: str) -> None:
    policy.write_text(GOOD + "schedule: {every: 7m}\n")
    result = run("schedule", "--policy", policy, *words)
    assert result.stdout == ""
    assert refusal in str(result.exception)
