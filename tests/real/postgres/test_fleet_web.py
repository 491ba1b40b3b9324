"""`gpukeeper serve --web PORT --from postgresql://…`: all machines on one page, and requests to the right one."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.engine.outlook import NOT_SHOWN
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.daemon.fleet_web import FleetRequests
from gpukeeper.interfaces.daemon.requests import Identity
from gpukeeper.ledger.copy.reader import CopyReader
from gpukeeper.ledger.logins import LoginKind, open_logins
from tests.cli.fleet import Fleet
from tests.real.postgres.daemons import Daemon
from tests.real.postgres.fleet import FleetDatabase, wait_for

WEB_POLICY = """\
preset: development
scope: {docker: {}}
admins: [eve]
fleet: {machine: web-1, same_users: SAME}
"""


class WebServer:
    """The web server of a fleet, with state of its own."""

    def __init__(self, database: FleetDatabase, folder: Path, key: str, *, same_users: bool = True) -> None:
        self.database = database
        folder.mkdir()
        self.fleet = Fleet(folder, WEB_POLICY.replace("SAME", str(same_users).lower()))
        self.key_file = folder / "key"
        self.key_file.write_text(key + "\n")
        self.key_file.chmod(0o600)
        self.url = ""
        self.log: list[str] = []
        self._tokens: dict[str, str] = {}

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[str]]:
        child = self.fleet.start(
            *("serve", "--web", "0", "--from", self.database.server.address("gpukeeper_web", self.database.name)),
            *("--password-file", str(self.database.secrets["gpukeeper_web"]), "--key-file", str(self.key_file)),
        )
        reading = threading.Thread(target=self._read, args=(child,))
        reading.start()
        try:
            wait_for(lambda: self.url or child.poll() is not None, "the address of the dashboard")
            assert child.poll() is None, self.log
            wait_for(lambda: self.get("/healthz")[0] == 200, "the web process")
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(60)
            reading.join()
            assert child.stdout is not None
            assert child.stderr is not None
            child.stdout.close()
            child.stderr.close()

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stderr is not None
        for line in child.stderr:
            self.log.append(line)
            if found := re.search(r"dashboard on (http://[^/\s]+)", line):
                self.url = found[1]

    def token(self, person: str) -> str:
        if person not in self._tokens:
            logins = open_logins(self.fleet.state / "ledger.db")
            try:
                now = datetime.now(UTC)
                made = asyncio.run(logins.create(LoginKind.TOKEN, person, 1000, now, timedelta(hours=1), "test"))
            finally:
                logins.close()
            self._tokens[person] = made.secret
        return self._tokens[person]

    def get(self, path: str, person: str = "") -> tuple[int, str]:
        return self._call(urllib.request.Request(self.url + path), person)

    def post(self, path: str, person: str, **body: object) -> tuple[int, str]:
        headers = {"content-type": "application/json"}
        data = json.dumps(body).encode()
        return self._call(urllib.request.Request(self.url + path, data=data, headers=headers), person)

    def _call(self, request: urllib.request.Request, person: str) -> tuple[int, str]:
        if person:
            request.add_header("authorization", f"Bearer {self.token(person)}")
        try:
            with urllib.request.urlopen(request, timeout=200) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def api(self, path: str, person: str = "eve") -> Any:
        status, body = self.get(f"/api/v1{path}", person)
        assert status == 200, body
        return json.loads(body)

    def machines(self) -> dict[str, dict[str, Any]]:
        return {one["machine"]: one for one in self.api("/machines")["machines"]}

    def workload(self, machine: str, name: str = "train") -> str:
        found = self.api(f"/workloads?machine={machine}")["workloads"]
        return str(next(one["id"] for one in found if one["name"] == name))

    def shows(self, *machines: str) -> None:
        wait_for(lambda: set(machines) <= self.machines().keys(), f"the views of {machines}")


class FleetOfTwo:
    def __init__(self, database: FleetDatabase, folder: Path, *, same_users: bool = True) -> None:
        self.database, key = database, secrets.token_hex(32)
        names = ("node-1", "node-2")
        self.one, self.two = (Daemon(database, folder / name, name, same_users=same_users, key=key) for name in names)
        self.web = WebServer(database, folder / "web", key, same_users=same_users)


@pytest.fixture
def fleet(database: FleetDatabase, tmp_path: Path) -> Iterator[FleetOfTwo]:
    made = FleetOfTwo(database, tmp_path)
    with made.one.serving(), made.two.serving(), made.web.serving():
        made.web.shows("node-1", "node-2")
        yield made


def test_all_machines_are_shown_and_a_hold_reaches_the_right_one(fleet: FleetOfTwo) -> None:
    """Both machines have a workload of the same name, place and uid."""
    web = fleet.web
    status, page = web.get("/", "ann")
    assert status == 200
    assert "2 machines" in page
    assert page.count('class="tile ') == 2
    assert "not seen since" not in page
    ids = {machine: web.workload(machine) for machine in ("node-1", "node-2")}
    assert ids["node-1"] != ids["node-2"]

    status, body = web.post(f"/api/v1/workloads/{ids['node-2']}/hold", "ann", seconds=3600, reason="through the web")
    assert status == 200, body
    assert "is held until" in json.loads(body)["words"]
    (held,) = fleet.two.holds()
    assert (held["by"], held["hold"]["reason"]) == ("ann", "through the web")
    assert re.fullmatch(r"web, token [0-9a-f]{8}, from 127\.0\.0\.1, at web-1", held["via"])
    assert fleet.one.holds() == []

    def shown(machine: str) -> Any:
        return web.api(f"/workloads/{ids[machine]}", "ann")["held_by"]

    wait_for(lambda: shown("node-2") == "ann", "the hold on the page")
    assert shown("node-1") == ""
    wait_for(lambda: web.api("/ledger?machine=node-2&type=hold")["lines"], "the line in the history")
    assert web.api("/ledger?machine=node-1&type=hold")["lines"] == []
    assert web.api("/ledger?machine=node-2&type=hold", "ann")["lines"]
    assert web.api("/ledger?machine=node-2&type=hold", "bob")["lines"] == []


def test_the_daemon_decides_and_others_see_less(fleet: FleetOfTwo) -> None:
    web = fleet.web
    id_ = web.workload("node-1")
    status, body = web.post(f"/api/v1/workloads/{id_}/hold", "bob")
    assert status == 409
    assert "bob" in json.loads(body)["error"]
    status, body = web.post("/api/v1/pause", "eve", machine="node-1", reason="maintenance")
    assert status == 409, "eve is an admin of the web server, not of node-1"
    assert fleet.one.fleet.lines("pause", "hold") == []
    status, body = web.post("/api/v1/pause", "root", machine="node-1", reason="maintenance")
    assert status == 200, body
    assert [line["by"] for line in fleet.one.fleet.lines("pause")] == ["root"]
    assert fleet.two.fleet.lines("pause") == []
    assert web.api(f"/workloads/{id_}", "ann")["reason"] != NOT_SHOWN
    assert web.api(f"/workloads/{id_}", "bob")["reason"] == NOT_SHOWN


def test_a_stop_is_confirmed_over_two_requests(fleet: FleetOfTwo) -> None:
    web = fleet.web
    id_ = web.workload("node-2")
    status, body = web.post(f"/api/v1/workloads/{id_}/stop", "ann")
    assert status == 202, body
    token = json.loads(body)["token"]
    assert web.post(f"/api/v1/workloads/{id_}/stop", "bob", token=token)[0] == 409
    assert fleet.two.fleet.state_of("train") == "running"
    status, body = web.post(f"/api/v1/workloads/{id_}/stop", "ann", token=token)
    assert status == 200, body
    assert (fleet.one.fleet.state_of("train"), fleet.two.fleet.state_of("train")) == ("running", "ended")
    outcome = fleet.two.fleet.lines("outcome")[-1]
    assert (outcome["result"], outcome["requested_by"]) == ("reclaimed", "ann")
    assert outcome["via"].endswith(", at web-1")
    status, body = web.post("/api/v1/restore", "ann", machine="node-2", workload="train")
    assert status == 200, body


def test_what_the_copy_holds_and_what_it_does_not(fleet: FleetOfTwo) -> None:
    web = fleet.web
    id_ = web.workload("node-1")
    for path in ("/", "/workloads", f"/workload/{id_}", "/plan", "/history?machine=node-2", "/usage", "/health"):
        status, page = web.get(path, "eve")
        assert status == 200, (path, page)
    assert "not in the copy of the fleet" in web.get(f"/workload/{id_}", "eve")[1]
    assert web.get("/acceptance?machine=node-1", "eve")[0] == 200
    status, page = web.get("/policy", "eve")
    assert (status, "node-1" in page, "node-2" in page, "gpukeeper policy show" in page) == (200, True, True, True), (
        page
    )
    assert web.get("/api/v1/policy?machine=node-1", "eve")[0] == 404
    status, page = web.get("/health", "eve")
    assert ("could not be read" in page.replace("Could not be read", ""), page.count("Nothing to check")) == (
        False,
        2,
    ), page
    assert web.api("/report")["total"]["active"] == 0
    assert web.api("/report?machine=node-1", "bob")["person"] == "bob"
    assert web.get("/api/v1/ledger", "eve")[0] == 400, "the machine must be named"
    assert web.get("/api/v1/ledger?machine=node-9", "eve")[0] == 404
    assert web.get("/api/v1/workloads/nothing/signals", "eve")[0] == 404
    assert web.api(f"/workloads/{id_}/signals", "ann")["series"] == []
    assert web.get(f"/api/v1/workloads/{id_}/signals", "bob")[0] == 403
    for query in ("q=%25%00'\"\\", "workload=%25", "owner=%00", "before=99999999999"):
        assert web.get(f"/history?machine=node-1&{query}", "eve")[0] == 200, query


def test_a_person_is_somebody_else_elsewhere_unless_all_have_the_same_users(
    database: FleetDatabase, tmp_path: Path
) -> None:
    fleet = FleetOfTwo(database, tmp_path, same_users=False)
    with fleet.one.serving(), fleet.web.serving():
        fleet.web.shows("node-1")
        id_ = fleet.web.workload("node-1")
        status, body = fleet.web.post(f"/api/v1/workloads/{id_}/hold", "ann")
        assert status == 409
        assert "ann@web-1" in body
        assert fleet.web.api(f"/workloads/{id_}", "ann")["reason"] == NOT_SHOWN
        assert fleet.web.api("/ledger?machine=node-1", "ann")["lines"] == []
    assert fleet.one.holds() == []


def test_a_web_server_with_another_key_gets_nothing_done(database: FleetDatabase, tmp_path: Path) -> None:
    fleet = FleetOfTwo(database, tmp_path)
    fleet.web.key_file.write_text("k" * 64)
    with fleet.one.serving(), fleet.web.serving():
        fleet.web.shows("node-1")
        id_ = fleet.web.workload("node-1")
        status, body = fleet.web.post(f"/api/v1/workloads/{id_}/hold", "ann")
        assert status == 409
        assert "not signed with the key of this fleet" in body
    assert fleet.one.holds() == []


def test_a_machine_that_is_off_is_shown_as_old_and_gets_no_requests(fleet: FleetOfTwo) -> None:
    web = fleet.web
    id_ = web.workload("node-1")
    earlier = "UPDATE gpukeeper.views SET at = at - interval '1 hour' WHERE machine = 'node-1'"
    with ExitStack() as stack:
        stack.enter_context(_stopped(fleet.one))
        fleet.database.sql(earlier)
        wait_for(lambda: web.machines()["node-1"]["not_seen_since"], "node-1 is old")
        assert web.machines()["node-2"]["not_seen_since"] is None
        page = web.get("/", "ann")[1]
        assert "not seen since" in page
        (tile,) = web.api("/gpus?machine=node-1")["gpus"]
        assert tile["state"] == "unknown"
        assert tile["last_state"] != "unknown"
        assert tile["steps"] == []
        status, body = web.post(f"/api/v1/workloads/{id_}/hold", "ann")
        assert status == 409
        assert "nothing was done" in body
        assert fleet.database.sql("SELECT count(*) FROM gpukeeper.requests") == [(0,)]
    wait_for(lambda: web.machines()["node-1"]["not_seen_since"] is None, "node-1 is back")
    assert web.post(f"/api/v1/workloads/{id_}/hold", "ann")[0] == 200


@contextmanager
def _stopped(daemon: Daemon) -> Iterator[None]:
    """Its process does not run, as if the machine were hanging."""
    pids = _processes(daemon)
    for pid in pids:
        subprocess.run(["kill", "-STOP", str(pid)], check=True)
    try:
        yield
    finally:
        for pid in pids:
            subprocess.run(["kill", "-CONT", str(pid)], check=True)


def _processes(daemon: Daemon) -> list[int]:
    assert daemon.process is not None
    return [daemon.process.pid]


def test_a_request_that_no_daemon_answers_expires(database: FleetDatabase, tmp_path: Path) -> None:
    database.add("node-1")

    async def send() -> Any:
        address = database.server.address("gpukeeper_web", database.name)
        copy = CopyReader(address, str(database.secrets["gpukeeper_web"]), "test")
        try:
            requests = FleetRequests(copy, "web-1", "k" * 64, lasts=timedelta(seconds=1))
            who = Identity(name="ann", uid=1000, via="web, token 1, from 127.0.0.1")
            return await requests.send(who, "node-1", Request(verb="hold", workload="train"))
        finally:
            copy.close()

    reply = asyncio.run(send())
    assert not reply.done
    assert "expired" in reply.words
    assert "nothing was done" in reply.words


def test_the_last_views_stay_while_the_database_is_away(own_database: FleetDatabase, tmp_path: Path) -> None:
    fleet = FleetOfTwo(own_database, tmp_path)
    web = fleet.web
    with fleet.one.serving(), web.serving():
        web.shows("node-1")
        assert web.get("/readyz") == (200, "ok\n")
        id_ = web.workload("node-1")
        own_database.server.stop("immediate")
        wait_for(lambda: web.get("/readyz")[0] == 503, "readyz reports it")
        assert "the fleet database cannot be read" in web.get("/readyz")[1]
        status, page = web.get("/", "ann")
        assert status == 200
        assert "The fleet database cannot be read" in page
        assert page.count('class="tile ') == 1
        status, body = web.post(f"/api/v1/workloads/{id_}/hold", "ann")
        assert status == 409
        assert "nothing was done" in body
        for path in ("/history", "/usage", "/acceptance", "/health", f"/workload/{id_}"):
            assert web.get(path, "eve")[0] == (200 if path in ("/health", f"/workload/{id_}") else 503), path
        own_database.server.start()
        wait_for(lambda: web.get("/readyz")[0] == 200, "readyz reports that it is back")
        wait_for(lambda: web.post(f"/api/v1/workloads/{id_}/hold", "ann")[0] == 200, "a hold")
        assert "cannot be read" not in web.get("/", "ann")[1]
    assert len(fleet.one.holds()) == 1


def test_people_log_in_at_the_web_server(fleet: FleetOfTwo) -> None:
    ran = fleet.web.fleet.run("login", "--json")
    assert ran.code == 0, ran.err
    assert "/login/" in ran.json()["secret"]
    ran = fleet.web.fleet.run("login", "--list")
    assert ran.code == 0
    ran = fleet.web.fleet.run("hold", "train")
    assert ran.code != 0


def test_a_second_server_with_the_same_state_is_refused(fleet: FleetOfTwo) -> None:
    address = fleet.database.server.address("gpukeeper_web", fleet.database.name)
    ran = fleet.web.fleet.run("serve", "--web", "0", "--from", address)
    assert ran.code != 0
    assert "already running" in ran.err
    assert "GPUKEEPER_STATE" in ran.err
