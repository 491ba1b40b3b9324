"""What an entry of the table of routes is; the parameters, bodies and replies of the API that are not values of
`views` themselves, and how they are read.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Annotated, Any, TypeVar
from zoneinfo import available_timezones

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.ledger.lines import TYPES
from gpukeeper.model import reading
from gpukeeper.model.reading import TEXT_MAX, Moment
from gpukeeper.model.subject import Outcome
from gpukeeper.views.explain import ExplainView
from gpukeeper.views.live import GpuState, GpuTile, MachineState, WorkloadLine
from gpukeeper.views.plan import PlanView
from gpukeeper.views.trial import STATES, WorkloadWords

Limit = Annotated[int, msgspec.Meta(ge=1, le=1000, description="The most entries of one reply.")]
Word = Annotated[str, msgspec.Meta(max_length=200)]
Words = Annotated[str, msgspec.Meta(max_length=1000)]
LineNumber = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
LineType = Annotated[Word, msgspec.Meta(extra_json_schema={"enum": sorted(TYPES)})]
ZoneName = Annotated[Word, msgspec.Meta(extra_json_schema={"enum": ["", *sorted(available_timezones())]})]
_SPAN = "([0-9]{1,4}(us|ms|s|m|h|d|w))+"
SpanWords = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^({_SPAN}|0|)$", "maxLength": TEXT_MAX})]
MachineName = Annotated[Word, msgspec.Meta(description="The machine; may be left out if there is only one.")]


class OfMachine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    machine: MachineName = ""


class ListQuery(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`after`: `next` of the previous reply."""

    place: Word = ""
    platform: Word = ""
    owner: Word = ""
    class_: Word = msgspec.field(default="", name="class")
    q: Word = ""
    limit: Limit = 500
    after: Word = ""


class GpuQuery(ListQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: GpuState | None = None


class LedgerQuery(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`after`: `next` of the previous reply; older lines follow."""

    type: tuple[LineType, ...] = ()
    owner: Word = ""
    workload: Word = ""
    errors: bool = False
    q: Word = ""
    limit: Limit = 100
    after: LineNumber | None = None


class RunsQuery(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Limit = 100
    after: LineNumber | None = None


class GpuHistoryQuery(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`serial`: its serial number, or uuid where it has none."""

    serial: Word = ""


class ReportTime(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Default: the last 30 days."""

    since: Moment | None = None
    until: Moment | None = None
    zone: ZoneName = ""
    owner: Word = ""


class TrialQuery(WorkloadWords, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As the options of `gpukeeper policy try`; a duration like 2h."""

    machine: MachineName = ""
    gpus: Annotated[int, msgspec.Meta(ge=0, le=64)] = 1
    state: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["", *STATES]})] = ""
    outcome: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["", *Outcome]})] = ""
    label: tuple[Annotated[str, msgspec.Meta(extra_json_schema={"pattern": "^[^=]"})], ...] = ()
    running_for: SpanWords = ""
    idle_for: SpanWords = ""
    ended_since: SpanWords = ""
    ttl: SpanWords = ""
    hold: SpanWords = ""


class SignalsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hours: Annotated[float, msgspec.Meta(gt=0, le=168)] = 24.0


class HoldBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`seconds` None: as long as the policy allows."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=366 * 86400)] | None = None
    reason: Words = ""


