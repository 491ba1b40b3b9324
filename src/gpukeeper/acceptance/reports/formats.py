"""A report as JSON (read back strictly), as JUnit XML, as metrics of a textfile collector; and its probes' records.

The verdict of what is read is computed again from its findings. In JUnit, what could not be tested is an error, never
skipped. A metric that was not measured has no series.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any, TypeVar

import msgspec

from gpukeeper.acceptance.recompute import recomputed
from gpukeeper.acceptance.record import SCHEMA, Finding, Report, Values
from gpukeeper.acceptance.reports.merge import FleetReport, why_missing
from gpukeeper.acceptance.reports.wording import figure, gpu_of, gpu_words, metric_words, serial_of, worst_first
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.gpu import Grade, Reading, worst

REPORT, SAMPLES = "report.json", "samples.json"
_FAMILY = SCHEMA.rpartition("/")[0]
# Not JSON, not this form, not UTF-8, or nested too deeply.
DAMAGED = (msgspec.MsgspecError, UnicodeError, RecursionError)
T = TypeVar("T")


class SampleFile(msgspec.Struct, frozen=True, kw_only=True):
    """The second file: large, and needed only for details."""

    run: str
    timeline: tuple[Reading, ...] = ()
    records: tuple[Values, ...] = ()
    schema: str = SCHEMA


class _Head(msgspec.Struct, frozen=True):
    schema: str = ""


def encodable(report: Report) -> Report:
    """The same, in UTF-8: the system's names and variables may hold bytes that are no text, and a run that took hours
    must not be lost for one of them."""
    try:
        msgspec.json.encode(report)
    except UnicodeEncodeError:
        return _in_utf8(report)
    return report


def report_json(report: Report, *, with_records: bool = False) -> bytes:
    """`with_records`: also what each probe replied, from which the files of the older test kits are made."""
    lean = msgspec.structs.replace(
        report,
        timeline=(),
        records=report.records if with_records else (),
        findings=tuple(_finite(finding) for finding in report.findings),
    )
    return msgspec.json.format(msgspec.json.encode(lean), indent=1) + b"\n"


def samples_json(report: Report) -> bytes:
    samples = SampleFile(run=report.run, timeline=report.timeline, records=report.records)
    return msgspec.json.encode(samples) + b"\n"


def read_report(text: bytes, where: str, doubts: Iterable[str] = ()) -> Report:
    """`doubts`: why the file may not be what was written, a sentence each; with any it accepts no node."""
    return recomputed(decode_report(text, where), doubts)


def decode_report(text: bytes, where: str) -> Report:
    """As it is in the file, its verdict included."""
    _expect_schema(text, where)
    try:
        report = reading.decode(text, type=Report)
    except DAMAGED as error:
        raise KeeperError(f"{where} is damaged: {error}. Nothing was read from it.") from error
    if report.started.tzinfo is None or report.ended.tzinfo is None:
        raise KeeperError(f"{where} is damaged: its times have no time zone. Nothing was read from it.")
    try:
        report.started.astimezone(UTC), report.ended.astimezone(UTC)
    except OverflowError:  # the last hours of the calendar, in a zone behind UTC
        raise KeeperError(f"{where} is damaged: its times are out of range. Nothing was read from it.") from None
    return report


def read_samples(text: bytes, where: str) -> SampleFile:
    _expect_schema(text, where)
    try:
        return reading.decode(text, type=SampleFile)
    except DAMAGED as error:
        raise KeeperError(f"{where} is damaged: {error}. The report can be read without it.") from error


def with_samples(report: Report, samples: SampleFile, where: str) -> Report:
    if samples.run != report.run:
        raise KeeperError(f"{where} belongs to run {samples.run}, not to {report.run}. Its samples were not used.")
    return msgspec.structs.replace(report, timeline=samples.timeline, records=samples.records)


def _expect_schema(text: bytes, where: str) -> None:
    try:
        schema = reading.decode(text, type=_Head).schema
    except DAMAGED as error:
        raise KeeperError(f"{where} is not an acceptance report of gpukeeper: {error}.") from error
    if schema == SCHEMA:
        return
    if schema.rpartition("/")[0] == _FAMILY:
        raise KeeperError(
            f"{where} has schema {schema!r}; this version of gpukeeper reads {SCHEMA}. "
            "Read it with the version that wrote it."
        )
    found = f"its schema is {schema!r}" if schema else "it has no schema"
    raise KeeperError(f"{where} is not an acceptance report of gpukeeper: {found}, expected {SCHEMA}.")


def _finite(finding: Finding) -> Finding:
    """JSON has no NaN: such samples move into the evidence, as words, and no figure is made of them."""
    strange = [str(sample) for sample in finding.samples if not math.isfinite(sample)]
    changes: dict[str, Any] = {
        name: None
        for name in finding.__struct_fields__
        if isinstance(value := getattr(finding, name), float) and not math.isfinite(value) and name != "seconds"
    }
    if strange:
        changes["samples"] = tuple(sample for sample in finding.samples if math.isfinite(sample))
        changes["evidence"] = {**finding.evidence, "not_finite": strange}
    return msgspec.structs.replace(finding, **changes) if changes else finding


def _in_utf8(value: T) -> T:
    """What is no text is written as `\\udcff`."""
    changed: Any = value
    if isinstance(value, str) and not value.isascii():
        changed = value.encode("utf-8", "backslashreplace").decode()
    elif isinstance(value, msgspec.Struct):
        fields = {name: _in_utf8(getattr(value, name)) for name in value.__struct_fields__}
        changed = msgspec.structs.replace(value, **fields)
    elif isinstance(value, Mapping):
        changed = {_in_utf8(name): _in_utf8(one) for name, one in value.items()}
    elif isinstance(value, list | tuple):
        changed = type(value)(_in_utf8(one) for one in value)
    return changed  # type: ignore[no-any-return]


COLLECTIVES = "collectives"


# A record is {"check", "who": the GPU's uuid or the rank's number, "params", "again", "answer": Done or Broken}, as
# acceptance/run.py writes it. Tries that only confirmed a finding are left out here.
@dataclass(frozen=True)
class ProbeRecord:
    by: str
    result: Values


def probe_records(report: Report, check: str) -> tuple[ProbeRecord, ...]:
    """Measurements of a check, in the order of the GPUs or ranks."""
    found = [
        ProbeRecord(by=who, result=result)
        for who, answer in _answers(report, check)
        if isinstance(result := answer.get("result"), Mapping)
    ]
    return tuple(sorted(found, key=lambda one: (len(one.by), one.by)))


def records_over_nodes(report: Report, probe: str) -> tuple[ProbeRecord, ...]:
    """Measurements of this node's ranks in the first job over the most nodes, on the node with rank 0. Elsewhere none:
    the older kits wrote their files there only."""
    own = [one for one in report.records if one.get("check") == f"group_{probe}" and not one.get("again")]
    most = max((_members(one) for one in own), default=0)
    ranks: dict[str, Any] = {}
    for record in own:
        if _members(record) == most:
            ranks.setdefault(str(record.get("who", "")), record.get("answer"))
    if "0" not in ranks:
        return ()
    return tuple(
        ProbeRecord(by=who, result=answer["result"])
        for who, answer in ranks.items()
        if isinstance(answer, Mapping) and isinstance(answer.get("result"), Mapping)
    )


def _members(record: Mapping[str, Any]) -> int:
    found = record.get("members")
    return len(found) if isinstance(found, list | tuple) else 0


def broken_words(report: Report, check: str) -> tuple[str, ...]:
    """Output of probes that failed."""
    return tuple(str(answer["words"]) for _, answer in _answers(report, check) if "words" in answer)


def floats(values: Any) -> list[float]:
    """Those of a list that are figures; probes write "nan" and "inf" as words."""
    if not isinstance(values, list | tuple):
        values = [values]
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def mappings(values: Any) -> list[Mapping[str, Any]]:
    """Those of a list that are records; nothing when it is no list."""
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list | tuple) else []


def plain(check: str) -> str:
    return check.replace("-", "_")


def family(check: str) -> str:
    """The kind of a check: its variants (collectives over NVLink, over the network) count with it."""
    name = plain(check)
    return COLLECTIVES if name.startswith(COLLECTIVES) else name


def _answers(report: Report, check: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for record in report.records:
        mine = plain(str(record.get("check", ""))) == plain(check) and not record.get("again")
        if mine and isinstance(answer := record.get("answer"), Mapping):
            yield str(record.get("who", "")), answer


RUN_CASE = "run"
_OUTCOME = {Grade.FAIL: "failure", Grade.INCONCLUSIVE: "error"}
_COUNTED = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def junit_xml(report: Report) -> str:
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
    return _junit_document(suite)


def _junit_document(suite: ET.Element) -> str:
    suites = ET.Element("testsuites", name="gpukeeper accept")
    suites.append(suite)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def fleet_junit_xml(fleet: FleetReport, name: str) -> str:
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
    return _junit_document(suite)


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
    text = "\n".join(_case_words(finding) for finding in ordered)
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
    case = ET.Element("testcase", classname=_clean(report.node), name=RUN_CASE, time="0.000")
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


def _case_words(finding: Finding) -> str:
    value = "" if finding.value is None else f" = {figure(finding.value, finding.unit)}"
    floor = "" if finding.floor is None else f", floor {figure(finding.floor, finding.unit)}"
    action = f" Action: {finding.action.value}." if finding.action != "none" else ""
    return f"{finding.verdict} {metric_words(finding)}{value}{floor} [{finding.code}] {finding.message}{action}"


def _clean(words: str) -> str:
    """XML 1.0 has no way at all to write most control characters."""
    return "".join(ch if ch in "\t\n" or (ch >= " " and not _unwritable(ord(ch))) else " " for ch in words)


def _unwritable(code: int) -> bool:
    return 0x7F <= code <= 0x9F or 0xD800 <= code <= 0xDFFF or code in {0xFFFE, 0xFFFF}


METRIC_PREFIX = "gpukeeper_acceptance_"
VERDICT_CODES: Mapping[Grade, int] = {Grade.PASS: 0, Grade.WARN: 1, Grade.FAIL: 2, Grade.INCONCLUSIVE: 3}
_VERDICTS = "0 PASS, 1 WARN, 2 FAIL, 3 INCONCLUSIVE."
SERIES: Mapping[str, str] = {
    "info": "Always 1; the labels identify the run.",
    "node_verdict": f"Verdict on the node: {_VERDICTS}",
    "gpu_verdict": f"Verdict on a GPU: {_VERDICTS}",
    "verdict": f"Verdict of a test: {_VERDICTS}",
    "value": "Measured value of a test, in its unit.",
    "floor": "Floor of a test, in its unit; below it the test fails.",
    "peer_z": "Distance of a GPU from the median of its peers, in robust standard deviations.",
    "last_run_timestamp_seconds": "End of the last acceptance run.",
    "run_duration_seconds": "Duration of the last acceptance run.",
}


@dataclass(frozen=True)
class _Sample:
    series: str
    labels: Mapping[str, str]
    value: float


def metrics(report: Report) -> str:
    samples = [*_of_run(report), *_of_gpus(report), *_of_findings(report)]
    lines: list[str] = []
    for series, meaning in SERIES.items():
        mine = [sample for sample in samples if sample.series == series]
        if mine:
            lines += [f"# HELP {METRIC_PREFIX}{series} {meaning}", f"# TYPE {METRIC_PREFIX}{series} gauge"]
            lines += [_sample_line(sample) for sample in mine]
    return "\n".join(lines) + "\n"


def _of_run(report: Report) -> Iterable[_Sample]:
    node = {"node": report.node}
    labels = {"run": report.run, "version": report.version, "device": report.device, "profile": report.profile}
    yield _Sample("info", node | labels, 1)
    if report.verdict in VERDICT_CODES:
        yield _Sample("node_verdict", node, VERDICT_CODES[report.verdict])
    yield _Sample("last_run_timestamp_seconds", node, report.ended.timestamp())
    yield _Sample("run_duration_seconds", node, (report.ended - report.started).total_seconds())


def _of_gpus(report: Report) -> Iterable[_Sample]:
    for tally in report.tallies:
        if tally.verdict in VERDICT_CODES:
            yield _Sample("gpu_verdict", _place(report, tally.gpu), VERDICT_CODES[tally.verdict])


def _of_findings(report: Report) -> Iterable[_Sample]:
    """One series for a test, however many findings it has: the worst."""
    seen: set[tuple[str, str | None]] = set()
    for finding in worst_first(report.findings):
        key = (metric_words(finding), finding.gpu)
        if finding.verdict not in VERDICT_CODES or key in seen:
            continue
        seen.add(key)
        labels = _place(report, finding.gpu) | {"test": metric_words(finding)}
        yield _Sample("verdict", labels, VERDICT_CODES[finding.verdict])
        yield from _figures(finding, labels)


def _figures(finding: Finding, labels: Mapping[str, str]) -> Iterable[_Sample]:
    for series, value in (("value", finding.value), ("floor", finding.floor)):
        if value is not None and math.isfinite(value):
            yield _Sample(series, {**labels, "unit": finding.unit}, value)
    if finding.peer_z is not None and math.isfinite(finding.peer_z):
        yield _Sample("peer_z", labels, finding.peer_z)


def _place(report: Report, uuid: str | None) -> dict[str, str]:
    gpu = gpu_of(report, uuid)
    name = "" if uuid is None else uuid if gpu is None else f"{gpu.index}"
    if gpu is not None and gpu.part_of:
        name = gpu.uuid  # slices share their GPU's place
    return {"node": report.node, "gpu": name, "serial": serial_of(gpu)}


def _sample_line(sample: _Sample) -> str:
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
    return f"{METRIC_PREFIX}{sample.series}{{{labels}}} {float(sample.value)!r}"


def _escaped(value: str) -> str:
    """The format forbids only backslash, quote and line end as they are; halves of characters are no UTF-8."""
    text = value.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
