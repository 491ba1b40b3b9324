"""The state API: what is asked, what is not believed, and who gets the token."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import pytest

from gpukeeper.clients.ray import StateApi, read_token
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.busy import ClusterState, busy
from gpukeeper.platforms.ray.state import Dashboard as FoundDashboard
from gpukeeper.platforms.ray.state import DashboardQueries, addresses, answers_of, why_out_of_reach
from tests.patience import PATIENT
from tests.unit.platforms.ray.nodes_here import as_raylet, process

SESSION, NODE = "session_2026-11-15_13-26-05_963367_26613", "a" * 56
RECORDED = sorted(Path(__file__).with_name("recorded").glob("ray-*.json"))


class Dashboard:
    """Works as Ray's does: rows of each kind, filters, its limit and that of its store, a token if it has one."""

    def __init__(self) -> None:
        self.session: str | None = SESSION
        self.token: str | None = None
        self.most = 10_000  # rows that the store gives
        self.dropped = 0  # events of tasks that the store forgot
        self.rows: dict[str, list[dict[str, Any]]] = {
            "nodes": [{"node_id": NODE, "node_ip": "10.0.0.1", "state": "ALIVE", "is_head_node": True, "labels": {}}],
            **{kind: [] for kind in ("workers", "actors", "tasks", "placement_groups", "jobs")},
        }
        self.more: dict[str, Any] = {}  # beside the rows
        self.asked: list[str] = []
        self.logins: list[str | None] = []
        self.url = ""

    def answer(self, path: str, login: str | None) -> tuple[int, bytes]:
        self.asked.append(path)
        self.logins.append(login)
        if self.token is not None and login != f"Bearer {self.token}":
            return (403, b"Forbidden: Invalid authentication token") if login else (401, b"Unauthorized")
        parts = urlsplit(path)
        if parts.path == "/api/version":
            return 200, json.dumps({"version": "4", "ray_version": "2.60.0", "session_name": self.session}).encode()
        page = self._page(parts.path.removeprefix("/api/v0/"), parse_qsl(parts.query))
        return 200, json.dumps({"result": True, "msg": "", "data": {"result": page}}).encode()

    def _page(self, kind: str, query: list[tuple[str, str]]) -> dict[str, Any]:
        def given(name: str) -> list[str]:
            return [value for key, value in query if key == name]

        rows = self.rows[kind]
        filters = list(zip(given("filter_keys"), given("filter_predicates"), given("filter_values"), strict=True))
        at_source = [one for one in filters if one[1] == "=" and one[2] != "true"]
        left = [row for row in rows if all(_fits(row, one) for one in at_source)][: self.most]
        fit = [row for row in left if all(_fits(row, one) for one in filters)]
        total = len(left) + self.dropped if kind == "tasks" else len(rows)
        return {
            "result": fit[: int(given("limit")[0])],
            "total": total,
            "num_after_truncation": len(left),
            "num_filtered": len(fit),
            "partial_failure_warning": "",
            "warnings": None,
            **self.more,
        }


def _fits(row: dict[str, Any], one: tuple[str, str, str]) -> bool:
    key, predicate, value = one
    return (str(row[key]).lower() == value.lower()) is (predicate == "=")


