"""The verdict field of a report is a claim: what counts is what its findings, coverage and machine say."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from gpukeeper.acceptance.recompute import PASSED, recomputed
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import formats, merge
from gpukeeper.acceptance.reports.store import MANIFEST, ReportFolder, load_file
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.reports import altered

ACCEPTED = {Grade.PASS, Grade.WARN}
PARTS = {"only one GPU asked for", "only one check asked for", "a check left out", "a self-test"}  # merge refuses these
HONEST: tuple[dict[str, object], ...] = (
    *({}, {"slow": {0: 0.1}}, {"flip": (0,)}, {"training": (0,)}, {"memory": (0,)}, {"missing": 1}, {"throttle": (0,)}),
    *({"wrong_collective": True}, {"hang": (0,)}, {"hang": {1: "collectives"}}, {"broken": (0,)}, {"xid": (0,)}),
    *({"ecc": (0,)}, {"foreign": (0,)}, {"links_down": (0,)}, {"slow_link": (0,)}),
)


@pytest.mark.parametrize("faults", HONEST, ids=str)
@pytest.mark.parametrize("gpus", [1, 8])
def test_a_report_that_nobody_changed_comes_back_as_it_is(gpus: int, faults: dict[str, object]) -> None:
    report = altered.run(gpus, within_s=300.0, **faults)
    assert recomputed(report) == report


def test_a_good_report_is_accepted(tmp_path: Path) -> None:
    """Else the altered ones below would prove nothing."""
    report = load_file(altered.put(tmp_path / "run", altered.good()) / formats.REPORT)
    assert (report.verdict, merge.merge([report]).verdict) == (Grade.PASS, Grade.PASS)


@pytest.mark.parametrize("name", altered.NAMES)
def test_an_altered_report_is_never_accepted(name: str, tmp_path: Path) -> None:
    folder = altered.put(tmp_path / "run", altered.altered(name))
    report = load_file(folder / formats.REPORT)
    assert merge.merge([report]).verdict not in ACCEPTED
    (entry,) = ReportFolder(tmp_path).list()
    assert entry.verdict is report.verdict
    if name not in PARTS:
        assert report.verdict not in ACCEPTED


@pytest.mark.parametrize("name", ["a FAIL that says PASS", "a FAIL whose verdict field says WARN", "a FAIL inside"])
def test_a_failure_inside_is_a_failure(name: str) -> None:
    report = formats.read_report(altered.altered(name), "report.json")
    assert report.verdict is Grade.FAIL
    assert any(one.code == "report-verdict" for one in report.findings)
    said = "WARN" if "WARN" in name else "PASS"
    assert f"The verdict of the report is {said}, its findings give FAIL." in {
        one.message.partition(" Test")[0] for one in report.findings
    }


@pytest.mark.parametrize("name", altered.GOOD)
def test_a_worse_verdict_in_the_file_stays(name: str) -> None:
    """Evidence that is gone never makes it better."""
    report = json.loads(altered.altered(name))
    report["verdict"] = "FAIL"
    assert formats.read_report(json.dumps(report).encode(), "report.json").verdict is Grade.FAIL


def test_missing_gpus_are_a_failure_though_no_finding_reports_it() -> None:
    report = formats.read_report(altered.altered("8 expected and 1 present"), "report.json")
    assert report.verdict is Grade.FAIL
    assert "gpus-missing" in {one.code for one in report.findings}


def test_tallies_are_of_gpus_that_are_there_and_as_bad_as_their_findings() -> None:
    report = formats.read_report(altered.altered("a FAIL that says PASS"), "report.json")
    assert [one.verdict for one in report.tallies] == [Grade.FAIL if n == 2 else Grade.PASS for n in range(8)]
    gone = formats.read_report(altered.altered("findings of other GPUs"), "report.json")
    assert {one.gpu for one in gone.tallies} == {gpu.uuid for gpu in gone.machine.gpus}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), "no readable MANIFEST.sha256 next to it"),
        (lambda folder: (folder / MANIFEST).write_text(""), "is not in the MANIFEST.sha256 next to it"),
        (
            lambda folder: (folder / "report.json").write_bytes((folder / "report.json").read_bytes() + b" "),
            "was changed after it was written",
        ),
    ],
)
def test_a_report_that_its_manifest_does_not_vouch_for_is_inconclusive(
    damage: object, said: str, tmp_path: Path
) -> None:
    folder = altered.put(tmp_path / "run", altered.good())
    damage(folder)  # type: ignore[operator]
    report = ReportFolder(tmp_path).load("run", samples=False)
    assert report.verdict is Grade.INCONCLUSIVE
    assert said in report.reason


def test_codes_of_a_pass_end_as_a_reader_of_reports_expects() -> None:
    reports: list[Report] = [altered.run(8, within_s=1800.0), altered.run(1)]
    codes = {one.code for report in reports for one in report.findings if one.verdict is Grade.PASS}
    assert {code for code in codes if not code.endswith(PASSED)} == set()


def test_removing_any_single_finding_never_makes_a_failure_acceptable() -> None:
    """Whichever finding of a failed run is cut out, with every verdict field set to PASS."""
    report = msgspec.json.decode(altered.failed(), type=Report)
    good = msgspec.structs.replace(
        report,
        verdict=Grade.PASS,
        tallies=tuple(msgspec.structs.replace(one, verdict=Grade.PASS) for one in report.tallies),
    )
    for cut in report.findings:
        left = tuple(one for one in report.findings if one is not cut)
        assert recomputed(msgspec.structs.replace(good, findings=left)).verdict not in ACCEPTED, cut.code
