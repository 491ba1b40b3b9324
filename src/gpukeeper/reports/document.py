"""A report as JSON: report.json with what was found, samples.json beside it with what was measured second by second.

Read back strictly: what another version wrote, or somebody else, is refused with a sentence and never guessed.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gpukeeper.model.acceptance import SCHEMA, Finding, Reading, Report, Values
from gpukeeper.model.errors import KeeperError

REPORT, SAMPLES = "report.json", "samples.json"
_FAMILY = SCHEMA.rpartition("/")[0]


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The side file: large, and of interest only to who looks closer."""

    run: str
    timeline: tuple[Reading, ...] = ()
    records: tuple[Values, ...] = ()
    schema: str = SCHEMA


class _Head(msgspec.Struct, frozen=True):
    schema: str = ""


def report_json(report: Report) -> bytes:
    lean = msgspec.structs.replace(
        report, timeline=(), records=(), findings=tuple(_finite(finding) for finding in report.findings)
    )
    return msgspec.json.format(msgspec.json.encode(lean), indent=1) + b"\n"


def samples_json(report: Report) -> bytes:
    samples = Samples(run=report.run, timeline=report.timeline, records=report.records)
    return msgspec.json.encode(samples) + b"\n"


def read_report(text: bytes, where: str) -> Report:
    _expect_schema(text, where)
    try:
        return msgspec.json.decode(text, type=Report)
    except msgspec.MsgspecError as error:
        raise KeeperError(f"{where} is damaged: {error}. Nothing was read from it.") from error


def read_samples(text: bytes, where: str) -> Samples:
    _expect_schema(text, where)
    try:
        return msgspec.json.decode(text, type=Samples)
    except msgspec.MsgspecError as error:
        raise KeeperError(f"{where} is damaged: {error}. The report beside it can be read without it.") from error


def with_samples(report: Report, samples: Samples, where: str) -> Report:
    if samples.run != report.run:
        raise KeeperError(f"{where} belongs to run {samples.run}, not to {report.run}. Its samples were not used.")
    return msgspec.structs.replace(report, timeline=samples.timeline, records=samples.records)


def _expect_schema(text: bytes, where: str) -> None:
    try:
        schema = msgspec.json.decode(text, type=_Head).schema
    except msgspec.MsgspecError as error:
        raise KeeperError(f"{where} is not an acceptance report of gpukeeper: {error}.") from error
    if schema == SCHEMA:
        return
    if schema.rpartition("/")[0] == _FAMILY:
        raise KeeperError(
            f"{where} has the form {schema}; this version of gpukeeper reads {SCHEMA}. "
            "Read it with the version that wrote it."
        )
    said = f"it says {schema!r}" if schema else "it names no schema"
    raise KeeperError(f"{where} is not an acceptance report of gpukeeper: {said}, expected {SCHEMA}.")


def _finite(finding: Finding) -> Finding:
    """JSON knows no NaN: such samples move into the evidence, as words, and no figure is made of them."""
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
