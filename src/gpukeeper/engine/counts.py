"""How much one survey of a place found, for the breaker, the budget and the metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpukeeper.engine.notice import is_strange
from gpukeeper.lifecycle.rules.idle import watched
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Decision, View
from gpukeeper.model.subject import Outcome, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
AGES, OLDER = ((HOUR, "<1h"), (DAY, "<1d"), (7 * DAY, "<7d"), (30 * DAY, "<30d")), ">=30d"
LIVE = "live"  # of a tree that is no leftover of anything: what it belongs to runs; in place of its category
_LIVE = (State.RUNNING, State.PAUSED)


@dataclass
class TreeCount:
    """So many trees, and what those that were measured add up to. `unsized`: the size of these could not be learned."""

    number: int = 0
    bytes: int = 0
    sized: int = 0
    unsized: int = 0

    def add(self, size: int | Unknown) -> None:
        self.number += 1
        if isinstance(size, Unknown):
            self.unsized += not size.by_design
        else:
            self.sized += 1
            self.bytes += size

    def __add__(self, other: TreeCount) -> TreeCount:
        both = (self.number + other.number, self.bytes + other.bytes)
        return TreeCount(*both, self.sized + other.sized, self.unsized + other.unsized)


@dataclass
class Counts:
    seen: int = 0
    running: int = 0
    before: int = 0  # in the last complete list
    vanished: int = 0  # of those, missing now, that ought to be there
    kinds: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # kind, state, outcome, age
    oldest: dict[str, datetime] = field(default_factory=dict)  # by kind: the end that is longest ago
    idle: Counter[tuple[str, str]] = field(default_factory=Counter)  # running work by what idle makes of it, and class
    decided: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # class, action, verdict, rule
    trees: dict[tuple[str, bool], TreeCount] = field(default_factory=dict)  # by category, and whether they are due

    def add(self, view: View, book: Rulebook, now: datetime) -> None:
        """Only workloads and orphans are `seen`. Images, build cache and trees come and go by the hundred: they are no
        sign of a broken place, nor may many of them raise a budget that is a share."""
        subject = view.subject
        if subject.shape is not Shape.WORKLOAD:
            self.seen += subject.shape is Shape.ORPHAN and not is_strange(subject)
            return
        self.seen += 1
        if subject.root is not None:
            return
        runs = subject.state in _LIVE
        self.running += runs or subject.live_children != 0
        if runs:
            settings = book.settings(subject)
            self.idle[watched(view, settings, now), settings.class_name] += 1
        self._add_kind(subject, now)

    def _add_kind(self, subject: Subject, now: datetime) -> None:
        """How much of what is there, and for how long it has been over."""
        kind, state, outcome, age = subject.ref.kind, subject.state, "", ""
        if state is State.ENDED:
            ended = subject.ended
            outcome = subject.outcome if isinstance(subject.outcome, Outcome) else ""
            if isinstance(ended, datetime):
                age = _age(now - ended)
                self.oldest[kind] = min(ended, self.oldest.get(kind, ended))
        self.kinds[kind, "unknown" if isinstance(state, Unknown) else state, outcome, age] += 1

    def add_decision(self, subject: Subject, decision: Decision) -> None:
        if subject.shape is Shape.WORKLOAD and subject.root is None:
            self.decided[decision.class_, decision.action, decision.verdict, decision.rule] += 1

    def add_tree(self, subject: Subject, *, due: bool) -> None:
        if subject.shape is Shape.TREE:
            category = LIVE if subject.state in _LIVE else subject.category.value
            self.trees.setdefault((category, due), TreeCount()).add(subject.size)


def _age(since: timedelta) -> str:
    for span, words in AGES:
        if since < span:
            return words
    return OLDER
