"""The journal for other programs."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpukeeper.ledger.lines import FIELDS, csv_lines, event_type, json_lines, syslog_lines, tag_of
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Checkpoint, Complaint, Event, GpuChecked
from gpukeeper.model.gpu import CheckResult
from gpukeeper.model.subject import Memory, Ref
from tests.unit.ledger.examples import EVAL, EVERY_TYPE, NOW, TRAIN, closed, noticed, passed

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "ledger-schema.md"
NAMED = (
    closed(),
    closed(rule="max_runtime"),
    closed(action=Action.REMOVE, rule="finished"),
    closed(ref=TRAIN, action=Action.REMOVE, rule="finished"),
)


def exported(line: Event) -> dict[str, Any]:
    (written,) = json_lines([(7, line)])
    found: dict[str, Any] = json.loads(written)
    return found


def test_a_line_has_the_fields_other_programs_expect() -> None:
    """C15.6"""
    found = exported(closed(gpus_back=4, reason="idle for 31m"))
    assert tuple(found) == FIELDS
    assert found["timestamp"] == "2026-03-10T12:00:00Z"
    assert (found["user"], found["source"], found["schema_version"]) == ("ann", "gpukeeper/docker/node-3", 1)
    assert found["details"]["seq"] == 7
    assert found["details"]["workload"] == "docker/node-3/eval"
    assert found["details"]["reason"] == "idle for 31m"
    assert exported(passed())["source"] == "gpukeeper/docker/node-3"
    assert exported(Complaint(at=NOW, what="x"))["user"] == ""


@pytest.mark.parametrize("result", list(CheckResult))
def test_what_became_of_a_gpu_is_exported_by_its_old_name(result: CheckResult) -> None:
    """C11.3"""
    gpu = Ref("host", "node-3", "gpu", "GPU-0", "GPU-0")
    found = exported(GpuChecked(at=NOW, ref=gpu, result=result, reason="memory is back", workload="docker/node-3/eval"))
    assert found["event_type"] == "gpu.health_check"
    assert (found["details"]["result"], found["details"]["reason"]) == (result.value, "memory is back")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (NAMED[0], "maintenance.idle_kill"),
        (NAMED[1], "maintenance.runtime_kill"),
        (NAMED[2], "container.remove"),
        (NAMED[3], "workload.remove"),
        (closed(ref=Ref("docker", "a", "image", "x", "1"), action=Action.REMOVE), "workload.remove"),
        (closed(result=Result.STILL_THERE), "gpukeeper.outcome"),
        (closed(action=Action.REMOVE, result=Result.UNKNOWN), "gpukeeper.outcome"),
        (closed(rule="never_started"), "gpukeeper.outcome"),
        (noticed(), "gpukeeper.noticed"),
    ],
)
def test_only_what_was_seen_to_happen_is_called_a_kill_or_a_removal(line: Event, name: str) -> None:
    """C15.6"""
    assert event_type(line) == name


def test_the_documented_event_types_are_those_of_the_code() -> None:
    section = PAGE.read_text().split("## Event types in exports")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `([a-z._]+)` \|", section, re.MULTILINE)
    assert sorted(documented) == sorted({event_type(line) for line in (*EVERY_TYPE, *NAMED)} | {"gpukeeper.outcome"})


def test_the_documented_columns_are_those_of_the_code() -> None:
    from gpukeeper.ledger.lines import COLUMNS

    section = PAGE.read_text().split("## The journal")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)
    assert documented == ["seq", *COLUMNS]


_text = st.text(st.characters(codec="utf-8"), max_size=3000)


@given(_text, _text, _text)
def test_any_line_is_one_short_line_of_printable_text(name: str, owner: str, reason: str) -> None:
    """C15.6: below 4 KB, valid JSON, and nothing a terminal or a spreadsheet would obey."""
    line = closed(ref=Ref("docker", "a", "container", name, "1"), owner=owner, reason=reason)
    (written,) = json_lines([(1, line)])
    header, row = csv_lines([(1, line)])
    for text in (written, row):
        assert len(text.encode()) < 4096
        assert text.endswith("\n")
        assert text[:-1].isprintable()
    found = json.loads(written)
    if "cut" not in found["details"]:
        assert (found["details"]["ref"]["name"], found["details"]["reason"]) == (name, reason)
    assert header == ",".join(FIELDS) + "\n"
    (cells,) = csv.reader(io.StringIO(row))
    assert len(cells) == len(FIELDS)
    json.loads(cells[FIELDS.index("details")])
    assert not any(cell.lstrip().startswith(("=", "+", "-", "@")) for cell in cells)


def test_what_is_cut_is_named() -> None:
    """C15.6"""
    details = exported(closed(reason="x" * 9000))["details"]
    assert details["cut"] == ["reason"]
    assert details["reason"] == "x" * 120 + " [cut]"
    unseen = tuple(f"namespace {n}" for n in range(2000))
    assert exported(passed(unseen=unseen))["details"]["cut"] == ["unseen"]


def test_formulas_and_control_characters_are_harmless() -> None:
    """C15.6"""
    _, row = csv_lines([(1, noticed(Ref("docker", "a", "c", "\x1b[2J\u202e\x9b", "1")))])
    assert "\\u001b" in row
    line = closed(owner="=cmd|' /C calc'!A0")
    (cells,) = csv.reader(list(csv_lines([(1, line)]))[1:])
    assert cells[2] == "'=cmd|' /C calc'!A0"
    assert exported(line)["user"] == "=cmd|' /C calc'!A0"  # JSON is no spreadsheet


def test_a_checkpoint_is_exported_as_counts() -> None:
    line = Checkpoint(at=NOW, memories={str(n): Memory() for n in range(5000)}, present=(EVAL,))
    assert exported(line)["details"] == {"seq": 7, "memories": 5000, "present": 1, "open": 0}


def test_a_line_of_a_syslog_has_time_place_tag_and_what_happened() -> None:
    """C15.6: the tags that scripts already look for."""
    (idle,) = syslog_lines([(7, closed(reason="idle for 31m"))])
    head = "2026-03-10T12:00:00Z node-3 ds01-idle: maintenance.idle_kill reclaimed docker/node-3/eval user=ann: "
    assert idle == head + "idle for 31m\n"
    assert tag_of(closed(rule="max_runtime")) == "ds01-maxruntime"
    assert tag_of(closed(action=Action.REMOVE, rule="retention")) == "ds01-cleanup"
    assert {tag_of(line) for line in (noticed(), passed(), Complaint(at=NOW, what="x"))} == {"gpukeeper"}


@given(st.text(), st.text(max_size=6000))
@example("\x1b" * 300, "\x85" * 6000)
def test_any_line_of_a_syslog_is_one_short_line_of_printable_text(name: str, words: str) -> None:
    ref = Ref("docker", "node-3", "container", name, "id")
    for line in (closed(ref=ref, reason=words), Complaint(at=NOW, what=words)):
        (written,) = syslog_lines([(1, line)])
        assert len(written.encode()) <= 4096
        assert written.endswith("\n")
        assert written[:-1].isprintable()
