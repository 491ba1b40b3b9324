"""The HTTP API over ASGI: values, rights, paging, ETags, and errors in sentences."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from starlette.requests import Request

from gpukeeper.config.units import read_span
from gpukeeper.interfaces.daemon.queries import Queries
from gpukeeper.interfaces.web.api_table import ApiOutcome, respond
from gpukeeper.ledger.logins import LoginKind
from tests.unit.interfaces.web.sites import Dashboard, dashboard

TRIED = {("policy/try", "state"), ("policy/try", "outcome")}
READS = ("machines", "gpus", "workloads", "plan", "ledger", "report", "acceptance", "policy", "health", "openapi.json")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path) as made:
        yield made


@pytest.mark.parametrize("name", READS)
def test_what_only_reads_has_an_etag_and_is_not_sent_again(site: Dashboard, name: str) -> None:
    first = site.get(f"/api/v1/{name}", "root")
    assert first.status_code == 200
    if name in ("machines", "report", "health"):  # with the present time
        return
    again = site.get(f"/api/v1/{name}", "root", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_reply_is_packed_where_the_caller_accepts_that(site: Dashboard) -> None:
    plain = site.get("/api/v1/openapi.json", headers={"accept-encoding": "identity"})
    assert plain.headers["vary"] == "accept-encoding"
    assert "content-encoding" not in plain.headers
    with site.client.stream("GET", "/api/v1/openapi.json", headers={"accept-encoding": "br, gzip;q=0.5"}) as packed:
        raw = b"".join(packed.iter_raw())
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == ("gzip", "accept-encoding")
    assert len(raw) == int(packed.headers["content-length"]) < len(plain.content) / 3
    assert gzip.decompress(raw) == plain.content
    assert packed.headers["etag"] == f"W/{plain.headers['etag']}"
    again = site.get("/api/v1/openapi.json", headers={"if-none-match": packed.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("accepted", ["", "identity", "br", "gzip;q=0", "gzip; q=0.0"])
def test_a_reply_is_not_packed_where_it_is_not_accepted(site: Dashboard, accepted: str) -> None:
    assert "content-encoding" not in site.get("/api/v1/openapi.json", headers={"accept-encoding": accepted}).headers


def test_what_is_small_or_has_a_secret_beside_words_of_the_request_is_not_packed(site: Dashboard) -> None:
    gzip_ = {"accept-encoding": "gzip"}
    assert site.get("/workloads?q=train", headers=gzip_).headers["content-encoding"] == "gzip"
    assert site.get("/static/style.css", headers=gzip_).headers["content-encoding"] == "gzip"
    assert "content-encoding" not in site.get("/workloads?q=train", "ann", headers=gzip_).headers
    assert "content-encoding" not in site.get("/login", headers=gzip_).headers
    assert "content-encoding" not in site.get("/healthz", headers=gzip_).headers
    assert "content-encoding" not in site.get("/api/v1/workloads/0", headers=gzip_).headers  # an error


def test_of_the_work_of_others_no_reason_is_sent(site: Dashboard) -> None:
    for person, own in (("", ()), ("eve", ()), ("ann", ("train",)), ("root", ("train", "eval"))):
        found = {one["name"]: one["reason"] for one in site.get("/api/v1/workloads", person).json()["workloads"]}
        assert {name for name, reason in found.items() if "shown only" not in reason} == set(own), person


def test_an_explanation_to_others_has_no_labels(site: Dashboard) -> None:
    path = f"/api/v1/workloads/{site.workload('train')}/explain"
    assert "secret" in site.get(path, "ann").text
    for person in ("", "bob"):
        reply = site.get(path, person)
        assert reply.status_code == 200
        assert "secret" not in reply.text


def test_signals_are_for_the_owner_and_admins(site: Dashboard) -> None:
    path = f"/api/v1/workloads/{site.workload('train')}/signals"
    assert [site.get(path, person).status_code for person in ("ann", "root", "bob", "")] == [200, 200, 403, 403]


def test_pages_follow_each_other(site: Dashboard) -> None:
    first = site.get("/api/v1/workloads?limit=1").json()
    second = site.get(f"/api/v1/workloads?limit=1&after={first['next']}").json()
    assert len(first["workloads"]) == len(second["workloads"]) == 1
    assert first["workloads"] != second["workloads"]
    assert second["next"] is None


def test_the_plan_is_paged_and_no_decision_is_missed_or_repeated(site: Dashboard) -> None:
    whole = site.get("/api/v1/plan", "root").json()
    (place,) = whole["places"]
    assert whole["next"] is None
    assert len(place["decisions"]) == 2
    assert len(place["steps"]) == 1
    found, steps, after = [], [], ""
    while after is not None:
        page = site.get("/api/v1/plan", "root", params={"limit": 1, "after": after}).json()
        assert {**page["places"][0], "decisions": [], "steps": []} == {**place, "decisions": [], "steps": []}
        assert len(page["places"][0]["decisions"]) == 1
        found += page["places"][0]["decisions"]
        steps += page["places"][0]["steps"]
        after = page["next"]
    assert sorted(map(str, found)) == sorted(map(str, place["decisions"]))
    assert steps == place["steps"]


@pytest.mark.parametrize("path", ["ledger", "acceptance", "health"])
def test_a_ledger_that_is_not_read_in_time_is_503_and_worth_another_try(
    site: Dashboard, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(_: object) -> object:
        raise TimeoutError

    monkeypatch.setattr(Queries, "_lines", late)
    reply = site.get(f"/api/v1/{path}", "root")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "10")
    assert reply.json() == {"error": "the ledger could not be read in time; try again"}


def test_a_bug_of_the_daemon_is_not_the_fault_of_the_request(site: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(Queries, "_lines", broken)
    reply = site.get("/api/v1/ledger", "root")
    assert (reply.status_code, "retry-after" in reply.headers) == (500, False)
    assert "bug" in reply.json()["error"]


def test_durations_are_in_whole_seconds(site: Dashboard) -> None:
    memory = site.get(f"/api/v1/workloads/{site.workload('eval')}/explain", "root").json()["memory"]
    assert memory["ran"].startswith("P")
    assert "." not in memory["ran"]


def test_only_durations_are_rounded() -> None:
    words = "PT1.5S"
    value = {"name": [words], "span": timedelta(hours=7, seconds=2.97), "back": -timedelta(seconds=1.5), "share": 0.25}
    sent = json.loads(respond(Request({"type": "http", "method": "POST", "headers": []}), ApiOutcome(value)).body)
    assert sent == {"name": [words], "span": "PT25202S", "back": "-PT2S", "share": 0.25}


def test_every_value_that_the_document_names_is_accepted(site: Dashboard) -> None:
    paths = site.get("/api/v1/openapi.json").json()["paths"]
    tried = set()
    for path, operations in paths.items():
        for one in operations.get("get", {}).get("parameters", []):
            named = one["schema"].get("items", one["schema"]).get("enum", [])
            for value in named[:: max(1, len(named) // 30)]:
                reply = site.get(path, "root", params={one["name"]: value})
                assert reply.status_code == 200, (path, one["name"], value, reply.text)
                tried.add((path.removeprefix("/api/v1/"), one["name"]))
    assert tried == {("gpus", "state"), ("ledger", "type"), ("report", "zone"), *TRIED}


@pytest.mark.parametrize("name", ["running_for", "idle_for", "ended_since", "ttl", "hold"])
def test_a_duration_of_a_trial_is_described_as_it_is_read(site: Dashboard, name: str) -> None:
    parameters = site.get("/api/v1/openapi.json").json()["paths"]["/api/v1/policy/try"]["get"]["parameters"]
    (schema,) = [one["schema"] for one in parameters if one["name"] == name]
    for words in ("", "0", "30m", "1h30m", "9999d"):
        assert re.search(schema["pattern"], words)
        assert read_span(words or "0") is not None
    assert not re.search(schema["pattern"], "soon")
    assert site.get("/api/v1/policy/try", "root", params={name: "soon"}).status_code == 400


def test_lines_of_the_ledger_are_paged_back(site: Dashboard) -> None:
    everything = site.get("/api/v1/ledger?limit=1000", "root").json()["lines"]
    found, after = [], ""
    while True:
        page = site.get(f"/api/v1/ledger?limit=1{after}", "root").json()
        found = [*page["lines"], *found]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert found == everything
    assert len(found) > 1


def test_lines_of_others_are_not_sent(site: Dashboard) -> None:
    assert {one["owner"] for one in site.get("/api/v1/ledger", "bob").json()["lines"]} == {"bob"}
    assert site.get("/api/v1/ledger").json()["lines"] == []
    refused = site.get("/api/v1/ledger?owner=ann", "bob")
    assert (refused.status_code, refused.json()["error"]) == (400, "bob may read only lines about their own work")


def test_a_hold_is_shown_at_once_and_is_in_the_ledger_with_its_login(site: Dashboard) -> None:
    id_ = site.workload("train")
    done = site.post(f"/api/v1/workloads/{id_}/hold", "ann", json={"seconds": 3600, "reason": "paper"})
    assert (done.status_code, done.json()["done"]) == (200, True)
    line = site.get(f"/api/v1/workloads/{id_}", "ann").json()
    assert line["held_by"] == "ann"
    (held,) = site.get("/api/v1/ledger?type=hold", "ann").json()["lines"]
    assert held["by"] == "ann"
    assert held["via"].startswith("web, token ")
    assert held["via"].endswith(", from 10.0.0.5")
    assert site.post(f"/api/v1/workloads/{id_}/release", "ann", json={}).status_code == 200
    assert site.get(f"/api/v1/workloads/{id_}", "ann").json()["held_by"] == ""


def test_an_object_that_took_the_name_of_another_is_not_changed_through_its_old_entry(
    site: Dashboard, tmp_path: Path
) -> None:
    id_, file = site.workload("train"), tmp_path / "node-1" / "train.json"
    again = file.read_bytes()
    file.rename(file.with_suffix(".old"))  # so that its inode, and with it its uid, is not used again
    file.write_bytes(again)
    for verb, person in (("hold", "ann"), ("stop", "ann"), ("remove", "root")):
        site.session.keeper.request_state.listings.clear()  # it is looked for again
        refused = site.post(f"/api/v1/workloads/{id_}/{verb}", person, json={})
        assert refused.status_code in (404, 409), (verb, refused.text)
    assert site.get("/api/v1/ledger?type=hold", "root").json()["lines"] == []
    assert file.read_bytes() == again


def test_others_may_not_act(site: Dashboard) -> None:
    id_ = site.workload("train")
    for verb, body in (("hold", {}), ("release", {}), ("stop", {}), ("remove", {})):
        refused = site.post(f"/api/v1/workloads/{id_}/{verb}", "bob", json=body)
        assert refused.status_code == 409, verb
        assert site.post(f"/api/v1/workloads/{id_}/{verb}", json=body).status_code == 401, verb
    assert site.post("/api/v1/pause", "bob", json={}).status_code == 409
    assert site.post("/api/v1/pause", "root", json={"reason": "move"}).status_code == 200
    assert site.post("/api/v1/resume", "root", json={}).status_code == 200


def test_a_stop_is_confirmed_with_the_token_of_the_first_reply(site: Dashboard) -> None:
    path = f"/api/v1/workloads/{site.workload('train')}/stop"
    headers = site.bearer("ann")
    asked = site.client.post(path, headers=headers, json={})
    assert (asked.status_code, asked.json()["done"]) == (202, False)
    done = site.client.post(path, headers=headers, json={"token": asked.json()["token"]})
    assert (done.status_code, done.json()["done"]) == (200, True)
    assert site.client.post(path, headers=headers, json={"token": asked.json()["token"]}).status_code == 409


def test_a_session_needs_the_csrf_token_and_a_bearer_does_not(site: Dashboard) -> None:
    from gpukeeper.interfaces.web.security import COOKIE, Signer

    signer, secret = Signer(b"k" * 32), site.token("ann", LoginKind.SESSION)
    path = f"/api/v1/workloads/{site.workload('train')}/hold"
    cookie = {"cookie": f"{COOKIE}={signer.sign(secret)}"}
    assert site.client.post(path, headers=cookie, json={}).status_code == 403
    assert site.client.post(path, headers={**cookie, "x-csrf-token": "0" * 64}, json={}).status_code == 403
    assert site.client.post(path, headers={**cookie, "x-csrf-token": signer.csrf(secret)}, json={}).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("gpus?limit=0", 400),
        ("gpus?limit=many", 400),
        ("gpus?limit=1&limit=2", 400),
        ("gpus?unknown=1", 400),
        ("gpus?state=broken", 400),
        ("gpus?state=null", 400),
        ("ledger?after=null", 400),
        ("gpus?machine=other", 404),
        ("report?since=2026-10-01T00:00:00", 400),
        ("report?until=7", 400),
        ("report?since=2026-10-02T00:00:00Z&until=2026-10-01T00:00:00Z", 400),
        ("report?zone=Nowhere/City", 400),
        ("ledger?type=nonsense", 400),
        ("ledger?after=-1", 400),
        ("workloads/000000000000000000", 404),
        ("nothing", 404),
    ],
)
def test_bad_requests_get_a_sentence(site: Dashboard, path: str, status: int) -> None:
    reply = site.get(f"/api/v1/{path}", "root")
    assert reply.status_code == status
    assert " " in reply.json()["error"]


def test_null_is_a_word_where_words_are_searched(site: Dashboard) -> None:
    assert site.get("/api/v1/gpus?q=null", "root").json() == {"gpus": [], "next": None}


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"seconds": -1}', "application/json", 400),
        (b'{"second": 1}', "application/json", 400),
        (b'{"seconds": NaN}', "application/json", 400),
        (b"seconds=1", "application/x-www-form-urlencoded", 415),
        (b"x" * 70_000, "application/json", 413),
    ],
)
def test_bad_bodies_get_a_sentence_and_nothing_is_done(site: Dashboard, content: bytes, kind: str, status: int) -> None:
    path = f"/api/v1/workloads/{site.workload('train')}/hold"
    reply = site.post(path, "ann", content=content, headers={"content-type": kind})
    assert reply.status_code == status
    assert " " in reply.json()["error"]
    assert site.get("/api/v1/ledger?type=hold", "root").json()["lines"] == []


def test_elsewhere_than_on_loopback_reading_needs_a_login(tmp_path: Path) -> None:
    with dashboard(tmp_path, anonymous=False) as site:
        for name in READS:
            assert site.get(f"/api/v1/{name}").status_code == 401, name
        assert site.get("/api/v1/gpus", "eve").status_code == 200


def test_the_policy_is_shown_by_rights(site: Dashboard) -> None:
    nobody, ann, root = (site.get("/api/v1/policy", person).json()["settings"] for person in ("", "ann", "root"))
    assert nobody == []
    assert {one["setting"] for one in ann} <= {one["setting"] for one in root}
    assert not any(one["setting"].startswith(("notify", "fleet")) for one in ann)
