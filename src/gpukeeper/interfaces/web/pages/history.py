"""Lines of the ledger: one's own work, or everything for admins. Newest first."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.app import Site, ask_for, form_of, machine_named, machine_of
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.ledger.lines import TYPES, NumberedLine
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Event, Passed
from gpukeeper.views.history import line_row

PAGE = 100
WITHOUT_PASSES = tuple(sorted(name for name in TYPES if name != Passed.__struct_config__.tag))
FILTERS = ("machine", "type", "owner", "workload", "q", "errors")


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    given = {name: request.query_params.get(name, "").strip()[:200] for name in FILTERS}
    machine = machine_of(site, request)
    asked = Request(
        verb="ledger",
        types=(given["type"],) if given["type"] else WITHOUT_PASSES,
        owner=given["owner"] or None,
        workload=given["workload"],
        errors=bool(given["errors"]),
        search=given["q"],
        last=PAGE,
        before=_number(request.query_params.get("before", "")),
    )
    found = await ask_for(site, visitor, machine, NumberedLine, asked)
    removed = ""
    if (
        (uid := removed_last(found.lines))
        and given["workload"]
        and asked.before is None
        and not site.source.settings.fleet
    ):
        answer = await site.ask(visitor, machine, Request(verb="explain", workload=uid))
        removed = "" if answer.done else answer.words
    kept = {name: value for name, value in given.items() if value}
    older = urlencode({**kept, "before": found.lines[0][0]}) if len(found.lines) == PAGE else ""
    return site.page(
        request,
        visitor,
        "history.html",
        machine=machine,
        rows=[(line_row(*one), one[1], restorable(one[1])) for one in reversed(found.lines)],
        given=given,
        removed=removed,
        filtered=any(given[name] for name in FILTERS[1:]),
        types=sorted(TYPES),
        older=older,
        newest=f"?{urlencode(kept)}" if asked.before is not None else "",
    )


async def restore(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    form = await form_of(request)
    words = form.get("workload", "")[:1000]
    if not words:
        raise HTTPException(400, "Name the workload to restore. Nothing was done.")
    machine = machine_named(site, form.get("machine", ""))
    answer = await site.ask(visitor, machine, Request(verb="restore", workload=words))
    status = 200 if answer.done else 409
    return site.page(request, visitor, "done.html", status, line=None, words=answer.words, done=answer.done)


def removed_last(lines: Sequence[tuple[int, Event]]) -> str:
    """The uid, if the newest of them about any object says that gpukeeper removed it."""
    last = next((line for _, line in reversed(lines) if line.ref is not None), None)
    gone = isinstance(last, Closed) and last.result is Result.RECLAIMED and last.action is Action.REMOVE
    return last.ref.uid if gone and last is not None and last.ref is not None else ""


def restorable(line: Event) -> str:
    """The uid of what gpukeeper stopped or removed; whether it can be restored is decided when it is requested."""
    acted = isinstance(line, Closed) and line.result is Result.RECLAIMED and line.action in (Action.STOP, Action.REMOVE)
    return line.ref.uid if acted and line.ref is not None else ""


def _number(words: str) -> int | None:
    if not words:
        return None
    if not (words.isascii() and words.isdecimal() and 0 < int(words) < 2**62):
        raise HTTPException(400, f'"{words[:40]}" is not the number of a line.')
    return int(words)
