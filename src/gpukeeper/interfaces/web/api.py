"""The HTTP API under /api/v1: the values of --json, with the rights of the caller. The server and the OpenAPI 3.1
document are made of one table of routes. The daemon decides about requests that change something as it does for its
socket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.exceptions import HTTPException

from gpukeeper import __version__
from gpukeeper.engine.outlook import Explanation, Outlooks
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.web.api_table import (
    PREFIX,
    ActionReply,
    ApiOutcome,
    ApiRoute,
    Call,
    ConfirmBody,
    EmptyBody,
    ExplainDocument,
    GpuHistoryQuery,
    GpuList,
    GpuQuery,
    HoldBody,
    LedgerQuery,
    LineList,
    ListQuery,
    MachineHead,
    MachineList,
    NoQuery,
    OfMachine,
    PlanPage,
    PlanQuery,
    Problem,
    ReasonBody,
    ReportTime,
    RestoreBody,
    RunsQuery,
    SignalsQuery,
    TrialQuery,
    WorkloadList,
    page_of,
)
from gpukeeper.interfaces.web.app import Page, ask_for, machine_named, machine_or_all
from gpukeeper.interfaces.web.pages.acceptance import history_of
from gpukeeper.interfaces.web.pages.fleet import Selection, fits, fits_workload, readable
from gpukeeper.ledger.lines import NumberedLine
from gpukeeper.model.decision import Decision
from gpukeeper.views.acceptance_history import GpuHistory, RunLines
from gpukeeper.views.explain import Timeline, explain_view
from gpukeeper.views.history import lines_view
from gpukeeper.views.live import MachineState, MachineView, Row, WorkloadLine, row_id
from gpukeeper.views.own_state import HealthView, PolicyView
from gpukeeper.views.plan import daemon_plan_view
from gpukeeper.views.trial import PolicyTrial
from gpukeeper.views.usage_report import UsageReport

_PARAMETER = re.compile(r"\{(\w+)\}")
PROBLEMS = {
    "400": "The request is not valid.",
    "401": "Log in first.",
    "403": "Not allowed, or the CSRF token is missing.",
    "404": "Not found.",
    "429": "Too many requests.",
    "503": "The daemon does not reply, or could not read its ledger in time.",
}
OF_CHANGES = {
    "409": "The request was refused. Nothing was done.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
}


def document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    replies = [reply for route in routes for reply in route.replies.values()]
    bodies = [route.body for route in routes if route.body is not None]
    types = list(dict.fromkeys([*replies, *bodies, Problem]))
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(f"{PREFIX}{route.path}", {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpukeeper",
            "version": __version__,
            "description": "What the dashboard shows, as JSON, with the rights of the caller.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    problems = PROBLEMS | (OF_CHANGES if route.changes else {})
    responses: dict[str, Any] = {
        str(status): {"description": "OK" if status == 200 else "To be confirmed.", **_json(schemas[reply])}
        for status, reply in route.replies.items()
    }
    if not route.changes:
        responses["304"] = {"description": "Not changed, by its ETag."}
    responses |= {code: {"description": words, **_json(schemas[Problem])} for code, words in problems.items()}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [*_in_path(route.path), *_in_query(route.query)],
        "responses": responses,
        "security": [{"token": []}] if route.changes else [{}, {"token": []}],
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_json(schemas[route.body])}
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _in_path(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9a-f]{18}$"}}
        for name in _PARAMETER.findall(path)
    ]


def _in_query(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    (_,), components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    properties: dict[str, Any] = components[kind.__name__].get("properties", {})
    return [
        {"name": name, "in": "query", "required": False, "schema": _inlined(schema, components)}
        for name, schema in properties.items()
    ]


def _inlined(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """A parameter is never null, and its types are few: each is written where it is used."""
    if "anyOf" in schema:
        (only,) = [one for one in schema["anyOf"] if one != {"type": "null"}]
        schema = only
    if "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    return {name: value for name, value in schema.items() if name not in ("default", "title")}


T = TypeVar("T")
SPAN = timedelta(days=30)


async def machines(call: Call) -> ApiOutcome:
    return ApiOutcome(MachineList(tuple(_head(view) for view in readable(call.site, call.visitor))))


async def gpus(call: Call) -> ApiOutcome:
    wanted = _selection(call.query)
    found = [one for view in _views(call) for one in view.gpus if fits(one, wanted)]
    page, following = _page(found, call.query)
    return ApiOutcome(GpuList(gpus=page, next=following))


async def workloads(call: Call) -> ApiOutcome:
    wanted = _selection(call.query)
    found = [one for view in _views(call) for one in view.workloads if fits_workload(one, wanted)]
    page, following = _page(found, call.query)
    return ApiOutcome(WorkloadList(workloads=page, next=following))


async def workload(call: Call) -> ApiOutcome:
    return ApiOutcome(named(call)[1])


async def explain(call: Call) -> ApiOutcome:
    view, line = named(call)
    return ApiOutcome(
        explain_view(await ask(call, view.machine, Explanation, Request(verb="explain", workload=line.uid)))
    )


async def signals(call: Call) -> ApiOutcome:
    view, line = named(call)
    request = Request(verb="signals", workload=line.uid, seconds=call.query.hours * 3600)
    return ApiOutcome(await ask(call, view.machine, Timeline, request, refused=403))


async def plan(call: Call) -> ApiOutcome:
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
    return ApiOutcome(PlanPage(view.policy, tuple(places), next=following))


async def ledger(call: Call) -> ApiOutcome:
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
    return ApiOutcome(LineList(lines=lines_view(found.lines).lines, next=following))


async def report(call: Call) -> ApiOutcome:
    query, now = call.query, call.site.now()
    until = query.until or now
    since = query.since or max(until, datetime.min.replace(tzinfo=UTC) + SPAN) - SPAN
    if since >= until:
        raise HTTPException(400, "The beginning of a report must be before its end.")
    request = Request(verb="report", since=since, until=until, zone=query.zone, owner=query.owner or None)
    return ApiOutcome(await ask(call, machine_or_all(call.site, query.machine), UsageReport, request))


async def runs(call: Call) -> ApiOutcome:
    request = Request(verb="runs", last=call.query.limit, before=call.query.after)
    return ApiOutcome(await ask(call, machine_of(call), RunLines, request))


async def gpu_runs(call: Call) -> ApiOutcome:
    return ApiOutcome(await history_of(call.site, call.visitor, machine_of(call), call.query.serial))


async def policy(call: Call) -> ApiOutcome:
    return ApiOutcome(await ask(call, machine_of(call), PolicyView, Request(verb="policy")))


async def policy_trial(call: Call) -> ApiOutcome:
    if not call.visitor.logged_in:
        raise HTTPException(401, "Log in first.")
    described = {name: value for name, value in msgspec.to_builtins(call.query).items() if name != "machine"}
    request = Request(verb="try", described=described)
    return ApiOutcome(await ask(call, machine_of(call), PolicyTrial, request))


async def health(call: Call) -> ApiOutcome:
    return ApiOutcome(await ask(call, machine_of(call), HealthView, Request(verb="health")))


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
    fields = {name: getattr(view, name) for name in MachineState.__struct_fields__}
    return MachineHead(**fields, gpus=len(view.gpus), workloads=len(view.workloads))


async def hold(call: Call) -> ApiOutcome:
    return await _of_workload(call, Request(verb="hold", seconds=call.body.seconds, reason=call.body.reason))


async def release(call: Call) -> ApiOutcome:
    return await _of_workload(call, Request(verb="release"))


async def stop(call: Call) -> ApiOutcome:
    return await _of_workload(call, Request(verb="stop", confirm=True, token=call.body.token))


async def remove(call: Call) -> ApiOutcome:
    return await _of_workload(call, Request(verb="remove", confirm=True, token=call.body.token))


async def restore(call: Call) -> ApiOutcome:
    return await _sent(call, machine_of(call, call.body.machine), Request(verb="restore", workload=call.body.workload))


async def pause(call: Call) -> ApiOutcome:
    return await _sent(call, machine_of(call, call.body.machine), Request(verb="pause", reason=call.body.reason))


async def resume(call: Call) -> ApiOutcome:
    return await _sent(call, machine_of(call, call.body.machine), Request(verb="resume"))


async def _of_workload(call: Call, request: Request) -> ApiOutcome:
    view, line = named(call)
    return await _sent(call, view.machine, replace(request, workload=line.uid))


async def _sent(call: Call, machine: str, request: Request) -> ApiOutcome:
    answer = await call.site.ask(call.visitor, machine, request)
    if answer.token:
        return ApiOutcome(ActionReply(done=False, words=answer.words, token=answer.token), 202)
    if not answer.done:
        raise HTTPException(409, answer.words)
    return ApiOutcome(ActionReply(done=True, words=answer.words))


_DONE = {200: ActionReply}
_ASKED = {200: ActionReply, 202: ActionReply}

API: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/machines", "machines", "Machines and their places.", machines, {200: MachineList}),
    ApiRoute("GET", "/gpus", "gpus", "GPUs with use, holder and next step.", gpus, {200: GpuList}, GpuQuery),
    ApiRoute("GET", "/workloads", "workloads", "Workloads.", workloads, {200: WorkloadList}, ListQuery),
    ApiRoute("GET", "/workloads/{id}", "workload", "One workload.", workload, {200: WorkloadLine}),
    ApiRoute(
        "GET",
        "/workloads/{id}/explain",
        "explain",
        "Every rule's verdict and why.",
        explain,
        {200: ExplainDocument},
    ),
    ApiRoute(
        *("GET", "/workloads/{id}/signals", "signals", "Signals over time: own work, or as an admin."),
        *(signals, {200: Timeline}, SignalsQuery),
    ),
    ApiRoute("GET", "/plan", "plan", "What would be done now, and why.", plan, {200: PlanPage}, PlanQuery),
    ApiRoute("GET", "/ledger", "ledger", "Lines of the ledger.", ledger, {200: LineList}, LedgerQuery),
    ApiRoute("GET", "/report", "report", "Usage and savings.", report, {200: UsageReport}, ReportTime),
    ApiRoute("GET", "/acceptance", "acceptance", "Acceptance runs.", runs, {200: RunLines}, RunsQuery),
    ApiRoute(
        *("GET", "/acceptance/gpu", "acceptanceOfGpu", "A GPU's figures over its runs, with peers and floor."),
        *(gpu_runs, {200: GpuHistory}, GpuHistoryQuery),
    ),
    ApiRoute("GET", "/policy", "policy", "The policy in effect.", policy, {200: PolicyView}, OfMachine),
    ApiRoute(
        *("GET", "/policy/try", "policyTry", "What would happen to a hypothetical workload; needs a login."),
        *(policy_trial, {200: PolicyTrial}, TrialQuery),
    ),
    ApiRoute("GET", "/health", "health", "Health of gpukeeper.", health, {200: HealthView}, OfMachine),
    ApiRoute("POST", "/workloads/{id}/hold", "hold", "Hold it.", hold, _DONE, NoQuery, HoldBody),
    ApiRoute("POST", "/workloads/{id}/release", "release", "End a hold.", release, _DONE, NoQuery, EmptyBody),
    ApiRoute("POST", "/workloads/{id}/stop", "stop", "Stop it.", stop, _ASKED, NoQuery, ConfirmBody),
    ApiRoute("POST", "/workloads/{id}/remove", "remove", "Remove it.", remove, _ASKED, NoQuery, ConfirmBody),
    ApiRoute("POST", "/restore", "restore", "Restore what was stopped.", restore, _DONE, NoQuery, RestoreBody),
    ApiRoute("POST", "/pause", "pause", "Pause all actions (admins).", pause, _DONE, NoQuery, ReasonBody),
    ApiRoute("POST", "/resume", "resume", "End a pause (admins).", resume, _DONE, NoQuery, OfMachine),
)


async def _openapi(call: Call) -> ApiOutcome:
    return ApiOutcome(_DOCUMENT)


_DOCUMENT = document(API)
_DESCRIPTION = ApiRoute("GET", "/openapi.json", "openapi", "This document.", _openapi, {})
API_ROUTES: tuple[tuple[str, str, Page], ...] = tuple(
    (one.method, f"{PREFIX}{one.path}", page_of(one)) for one in (*API, _DESCRIPTION)
)
