"""The alert rules in examples/prometheus fire when they should, not at the border, and resolve; each has a runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ruamel.yaml import YAML

from gpukeeper.config.load import load_text
from tests import engines
from tests.docs import generate, markdown
from tests.docs.markdown import ROOT
from tests.patience import PATIENCE

EXAMPLES = ROOT / "examples" / "prometheus"
ALERTS = EXAMPLES / "ray-alerts.yaml"
RULES = {rule["alert"]: rule for group in YAML(typ="safe").load(ALERTS)["groups"] for rule in group["rules"]}
NODE = 'instance="node-1:9101",place="node-1",platform="ray",node="ray-worker-1"'
DISK = f'{NODE},disk="/"'
HOST = 'instance="node-1:9101",place="node-1",platform="host",node="",disk="/"'
HERE = '{instance="node-1:9101"}'
PASSES = {f"gpukeeper_last_pass_timestamp_seconds{HERE}": "0+60x300"}
GIB = 2**30


def promtool(*arguments: str | Path) -> None:
    engines.require("promtool", engines.has_promtool())
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_alerts_and_the_configuration() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", ALERTS)
    promtool("check", "config", EXAMPLES / "prometheus.yaml")


def temporary(values: str) -> dict[str, str]:
    """Per cent of a disk of 100 GiB that temporary files of a worker take, minute by minute."""
    return {
        f"gpukeeper_node_temporary_bytes{{{NODE}}}": scaled(values),
        f"gpukeeper_disk_size_bytes{{{DISK}}}": f"{100 * GIB}x300",
        # Other nodes and disks of the same machine, which must not be mixed up with it.
        f"gpukeeper_node_temporary_bytes{{{NODE.replace('worker-1', 'worker-2')}}}": f"{GIB}x300",
        f"gpukeeper_disk_size_bytes{{{DISK.replace('worker-1', 'worker-2')}}}": f"{100 * GIB}x300",
        f"gpukeeper_disk_size_bytes{{{HOST}}}": f"{GIB}x300",
        f"gpukeeper_disk_size_bytes{{{HOST.replace('/', '/data')}}}": f"{GIB}x300",
    }


def taken(values: str) -> dict[str, str]:
    """Share of a worker's disk that is used."""
    return {f"gpukeeper_disk_used_ratio{{{DISK}}}": values}


def scaled(values: str) -> str:
    """Per cent of 100 GiB, in the words of promtool."""
    return re.sub(r"(\d+)x", lambda found: f"{int(found[1]) * GIB}x", values)


def used(values: str, series: str = "disk_used_ratio") -> dict[str, str]:
    return {f"gpukeeper_{series}{{{HOST}}}": values}


LARGE, CRITICAL = "RayWorkerLargeTmpDirectory", "RayWorkerCriticalTmpDirectory"
HIGH, LOW = "RayWorkerDiskUsageHigh", "RayWorkerDiskCritical"
FULL, ALMOST = "GpukeeperDiskTooFull", "GpukeeperDiskCritical"
# Story, series, and which alerts fire after so many minutes. 29 minutes of one value are its minutes 0 to 29.
STORIES: list[tuple[str, dict[str, str], dict[int, set[str]]]] = [
    ("half of the disk is the border", temporary("50x300"), {60: set()}),
    ("more than half", temporary("51x29 49x200"), {9: set(), 10: {LARGE}, 29: {LARGE}, 31: set()}),
    ("80 per cent is the border", temporary("80x300"), {60: {LARGE}}),
    ("more than 80", temporary("81x29 10x200"), {4: set(), 5: {CRITICAL}, 10: {LARGE, CRITICAL}, 31: set()}),
    ("30 per cent free is the border", taken("0.7x300"), {60: set()}),
    ("less than 30", taken("0.71x29 0.7x200"), {4: set(), 5: {HIGH}, 31: set()}),
    ("15 per cent free is the border", taken("0.85x300"), {60: {HIGH, FULL}}),
    ("less than 15", taken("0.86x29 0.6x200"), {1: set(), 2: {LOW}, 5: {HIGH, LOW}, 31: set()}),
    ("a disk at 80 per cent", used("0.8x300"), {60: set()}),
    ("a disk above 80", used("0.81x29 0.7x200"), {14: set(), 15: {FULL}, 31: set()}),
    ("a disk above 90", used("0.91x29 0.7x200"), {4: set(), 5: {ALMOST}, 15: {FULL, ALMOST}, 31: set()}),
    ("inodes above 90", used("0.91x300", "disk_inodes_used_ratio"), {60: {FULL, ALMOST}}),
    ("deleted files, 10 GB", used("10000000000x300", "held_open_bytes"), {60: set()}),
    ("deleted files, more", used("10000000001x40 0x200", "held_open_bytes"), {30: {"GpukeeperHeldOpen"}, 42: set()}),
    ("not measured", {'gpukeeper_not_measured{what="busy"}': "1x70 0x200"}, {60: {"GpukeeperNotMeasured"}, 72: set()}),
    ("six hours overdue", {"gpukeeper_oldest_overdue_seconds": "21600x300"}, {60: set()}),
    ("more", {"gpukeeper_oldest_overdue_seconds": "21601x40 0x200"}, {30: {"GpukeeperOverdue"}, 42: set()}),
    ("five came to nothing", {'gpukeeper_failed_total{kind="tree",result="refused"}': "0x10 5x300"}, {60: set()}),
    (
        "again and again",
        {'gpukeeper_failed_total{kind="tree",result="refused"}': "0+1x60 60x300"},
        {60: {"GpukeeperFailing"}, 200: set()},
    ),
]
MISSING = {"GpukeeperPassMissing"}
SILENCE: list[tuple[str, dict[str, str], dict[int, set[str]]]] = [
    ("nothing is scraped", {}, {9: set(), 10: MISSING}),
    ("passes happen", PASSES, {200: set()}),
    (
        "passes stopped, and go on",
        {f"gpukeeper_last_pass_timestamp_seconds{HERE}": "0x60 3660+60x200"},
        {55: set(), 56: MISSING, 62: set()},
    ),
    (
        "one of two hosts is gone",
        {
            **PASSES,
            'gpukeeper_last_pass_timestamp_seconds{instance="node-2:9101"}': "0+60x30",
        },
        {30: set(), 70: MISSING},
    ),
    (
        "a daemon that never finished a pass",
        {**PASSES, 'gpukeeper_info{instance="node-2:9101"}': "1x300"},
        {9: set(), 10: MISSING},
    ),
    (
        "an operator that stands by",
        {
            **PASSES,
            'gpukeeper_info{instance="pod-2:8080"}': "1x300",
            'gpukeeper_leader{instance="pod-2:8080"}': "0x300",
        },
        {60: set()},
    ),
]


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    stories = [*((story, {**PASSES, **series}, firing) for story, series, firing in STORIES), *SILENCE]
    tests = [
        {
            "name": story,
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            # 1: fires, 0: does not; the annotations are not compared this way.
            "promql_expr_test": [
                {
                    # promtool shows this, and not the name of a test.
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) > bool 0 or vector(0) # {story}',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"value": float(name in alerts), "labels": "{}"}],
                }
                for minute, alerts in firing.items()
                for name in RULES
            ],
        }
        for story, series, firing in stories
    ]
    file = tmp_path / "test.yaml"
    with file.open("w") as out:
        YAML(typ="safe").dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}, out)
    promtool("test", "rules", file)


