"""Every page over ASGI: for everybody, for an owner, for an admin; with rights, filters and errors in sentences."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from gpukeeper.engine.requests import Request as AskedRequest
from gpukeeper.interfaces.link import Credentials, Question
from gpukeeper.interfaces.web.application import Feed
from gpukeeper.interfaces.web.security import COOKIE, Signer
from gpukeeper.ledger.logins import LoginKind
from gpukeeper.model.event import NodeTested
from gpukeeper.model.gpu import Grade
from gpukeeper.model.subject import Ref
from tests.patience import PATIENCE
from tests.unit.interfaces.web.sites import Dashboard, dashboard

EXPLAIN = AskedRequest(verb="explain", workload="train")
PAGES = ("/", "/workloads", "/plan", "/history", "/usage", "/acceptance", "/policy", "/health", "/login")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path) as made:
        yield made


@pytest.mark.parametrize("person", ["", "ann", "root"])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_inline_script_or_style(site: Dashboard, page: str, person: str) -> None:
    reply = site.get(page, person)
    assert reply.status_code == 200
    assert "style=" not in reply.text
    assert "<style" not in reply.text
    assert re.findall(r"<script(?![^>]*src=)", reply.text) == []
    assert re.findall(r"\son\w+=", reply.text) == []
    assert "default-src 'none'" in reply.headers["content-security-policy"]


def test_the_page_of_a_workload_shows_by_rights(site: Dashboard) -> None:
    page = f"/workload/{site.workload('train')}"
    own, other, admin = (site.get(page, person).text for person in ("ann", "bob", "root"))
    for text in (own, admin):
        assert "secret" in text
        assert 'class="timeline"' in text
        assert "/hold" in text
    assert "secret" not in other
    assert 'class="timeline"' not in other
    assert "/hold" not in other


def test_the_history_is_filtered_and_shows_own_lines_only(site: Dashboard) -> None:
    assert "train" in site.get("/history", "ann").text
    assert "node-1/eval" not in site.get("/history", "ann").text
    assert "node-1/eval" in site.get("/history?workload=eval", "root").text
    assert "node-1/train" not in site.get("/history?workload=eval", "root").text
    assert "No line matches" in site.get("/history?q=nothing-like-this", "root").text
    assert site.get("/history?type=nonsense", "root").status_code == 400
    assert site.get("/history?before=x", "root").status_code == 400


def test_usage_is_also_a_table_to_download(site: Dashboard) -> None:
    reply = site.get("/usage.csv?days=7", "root")
    assert reply.status_code == 200
    assert reply.text.startswith("day,owner,class,group,model,held,active_gpu_hours")
    assert "attachment" in reply.headers["content-disposition"]
    for query in ("month=2026-13", "days=0", "days=x", "days=99999", "zone=Nowhere/City&days=1", "month=9999-12"):
        assert site.get(f"/usage?{query}", "root").status_code == 400, query


def test_a_gpu_has_a_page_with_its_figures(site: Dashboard) -> None:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    line = NodeTested(
        at=at,
        ref=Ref("host", "node-1", "node", "node-1", "node-1"),
        run="run-1",
        verdict=Grade.WARN,
        reason="slow",
        device="gpu",
        gpus={"S1": Grade.PASS, "S2": Grade.WARN},
        values={"S1": {"gemm.tflops bf16": 700.0}},
        not_passed={"S2": {"gemm.tflops bf16": 600.0}},
        floors={"S2": {"gemm.tflops bf16": 650.0}},
        models={"S2": "NVIDIA X"},
    )
    site.call(lambda: site.session.keeper.ledger.append([line]))
    assert "S2" in site.get("/acceptance").text
    page = site.get("/acceptance/gpu/S2").text
    assert "gemm.tflops bf16" in page
    assert 'class="peers"' in page
    assert 'class="floor"' in page
    assert "floor 650" in page
    assert "did not pass" in page
    assert "NVIDIA X" in page
    unknown = site.get("/acceptance/gpu/S1").text
    assert 'class="floor"' not in unknown
    assert "no floor known: the model is unknown" in unknown
    found = site.get("/api/v1/acceptance/gpu?serial=S2").json()
    assert (found["model"], found["figures"][0]["floor"]) == ("NVIDIA X", 650.0)
    assert site.get("/api/v1/acceptance/gpu?serial=other").status_code == 404
    assert site.get("/acceptance/gpu/other").status_code == 404


def test_login_by_a_link_works_once(site: Dashboard) -> None:
    link = f"/login/{site.token('ann', LoginKind.LINK)}"
    assert "Log in here" in site.get(link).text  # a program that only opens links uses nothing up
    first = site.client.post(link, follow_redirects=False)
    assert first.status_code == 303
    cookie = first.headers["set-cookie"]
    for word in ("HttpOnly", "SameSite=strict", "Path=/"):
        assert word in cookie
    assert "ann" in site.client.get("/").text
    site.client.cookies.clear()
    assert site.client.post(link, follow_redirects=False).status_code == 403


def test_a_revoked_session_and_a_forged_cookie_are_nobody(site: Dashboard) -> None:
    secret = site.token("ann", LoginKind.SESSION)
    signed = {"cookie": f"{COOKIE}={Signer(b'k' * 32).sign(secret)}"}
    assert "Log out" in site.client.get("/", headers=signed).text
    forged = {"cookie": f"{COOKIE}={Signer(b'other' * 8).sign(secret)}"}
    assert "Log out" not in site.client.get("/", headers=forged).text
    site.call(lambda: site.logins.revoke(None, "ann"))
    path = f"/workload/{site.workload('train')}/hold"
    csrf = {"x-csrf-token": Signer(b"k" * 32).csrf(secret)}
    assert site.client.post(path, headers={**signed, **csrf}, follow_redirects=False).status_code == 401


def test_a_revoked_session_reads_nothing_more_from_that_moment_on(tmp_path: Path) -> None:
    with dashboard(tmp_path, anonymous=False) as site:
        signed = {"cookie": f"{COOKIE}={Signer(b'k' * 32).sign(site.token('ann', LoginKind.SESSION))}"}
        assert site.client.get("/workloads", headers=signed).status_code == 200
        site.call(lambda: site.logins.revoke(None, "ann"))
        assert site.client.get("/workloads", headers=signed, follow_redirects=False).status_code == 303
        assert site.client.get("/api/v1/gpus", headers=signed).status_code == 401


def test_the_live_updates_of_a_revoked_session_end(site: Dashboard) -> None:
    signed = f"{COOKIE}={Signer(b'k' * 32).sign(site.token('ann', LoginKind.SESSION))}"
    scope = {
        "type": "http",
        "scheme": "http",
        "method": "GET",
        "path": "/events",
        "query_string": b"",
        "client": ("10.0.0.5", 1),
    }

    async def read() -> list[object]:
        response = await Feed(site.app.state.site).events(Request({**scope, "headers": [(b"cookie", signed.encode())]}))
        assert isinstance(response, StreamingResponse)
        stream = aiter(response.body_iterator)
        received = [await anext(stream)]
        await site.logins.revoke(None, "ann")
        site.session.keeper.live.places.clear()  # a change that would be sent
        await site.app.state.site.source.publish()
        return [*received, await anext(stream, "the end")]

    assert site.call(read) == [b"retry: 3000\n\n", "the end"]


def test_a_person_reads_while_a_request_of_theirs_is_in_progress(site: Dashboard) -> None:
    """A stop may take its grace."""
    asked = Question(id=1, credentials=Credentials(secret=site.token("ann")), request=EXPLAIN)

    async def read() -> list[bool]:
        web = site.app.state.site.source.web
        async with web._changes.turn(1000), asyncio.timeout(PATIENCE):
            return [(await web.answer(asked)).done for _ in range(40)]  # more than changes are allowed at once

    assert site.call(read) == [True] * 40


def test_a_form_without_its_csrf_token_does_nothing(site: Dashboard) -> None:
    secret = site.token("ann", LoginKind.SESSION)
    signer = Signer(b"k" * 32)
    cookie = {"cookie": f"{COOKIE}={signer.sign(secret)}"}
    path = f"/workload/{site.workload('train')}/hold"
    for form in ({}, {"csrf": ""}, {"csrf": signer.csrf("other")}, {"csrf": "é"}):
        assert site.client.post(path, headers=cookie, data=form).status_code == 403
    assert site.get("/api/v1/ledger?type=hold", "root").json()["lines"] == []
    done = site.client.post(path, headers=cookie, data={"csrf": signer.csrf(secret), "hours": "1"})
    assert done.status_code == 200
    assert "is held until" in done.text


@pytest.mark.parametrize("hours", ["x", "-1", "0", "nan", "inf", "99999"])
def test_a_hold_of_no_length_is_refused(site: Dashboard, hours: str) -> None:
    reply = site.post(f"/workload/{site.workload('train')}/hold", "ann", data={"hours": hours})
    assert reply.status_code == 400
    assert "Nothing was done" in reply.text


def test_too_many_logins_are_refused(site: Dashboard) -> None:
    codes = [site.client.post(f"/login/guess-{number}", follow_redirects=False).status_code for number in range(12)]
    assert codes == [403] * 10 + [429] * 2


@pytest.mark.parametrize(("path", "said"), [("/workloads?page=20", "docker/node-1/train"), ("/?page=20", "GPU-1")])
def test_a_page_behind_the_last_one_is_the_last_one(site: Dashboard, path: str, said: str) -> None:
    page = site.get(path, "root")
    assert (page.status_code, said in page.text) == (200, True), page.text
    assert "There are no workloads" not in page.text
