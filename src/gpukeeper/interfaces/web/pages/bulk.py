"""Hold, release or stop several workloads: select, preview, confirm. For admins; the daemon decides about each.

The requests are kept in memory for a while: first previewed, then made one after the other, each with its own result.
What was done is in the ledger, a line for each workload.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response

from gpukeeper.engine.requests import PREVIEWED, Request, RequestPreview
from gpukeeper.interfaces.link import Answer
from gpukeeper.interfaces.web.app import MOST_AT_ONCE, Site, form_pairs
from gpukeeper.interfaces.web.pages.fleet import readable
from gpukeeper.interfaces.web.pages.workload import hold_seconds
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.model import reading
from gpukeeper.model.errors import LeaseHeld
from gpukeeper.views.live import WorkloadLine

TOGETHER = 4  # previews that are asked for at the same time


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


async def preview(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    _only_admins(visitor)
    pairs = await form_pairs(request)
    form = dict(pairs)
    verb = form.get("action", "")
    if verb not in PREVIEWED:
        raise HTTPException(400, f"Choose what to do: {', '.join(PREVIEWED)}. Nothing was done.")
    wanted = list(dict.fromkeys(value for name, value in pairs if name == "id"))
    if not wanted:
        raise HTTPException(400, "No workload is selected. Nothing was done.")
    if len(wanted) > MOST_AT_ONCE:
        raise HTTPException(
            400, f"{len(wanted)} workloads are selected; at most {MOST_AT_ONCE} at once. Nothing was done."
        )
    seconds = hold_seconds(form.get("hours", "")) if verb == "hold" else None
    asked = Request(verb="preview", action=verb, seconds=seconds, reason=form.get("reason", "")[:1000])
    run = _runs(request).add(
        visitor.person.name, verb, seconds, asked.reason, await _items(site, visitor, wanted, asked)
    )
    return site.page(request, visitor, "bulk_preview.html", run=run)


async def confirm(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    _only_admins(visitor)
    run = _runs(request).of(visitor.person.name, request.path_params["token"])
    if run is None or run.confirmed or is_old(run):
        raise HTTPException(
            409, "This preview is unknown, was confirmed already or is older than 10 minutes. Nothing was done."
        )
    if not run.possible:
        raise HTTPException(409, "Every workload of this preview was refused. Nothing was done.")
    if _runs(request).busy(visitor.person.name):
        raise HTTPException(409, "Your last requests are still in progress. Nothing was done. Try again when they end.")

    async def ask(machine: str, asked: Request) -> Answer:
        return await site.ask(visitor, machine, asked)

    _runs(request).begin(run, ask)
    return RedirectResponse(f"/bulk/{run.token}", 303)


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    run = _runs(request).of(visitor.person.name, request.path_params["token"])
    if run is None or not run.confirmed:
        raise HTTPException(404, "These results are not kept any more. What was done is in the history.")
    return site.page(request, visitor, "bulk.html", run=run, summary=_summary(run))


def _runs(request: HttpRequest) -> BulkRuns:
    runs: BulkRuns = request.app.state.bulk
    return runs


def _only_admins(visitor: Visitor) -> None:
    if not visitor.person.admin:
        raise HTTPException(403, "Only admins may act on several workloads at once. Nothing was done.")


async def _items(site: Site, visitor: Visitor, wanted: list[str], asked: Request) -> tuple[BulkItem, ...]:
    known = {one.id: (view.machine, one) for view in readable(site, visitor) for one in view.workloads}
    turns = asyncio.Semaphore(TOGETHER)

    async def item(id_: str) -> BulkItem:
        if id_ not in known:
            return BulkItem("", "", id_[:40], "", "it does not exist any more", refused=True)
        async with turns:
            return await _item(site, visitor, *known[id_], asked)

    return tuple(await asyncio.gather(*(item(one) for one in wanted)))


async def _item(site: Site, visitor: Visitor, machine: str, line: WorkloadLine, asked: Request) -> BulkItem:
    """Asked for by its uid: another object may have its name by now."""
    owner = line.owner if isinstance(line.owner, str) else "unknown"
    answer = await site.ask(
        visitor,
        machine,
        Request(verb="preview", action=asked.action, workload=line.uid, seconds=asked.seconds, reason=asked.reason),
    )
    if not answer.done:
        return BulkItem(machine, line.id, line.path, owner, answer.words, refused=True)
    found = reading.decode(answer.body, type=RequestPreview)
    return BulkItem(machine, line.id, found.path, owner, found.words, found.uid, found.revision)


def _summary(run: BulkRun) -> str:
    counts = [(run.count(state), state) for state in ("done", "not done", "refused", "in progress", "waiting")]
    return ", ".join(f"{number} {state}" for number, state in counts if number)
