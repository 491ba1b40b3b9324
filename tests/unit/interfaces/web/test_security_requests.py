"""Requests over ASGI that must not get through: other hosts, other sites, forged headers, floods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import Credentials
from gpukeeper.interfaces.web.pages.metrics import MEANING, REASONS
from gpukeeper.interfaces.web.security import COOKIE, Bucket, Signer, hostname_of
from gpukeeper.ledger.logins import LoginKind
from tests.unit.interfaces.web.sites import POLICY, Dashboard, dashboard

PROXIED = f"{POLICY}web: {{url: 'https://gpu.example', proxy: {{header: X-Forwarded-User, from: [10.0.0.5]}}}}\n"
HOST = {"host": "localhost:8790"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path, policy=f"{POLICY}web: {{url: 'https://gpu.example'}}\n") as made:
        yield made


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path, policy=PROXIED) as made:
        yield made


def session_of(site: Dashboard, person: str) -> tuple[dict[str, str], str]:
    """The cookie, and the CSRF token that belongs to it."""
    secret, signer = site.token(person, LoginKind.SESSION), Signer(b"k" * 32)
    return {"cookie": f"{COOKIE}={signer.sign(secret)}", **HOST}, signer.csrf(secret)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8790", 200),
        ("localhost.:8790", 200),
        ("127.0.0.1:8790", 200),
        ("[::1]:8790", 200),
        ("[::ffff:127.0.0.1]:8790", 200),
        ("gpu.example", 401),  # through a proxy: only with a login
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example:8790", 421),
        ("10.0.0.1", 421),
        ("localhost@evil.example", 421),
        ("[::1].evil.example", 421),
        ("[::1]evil:80", 421),
        ("", 421),
    ],
)
def test_on_loopback_only_known_hosts_are_answered(site: Dashboard, host: str, status: int) -> None:
    for path in ("/api/v1/gpus", "/api/v1/machines"):
        assert site.client.get(path, headers={"host": host}).status_code == status
    if status == 421:
        assert site.client.get("/events", headers={"host": host}).status_code == 421
        assert site.client.get("/static/live.js", headers={"host": host}).status_code == 421
        assert "web.url" in site.client.get("/", headers={"host": host}).text


@pytest.mark.parametrize("name", ["x-forwarded-for", "forwarded", "via", "x-real-ip", "x-forwarded-host"])
def test_what_a_proxy_forwarded_is_not_read_without_a_login(site: Dashboard, name: str) -> None:
    assert site.client.get("/api/v1/gpus", headers={**HOST, name: "10.9.9.9"}).status_code == 401
    sent = {**HOST, name: "10.9.9.9"}
    assert site.client.get("/events", headers=sent, follow_redirects=False).headers["location"] == "/login"
    assert site.get("/api/v1/gpus", "ann", headers={**HOST, name: "10.9.9.9"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:8790"}, 200),
        ({"origin": "https://gpu.example"}, 200),
        ({"origin": "https://gpu.example:443", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://gpu.example"}, 403),
        ({"origin": "https://localhost:8790"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[::1"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://localhost:8790", "sec-fetch-site": "same-site"}, 403),
    ],
)
def test_a_form_of_another_site_changes_nothing(site: Dashboard, headers: dict[str, str], status: int) -> None:
    cookie, csrf = session_of(site, "ann")
    sent = {**cookie, **headers, "x-csrf-token": csrf}
    path = f"/api/v1/workloads/{_train(site)}/hold"
    assert site.client.post(path, json={"seconds": 60}, headers=sent).status_code == status
    if status == 403:
        assert site.client.post("/theme", data={"theme": "dark"}, headers=sent).status_code == 403
        assert site.client.post("/login/abc", headers=sent).status_code == 403
        assert "another site" in site.client.post(path, json={}, headers=sent).json()["error"]


def test_a_change_by_cookie_needs_the_csrf_token_of_that_session(site: Dashboard) -> None:
    cookie, _ = session_of(site, "ann")
    _, of_bob = session_of(site, "bob")
    path = f"/api/v1/workloads/{_train(site)}/hold"
    for token in ("", of_bob, "ä"):
        sent = [*cookie.items(), ("x-csrf-token", token.encode("latin-1"))]
        assert site.client.post(path, json={}, headers=sent).status_code == 403
    assert site.app.state.site.refused["csrf"] == 3


def test_a_proxy_logs_people_in_and_the_daemon_decides_what_they_may(proxied: Dashboard) -> None:
    def ask(person: str, path: str = "/api/v1/policy") -> str:
        return str(proxied.client.get(path, headers={"host": "gpu.example", "x-forwarded-user": person}).text)

    assert ask("ann", "/").count("Log in<") == 0
    assert 'class="chip">admin' not in ask("ann", "/")
    assert 'class="chip">admin' in ask("root", "/")
    for unknown in ("no-such-person", "mallory@evil.example", "Root", "ROOT"):
        page = ask(unknown, "/")
        assert unknown in page
        assert 'class="chip">admin' not in page
        assert "web.proxy" not in ask(unknown)


@pytest.mark.parametrize("name", ["ann bob", "ann\tx", "-x", "a" * 200])
def test_a_header_that_names_nobody_is_refused_and_counted(proxied: Dashboard, name: str) -> None:
    reply = proxied.client.get("/", headers={**HOST, "x-forwarded-user": name})
    assert reply.status_code == 400
    assert "no person can have" in reply.text
    assert proxied.app.state.site.refused["proxy header"] == 1


def test_a_header_that_was_sent_twice_is_refused(proxied: Dashboard) -> None:
    headers = [("host", "localhost"), ("x-forwarded-user", "ann"), ("X-Forwarded-User", "root")]
    reply = proxied.client.get("/api/v1/gpus", headers=headers)
    assert reply.status_code == 400
    assert "more than once" in reply.json()["error"]


@pytest.mark.parametrize("address", ["10.0.0.6", "127.0.0.1", "::1", "::ffff:10.0.0.6", "testclient"])
def test_a_forged_header_is_ignored_and_counted(tmp_path: Path, address: str) -> None:
    with dashboard(tmp_path, policy=PROXIED, client_address=address) as site:
        reply = site.client.get("/", headers={**HOST, "x-forwarded-user": "root"})
        assert (reply.status_code, "Log in" in reply.text) == (200, True)
        assert (
            site.client.post("/api/v1/pause", json={}, headers={**HOST, "x-forwarded-user": "root"}).status_code == 401
        )
        assert site.app.state.site.refused["proxy header"] == 2


def test_without_a_proxy_in_the_policy_the_daemon_accepts_no_name_from_its_web_process(tmp_path: Path) -> None:
    """As a compromised web process would send it."""
    with dashboard(tmp_path) as site:
        source = site.app.state.site.source
        forged = Credentials(proxy_user="root", address="x")
        answer = site.call(lambda: source.ask(forged, "", Request(verb="pause", reason="forged")))
        assert not answer.done
        assert answer.person.name == ""


def test_only_the_proxy_is_answered_where_others_would_not_be_encrypted(tmp_path: Path) -> None:
    for address, status in (("10.0.0.5", 401), ("10.0.0.6", 403), ("127.0.0.1", 401)):
        folder = tmp_path / address
        folder.mkdir()
        with dashboard(folder, policy=PROXIED, anonymous=False, client_address=address) as site:
            reply = site.client.get("/api/v1/gpus", headers={"host": "anything"})
            assert reply.status_code == status, address
            if status == 403:
                assert "https://gpu.example" in reply.json()["error"]


def test_rate_limits_report_when_to_try_again(tmp_path: Path) -> None:
    with dashboard(tmp_path, limits=Bucket(rate=0.1, burst=2)) as site:
        replies = [site.client.get("/api/v1/gpus") for _ in range(3)]
        assert [one.status_code for one in replies] == [200, 200, 429]
        assert replies[2].headers["retry-after"] == "10"
        assert replies[2].json()["error"] == "Too many requests. Try again in 10 s."
        assert site.client.get("/events").status_code == 429
        assert site.get("/api/v1/gpus", "ann").status_code == 200  # a person has their own


def test_tokens_that_do_not_exist_are_limited_by_address(site: Dashboard) -> None:
    site.app.state.site.unknown = Bucket(rate=0.01, burst=5)
    found = [
        site.client.get("/api/v1/gpus", headers={**HOST, "authorization": f"Bearer guess-{number}"}).status_code
        for number in range(7)
    ]
    assert found == [401, 401, 401, 401, 401, 429, 429]
    assert site.client.get("/api/v1/gpus", headers=HOST).status_code == 200


def test_large_headers_are_refused_though_they_arrive_at_once(site: Dashboard) -> None:
    for given in ({"x": "y" * 33_000}, {f"x-{n}": "y" * 900 for n in range(40)}):
        assert site.client.get("/api/v1/gpus", headers={**HOST, **given}).status_code == 400
    assert site.client.get("/api/v1/gpus?" + "x" * 33_000, headers=HOST).status_code == 400
    assert site.client.get("/api/v1/gpus", headers={**HOST, "x": "y" * 20_000}).status_code == 200


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(site: Dashboard) -> None:
    """A proxy in front may have used the other one."""
    both = {**HOST, "content-length": "5", "transfer-encoding": "chunked"}
    reply = site.client.get("/api/v1/gpus", headers=both)
    assert (reply.status_code, reply.headers["connection"]) == (400, "close")


def test_a_large_body_is_refused(site: Dashboard) -> None:
    reply = site.post("/api/v1/pause", "root", content=b"x" * 70_000, headers=HOST)
    assert (reply.status_code, site.app.state.site.refused["size"]) == (413, 1)
    reply = site.post("/api/v1/pause", "root", content=iter([b"x"]), headers=HOST)
    assert reply.status_code == 413


def test_every_reason_is_a_series(site: Dashboard) -> None:
    site.client.get("/", headers={"host": "evil.example"})
    assert set(site.app.state.site.refused) <= set(REASONS)


def test_metrics_are_read_as_pages_are(tmp_path: Path) -> None:
    with dashboard(tmp_path, anonymous=False) as site:
        assert site.client.get("/metrics", follow_redirects=False).status_code == 401
        reply = site.get("/metrics", "ann")
        assert reply.status_code == 503  # the daemon of this test has none
        assert ".[metrics]" in reply.text


def test_ready_as_long_as_views_arrive(site: Dashboard) -> None:
    assert site.client.get("/readyz", headers=HOST).status_code == 200
    site.app.state.site.changed_at -= 600
    reply = site.client.get("/readyz", headers=HOST)
    assert reply.status_code == 503
    assert "the last view was received 600 s ago" in reply.text
    assert site.client.get("/healthz", headers=HOST).text == "ok\n"


def test_hsts_is_sent_with_tls_only(site: Dashboard) -> None:
    assert "strict-transport-security" not in site.client.get("/", headers=HOST).headers


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a:1", "a"),
        ("A.", "a"),
        ("[::1]", "::1"),
        ("[::ffff:127.0.0.1]:1", "127.0.0.1"),
        ("", ""),
        (":1", ":1"),
        ("[::1].evil", "[::1].evil"),
        ("[::1]:80.evil", "[::1]:80.evil"),
    ],
)
def test_the_name_in_a_host_header(given: str, name: str) -> None:
    assert hostname_of(given) == name


def _train(site: Dashboard) -> str:
    found = site.get("/api/v1/workloads", "root", headers=HOST).json()["workloads"]
    return str(next(one["id"] for one in found if one["name"] == "train"))


def test_the_reference_lists_the_series_of_the_web_process() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "metrics.md").read_text()
    for name, words in MEANING.items():
        assert f"`{name}`" in page
        assert words in page
