"""What an entry of the table of routes is, and how its parameters and body are read."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.model import reading

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


class Outcome(msgspec.Struct, frozen=True):
    value: object
    status: int = 200


Handler = Callable[[Call], Awaitable[Outcome]]


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
        for field in msgspec.structs.fields(kind) if "null" in found.values() else ():
            if found.get(field.encode_name) == "null" and getattr(query, field.name) is None:
                raise HTTPException(400, f'The parameter "{field.encode_name}" has no value null. Leave it out.')
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


def respond(request: HttpRequest, outcome: Outcome) -> Response:
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
