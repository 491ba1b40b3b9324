"""Promise 10: "Could not test" is never a pass, neither at the end of a run nor when its report is read later."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.model.gpu import Grade
from tests.simulation.acceptance import AcceptanceRun

ACCEPTED = (Grade.PASS, Grade.WARN)


def violations(run: AcceptanceRun) -> Iterator[str]:
    if run.report.verdict in ACCEPTED:
        yield from (f"{run.report.verdict}, though {why}" for why in _untested(run))
    if run.read.verdict not in ACCEPTED:
        return
    yield from (f"read back as {run.read.verdict}, though {why}" for why in _untested(run))
    if run.truth.cut not in ("", "verdict"):
        yield f"read back as {run.read.verdict}, though its {run.truth.cut} had been removed"
    if run.report.verdict not in ACCEPTED:
        yield f"read back as {run.read.verdict}, though the run was {run.report.verdict}"


def _untested(run: AcceptanceRun) -> Iterator[str]:
    """By what happened on the machine, not by what the report says of it."""
    truth = run.truth
    if truth.gpus is None or len(truth.gpus) < truth.expected:
        yield f"{'no' if truth.gpus is None else len(truth.gpus)} GPUs of {truth.expected} were there"
    for gpu in sorted(truth.gpus or ()):
        if not truth.measured.get(gpu):
            yield f"nothing was measured on {gpu}"
    for gpu, probe in sorted(truth.unanswered):
        yield f"{probe} gave no answer on {gpu}"
    if truth.blind:
        yield "the driver was silent when health was read"
    if truth.interrupted:
        yield "the run was interrupted"
    asked = {probe for probes in truth.measured.values() for probe in probes}
    for name in ("gemm", "exact"):
        if name not in asked:
            yield f"{name} never ran"
