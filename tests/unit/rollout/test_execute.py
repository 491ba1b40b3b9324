"""Order, verification and the way back, with replies of servers as values; real ssh servers: tests/real/ssh."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.clients.ssh import Host, HostError, Settings
from gpukeeper.interfaces.cli.doctor import last_pass
from gpukeeper.interfaces.terminal import server_passes
from gpukeeper.model.subject import Ref
from gpukeeper.rollout import execute
from gpukeeper.rollout.execute import Outcome, ServerLogs, ServerPass, ServerResult, Servers
from gpukeeper.rollout.plan import Done, Finding, Seen, Wanted
from tests.unit.rollout.test_plan import BARE, THERE, WANTED, seen

OLD = seen(version="1.0")
REF = {"platform": "docker", "place": "gpu1", "kind": "container", "name": "train", "uid": "c0ffee"}
Reply = object | Exception


class Scripted:
    """Replies of each server, in their order; what was requested is in `requests`."""

    def __init__(self, **replies: list[Reply]) -> None:
        self.replies = replies
        self.requests: list[tuple[str, str]] = []
        self.what: dict[str, object] = {}

    async def request(self, host: Host, reply: type, do: str, **what: object) -> Any:
        self.requests.append((host.node, do))
        self.what = what
        found = self.replies[host.node].pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def send(self, host: Host, reply: type, do: str, file: Path, /, **what: object) -> Any:
        return await self.request(host, reply, do, **what)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    def given(**replies: list[Reply]) -> Scripted:
        made = Scripted(**replies)
        monkeypatch.setattr(Servers, "_client", lambda *_, **__: made)
        return made

    monkeypatch.setattr(execute, "installer", lambda _: "print()")
    return given


def wanted(name: str = "gpu1") -> Wanted:
    return msgspec.structs.replace(WANTED, host=Host(name, name))


def do(act: Callable[[Servers], Awaitable[Any]]) -> Any:
    async def story() -> Any:
        return await act(Servers(Settings()))

    return asyncio.run(story())


def one(method: str, name: str = "gpu1") -> ServerResult:
    return do(lambda servers: getattr(servers, method)(wanted(name)))


def test_it_is_deployed_when_a_second_look_says_so(script: Callable[..., Scripted]) -> None:
    script(gpu1=[BARE, Done(installed=True), THERE])
    assert one("deploy").outcome is Outcome.DEPLOYED


def test_the_reply_of_a_step_is_not_believed(script: Callable[..., Scripted]) -> None:
    script(gpu1=[BARE, Done(installed=True), BARE])
    found = one("deploy")
    assert found.outcome is Outcome.FAILED
    assert "version unknown is installed instead of 2.0" in found.words


@pytest.mark.parametrize(
    ("done", "after", "words"),
    [
        (Done(installed=True, problem="no such unit"), THERE, "no such unit"),
        (Done(installed=True), seen(program="ImportError"), "gpukeeper does not run: ImportError"),
        (Done(installed=True), seen(findings=(Finding("problem", "ledger", "damaged"),)), "ledger: damaged"),
    ],
)
def test_a_version_that_is_not_verified_is_rolled_back_with_the_policy_before(
    script: Callable[..., Scripted], done: Done, after: Seen, words: str
) -> None:
    script_ = script(gpu1=[seen(OLD, policy="mode: plan\n"), done, after, Done(), OLD])
    found = one("deploy")
    assert (found.outcome, found.words) == (Outcome.ROLLED_BACK, (words,))
    assert [do for _, do in script_.requests] == ["look", "deploy", "look", "roll_back", "look"]


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        ([Done(problem="no version before"), OLD], "after rolling back: no version before"),
        ([Done(), seen()], ""),  # the new version is still in force
        (
            [Done(), seen(OLD, findings=(Finding("problem", "ledger", "written by a newer gpukeeper"),))],
            "after rolling back: ledger: written by a newer gpukeeper",
        ),
        ([HostError("unreachable", "gone")], "it could not be rolled back: gone"),
    ],
)
def test_a_way_back_that_did_not_work_is_a_failure(
    script: Callable[..., Scripted], replies: list[Reply], words: str
) -> None:
    script(gpu1=[OLD, Done(installed=True, problem="broken"), seen(), *replies])
    found = one("upgrade")
    assert found.outcome is Outcome.FAILED
    assert "broken" in found.words
    assert words in " ".join(found.words)


def test_a_setup_that_fails_without_an_installation_is_not_rolled_back(script: Callable[..., Scripted]) -> None:
    assert THERE.setup is not None
    stopped = seen(setup=msgspec.structs.replace(THERE.setup, active=False))
    script_ = script(gpu1=[stopped, Done(problem="start failed"), stopped])
    assert one("deploy").outcome is Outcome.FAILED
    assert [do for _, do in script_.requests] == ["look", "deploy", "look"]


def test_a_connection_that_breaks_during_a_change_says_how_to_go_on(script: Callable[..., Scripted]) -> None:
    script(gpu1=[BARE, HostError("unreachable", "broken pipe")])
    found = one("deploy")
    assert found.outcome is Outcome.FAILED
    assert "the next `gpukeeper fleet deploy`" in found.words[0]


def test_a_server_that_is_unreachable_stops_no_other(script: Callable[..., Scripted]) -> None:
    script(gpu1=[HostError("unreachable", "no route")], gpu2=[THERE], gpu3=[HostError("refused", "no")])
    servers = [wanted(name) for name in ("gpu1", "gpu2", "gpu3")]
    found = do(lambda made: made.each(servers, made.deploy))
    assert [row.outcome for row in found] == [Outcome.UNREACHABLE, Outcome.UNCHANGED, Outcome.FAILED]


def test_after_a_first_one_that_failed_no_other_is_begun(script: Callable[..., Scripted]) -> None:
    made = script(gpu1=[BARE, Done(problem="broken"), BARE], gpu2=[], gpu3=[])
    servers = [wanted(name) for name in ("gpu1", "gpu2", "gpu3")]
    found = do(lambda ours: ours.in_order(servers, ours.deploy, 1))
    assert [row.outcome for row in found] == [Outcome.FAILED, Outcome.NOT_STARTED, Outcome.NOT_STARTED]
    assert {host for host, _ in made.requests} == {"gpu1"}


def test_a_pass_that_is_late_differs_and_is_no_reason_to_go_back(script: Callable[..., Scripted]) -> None:
    late = (Finding("note", "pass", "the last one was 3d ago"),)
    script(gpu1=[seen(findings=(Finding("note", *last_pass([], datetime.now(UTC))[1:]),))])
    assert one("status").outcome is Outcome.UNCHANGED, "the first pass is still to come"
    script(gpu1=[seen(findings=late)])
    found = one("status")
    assert (found.outcome, found.words) == (Outcome.DIFFERS, ("pass: the last one was 3d ago",))
    script(gpu1=[OLD, Done(installed=True), seen(findings=late)])
    assert one("deploy").outcome is Outcome.DEPLOYED


@pytest.mark.parametrize(
    ("before", "replies", "outcome"),
    [
        (BARE, [], Outcome.UNCHANGED),
        (seen(BARE, cron=True), [], Outcome.BLOCKED),  # installed in another directory
        (seen(root=False, sudo="there is no sudo"), [], Outcome.BLOCKED),
        (THERE, [Done(), BARE], Outcome.REMOVED),
        (THERE, [Done(left=("/etc/gpukeeper/policy.yaml",)), BARE], Outcome.FAILED),
        (THERE, [Done(problem="busy"), THERE], Outcome.FAILED),
        (THERE, [Done(), THERE], Outcome.FAILED),  # it is still there
    ],
)
def test_removed_means_that_it_is_gone(
    script: Callable[..., Scripted], before: Seen, replies: list[Reply], outcome: Outcome
) -> None:
    # A user without root looks once; with root but not as root the reply is made again by sudo.
    script(gpu1=[before, *replies])
    assert one("remove").outcome is outcome


# Passes.


def passed(**place: object) -> ServerPass:
    given = {"code": 0, "mode": "enforce", "places": [{"platform": "docker", "place": "gpu1", **place}]}
    return msgspec.convert(given, ServerPass)


def outcome_line(result: str) -> dict[str, object]:
    return {"ref": REF, "action": "remove", "result": result, "reason": "ended 2h ago"}


@pytest.mark.parametrize(
    ("reply", "outcome", "words"),
    [
        (passed(outcomes=[outcome_line("reclaimed")]), Outcome.APPLIED, ""),
        (passed(outcomes=[outcome_line("refused")]), Outcome.INCOMPLETE, "1 of 1 steps did not reclaim"),
        (
            passed(unseen=[{"what": "containers", "why": "no answer"}]),
            Outcome.INCOMPLETE,
            "could not be read: no answer",
        ),
        (passed(leased="the daemon runs a pass"), Outcome.INCOMPLETE, "the daemon runs a pass"),
        (passed(breaker="too many"), Outcome.INCOMPLETE, "too many"),
        (ServerPass(code=2, problem="mode is plan"), Outcome.FAILED, "mode is plan"),
        (msgspec.structs.replace(passed(), code=3, said="Docker: no socket"), Outcome.INCOMPLETE, "Docker: no socket"),
    ],
)
def test_a_pass_is_applied_only_if_nothing_was_left_out(
    script: Callable[..., Scripted], reply: ServerPass, outcome: Outcome, words: str
) -> None:
    made = script(gpu1=[THERE, reply])
    found = one("apply_pass")
    assert found.outcome is outcome
    assert words in " ".join(found.words)
    assert made.what["act"] is True


def test_a_plan_of_a_pass_acts_on_nothing(script: Callable[..., Scripted]) -> None:
    step = {"seen": {"ref": REF}, "action": "remove", "reason": "ended 2h ago"}
    made = script(gpu1=[THERE, passed(steps=[step])])
    found = one("plan_pass")
    assert found.outcome is Outcome.PLANNED
    assert found.passed is not None
    assert found.passed.places[0].steps[0].seen.ref == Ref(**REF)
    assert made.what["act"] is False


def test_the_table_of_a_pass_has_before_after_freed_and_duration(
    script: Callable[..., Scripted], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each disk and node, the GPUs, and the pass; also in JSON. What could not be read again is no number."""
    gib = 1 << 30
    disk = {"name": "/", "used": 0.81, "inodes": None}
    nodes = [
        {
            "kind": "disk",
            "name": "/",
            "before": {"bytes": 405 * gib, "disk": disk, "disk_size": 500 * gib, "disk_free": 95 * gib},
            "after": {"bytes": 320 * gib, "disk": {**disk, "used": 0.64}, "disk_size": 500 * gib, "disk_free": None},
        },
        {"kind": "node", "name": "ray-worker-1", "before": {"bytes": 35 * gib}, "after": {"bytes": 70 << 20}},
        {"kind": "node", "name": "ray-worker-2", "before": {"bytes": gib}, "after": {"why": "no answer"}},
    ]
    removed = {**outcome_line("reclaimed"), "gpus_back": 2}
    unmeasured = {**outcome_line("reclaimed"), "gpus_back": {"why": "no driver", "by_design": False}}
    place = {"nodes": nodes, "outcomes": [removed, unmeasured], "bytes_back": 85 * gib}
    reply = msgspec.structs.replace(
        passed(**place), seconds=12.0, gpus_before=execute.Gpus(8, 2), gpus_after=execute.Gpus(8, 4)
    )
    script(gpu1=[THERE, reply], gpu2=[THERE, passed()])
    found = [one("apply_pass"), one("apply_pass", "gpu2")]
    server_passes.print_passes(found)
    table = capsys.readouterr().out.split("\n\n")[1]
    assert [re.split(r" {2,}", line.strip()) for line in table.splitlines()] == [
        ["HOST", "WHAT", "BEFORE", "AFTER", "FREED", "DURATION"],
        ["gpu1", "disk /", "81% of 500 GiB", "64% of 500 GiB", "85.0 GiB"],
        ["gpu1", "node ray-worker-1", "35.0 GiB", "70.0 MiB", "34.9 GiB"],
        ["gpu1", "node ray-worker-2", "1.0 GiB", "?", "?"],
        ["gpu1", "free GPUs", "2 of 8", "4 of 8", "2"],
        ["gpu1", "pass", "85.0 GiB", "12s"],
    ]
    server_passes.finish_passes(found, json=True)
    row = msgspec.json.decode(capsys.readouterr().out)["hosts"][0]
    assert (row["bytes_back"], row["gpus_back"], row["seconds"]) == (85 * gib, 2, 12.0)
    assert (row["gpus_before"], row["gpus_after"]) == ({"number": 8, "free": 2}, {"number": 8, "free": 4})
    assert row["places"][0]["nodes"][1]["after"]["bytes"] == 70 << 20


