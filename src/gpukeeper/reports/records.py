"""What the probes said, out of a report's records: one for every answer of a check.

A record is {"check", "by": the GPU's uuid or the rank's number, "done": {...}} or {…, "broken": {"kind", "words"}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpukeeper.model.acceptance import Report, Values


@dataclass(frozen=True)
class Said:
    by: str
    result: Values


def said(report: Report, check: str) -> tuple[Said, ...]:
    """Measurements of a check, in the order of the GPUs or ranks."""
    found = [
        Said(by=str(record.get("by", "")), result=result)
        for record in report.records
        if plain(str(record.get("check", ""))) == plain(check)
        and isinstance(result := record.get("done", record.get("result")), Mapping)
    ]
    return tuple(sorted(found, key=lambda one: (len(one.by), one.by)))


def broken(report: Report, check: str) -> tuple[str, ...]:
    """What the probes of a check said instead of measuring."""
    return tuple(
        str(failure.get("words", failure))
        for record in report.records
        if plain(str(record.get("check", ""))) == plain(check) and isinstance(failure := record.get("broken"), Mapping)
    )


def floats(values: Any) -> list[float]:
    """Those of a list that are figures; probes write "nan" and "inf" as words."""
    if not isinstance(values, list | tuple):
        values = [values]
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def plain(check: str) -> str:
    return check.replace("-", "_")
