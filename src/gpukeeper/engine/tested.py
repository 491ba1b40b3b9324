"""An acceptance run as a line of the ledger, and what the ledger remembers of earlier ones as history. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpukeeper.model.acceptance import Finding, Past, Report
from gpukeeper.model.event import NodeTested
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown


def ref_of(node: str) -> Ref:
    return Ref("host", node, "node", node, node)


def line_of(report: Report, folder: str) -> NodeTested:
    """`folder`: where the report was written."""
    identity = _identities(report)
    values: dict[str, dict[str, float]] = {}
    for one in report.findings:
        if one.gpu in identity and one.value is not None:
            values.setdefault(identity[one.gpu], {})[figure(one)] = one.value
    return NodeTested(
        at=report.ended,
        ref=ref_of(report.node),
        run=report.run,
        verdict=report.verdict,
        reason=report.reason,
        device=report.device,
        report=folder,
        expected=report.expected,
        gpus={identity[one.gpu]: one.verdict for one in report.tallies if one.gpu in identity},
        values=values,
    )


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
    gpus = () if isinstance(report.machine.gpus, Unknown) else report.machine.gpus
    return {gpu.uuid: gpu.identity for gpu in gpus}
