"""A report is its JSON: what is written is what is read, and nothing else is taken for one."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import formats
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.reports import examples


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_what_is_written_is_read_back(name: str) -> None:
    """C4.7: one record; the views are made of it."""
    report = examples.EXAMPLES[name]()
    read = formats.decode_report(formats.report_json(report), "report.json")
    samples = formats.read_samples(formats.samples_json(report), "samples.json")
    assert formats.with_samples(read, samples, "samples.json") == report


def test_samples_are_in_the_side_file_alone() -> None:
    report = examples.eight_gpus()
    lean = formats.decode_report(formats.report_json(report), "report.json")
    assert not lean.timeline
    assert not lean.records
    assert lean.findings == report.findings


def test_unknown_facts_stay_unknown() -> None:
    read = formats.decode_report(formats.report_json(examples.one_good_gpu()), "report.json")
    assert isinstance(read.machine.environment["fabric_manager"], Unknown)
    assert read.machine.environment["nccl_tests"] is None


def test_a_figure_that_is_no_number_becomes_words_and_no_figure() -> None:
    found = examples.finding(
        "gemm", None, Grade.FAIL, value=math.nan, samples=(1.0, math.nan, math.inf), unit="TFLOP/s"
    )
    read = formats.decode_report(formats.report_json(examples.report([], [found])), "report.json")
    assert read.findings[0].value is None
    assert read.findings[0].samples == (1.0,)
    assert read.findings[0].evidence["not_finite"] == ["nan", "inf"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not an acceptance report"),
        (b"not json", "not an acceptance report"),
        (b"[1, 2]", "not an acceptance report"),
        (b'{"a": 1}', "it has no schema"),
        (b'{"schema": "somebody/else"}', "somebody/else"),
        (b'{"schema": "gpukeeper/acceptance/v9"}', "the version that wrote it"),
        (b'{"schema": "gpukeeper/acceptance/v1", "run": 7}', "damaged"),
    ],
)
def test_what_is_no_report_of_this_version_is_refused_with_a_sentence(text: bytes, words: str) -> None:
    with pytest.raises(KeeperError, match=words) as told:
        formats.read_report(text, "some/report.json")
    assert "some/report.json" in str(told.value)


def test_a_report_cut_off_in_the_middle_is_refused() -> None:
    whole = formats.report_json(examples.one_good_gpu())
    with pytest.raises(KeeperError, match="some report"):
        formats.read_report(whole[: len(whole) // 2], "some report")


@pytest.mark.parametrize("at", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00"])
def test_a_time_that_has_no_utc_is_refused(at: str) -> None:
    """Otherwise every page and table that shows it fails."""
    text = json.loads(formats.report_json(examples.one_good_gpu())) | {"ended": at}
    with pytest.raises(KeeperError, match="times are out of range"):
        formats.read_report(json.dumps(text).encode(), "report.json")


def test_samples_of_another_run_are_refused() -> None:
    one, other = examples.one_good_gpu(), examples.eight_gpus()
    samples = formats.read_samples(formats.samples_json(other), "samples.json")
    with pytest.raises(KeeperError, match=other.run):
        formats.with_samples(one, samples, "samples.json")


def test_fields_of_a_later_minor_version_do_no_harm() -> None:
    plain = json.loads(formats.report_json(examples.one_good_gpu()))
    plain["something_new"] = {"a": 1}
    read = formats.read_report(json.dumps(plain).encode(), "report.json")
    assert isinstance(read, Report)
    assert msgspec.structs.asdict(read)["run"] == plain["run"]
