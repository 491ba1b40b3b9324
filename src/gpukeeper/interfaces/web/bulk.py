"""Requests for several workloads: first previewed, then made one after the other, each with its own result.

Kept in the memory of the web process, for a while. What was done is in the ledger, a line for each workload.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import Answer
from gpukeeper.model.errors import LeaseHeld

MOST_AT_ONCE = 100  # workloads of one request
MOST_KEPT = 50  # previews and results; the oldest is forgotten
PREVIEW_LASTS = 600.0  # seconds
LEASE_TRIES, LEASE_PAUSE = 20, 3.0  # a pass at the same place is waited for
Ask = Callable[[str, Request], Awaitable[Answer]]


@dataclass(frozen=True)
class BulkItem:
    """One workload as it was previewed. `refused`: it is shown and left alone."""

    machine: str
    id: str
    path: str
    owner: str
    words: str
    uid: str = ""
    revision: str = ""
    refused: bool = False


@dataclass
class BulkResult:
    """`state`: waiting, in progress, done, not done or refused."""

    item: BulkItem
    state: str = "waiting"
    words: str = ""


@dataclass
class BulkRun:
    """A preview of one person, and what came of it."""

    token: str
    person: str
    verb: str
    seconds: float | None
    reason: str
    items: tuple[BulkItem, ...]
    made: float
    results: list[BulkResult] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def possible(self) -> list[BulkItem]:
        return [one for one in self.items if not one.refused]

    @property
    def confirmed(self) -> bool:
        return self.task is not None

    @property
    def finished(self) -> bool:
        return self.task is not None and self.task.done()

    def count(self, state: str) -> int:
        return sum(one.state == state for one in self.results)


class BulkRuns:
    def __init__(self) -> None:
        self._runs: dict[str, BulkRun] = {}  # by token, oldest first

    def add(self, person: str, verb: str, seconds: float | None, reason: str, items: tuple[BulkItem, ...]) -> BulkRun:
        for token in [one.token for one in self._runs.values() if one.finished or not one.confirmed]:
            if len(self._runs) < MOST_KEPT:
                break
            del self._runs[token]
        made = BulkRun(secrets.token_urlsafe(18), person, verb, seconds, reason, items, time.monotonic())
        self._runs[made.token] = made
        return made

    def of(self, person: str, token: str) -> BulkRun | None:
        """Nobody but the person who made it sees it."""
        found = self._runs.get(token)
        return found if found is not None and person and found.person == person else None

    def busy(self, person: str) -> bool:
        return any(one.person == person and one.confirmed and not one.finished for one in self._runs.values())

    def begin(self, run: BulkRun, ask: Ask) -> None:
        """Once. Only what the preview did not refuse is requested."""
        assert run.task is None, "a preview is confirmed once"
        run.results = [BulkResult(one, "refused", one.words) if one.refused else BulkResult(one) for one in run.items]
        run.task = asyncio.create_task(_make_requests(run, ask))


def is_old(run: BulkRun) -> bool:
    return time.monotonic() - run.made > PREVIEW_LASTS


async def _make_requests(run: BulkRun, ask: Ask) -> None:
    for one in run.results:
        if one.state != "waiting":
            continue
        one.state = "in progress"
        try:
            answer = await _request(run, one.item, ask)
            one.state, one.words = ("done" if answer.done else "not done"), answer.words
        except Exception as problem:  # of one workload: the others go on
            one.state, one.words = "not done", f"{str(problem) or type(problem).__name__}. See the history"


async def _request(run: BulkRun, item: BulkItem, ask: Ask) -> Answer:
    """On condition that it is still what was previewed. A stop has a confirmation of its own, bound to that object."""
    if run.verb != "stop":
        request = Request(
            verb=run.verb, workload=item.uid, seconds=run.seconds, reason=run.reason, revision=item.revision
        )
        return await ask(item.machine, request)
    for _ in range(LEASE_TRIES):
        answer = await ask(item.machine, Request(verb="stop", workload=item.uid, confirm=True, revision=item.revision))
        if answer.token:
            answer = await ask(item.machine, Request(verb="stop", workload=item.uid, token=answer.token))
        if answer.exit_code != LeaseHeld.exit_code:
            break
        await asyncio.sleep(LEASE_PAUSE)
    return answer
