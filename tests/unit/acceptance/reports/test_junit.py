"""JUnit: a case for every check and GPU; what could not be tested is an error, never skipped and never green."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from gpukeeper.acceptance.reports import formats
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.reports import examples


def suite(text: str) -> ET.Element:
    root = ET.fromstring(text)
    assert root.tag == "testsuites"
    found = root.find("testsuite")
    assert found is not None
    return found


def cases(text: str) -> dict[tuple[str, str], ET.Element]:
    found = {(case.get("classname", ""), case.get("name", "")): case for case in suite(text).findall("testcase")}
    assert len(found) == len(suite(text).findall("testcase")), "two cases have one name"
    return found


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_it_is_well_formed_and_counts_what_is_in_it(name: str) -> None:
    """C4.7"""
    whole = suite(formats.junit_xml(examples.EXAMPLES[name]()))
    assert int(whole.get("tests", "")) == len(whole.findall("testcase"))
    assert int(whole.get("failures", "")) == len(whole.findall("testcase/failure"))
    assert int(whole.get("errors", "")) == len(whole.findall("testcase/error"))
    assert int(whole.get("skipped", "")) == len(whole.findall("testcase/skipped"))


def test_a_failed_check_is_a_failure_with_its_reason_and_figures() -> None:
    case = cases(formats.junit_xml(examples.eight_gpus()))["node-07.gemm", "GPU 3"]
    failure = case.find("failure")
    assert failure is not None
    assert failure.get("type") == "gemm-below-floor"
    assert "floor 690 TFLOP/s" in (failure.text or "")


@pytest.mark.parametrize("make", [examples.on_the_cpu, examples.interrupted, examples.empty])
def test_an_inconclusive_run_is_never_green(make: object) -> None:
    whole = suite(formats.junit_xml(make()))  # type: ignore[operator]
    assert int(whole.get("errors", "")) > 0


def test_an_inconclusive_finding_is_an_error_and_a_skipped_one_is_skipped() -> None:
    only = examples.gpu(0)
    found = [examples.finding("gemm", only.uuid, Grade.INCONCLUSIVE), examples.finding("links", None, Grade.SKIPPED)]
    written = cases(formats.junit_xml(examples.report([only], found)))
    assert written["node-07.gemm", "GPU 0"].find("error") is not None
    assert written["node-07.links", "node"].find("skipped") is not None


def test_what_was_left_out_is_skipped_with_the_reason() -> None:
    skipped = cases(formats.junit_xml(examples.one_good_gpu()))["node-07.collectives", "not tested"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "it needs 2 GPUs, 1 is here"


def test_the_worst_of_several_findings_of_one_check_counts() -> None:
    only = examples.gpu(0)
    found = [examples.finding("health", only.uuid, grade) for grade in (Grade.PASS, Grade.FAIL, Grade.INCONCLUSIVE)]
    whole = suite(formats.junit_xml(examples.report([only], found)))
    assert (whole.get("failures"), whole.get("errors")) == ("1", "0")


def test_names_stay_when_a_gpu_is_replaced() -> None:
    before = examples.report([examples.gpu(0)], examples.measured(examples.gpu(0)))
    new = examples.gpu(0, uuid="GPU-new", serial="999")
    after = examples.report([new], examples.measured(new))
    assert list(cases(formats.junit_xml(before))) == list(cases(formats.junit_xml(after)))
