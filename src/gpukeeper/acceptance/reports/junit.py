"""A report as JUnit XML, for CI servers: a case for every check and GPU. Pure.

What could not be tested is an error, never skipped: a server that shows green for it would accept an untested GPU.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Sequence

from gpukeeper.acceptance.record import Finding, Report
from gpukeeper.acceptance.reports.merge import FleetReport, why_missing
from gpukeeper.acceptance.reports.wording import figure, gpu_of, gpu_words, metric_words, worst_first
from gpukeeper.model.grade import Grade, worst

RUN = "run"
_OUTCOME = {Grade.FAIL: "failure", Grade.INCONCLUSIVE: "error"}
_COUNTED = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def xml(report: Report) -> str:
    suite = ET.Element("testsuite", name=_clean(f"gpukeeper.accept.{report.node}"), hostname=_clean(report.node))
    suite.set("timestamp", report.started.isoformat())
    suite.set("time", f"{(report.ended - report.started).total_seconds():.3f}")
    for (check, gpu), findings in _grouped(report).items():
        suite.append(_case(report, check, gpu, findings))
    for left_out in report.coverage:
        name = f"not tested: {left_out.what}" if left_out.what else "not tested"
        case = ET.SubElement(suite, "testcase", classname=_clean(f"{report.node}.{left_out.check}"), name=_clean(name))
        ET.SubElement(case, "skipped", message=_clean(left_out.why))
    suite.append(_run_case(report))
    _count(suite)
    return _document(suite)


def _document(suite: ET.Element) -> str:
    suites = ET.Element("testsuites", name="gpukeeper accept")
    suites.append(suite)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def fleet_xml(fleet: FleetReport, name: str) -> str:
    """A case for each node; one without a report is an error."""
    suite = ET.Element("testsuite", name=_clean(f"gpukeeper.accept.{name}"))
    nodes = [(one.node, one.verdict, one.reason) for one in fleet.nodes]
    nodes += [(one, Grade.INCONCLUSIVE, why_missing(fleet, one)) for one in fleet.missing]
    for node, verdict, reason in nodes:
        case = ET.SubElement(suite, "testcase", classname=_clean(name), name=_clean(node))
        if verdict in _OUTCOME:
            ET.SubElement(case, _OUTCOME[verdict], type=verdict.value, message=_clean(reason))
        else:
            ET.SubElement(case, "system-out").text = _clean(f"{verdict}: {reason}")
    _count(suite)
    return _document(suite)


def _grouped(report: Report) -> dict[tuple[str, str | None], list[Finding]]:
    found: defaultdict[tuple[str, str | None], list[Finding]] = defaultdict(list)
    for finding in report.findings:
        found[finding.check, finding.gpu].append(finding)
    return dict(found)


def _case(report: Report, check: str, gpu: str | None, findings: Sequence[Finding]) -> ET.Element:
    """Named by the GPU's place in the machine, which stays when a GPU is replaced."""
    known = gpu_of(report, gpu)
    name = gpu_words(report, gpu) if known is None or not known.part_of else f"{gpu_words(report, gpu)} {gpu}"
    case = ET.Element("testcase", classname=_clean(f"{report.node}.{check}"), name=_clean(name))
    case.set("time", f"{sum(finding.seconds for finding in findings):.3f}")
    ordered = worst_first(findings)
    first = ordered[0]
    text = "\n".join(_line(finding) for finding in ordered)
    if all(finding.verdict is Grade.SKIPPED for finding in findings):
        ET.SubElement(case, "skipped", message=_clean(first.message))
    elif first.verdict in _OUTCOME:
        outcome = ET.SubElement(case, _OUTCOME[first.verdict], type=_clean(first.code), message=_clean(first.message))
        outcome.text = _clean(text)
    else:
        ET.SubElement(case, "system-out").text = _clean(text)
    return case


def _run_case(report: Report) -> ET.Element:
    """The run itself: it fails or is an error only if no finding already does, so that one fault does not count
    twice."""
    case = ET.Element("testcase", classname=_clean(report.node), name=RUN, time="0.000")
    shown = worst(finding.verdict for finding in report.findings) if report.findings else None
    if report.verdict in _OUTCOME and (shown is not report.verdict or report.interrupted):
        ET.SubElement(case, _OUTCOME[report.verdict], type="run", message=_clean(report.reason))
    else:
        ET.SubElement(case, "system-out").text = _clean(f"{report.verdict}: {report.reason}")
    return case


def _count(suite: ET.Element) -> None:
    suite.set("tests", str(len(suite.findall("testcase"))))
    for tag, counted in _COUNTED.items():
        suite.set(counted, str(len(suite.findall(f"testcase/{tag}"))))


def _line(finding: Finding) -> str:
    value = "" if finding.value is None else f" = {figure(finding.value, finding.unit)}"
    floor = "" if finding.floor is None else f", floor {figure(finding.floor, finding.unit)}"
    action = f" Action: {finding.action.value}." if finding.action != "none" else ""
    return f"{finding.verdict} {metric_words(finding)}{value}{floor} [{finding.code}] {finding.message}{action}"


def _clean(words: str) -> str:
    """XML 1.0 has no way at all to write most control characters."""
    return "".join(ch if ch in "\t\n" or (ch >= " " and not _unwritable(ord(ch))) else " " for ch in words)


def _unwritable(code: int) -> bool:
    return 0x7F <= code <= 0x9F or 0xD800 <= code <= 0xDFFF or code in {0xFFFE, 0xFFFF}
