"""An acceptance run as a line of the ledger, and what the ledger remembers of earlier ones as history. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from gpukeeper.acceptance.record import Finding, Machine, Report
from gpukeeper.model.event import NodeTested
from gpukeeper.model.gpu import Gpu, Grade, Past, worst
from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown


def ref_of(node: str) -> Ref:
    return Ref("host", node, "node", node, node)


def line_of(report: Report, directory: str) -> NodeTested:
    """`folder`: where the report was written. Later runs are held against its figures, so only those that passed, or
    that nothing could be held against yet, are remembered: a GPU that gets slower must not become its own yardstick.
    Figures of all GPUs together are the node's."""
    identity = _identities(report)
    found = () if report.interrupted or report.self_test else report.findings
    measured = [one for one in found if one.gpu in identity and one.value is not None]
    values = _figures(identity, ((one, one.value) for one in measured if _may_be_held_against(one)))
    gpus = {identity[one.gpu]: one.verdict for one in report.tallies if one.gpu in identity}
    if report.node in values:
        gpus[report.node] = report.verdict
    if report.interrupted:
        gpus = {who: worst((verdict, Grade.INCONCLUSIVE)) for who, verdict in gpus.items()}
    return NodeTested(
        at=report.ended,
        ref=ref_of(report.node),
        run=report.run,
        verdict=report.verdict,
        reason=report.reason,
        device=report.device,
        report=directory,
        expected=report.expected,
        gpus=gpus,
        values=values,
        not_passed=_figures(identity, ((one, one.value) for one in measured if not _may_be_held_against(one))),
        floors=_figures(identity, ((one, one.floor) for one in measured)),
        models=_models(report),
        serials={one.uuid: one.identity for one in _gpus(report) if one.identity != one.uuid},
    )


def _figures(
    identity: Mapping[str | None, str], found: Iterable[tuple[Finding, float | None]]
) -> dict[str, dict[str, float]]:
    """By GPU and figure; what is None is left out."""
    made: dict[str, dict[str, float]] = {}
    for one, value in found:
        if value is not None:
            made.setdefault(identity[one.gpu], {})[figure(one)] = value
    return made


def _models(report: Report) -> dict[str, str]:
    return {one.identity: one.name for one in _gpus(report) if isinstance(one.name, str)}


def _gpus(report: Report) -> tuple[Gpu, ...]:
    gpus = with_unique_serials(report.machine).gpus
    return () if isinstance(gpus, Unknown) else gpus


def _may_be_held_against(finding: Finding) -> bool:
    return finding.verdict is Grade.PASS or (finding.verdict is Grade.SKIPPED and bool(finding.samples))


def with_unique_serials(machine: Machine) -> Machine:
    """A board with several GPUs has one serial number; a number that several GPUs share identifies none of them."""
    if isinstance(machine.gpus, Unknown):
        return machine
    counts = Counter(gpu.serial for gpu in machine.gpus if not isinstance(gpu.serial, Unknown))
    gpus = tuple(
        gpu
        if isinstance(gpu.serial, Unknown) or counts[gpu.serial] == 1
        else msgspec.structs.replace(gpu, serial=Unknown(f"{gpu.serial} is shared by {counts[gpu.serial]} GPUs"))
        for gpu in machine.gpus
    )
    return msgspec.structs.replace(machine, gpus=gpus)


def figure(finding: Finding) -> str:
    """What a figure is remembered by. Another method is another figure."""
    return f"{finding.check}.{finding.metric} {finding.method}"


def history_of(tested: Iterable[Past]) -> dict[str, tuple[Past, ...]]:
    """What the ledger remembers of a machine's GPUs, by the GPU's identity, oldest first."""
    found: dict[str, list[Past]] = {}
    for past in tested:
        found.setdefault(past.identity, []).append(past)
    return {who: tuple(sorted(runs, key=lambda one: one.at)) for who, runs in found.items()}


def _identities(report: Report) -> dict[str | None, str]:
    return {None: report.node, **{gpu.uuid: gpu.identity for gpu in _gpus(report)}}
