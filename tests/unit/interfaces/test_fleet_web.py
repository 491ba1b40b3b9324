"""The web server of a fleet without its database: what it shows, whom it answers, and what it never sends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.daemon.fleet_web import OLD, FleetRequests, FleetState, FleetWeb, fleet_access
from gpukeeper.interfaces.daemon.web import WebSettings
from gpukeeper.interfaces.link import Answer, Change, Condition, Credentials, Question
from gpukeeper.ledger.copy.reader import CopyReader, CopyUnavailable, MachineHead
from gpukeeper.ledger.logins import LoginKind, Logins, open_logins
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Fleet, Mode, Policy, Web
from gpukeeper.views.live import MachineView
from tests.cli.fleet import Fleet as CommandFleet
from tests.patience import PATIENCE
from tests.unit.views.test_live import AT

VIEW = MachineView(
    machine="host",
    at=AT,
    version="1",
    policy=PolicyHead("policy.yaml", "digest", "shared", Mode.PLAN),
    paused=None,
    places=(),
    gpus=(),
    workloads=(),
)
BODY = msgspec.json.encode(VIEW).decode()


class NoDatabase:
    """Stands in for CopyReader. Counts what was asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, work: Callable[[Any], Any]) -> Any:
        self.asked += 1
        raise CopyUnavailable("connection refused", begun=False)


class Served:
    def __init__(self, folder: Path, *, same_users: bool = True, key: str | None = "k" * 64, anonymous: bool = False):
        folder.chmod(0o700)
        self.logins: Logins = open_logins(folder / "ledger.db")
        self.logged: list[str] = []
        self.copy = NoDatabase()
        self.state = FleetState(asyncio.get_running_loop(), self.logged.append)
        policy = Policy(admins=("eve",), fleet=Fleet(same_users=same_users), web=Web(plain_http=True))
        copy = cast(CopyReader, self.copy)
        requests = FleetRequests(copy, "web-1", key)
        self.web = FleetWeb(
            *(self.state, copy, self.logins, Rulebook(policy), requests, self.logged.append),
            realm="web-1",
            settings=WebSettings(Web, "127.0.0.1" if anonymous else "10.0.0.1", self.logged.append),
        )

    async def see(self, machine: str = "node-1", ago: float = 1.0, body: str | None = BODY, seq: int = 1) -> None:
        """As the watcher does."""
        self.state.on_problem("")
        self.state.on_view(machine, body)
        self.state.on_round((head(machine, ago, seq),))
        await asyncio.sleep(0)

    async def ask(self, person: str, verb: str, machine: str = "node-1", **more: Any) -> Answer:
        secret = ""
        if person:
            now = datetime.now(UTC)
            made = await self.logins.create(LoginKind.TOKEN, person, 1000, now, timedelta(hours=1), "t")
            secret = made.secret
        credentials = Credentials(secret=secret, address="10.0.0.5")
        request = Request(verb=verb, **more)
        return await self.web.answer(Question(id=1, credentials=credentials, request=request, machine=machine))

    def close(self) -> None:
        self.web.close()
        self.logins.close()


def head(machine: str, ago: float | None, seq: int | None = 1, seen: float | None = 1.0) -> MachineHead:
    return MachineHead(machine=machine, version="1", seen_ago=seen, view_ago=ago, seq=seq)


def run(folder: Path, story: Callable[[Served], Awaitable[None]], **settings: Any) -> None:
    async def whole() -> None:
        served = Served(folder, **settings)
        try:
            await story(served)
        finally:
            served.close()

    asyncio.run(whole())