@contextmanager
def served(answer: Callable[[str, str | None], tuple[int, bytes]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, self.headers["Authorization"])
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:1/")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    made = Dashboard()
    with served(made.answer) as made.url:
        yield made


def answers(dashboard: Dashboard) -> ClusterState:
    return asyncio.run(answers_of(StateApi(dashboard.url, dashboard.token, deadline=PATIENT), SESSION))


def found(dashboard: Dashboard) -> str | Unknown | None:
    return busy(NODE, answers(dashboard))


def actor(number: int, state: str) -> dict[str, Any]:
    return {"actor_id": f"{number}", "class_name": "Trainer", "state": state, "node_id": NODE, "pid": 7}


def worker(job_id: str, alive: bool, kind: str = "DRIVER") -> dict[str, Any]:
    return {"worker_id": job_id.ljust(56, "f"), "worker_type": kind, "is_alive": alive, "node_id": NODE, "pid": 7}


def job(status: str, job_id: str) -> dict[str, Any]:
    driver = {"id": job_id, "node_ip_address": "10.0.0.1", "pid": "7"}
    return {"type": "DRIVER", "job_id": job_id, "submission_id": None, "status": status, "driver_info": driver}


def test_a_cluster_that_does_nothing_is_queried_for_everything(dashboard: Dashboard) -> None:
    assert found(dashboard) is None
    kinds = [urlsplit(path).path for path in dashboard.asked]
    assert kinds == [
        *("/api/v0/workers", "/api/v0/jobs", "/api/v0/tasks", "/api/v0/placement_groups", "/api/v0/actors"),
        *("/api/v0/nodes", "/api/version"),
    ]
    assert all(dict(parse_qsl(urlsplit(path).query))["limit"] == "10000" for path in dashboard.asked[:-1])


def test_what_runs_is_read(dashboard: Dashboard) -> None:
    dashboard.rows["actors"] = [actor(1, "DEAD"), actor(2, "ALIVE")]
    assert found(dashboard) == "actor Trainer is alive"


def test_a_list_that_is_cut_off_is_requested_by_state(dashboard: Dashboard) -> None:
    """The dead come first and fill it: what lives would not be seen."""
    dashboard.most = 3
    dashboard.rows["actors"] = [actor(number, "DEAD") for number in range(5)]
    dashboard.rows["workers"] = [worker(f"{number:08}", alive=False) for number in range(5)]
    assert found(dashboard) is None
    dashboard.rows["actors"].append(actor(6, "ALIVE"))
    assert found(dashboard) == "actor Trainer is alive"
    dashboard.rows["workers"].append(worker("09000000", alive=True))
    dashboard.rows["jobs"] = [job("RUNNING", "09000000")]
    assert found(dashboard) == "driver of job 09000000 is alive"


def test_rows_with_resources_are_also_joined_once(dashboard: Dashboard) -> None:
    class Held(msgspec.Struct, frozen=True):
        actor_id: str
        required_resources: dict[str, float]

    dashboard.most = 3
    rows = [actor(number, "ALIVE") | {"required_resources": {"GPU": 1.0}} for number in range(2)]
    dashboard.rows["actors"] = [rows[0], *(actor(number, "DEAD") for number in range(5, 9)), rows[1]]
    said = asyncio.run(StateApi(dashboard.url, None, deadline=PATIENT).rows("actors", Held))
    assert not isinstance(said, Unknown)
    assert said == tuple(Held(row["actor_id"], {"GPU": 1.0}) for row in rows)


def test_a_list_that_stays_cut_off_is_unknown(dashboard: Dashboard) -> None:
    dashboard.most = 3
    dashboard.rows["workers"] = [worker(f"{number:08}", alive=True, kind="WORKER") for number in range(4)]
    said = answers(dashboard).workers
    assert isinstance(said, Unknown)
    assert "returned 3 of 4 workers only" in said.why
    dashboard.rows["placement_groups"] = [{"state": "REMOVED", "name": "", "bundles": []}] * 4
    assert isinstance(answers(dashboard).groups, Unknown)


def test_a_store_that_forgot_tasks_long_ago_is_no_reason_to_know_nothing(dashboard: Dashboard) -> None:
    """It says so for ever. What runs is asked for once more; titles of processes tell the rest."""
    dashboard.dropped = 100_000
    assert found(dashboard) is None
    assert "filter_values=RUNNING_IN_RAY_GET" in "".join(dashboard.asked)
    dashboard.rows["tasks"] = [{"task_id": "1", "name": "train_step", "state": "RUNNING", "node_id": NODE}]
    assert found(dashboard) == "task train_step runs"


def test_a_driver_of_a_job_that_is_over_counts_and_one_of_no_job_does_not(dashboard: Dashboard) -> None:
    dashboard.rows["workers"] = [worker("01000000", alive=True)]
    assert found(dashboard) is None
    dashboard.rows["jobs"] = [job("STOPPED", "01000000"), job("SUCCEEDED", "02000000")]
    assert found(dashboard) == "driver of job 01000000 is alive"


@pytest.mark.parametrize(
    "more", [{"partial_failure_warning": "1 of 2 nodes did not answer\nTraceback"}, {"warnings": ["a store is away"]}]
)
def test_a_partial_answer_is_not_accepted(dashboard: Dashboard, more: dict[str, Any]) -> None:
    dashboard.more = more
    said = found(dashboard)
    assert isinstance(said, Unknown)
    assert "listed only a part of its nodes" in said.why
    assert "Traceback" not in said.why


def test_another_session_at_the_address_is_not_accepted(dashboard: Dashboard) -> None:
    """Also one that came there between the first question and the last."""
    dashboard.session = "session_other"
    assert found(dashboard) == Unknown(f"Ray at {dashboard.url} is session_other, not {SESSION}")
    dashboard.session = None
    assert isinstance(found(dashboard), Unknown)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"<html>", "could not be read"),
        (
            200,
            b'{"result": false, "msg": "limit 10000 exceeds 100\\nmore", "data": {"result": null}}',
            "limit 10000 exceeds",
        ),
        (200, b'{"result": true, "msg": "", "data": {"result": {"result": [{}], "total": 1}}}', "could not be read"),
        (401, b"Unauthorized", "requires a token"),
        (403, b"Forbidden", "refused the token"),
        (500, b'{"result": false, "msg": "GCS is away", "data": {}}', "500 GCS is away"),
        (302, b"", "302"),
    ],
)
def test_what_is_no_answer_is_unknown_and_gives_the_reason(status: int, body: bytes, words: str) -> None:
    version = json.dumps({"ray_version": "2.60.0", "session_name": SESSION}).encode()

    def answer(path: str, _login: str | None) -> tuple[int, bytes]:
        return (200, version) if path == "/api/version" else (status, body)

    with served(answer) as url:
        said = asyncio.run(answers_of(StateApi(url, deadline=PATIENT), SESSION))
    for part in (said.nodes, said.workers, said.actors, said.tasks, said.groups, said.jobs):
        assert isinstance(part, Unknown)
        assert words in part.why
        assert "more" not in part.why


