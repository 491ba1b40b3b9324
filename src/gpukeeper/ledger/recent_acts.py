"""How many steps were begun lately, by rule. Needed before every step, so each line of the journal is read only once.

Other processes write to the same journal (`apply` beside a daemon), so what is new is read from it, not counted here.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, insort
from datetime import datetime

from gpukeeper.ledger.lines import micros

_FIRST = "SELECT rule, at FROM journal WHERE type = 'intent' AND at >= ? AND seq <= ? ORDER BY at"
# The plus keeps SQLite from reading the whole hour again by the index of types.
_NEWER = "SELECT seq, rule, at FROM journal WHERE seq > ? AND +type = 'intent'"


SLACK = 60_000_000  # microseconds: concurrent steps do not call in the order of their times


class RecentActs:
    """Of one connection. Keeps the intents since the time of the last call; for an earlier time it reads them again."""

    def __init__(self) -> None:
        self._at: dict[str, list[int]] = {}  # by rule, sorted
        self._since: int | None = None
        self._seq = 0

    def count(self, c: sqlite3.Connection, since: datetime, rules: frozenset[str], *, but: bool) -> int:
        """Intents since then of these rules, or of all but these."""
        first = micros(since)
        if self._since is None or first < self._since:
            self._read(c, first - SLACK)
        else:
            self._read_newer(c, first - SLACK)
        counted = [times for rule, times in self._at.items() if (rule in rules) is not but]
        return sum(len(times) - bisect_left(times, first) for times in counted)

    def _read(self, c: sqlite3.Connection, first: int) -> None:
        """An error leaves everything as it was: what was read in part would count as nothing was done."""
        last, found = _last(c), dict[str, list[int]]()
        for rule, at in c.execute(_FIRST, (first, last)):
            found.setdefault(rule, []).append(at)
        self._at, self._since, self._seq = found, first, last

    def _read_newer(self, c: sqlite3.Connection, first: int) -> None:
        last, newer = _last(c), c.execute(_NEWER, (self._seq,)).fetchall()
        for seq, rule, at in newer:
            insort(self._at.setdefault(rule, []), at)
            last = max(last, seq)
        self._seq = last
        if self._since is not None and first > self._since:
            self._since = first
            for times in self._at.values():
                del times[: bisect_left(times, first)]


def _last(c: sqlite3.Connection) -> int:
    return int(c.execute("SELECT coalesce(max(seq), 0) FROM journal").fetchone()[0])