@pytest.mark.parametrize(
    ("before", "reply", "outcome"),
    [
        (THERE, ServerLogs(errors=("refused",)), Outcome.READ),
        (THERE, ServerLogs(problems=("the ledger could not be read: damaged",)), Outcome.INCOMPLETE),
        (BARE, None, Outcome.BLOCKED),
        (seen(root=False, sudo="no sudo"), None, Outcome.BLOCKED),
    ],
)
def test_logs_that_could_not_be_read_are_not_empty(
    script: Callable[..., Scripted], before: Seen, reply: ServerLogs | None, outcome: Outcome
) -> None:
    made = script(gpu1=[before, reply])
    found = do(lambda servers: servers.logs(wanted(), 5))
    assert (found.outcome, found.logs) == (outcome, reply)
    assert bool(found.words) is (outcome is not Outcome.READ)
    assert reply is None or made.what["last"] == 5


@pytest.mark.parametrize(
    ("before", "words"),
    [(BARE, "gpukeeper is not installed there"), (seen(root=False, sudo="no sudo"), "needs root: no sudo")],
)
def test_a_server_without_it_or_without_root_runs_no_pass(
    script: Callable[..., Scripted], before: Seen, words: str
) -> None:
    made = script(gpu1=[before])
    found = one("apply_pass")
    assert found.outcome is Outcome.BLOCKED
    assert words in found.words[0]
    assert [do for _, do in made.requests] == ["look"]