def test_a_silent_address_is_unknown_after_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        said = asyncio.run(StateApi(url, deadline=timedelta(milliseconds=50)).version())
    assert isinstance(said, Unknown)
    assert "did not answer within" in said.why


def test_no_address_of_another_kind_is_opened(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    (tmp_path / "api/version").write_text(json.dumps({"ray_version": "1", "session_name": SESSION}))
    assert "not a valid dashboard address" in str(asyncio.run(StateApi(f"file://{tmp_path}").version()))


def found_dashboard(
    session: str, urls: list[str], *, setting: str | None = None, token: str = ""
) -> FoundDashboard | Unknown:
    """Of a raylet with these addresses in its arguments."""
    webuis = [f"--webui={url.removeprefix('http://')}" for url in urls]
    raylet = as_raylet(process(2**22, "raylet", f"--session_name={session}", *webuis))
    queries = DashboardQueries(setting, {"RAY_AUTH_TOKEN": token} if token else {}, PATIENT)
    return asyncio.run(queries.dashboard(raylet))


def test_the_first_address_that_names_the_session_is_taken(dashboard: Dashboard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"http://127.0.0.1:{server.getsockname()[1]}"
    found = found_dashboard(SESSION, [nobody, dashboard.url])
    assert isinstance(found, FoundDashboard)
    assert found.api.address == dashboard.url
    lost = found_dashboard("session_x", [nobody, dashboard.url])
    assert isinstance(lost, Unknown)
    assert nobody in lost.why
    assert f"{dashboard.url} belongs to another session, {SESSION}" in lost.why


def test_only_the_address_of_the_policy_gets_the_token(dashboard: Dashboard) -> None:
    dashboard.token = "secret"
    said = found_dashboard(SESSION, [dashboard.url], token="secret")
    assert "requires a token" in str(said)
    assert dashboard.logins == [None]
    found = found_dashboard(SESSION, [], setting=dashboard.url, token="secret")
    assert isinstance(found, FoundDashboard)
    assert busy(NODE, asyncio.run(answers_of(found.api, SESSION))) is None
    assert "refused" in str(found_dashboard(SESSION, [], setting=dashboard.url, token="wrong"))


def test_the_token_is_found_as_ray_finds_it(tmp_path: Path) -> None:
    file, home = tmp_path / "token", tmp_path / "home"
    assert read_token({}, home) is None
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text("at-home\n")
    file.write_text("in-file\n")
    assert read_token({}, home) == "at-home"
    assert read_token({"RAY_AUTH_TOKEN_PATH": str(file)}, home) == "in-file"
    assert read_token({"RAY_AUTH_TOKEN_PATH": str(file), "RAY_AUTH_TOKEN": "given"}, home) == "given"


def test_a_token_that_cannot_be_read_is_unknown_and_is_not_repeated(tmp_path: Path) -> None:
    assert isinstance(read_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}, tmp_path), Unknown)
    assert isinstance(read_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path)}, tmp_path), Unknown)
    odd = read_token({"RAY_AUTH_TOKEN": "se\ncret"}, tmp_path)
    assert isinstance(odd, Unknown)
    assert "cret" not in odd.why


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_arguments_of_a_real_raylet_say_where_the_dashboard_is(path: Path) -> None:
    for raylet in json.loads(path.read_text())["raylets"]:
        first, *guesses = addresses(raylet)
        assert first.startswith("http://127.0.0.1:")
        assert guesses == ["http://192.0.2.2:8265", "http://127.0.0.1:8265"]


def test_a_raylet_that_says_nothing_leaves_the_usual_address() -> None:
    assert addresses(["raylet", "--python_worker_command=python x --webui=None y"]) == ["http://127.0.0.1:8265"]


HEAD_ONLY = ("raylet", "--gcs-address=10.0.0.1:6379", "--python_worker_command=python w.py --webui=127.0.0.1:8265")


@pytest.mark.parametrize("flag", ["--node_ip_address=10.0.0.2", "--node-ip-address=10.0.0.2"])
def test_a_worker_whose_head_listens_on_loopback_is_told_what_to_set(flag: str) -> None:
    words = why_out_of_reach((*HEAD_ONLY, flag))
    assert words is not None
    assert "127.0.0.1 of the head (10.0.0.1)" in words
    assert "--dashboard-host=0.0.0.0" in words
    assert "ray.dashboard" in words


@pytest.mark.parametrize(
    "argv",
    [
        (*HEAD_ONLY, "--node_ip_address=10.0.0.1"),  # the head itself: its dashboard is down, or starts
        HEAD_ONLY,
        ("raylet", "--gcs-address=10.0.0.1:6379", "--node_ip_address=10.0.0.2", "--w=x --webui=10.0.0.1:8265"),
        (),
    ],
)
def test_no_such_advice_where_that_is_not_the_reason(argv: tuple[str, ...]) -> None:
    assert why_out_of_reach(argv) is None
