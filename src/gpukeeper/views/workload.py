"""The decisions about workloads and leftovers, and each in a word. Behind `workload list`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpukeeper.model.decision import Action, Decision, Verdict
from gpukeeper.model.policy import Mode

DEVICES = ("gpu", "slice")  # kinds that are no workload
_KEPT = {Verdict.REPORT: "report", Verdict.UNKNOWN: "unknown"}


class WorkloadsView(msgspec.Struct, frozen=True):
    mode: Mode
    decisions: tuple[Decision, ...]


def workloads_view(decisions: Iterable[Decision], mode: Mode) -> WorkloadsView:
    return WorkloadsView(mode, tuple(one for one in decisions if one.seen.ref.kind not in DEVICES))


def next_word(decision: Decision) -> str:
    """The action, or how it is kept."""
    return decision.action.value if decision.action is not Action.KEEP else _KEPT.get(decision.verdict, "kept")
