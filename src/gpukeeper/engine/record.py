"""What a survey adds to the ledger: new facts, leases that begin, decisions that changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from gpukeeper.engine.ports import Ports
from gpukeeper.model.decision import Action, Decision, Verdict
from gpukeeper.model.event import Complaint, Decided, Event

TREE_LINES = 200  # of one pass: changed decisions about trees. Any user can create thousands of trees


@dataclass
class PendingLines:
    """Lines for the pass to append; observing itself writes nothing."""

    lines: list[Event] = field(default_factory=list)
    tree_lines: int = 0  # about trees, in this pass
    left_out: int = 0  # beyond TREE_LINES; the next pass finds them again

    def take(self) -> list[Event]:
        lines, self.lines = self.lines, []
        return lines


async def changed_decisions(
    ports: Ports, to_write: PendingLines, decisions: Sequence[Decision], now: datetime, trees: Collection[str] = ()
) -> list[Event]:
    """Decisions and complaints as lines, only where they differ from what was recorded last. Of trees only those that
    are due, or were, and no more than a bound: most are young or in use, and that changes from pass to pass."""
    known = await ports.ledger.decided([d.seen.ref.key for d in decisions])
    lines: list[Event] = []
    for d in decisions:
        if d.verdict is Verdict.SILENT:
            continue
        ref = d.seen.ref
        if known.get(ref.key) == f"{d.action} {d.rule} {d.verdict}":
            continue
        if ref.key in trees:
            if d.action is Action.KEEP and not d.complaints and ref.key not in known:
                continue
            if to_write.tree_lines >= TREE_LINES:
                to_write.left_out += 1
                continue
            to_write.tree_lines += 1
        decided = Decided(at=now, ref=ref, action=d.action, rule=d.rule, verdict=d.verdict, reason=d.reason, due=d.due)
        lines.append(msgspec.structs.replace(decided, owner=d.owner))
        lines += (Complaint(at=now, ref=ref, owner=d.owner, what=what) for what in d.complaints)
    return lines
