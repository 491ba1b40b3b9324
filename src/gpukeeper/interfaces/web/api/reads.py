"""Requests that only read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException

from gpukeeper.engine.explain import Explanation
from gpukeeper.engine.outlook import Outlooks
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.api.table import Call, Outcome
from gpukeeper.interfaces.web.api.values import (
    GpuList,
    GpuQuery,
    LineList,
    ListQuery,
    MachineHead,
    MachineList,
    PlanPage,
    WorkloadList,
)
from gpukeeper.interfaces.web.pages.acceptance import history_of
from gpukeeper.interfaces.web.pages.asking import ask_for, machine_named, machine_or_all
from gpukeeper.interfaces.web.pages.fleet import readable
from gpukeeper.interfaces.web.selection import Selection, fits, fits_workload
from gpukeeper.ledger.lines import NumberedLine
from gpukeeper.model.decision import Decision
from gpukeeper.views.acceptance_history import RunLines
from gpukeeper.views.explain import explain_view
from gpukeeper.views.health import HealthView
from gpukeeper.views.history import lines_view
from gpukeeper.views.live import GpuTile, MachineView, WorkloadLine, row_id
from gpukeeper.views.plan import daemon_plan_view
from gpukeeper.views.policy import PolicyView
from gpukeeper.views.timeline import Timeline
from gpukeeper.views.trial import PolicyTrial
from gpukeeper.views.usage_report import UsageReport

T = TypeVar("T")
Row = TypeVar("Row", GpuTile, WorkloadLine)
SPAN = timedelta(days=30)


async def machines(call: Call) -> Outcome:
    return Outcome(MachineList(tuple(_head(view) for view in readable(call.site, call.visitor))))


async def gpus(call: Call) -> Outcome:
    wanted = _selection(call.query)
    found = [one for view in _views(call) for one in view.gpus if fits(one, wanted)]
    page, following = _page(found, call.query)
    return Outcome(GpuList(gpus=page, next=following))


async def workloads(call: Call) -> Outcome:
    wanted = _selection(call.query)
    found = [one for view in _views(call) for one in view.workloads if fits_workload(one, wanted)]
    page, following = _page(found, call.query)
    return Outcome(WorkloadList(workloads=page, next=following))


async def workload(call: Call) -> Outcome:
    return Outcome(named(call)[1])


async def explain(call: Call) -> Outcome:
    view, line = named(call)
    return Outcome(explain_view(await ask(call, view.machine, Explanation, Request(verb="explain", workload=line.uid))))


async def signals(call: Call) -> Outcome:
    view, line = named(call)
    request = Request(verb="signals", workload=line.uid, seconds=call.query.hours * 3600)
    return Outcome(await ask(call, view.machine, Timeline, request, refused=403))


async def plan(call: Call) -> Outcome:
    machine = machine_of(call)
    view = daemon_plan_view(await ask(call, machine, Outlooks, Request(verb="plan")))
    ids = {one.seen.ref.key: row_id(machine, one.seen.ref.key) for place in view.places for one in place.decisions}
    rest = sorted(id_ for id_ in ids.values() if id_ > call.query.after)
    page = set(rest[: call.query.limit])

    def shown(decisions: Sequence[Decision]) -> tuple[Decision, ...]:
        return tuple(one for one in decisions if ids[one.seen.ref.key] in page)

    places = [
        msgspec.structs.replace(one, steps=shown(one.steps), decisions=shown(one.decisions)) for one in view.places
    ]
    following = rest[call.query.limit - 1] if len(rest) > call.query.limit else None
    return Outcome(PlanPage(view.policy, tuple(places), next=following))


async def ledger(call: Call) -> Outcome:
    query = call.query
    request = Request(
        verb="ledger",
        types=query.type,
        owner=query.owner or None,
        workload=query.workload,
        errors=query.errors,
        search=query.q,
        last=query.limit,
        before=query.after,
    )
    found = await ask(call, machine_of(call), NumberedLine, request)
    following = found.lines[0][0] if len(found.lines) == query.limit else None
    return Outcome(LineList(lines=lines_view(found.lines).lines, next=following))


async def report(call: Call) -> Outcome:
    query, now = call.query, call.site.now()
    until = query.until or now
    since = query.since or max(until, datetime.min.replace(tzinfo=UTC) + SPAN) - SPAN
    if since >= until:
        raise HTTPException(400, "The beginning of a report must be before its end.")
    request = Request(verb="report", since=since, until=until, zone=query.zone, owner=query.owner or None)
    return Outcome(await ask(call, machine_or_all(call.site, query.machine), UsageReport, request))


async def runs(call: Call) -> Outcome:
    request = Request(verb="runs", last=call.query.limit, before=call.query.after)
    return Outcome(await ask(call, machine_of(call), RunLines, request))


async def gpu_runs(call: Call) -> Outcome:
    return Outcome(await history_of(call.site, call.visitor, machine_of(call), call.query.serial))


async def policy(call: Call) -> Outcome:
    return Outcome(await ask(call, machine_of(call), PolicyView, Request(verb="policy")))


async def policy_trial(call: Call) -> Outcome:
    if not call.visitor.logged_in:
        raise HTTPException(401, "Log in first.")
    described = {name: value for name, value in msgspec.to_builtins(call.query).items() if name != "machine"}
    request = Request(verb="try", described=described)
    return Outcome(await ask(call, machine_of(call), PolicyTrial, request))


async def health(call: Call) -> Outcome:
    return Outcome(await ask(call, machine_of(call), HealthView, Request(verb="health")))


async def ask(call: Call, machine: str, kind: type[T], request: Request, *, refused: int = 400) -> T:
    return await ask_for(call.site, call.visitor, machine, kind, request, refused)


def machine_of(call: Call, name: str | None = None) -> str:
    return machine_named(call.site, call.query.machine if name is None else name)


def named(call: Call) -> tuple[MachineView, WorkloadLine]:
    wanted = call.http.path_params["id"]
    for view in readable(call.site, call.visitor):
        for one in view.workloads:
            if one.id == wanted:
                return view, one
    raise HTTPException(404, "There is no such workload now.")


def _views(call: Call) -> list[MachineView]:
    if call.query.machine:
        machine_of(call)
    return [view for view in readable(call.site, call.visitor) if call.query.machine in ("", view.machine)]


def _selection(query: ListQuery) -> Selection:
    state = query.state.value if isinstance(query, GpuQuery) and query.state is not None else ""
    return Selection(
        place=query.place, platform=query.platform, owner=query.owner, class_=query.class_, state=state, text=query.q
    )


def _page(found: Iterable[Row], query: ListQuery) -> tuple[tuple[Row, ...], str | None]:
    """By id, so that no entry is missed or repeated while others come and go."""
    rest: Sequence[Row] = sorted((one for one in found if one.id > query.after), key=lambda one: one.id)
    page = tuple(rest[: query.limit])
    return page, page[-1].id if len(rest) > query.limit else None


def _head(view: MachineView) -> MachineHead:
    fields = {
        name: getattr(view, name)
        for name in ("machine", "at", "version", "policy", "paused", "places", "not_seen_since")
    }
    return MachineHead(**fields, gpus=len(view.gpus), workloads=len(view.workloads))
