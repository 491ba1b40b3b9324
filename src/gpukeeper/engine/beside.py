"""Work that a step found running beside a temporary tree: the steps on trees in the same directory are then skipped.

Bounded: by the directories of the plan of each place; the next pass starts without any.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field

from gpukeeper.lifecycle.rules import temporary_tree
from gpukeeper.model.decision import Step
from gpukeeper.model.identity import PlaceKey
from gpukeeper.model.subject import Subject


@dataclass
class WorkBeside:
    _why: dict[tuple[str, str, str, str], str] = field(default_factory=dict)

    def note(self, step: Step, found: Subject) -> str | None:
        """What work runs beside it now, or may. None: none, or it is no temporary tree."""
        work = temporary_tree.work_beside(found) if step.decision.rule == temporary_tree.NAME else None
        if work is None:
            return None
        self._why[_where(step)] = work.reason
        return work.reason

    def found(self, step: Step) -> tuple[str, str] | None:
        """Its directory and what an earlier step found running there."""
        where = _where(step)
        if step.decision.rule != temporary_tree.NAME or where not in self._why:
            return None
        return "/".join(part for part in where[:3] if part) + where[3], self._why[where]

    def forget(self, place: PlaceKey) -> None:
        self._why = {where: why for where, why in self._why.items() if where[:2] != place}


def _where(step: Step) -> tuple[str, str, str, str]:
    """What it shares with trees that stay while work runs beside it: its node, and its directory."""
    ref = step.decision.seen.ref
    return ref.platform, ref.place, ref.namespace, posixpath.dirname(ref.name)
