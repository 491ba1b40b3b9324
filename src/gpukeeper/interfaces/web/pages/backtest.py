"""What other idle limits would have done to the work recorded here, from the ledger. Nothing is replayed or changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.terminal.backtest import point_key, tradeoff
from gpukeeper.interfaces.web.app import Site, ask_for, machine_of
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.lifecycle.replay import GIVEN, Variant
from gpukeeper.markup import Markup
from gpukeeper.model.words import in_words
from gpukeeper.views.backtest import BacktestOnRecord, LimitRow, limit_rows


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    if not visitor.logged_in:
        raise HTTPException(401, "Log in first.")
    machine = machine_of(site, request)
    found = await ask_for(site, visitor, machine, BacktestOnRecord, Request(verb="backtest"), refused=403)
    rows = () if found.record is None else limit_rows(found.record, found.regret_max)
    best = next((one.row.variant for one in rows if one.best), None)
    return site.page(
        request,
        visitor,
        "backtest.html",
        machine=machine,
        found=found,
        record=found.record,
        rows=rows,
        best=next((one for one in rows if one.best), None),
        likely=next((one for one in rows if one.likely), None),
        given=GIVEN,
        start=_start(rows),
        windows=_windows(rows),
        thresholds=sorted({one.row.variant.threshold for one in rows if one.row.variant.threshold is not None}),
        key=point_key,
        picture=_picture(rows, best, found.regret_max),
    )


def _picture(rows: Sequence[LimitRow], best: Variant | None, allowed: float) -> Markup | None:
    """None: no point has a place on it."""
    if all(one.row.regret is None for one in rows):
        return None
    return tradeoff([one.row for one in rows], best=best, allowed=allowed)


def _start(rows: Sequence[LimitRow]) -> LimitRow | None:
    """Where the slider begins: at the best of the compared limits, otherwise in the middle of them."""
    compared = [one for one in rows if one.row.variant != GIVEN]
    chosen = [one for one in compared if one.best or one.likely] or compared[len(compared) // 2 :]
    return chosen[0] if chosen else None


def _windows(rows: Sequence[LimitRow]) -> list[tuple[str, str]]:
    """Each as in the key of a point, and in words; the shortest first."""
    found: set[timedelta] = {one.row.variant.window for one in rows if one.row.variant.window is not None}
    return [(point_key(Variant(one)).rstrip("/"), in_words(one)) for one in sorted(found)]