def test_a_view_that_is_not_confirmed_becomes_old(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        await served.see(ago=3.0)
        now = datetime.now(UTC)
        (view,) = served.state.present(now).values()
        assert (view.machine, view.not_seen_since) == ("node-1", None)
        assert abs(now - view.at - timedelta(seconds=3)) < timedelta(seconds=2)
        (old,) = served.state.present(now + OLD).values()
        assert old.not_seen_since == view.at
        assert served.state.present(now + OLD)["node-1"] is old, "built once"
        await served.see(ago=3.5)
        assert served.state.present(now)["node-1"].at == view.at, "the same moment, measured again"

    run(tmp_path, story)


def test_a_view_that_cannot_be_read_leaves_the_last_one_which_gets_old(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        await served.see()
        seen = served.state.seen["node-1"]
        for body in ("{}", None):
            await served.see(ago=0.0, body=body, seq=2)
            assert served.state.seen["node-1"] == seen
            assert "node-1" in served.state.views
            assert "node-1" in served.state.silent
        await served.see(seq=3)
        assert served.state.silent == {}

    run(tmp_path, story)


def test_machines_without_a_view_are_named(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        served.state.on_round((head("node-1", None, None, None), head("node-2", None, None)))
        await asyncio.sleep(0)
        assert "has not connected yet" in served.state.silent["node-1"]
        assert "has not sent a view yet" in served.state.silent["node-2"]

    run(tmp_path, story)


def test_a_new_web_process_gets_everything_and_then_what_changed(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        sent: list[object] = []
        arrived = asyncio.Event()

        async def send(message: object) -> None:
            sent.append(message)
            arrived.set()

        welcome = await served.web.welcome()
        assert (welcome.fleet, welcome.anonymous, welcome.machine) == (True, True, "web-1")
        publishing = asyncio.create_task(served.web.publish(send))
        await asyncio.wait_for(arrived.wait(), PATIENCE)
        assert sent == [Condition(problem="it was not read yet")]
        arrived.clear()
        await served.see()
        while len(sent) < 3:
            arrived.clear()
            await asyncio.wait_for(arrived.wait(), PATIENCE)
        assert sent[1] == Condition()
        assert isinstance(sent[2], Change)
        assert (sent[2].whole, sent[2].delta.head.machine) == (True, "node-1")
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)

    run(tmp_path, story, anonymous=True)


def test_nothing_is_answered_without_a_login_unless_on_loopback(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        await served.see()
        for verb in ("ledger", "hold", "logins", "explain"):
            assert (await served.ask("", verb)).exit_code == 13
        forged = Question(id=1, credentials=Credentials(secret="x"), request=Request(verb="ledger"), machine="node-1")
        assert (await served.web.answer(forged)).exit_code == 13
        assert served.copy.asked == 0

    run(tmp_path, story)


def test_reading_on_loopback_needs_no_login_and_acting_does(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        await served.see()
        assert "could not be read: connection refused" in (await served.ask("", "runs")).words
        assert (await served.ask("", "hold")).exit_code == 13

    run(tmp_path, story, anonymous=True)


def test_what_cannot_be_sent_is_not_sent_and_says_so(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        assert "no machine" in (await served.ask("ann", "hold")).words
        await served.see()
        answer = await served.ask("ann", "hold")
        assert (answer.done, served.copy.asked) == (False, 1)
        assert "connection refused; nothing was done" in answer.words
        assert "name the machine" in (await served.ask("ann", "pause", machine="")).words
        await served.see(ago=3600, seq=2)
        answer = await served.ask("ann", "hold")
        assert "node-1 was not seen since" in answer.words
        assert "nothing was done" in answer.words
        await served.see()
        served.state.on_problem("connection refused")
        await asyncio.sleep(0)
        assert "nothing was done" in (await served.ask("ann", "hold")).words
        assert served.copy.asked == 1

    run(tmp_path, story)


def test_without_a_key_nothing_is_requested(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        await served.see()
        assert "has no key for requests" in (await served.ask("ann", "hold")).words
        assert served.copy.asked == 0

    run(tmp_path, story, key=None)


def test_what_the_copy_does_not_hold_gets_a_sentence(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        await served.see()
        answer = await served.ask("ann", "explain", workload="{machine} train")
        assert "On node-1: gpukeeper explain {machine} train" in answer.words
        for verb in ("plan", "policy", "try", "preview", "standing"):
            answer = await served.ask("ann", verb)
            assert not answer.done
            assert "copy of the fleet" in answer.words
        answer = await served.ask("ann", "signals", workload="x")
        assert 'no workload "x"' in answer.words
        assert served.copy.asked == 0

    run(tmp_path, story)


@pytest.mark.parametrize(("same_users", "name"), [(True, "ann"), (False, "ann@web-1")])
def test_whose_work_it_is(tmp_path: Path, same_users: bool, name: str) -> None:
    async def story(served: Served) -> None:
        await served.see()
        answer = await served.ask("ann", "whoami", machine="")
        assert (answer.person.name, answer.person.admin) == (name, False)
        assert (await served.ask("eve", "whoami", machine="")).person.admin
        answer = await served.ask("ann", "ledger", owner="bob")
        assert f"{name} may read only lines about their own work" in answer.words

    run(tmp_path, story, same_users=same_users)


def test_one_person_cannot_keep_all_requests_waiting(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        entered, release = asyncio.Semaphore(0), asyncio.Event()

        async def hang(work: object) -> object:
            entered.release()
            await release.wait()
            raise CopyUnavailable("closed", begun=True)

        served.copy.ask = hang  # type: ignore[method-assign, assignment]
        await served.see()
        waiting = [asyncio.create_task(served.ask("ann", "hold")) for _ in range(4)]
        for _ in waiting:
            await asyncio.wait_for(entered.acquire(), PATIENCE)
        assert "too many requests" in (await served.ask("ann", "hold")).words
        release.set()
        for one in await asyncio.gather(*waiting):
            assert "whether the request was sent is not known" in one.words

    run(tmp_path, story)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("mysql://x", "does not start with postgresql://"),
        ("postgresql://web:secret@db/x", "contains a password"),
        ("postgresql://db/x?password=secret", "contains a password"),
    ],
)
def test_addresses_that_are_refused(address: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        fleet_access(address, None, None, Policy())
    assert "secret" not in str(refused.value)


def test_secrets_come_from_files_that_only_we_can_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    key = tmp_path / "key"
    key.write_text("short\n")
    key.chmod(0o600)
    with pytest.raises(UsageError, match="shorter than 32 characters"):
        fleet_access("postgresql://db/x", None, key, Policy())
    key.write_text("k" * 64)
    key.chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        fleet_access("postgresql://db/x", None, key, Policy())
    with pytest.raises(UsageError, match="could not be read"):
        fleet_access("postgresql://db/x", tmp_path / "missing", None, Policy())
    key.chmod(0o600)
    given = Policy(fleet=Fleet(machine="web-1", request_key_file=str(key), password_file=str(key)))
    access = fleet_access("postgresql://db/x", None, None, given)
    assert (access.key, access.password_file, access.realm) == ("k" * 64, str(key), "web-1")


@pytest.mark.parametrize(
    "words",
    [
        ("--from", "postgresql://db/x"),
        ("--web", "0", "--from", "postgresql://db/x", "--platform", "docker"),
        ("--web", "0", "--from", "postgresql://db/x", "--metrics", "0"),
        ("--web", "0", "--from", "postgresql://db/x", "--json"),
        ("--key-file", "key"),
    ],
)
def test_options_that_exclude_each_other(tmp_path: Path, words: tuple[str, ...]) -> None:
    ran = CommandFleet(tmp_path).run("serve", *words)
    assert ran.code == 2
    assert "Nothing was started" in ran.err


def test_its_policy_needs_no_scope(tmp_path: Path) -> None:
    """It makes no passes: the address of the database is what is wrong here."""
    (tmp_path / "folder").mkdir()
    fleet = CommandFleet(tmp_path / "folder", "admins: [root]\n")
    ran = fleet.run("serve", "--web", "0", "--from", "mysql://db.example/fleet")
    assert (ran.code, "--from: this is not the address of a fleet database" in ran.err) == (2, True), ran.err
