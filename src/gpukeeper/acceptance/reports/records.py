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
