"""A report as JSON: report.json with what was found, samples.json beside it with what was measured second by second.

Read back strictly: what another version or program wrote is refused with a sentence and never guessed. The
verdict of what is read is computed again from its findings: the one in the file is only a claim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC
from typing import Any, TypeVar

import msgspec

from gpukeeper.acceptance.recompute import recomputed
from gpukeeper.acceptance.record import SCHEMA, Finding, Report, Values
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.gpu import Reading

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


def report_json(report: Report) -> bytes:
    lean = msgspec.structs.replace(
        report, timeline=(), records=(), findings=tuple(_finite(finding) for finding in report.findings)
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