class ReasonBody(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Words = ""


class ConfirmBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without a token the reply describes what would be done, with a token for the second request."""

    token: Word = ""


class EmptyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """{}"""


class RestoreBody(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`workload`: its path or uid, as in the ledger."""

    workload: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class MachineHead(MachineState, frozen=True, kw_only=True):
    """A machine without its GPUs and workloads."""

    gpus: int
    workloads: int


class MachineList(msgspec.Struct, frozen=True):
    machines: tuple[MachineHead, ...]


class GpuList(msgspec.Struct, frozen=True, kw_only=True):
    """`next`: None: these were the last."""

    gpus: tuple[GpuTile, ...]
    next: str | None = None


class PlanQuery(OfMachine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`after`: `next` of the previous reply."""

    limit: Limit = 500
    after: Word = ""


class PlanPage(PlanView, frozen=True, kw_only=True):
    """Of each place the decisions and steps of this page; the rest is of the whole place. `next`: None: these were the
    last."""

    next: str | None = None


class WorkloadList(msgspec.Struct, frozen=True, kw_only=True):
    workloads: tuple[WorkloadLine, ...]
    next: str | None = None


class LineList(msgspec.Struct, frozen=True, kw_only=True):
    """Oldest first, each with its number `seq`. `next`: for older lines."""

    lines: tuple[dict[str, Any], ...]
    next: int | None = None


class ExplainDocument(ExplainView, frozen=True, kw_only=True):
    """As the schema describes it. `diagnosis` is one of two untagged values, of which a schema knows no union."""

    diagnosis: Any


class ActionReply(msgspec.Struct, frozen=True, kw_only=True):
    """With a token nothing was done yet: the same request with that token does it."""

    done: bool
    words: str
    token: str = ""


PREFIX = "/api/v1"
T = TypeVar("T")
Query = TypeVar("Query", bound=msgspec.Struct)
_FRACTION = re.compile(rb'"-?P[0-9DT]*[.][0-9]+S"')


class Problem(msgspec.Struct, frozen=True):
    """Every reply with a status of 400 or above."""

    error: str


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters."""


class Call(msgspec.Struct, frozen=True):
    """One request to the API: `query` and `body` are of the types that its route names."""

    site: Site
    http: HttpRequest
    visitor: Visitor
    query: Any
    body: Any


class ApiOutcome(msgspec.Struct, frozen=True):
    value: object
    status: int = 200


Handler = Callable[[Call], Awaitable[ApiOutcome]]


class ApiRoute(msgspec.Struct, frozen=True):
    """`replies` by status; `path` without the prefix. The OpenAPI document is made of this."""

    method: str
    path: str
    name: str
    summary: str
    handler: Handler
    replies: Mapping[int, Any]
    query: type[msgspec.Struct] = NoQuery
    body: type[msgspec.Struct] | None = None

    @property
    def changes(self) -> bool:
        return self.method == "POST"


def page_of(route: ApiRoute) -> Callable[[Site, HttpRequest, Visitor], Awaitable[Response]]:
    """As the handler of a page: errors become sentences there."""

    async def handle(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
        query = read_query(request, route.query)
        body = None if route.body is None else await read_body(request, route.body)
        outcome = await route.handler(Call(site, request, visitor, query, body))
        return respond(request, outcome)

    return handle


def read_query(request: HttpRequest, kind: type[Query]) -> Query:
    """Numbers, times and flags from their text; a parameter of a list may be repeated."""
    found: dict[str, object] = {}
    lists = _lists(kind)
    for name in request.query_params:
        values = request.query_params.getlist(name)
        if len(values) > 1 and name not in lists:
            raise HTTPException(400, f'The parameter "{name[:60]}" is given more than once.')
        found[name] = values if name in lists else values[0]
    try:
        query = msgspec.convert(found, kind, strict=False)
        for field in msgspec.structs.fields(kind):
            given, value = found.get(field.encode_name), getattr(query, field.name)
            if given == "null" and value is None:
                raise HTTPException(400, f'The parameter "{field.encode_name}" has no value null. Leave it out.')
            if isinstance(value, datetime) and ":" not in str(given):  # msgspec reads a number as seconds since 1970
                raise HTTPException(
                    400, f'The parameter "{field.encode_name}" is not a time like 2026-01-31T12:00:00Z.'
                )
        return query
    except msgspec.ValidationError as problem:
        raise HTTPException(400, f"A parameter is not valid: {problem}.") from problem


def _lists(kind: type) -> set[str]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return {
        one.encode_name
        for one in info.fields
        if isinstance(one.type, msgspec.inspect.VarTupleType | msgspec.inspect.ListType)
    }


async def read_body(request: HttpRequest, kind: type[T]) -> T:
    words = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if words != "application/json":
        raise HTTPException(415, "The body must be JSON with the header content-type: application/json.")
    try:
        return reading.decode(await request.body(), type=kind)
    except (msgspec.MsgspecError, ValueError) as problem:
        raise HTTPException(400, f"The body is not valid: {problem}. Nothing was done.") from problem


def respond(request: HttpRequest, outcome: ApiOutcome) -> Response:
    """JSON with an ETag; 304 where the caller has it already."""
    body = _encoded(outcome.value)
    headers = {"cache-control": "private, no-cache"}
    if request.method != "POST":
        tag = etag_of(body)
        headers["etag"] = tag
        given = [one.strip() for one in request.headers.get("if-none-match", "").split(",")]
        if tag in given or f"W/{tag}" in given or "*" in given:
            return Response(None, 304, headers=headers)
    return Response(body, outcome.status, media_type="application/json", headers=headers)


def _encoded(value: object) -> bytes:
    """Durations in whole seconds: what was measured has no use of more, and readers of ISO 8601 often none for it."""
    body = msgspec.json.encode(value, order="sorted")
    if _FRACTION.search(body) is None:
        return body
    return msgspec.json.encode(_in_seconds(msgspec.to_builtins(value, builtin_types=(timedelta,))), order="sorted")


def _in_seconds(value: object) -> object:
    if isinstance(value, timedelta):
        return timedelta(seconds=value // timedelta(seconds=1))
    if isinstance(value, dict):
        return {name: _in_seconds(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_in_seconds(one) for one in value]
    return value


def etag_of(body: bytes) -> str:
    return f'"{blake2b(body, digest_size=12).hexdigest()}"'
