"""An acceptance run as a line of the ledger, and the figures of earlier runs out of such lines. Pure.

Only runs on real GPUs are remembered as history: what a CPU or a simulation showed says nothing about a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpukeeper.model.acceptance import Finding, Grade, Past, Report
from gpukeeper.model.event import Event, NodeTested
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown

KEPT = 20  # earlier runs of a GPU; the judge looks at fewer


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


def history_of(lines: Iterable[Event]) -> dict[str, tuple[Past, ...]]:
    """By the GPU's identity, oldest first."""
    found: dict[str, list[Past]] = {}
    for line in lines:
        if isinstance(line, NodeTested) and line.device == "cuda":
            for identity, values in line.values.items():
                verdict = line.gpus.get(identity, Grade.INCONCLUSIVE)
                past = Past(at=line.at, run=line.run, identity=identity, verdict=verdict, values=values)
                found.setdefault(identity, []).append(past)
    return {who: tuple(sorted(runs, key=lambda one: one.at)[-KEPT:]) for who, runs in found.items()}


def _identities(report: Report) -> dict[str | None, str]:
    gpus = () if isinstance(report.machine.gpus, Unknown) else report.machine.gpus
    return {gpu.uuid: gpu.identity for gpu in gpus}
