"""The OpenAPI 3.1 document of the API, made of the table of routes and the types that its entries name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gpukeeper import __version__
from gpukeeper.interfaces.web.api.table import PREFIX, ApiRoute, Problem

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
