"""Starts, ends, owners and GPUs of Slurm jobs, from `sacct --parsable2`. What was measured of them comes from a table.

Steps (`7.batch`, `7.extern`, `7.0`) are folded into their job. A job without a GPU is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, tzinfo
from pathlib import Path

from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.words import plain
from gpukeeper.traces.spool import Span, Spool
from gpukeeper.traces.table import Accounting, zone_of

COMMAND = "sacct --allusers --duplicates --parsable2 --format=JobID,User,Partition,Start,End,State,AllocTRES -S DAY"
NEEDED = ("JobID", "User", "Start", "End", "State", "AllocTRES")
LINE_MAX = 64 * 1024
_JOB = re.compile(r"[0-9]{1,20}(?:_[0-9]{1,10})?(?:\+[0-9]{1,10})?")
_GPUS = re.compile(r"(?:^|,)gres/gpu=([0-9]{1,6})(?=,|$)")
_NO_TIME = frozenset({"", "Unknown", "None"})
_RUNS = frozenset({"RUNNING", "SUSPENDED", "COMPLETING", "STOPPED"})


def add_jobs(spool: Spool, beside: Path, accounting: Accounting) -> int:
    """How many runs of jobs with GPUs. `beside`: the mapping file; the name of the other file is relative to it."""
    path = beside.parent / accounting.file
    try:
        with path.open(encoding="utf-8-sig", errors="backslashreplace") as file:
            return read_sacct(iter(lambda: file.readline(LINE_MAX), ""), zone_of(accounting.zone), spool, path.name)
    except OSError as error:
        raise UsageError(
            f"The file {path} of `sacct` in the mapping cannot be read: {error.strerror or error}. Nothing was "
            f"replayed. Write it with: {COMMAND}"
        ) from error


def read_sacct(lines: Iterable[str], zone: tzinfo | None, spool: Spool, name: str) -> int:
    numbered = enumerate(lines, start=1)
    header = next(numbered, (0, ""))[1].rstrip("\r\n").split("|")
    missing = [column for column in NEEDED if column not in header]
    if missing:
        raise UsageError(
            f"{name} does not have the columns {', '.join(missing)}. Nothing was replayed. It has: "
            f"{', '.join(header)[:1000]}. Write it with: {COMMAND}"
        )
    count = 0
    for number, line in numbered:
        fields = line.rstrip("\r\n").split("|")
        try:
            if len(fields) != len(header):
                raise ValueError(f"it has {len(fields)} fields, the header has {len(header)}")
            count += _add(spool, dict(zip(header, fields, strict=True)), zone)
        except ValueError as problem:
            spool.bad.add(number, f"{name}: {problem}")
    return count


def _add(spool: Spool, row: Mapping[str, str], zone: tzinfo | None) -> bool:
    job, dot, _step = row["JobID"].partition(".")
    if not _JOB.fullmatch(job):
        raise ValueError(f"{row['JobID'][:40]!r} is not the id of a job")
    gpus = _GPUS.search(row["AllocTRES"])
    if dot or gpus is None or int(gpus[1]) == 0:
        return False  # the line of the job itself covers its steps
    span = _span(row, zone)
    known = spool.workloads.get(job)
    if known is not None and known.owner != (plain(row["User"]) or None):
        raise ValueError(f"job {job} has another user than in an earlier row; its id was used twice")
    workload = spool.workload(job)
    workload.owner = plain(row["User"]) or None
    workload.gpus = max(workload.gpus, int(gpus[1]))
    if row.get("Partition"):
        workload.labels = {"partition": plain(row["Partition"])}
    workload.spans[span] = None
    return True


def _span(row: Mapping[str, str], zone: tzinfo | None) -> Span:
    state = row["State"].partition(" ")[0]
    if row["Start"] in _NO_TIME:
        raise ValueError(f"job {row['JobID'][:40]} has no start ({state[:40] or 'no state'})")
    started = _moment(row, "Start", zone)
    if row["End"] in _NO_TIME:
        if state not in _RUNS:
            raise ValueError(f"job {row['JobID'][:40]} has no end, and its state is {state[:40] or 'empty'}")
        return started, None
    ended = _moment(row, "End", zone)
    if ended < started:
        raise ValueError(f"job {row['JobID'][:40]} ends before it starts")
    return started, ended


def _moment(row: Mapping[str, str], column: str, zone: tzinfo | None) -> datetime:
    """Local time of the cluster, or seconds with SLURM_TIME_FORMAT=%s."""
    text = row[column]
    try:
        if text.isdecimal():
            return reading.instant(reading.whole(text))
        return reading.moment(text) if zone is None else reading.local(text, "", zone)
    except ValueError as problem:
        raise ValueError(f"{text[:40]!r} in column {column} {problem}") from None
