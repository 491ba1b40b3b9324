"""Acceptance runs as the ledger remembers them: verdicts of each GPU over time, and its figures beside its peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from statistics import median

import msgspec

from gpukeeper.model.event import Event, NodeTested
from gpukeeper.model.grade import Grade


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """`gpus` and `values`: by serial number, or uuid where there is none."""

    line: int
    at: datetime
    node: str
    run: str
    verdict: Grade
    reason: str
    device: str
    gpus: Mapping[str, Grade] = {}
    values: Mapping[str, Mapping[str, float]] = {}


class RunLines(msgspec.Struct, frozen=True):
    """Oldest first."""

    runs: tuple[RunLine, ...]


class FigurePoint(msgspec.Struct, frozen=True, kw_only=True):
    """`peers`: the median of the other GPUs in the same run; None: there were none."""

    at: datetime
    value: float
    peers: float | None


class Figure(msgspec.Struct, frozen=True):
    name: str
    points: tuple[FigurePoint, ...]


class GpuHistory(msgspec.Struct, frozen=True, kw_only=True):
    identity: str
    runs: tuple[RunLine, ...]
    figures: tuple[Figure, ...]


def run_lines(lines: Iterable[tuple[int, Event]]) -> RunLines:
    return RunLines(tuple(_run(seq, line) for seq, line in lines if isinstance(line, NodeTested)))


def _run(seq: int, line: NodeTested) -> RunLine:
    return RunLine(
        line=seq,
        at=line.at,
        node=line.ref.name if line.ref is not None else "",
        run=line.run,
        verdict=line.verdict,
        reason=line.reason,
        device=line.device,
        gpus=line.gpus,
        values=line.values,
    )


def gpu_history(runs: Sequence[RunLine], identity: str) -> GpuHistory | None:
    """None: no run names this GPU."""
    own = tuple(run for run in runs if identity in run.gpus)
    if not own:
        return None
    names = sorted({name for run in own for name in run.values.get(identity, {})})
    return GpuHistory(
        identity=identity,
        runs=own,
        figures=tuple(Figure(name, tuple(_points(own, identity, name))) for name in names),
    )


def _points(runs: Iterable[RunLine], identity: str, name: str) -> Iterable[FigurePoint]:
    for run in runs:
        value = run.values.get(identity, {}).get(name)
        if value is not None:
            others = [own[name] for who, own in run.values.items() if who != identity and name in own]
            yield FigurePoint(at=run.at, value=value, peers=median(others) if others else None)
