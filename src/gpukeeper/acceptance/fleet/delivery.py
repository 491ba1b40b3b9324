"""What a node sends besides its report: a report if there was no result, and the termination message. Pure."""

from __future__ import annotations

import hashlib
from datetime import datetime

import msgspec

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.record import Finding, Machine, Remedy, Report
from gpukeeper.model import reading
from gpukeeper.model.grade import Grade
from gpukeeper.model.unknown import Unknown

MESSAGE_MAX = 4096  # bytes; Kubernetes keeps no more of a termination message
_REASON_MAX = 3000
CHECK = "run"


class TerminationMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A few bytes that an engine keeps when the log is lost. `digest`: of the report, as in its frames."""

    verdict: Grade
    run: str
    node: str
    reason: str
    digest: str


def message(report: Report, text: bytes) -> bytes:
    """`text`: the report as it was sent. The reason is cut so that all fits."""
    made = TerminationMessage(
        verdict=report.verdict, run=report.run, node=report.node, reason="", digest=hashlib.sha256(text).hexdigest()
    )
    for length in (_REASON_MAX, 1000, 300, 100):
        found = msgspec.json.encode(msgspec.structs.replace(made, reason=report.reason[:length]))
        if len(found) <= MESSAGE_MAX:
            return found
    return msgspec.json.encode(msgspec.structs.replace(made, node=report.node[:64], run=report.run[:64]))


def read_message(text: str) -> TerminationMessage | None:
    """None: it is none of ours."""
    if len(text) > MESSAGE_MAX:
        return None
    try:
        return reading.decode(text, type=TerminationMessage)
    except (ValueError, msgspec.MsgspecError):
        return None


def without_result(
    *,
    run: str,
    node: str,
    version: str,
    wish: RunRequest,
    started: datetime,
    ended: datetime,
    why: str,
    interrupted: bool,
) -> Report:
    """The report of a run that ended before any check could: it accepts nothing, and gives the reason."""
    reason = f"The run ended without a result: {why}"
    finding = Finding(
        check=CHECK, verdict=Grade.INCONCLUSIVE, code="run-failed", message=reason, action=Remedy.CHECK_CONFIG
    )
    return Report(
        run=run,
        node=node,
        version=version,
        device=wish.device,
        started=started,
        ended=ended,
        profile=wish.profile,
        within_s=wish.within_s,
        verdict=Grade.INCONCLUSIVE,
        reason=reason,
        machine=Machine(node=node, gpus=Unknown("the run ended before the GPUs were read")),
        expected=wish.expected,
        findings=(finding,),
        settings={"wish": msgspec.to_builtins(wish)},
        interrupted=interrupted,
    )
