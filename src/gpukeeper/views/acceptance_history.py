"""Acceptance runs as the ledger remembers them: verdicts of each GPU over time, and its figures beside its peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from statistics import median

import msgspec

from gpukeeper.acceptance.judging.reference import limits
from gpukeeper.acceptance.record import Thresholds
from gpukeeper.model.event import Event, NodeTested
from gpukeeper.model.gpu import Gpu, Grade


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """By serial number, or uuid where there is none: the verdict, the figures, and what they were judged by."""

    line: int
    at: datetime
    node: str
    run: str
    verdict: Grade
    reason: str
    device: str
    gpus: Mapping[str, Grade] = {}
    values: Mapping[str, Mapping[str, float]] = {}
    not_passed: Mapping[str, Mapping[str, float]] = {}
    floors: Mapping[str, Mapping[str, float]] = {}
    models: Mapping[str, str] = {}


class RunLines(msgspec.Struct, frozen=True):
    """Oldest first."""

    runs: tuple[RunLine, ...]


class FigurePoint(msgspec.Struct, frozen=True, kw_only=True):
    """`peers`: the median of the other GPUs in the same run; None: there were none. `floor`: as judged in that run."""

    at: datetime
    value: float
    peers: float | None
    floor: float | None = None
    passed: bool = True


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """`floor`: of the newest run that recorded one, or of the reference values, as `floor_from` says. None: unknown."""

    name: str
    points: tuple[FigurePoint, ...]
    floor: float | None = None
    floor_from: str = ""


class GpuHistory(msgspec.Struct, frozen=True, kw_only=True):
    """`model` empty: unknown."""

    identity: str
    model: str
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
        not_passed=line.not_passed,
        floors=line.floors,
        models=line.models,
    )


def gpu_history(runs: Sequence[RunLine], identity: str, model: str = "") -> GpuHistory | None:
    """None: no run names this GPU. `model`: of the inventory, where no run recorded it."""
    own = tuple(run for run in runs if identity in run.gpus)
    if not own:
        return None
    model = next((run.models[identity] for run in reversed(own) if identity in run.models), model)
    names = sorted({name for run in own for name in _figures(run, identity)})
    return GpuHistory(
        identity=identity,
        model=model,
        runs=own,
        figures=tuple(_figure(own, identity, name, model) for name in names),
    )


def _figure(runs: Sequence[RunLine], identity: str, name: str, model: str) -> Figure:
    points = tuple(_points(runs, identity, name))
    recorded = next((one.floor for one in reversed(points) if one.floor is not None), None)
    if recorded is not None:
        return Figure(name=name, points=points, floor=recorded, floor_from="as judged in the run")
    floor = _reference_floor(model, name)
    source = f"reference values of {model}" if floor is not None else ""
    return Figure(name=name, points=points, floor=floor, floor_from=source)


def _reference_floor(model: str, name: str) -> float | None:
    """Of the method by which the figure was measured, or none."""
    check, _, rest = name.partition(".")
    metric, _, method = rest.partition(" ")
    found = limits(Gpu(uuid="", index=0, name=model), check, metric, method) if model else Thresholds()
    return found.floor if not found.method or fnmatchcase(method, found.method) else None


def _figures(run: RunLine, identity: str) -> dict[str, float]:
    return {**run.values.get(identity, {}), **run.not_passed.get(identity, {})}


def _points(runs: Iterable[RunLine], identity: str, name: str) -> Iterable[FigurePoint]:
    for run in runs:
        value = _figures(run, identity).get(name)
        if value is not None:
            others = [own[name] for who in run.gpus if who != identity and name in (own := _figures(run, who))]
            yield FigurePoint(
                at=run.at,
                value=value,
                peers=median(others) if others else None,
                floor=run.floors.get(identity, {}).get(name),
                passed=name in run.values.get(identity, {}),
            )