def test_rules_are_evaluated_every_minute_and_those_of_ray_wait_as_long_as_they_always_did() -> None:
    """C15.4"""
    groups = YAML(typ="safe").load(ALERTS)["groups"]
    assert {group["interval"] for group in groups} == {"1m"}
    assert [RULES[name]["for"] for name in (LARGE, CRITICAL, HIGH, LOW)] == ["10m", "5m", "5m", "2m"]


def test_every_alert_has_a_story_in_which_it_fires() -> None:
    told = {name for _, _, firing in [*STORIES, *SILENCE] for names in firing.values() for name in names}
    assert told == set(RULES)


def test_an_alert_shows_what_to_do_and_where_that_is_written() -> None:
    """C15.4"""
    wrong = []
    for name, rule in RULES.items():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        parts = {
            "severity": rule["labels"]["severity"] in {"info", "warning", "critical"},
            "category": rule["labels"]["category"] in {"ray", "disk", "gpukeeper"},
            "annotations": set(rule["annotations"]) == {"summary", "description", "impact", "action", "runbook"},
            "runbook": anchor == name.lower() and anchor in markdown.anchors(ROOT / page),
        }
        wrong += [f"{name}: {part}" for part, is_right in parts.items() if not is_right]
    assert not wrong, f"correct them in {ALERTS.name}: {wrong}"


def test_the_policies_on_the_page_are_valid() -> None:
    page = (ROOT / "docs" / "how-to" / "watch-disk-and-ray.md").read_text()
    found = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    for text in found:
        assert load_text(text).warnings == ()


def test_the_page_lists_every_alert_with_its_severity() -> None:
    page = (ROOT / "docs" / "how-to" / "watch-disk-and-ray.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(#\w+\) \| (.+) \| (\w+) \|$", page, re.MULTILINE)
    assert {name: severity for name, _, severity in rows} == {
        name: rule["labels"]["severity"] for name, rule in RULES.items()
    }
    assert not [name for name, when, _ in rows if name.startswith("Ray") and f"for {RULES[name]['for']}" not in when]


def test_the_units_start_verbs_and_flags_that_exist() -> None:
    units = sorted((ROOT / "examples" / "systemd").glob("*.service"))
    assert units
    for unit in units:
        (line,) = re.findall(r"^ExecStart=\S+/gpukeeper (.+)$", unit.read_text(), re.MULTILINE)
        verb, *words = line.split()
        flags = {name for one in dict(generate.verbs())[verb].params for name in one.opts}
        assert {word for word in words if word.startswith("--")} <= flags, unit.name


def test_no_rule_names_a_host() -> None:
    """C15.4: addresses were written into rules. Which host it is comes from the labels of a series."""
    by_kind = {"GpukeeperOverdue"}  # of all hosts that tell it; the series has the host
    address = re.compile(r"instance=|\d+\.\d+\.\d+\.\d+|\.lab\b|:9\d\d\d\b")
    fixed = [name for name, rule in RULES.items() if address.search(re.sub(r" *= *", "=", rule["expr"]))]
    assert not fixed, f"remove the host from expr: {fixed}"
    labels = {name: re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]) for name, rule in RULES.items()}
    silent = [name for name in RULES if "instance" not in labels[name] and name not in by_kind]
    assert not silent, f"name $labels.instance in the summary: {silent}"
