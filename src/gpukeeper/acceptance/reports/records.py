"""Results of probes from the records of a report: one for every reply of a check.

A record is {"check", "who": the GPU's uuid or the rank's number, "params", "again", "answer": Done or Broken}, as
acceptance/run.py writes it. Tries that only confirmed a finding are left out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpukeeper.acceptance.record import Report, Values

COLLECTIVES = "collectives"


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


def broken(report: Report, check: str) -> tuple[str, ...]:
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
