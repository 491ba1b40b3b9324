"""The API against its own OpenAPI document: no reply with 5xx, and none that the document does not describe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
)

from gpukeeper.interfaces.web.api import API
from gpukeeper.interfaces.web.api_table import ApiRoute
from gpukeeper.interfaces.web.security import Bucket
from tests.effort import how_many
from tests.unit.interfaces.web.sites import Dashboard, dashboard

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    positive_data_acceptance,
]
# No schema describes what contradicts itself (an end before its beginning) or is not in the policy.
SEMANTIC = ("policyTry", "report")
EXAMPLES = how_many(0.12)  # of valid and of invalid requests to each route


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    unlimited = Bucket(rate=1e9, burst=1e9)
    with dashboard(tmp_path_factory.mktemp("api"), raising=False, limits=unlimited) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda one: one.value)
@pytest.mark.parametrize("route", API, ids=lambda one: one.name)
def test_every_reply_is_as_described(site: Dashboard, route: ApiRoute, mode: GenerationMode) -> None:
    if mode is GenerationMode.NEGATIVE and route.name == "machines":
        return  # it has no parameters
    document = site.get("/api/v1/openapi.json").json()
    document["paths"][f"/api/v1{route.path}"][route.method.lower()].pop("security")  # test_api.py tests who may do what
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[f"/api/v1{route.path}"][route.method]
    headers = site.bearer("root")
    known = {"id": site.workload("train")} if "{id}" in route.path else None
    cases: st.SearchStrategy[Any] = operation.as_strategy(mode)
    if known is not None:
        cases |= operation.as_strategy(mode, path_parameters=known)

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(cases)
    def check(case: Any) -> None:
        sent = case.as_transport_kwargs(base_url="http://testserver")
        sent["headers"] = {**sent.get("headers", {}), **headers}
        sent = {name: value for name, value in sent.items() if name not in ("cookies", "auth", "files")}
        if "data" in sent:
            sent["content"] = sent.pop("data")
        case.validate_response(
            site.client.request(**sent),
            checks=[one for one in CHECKS if not (route.name in SEMANTIC and one is positive_data_acceptance)],
        )

    check()
