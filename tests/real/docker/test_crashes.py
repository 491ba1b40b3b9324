"""Nobody gets to finish: gpukeeper and the engine are killed in the middle of `apply`, at moments spread over the run.

Afterwards a plain `apply` goes on. What was kept is untouched, by Docker's own events; nothing was removed twice; and
for everything that Docker destroyed the ledger has evidence, an intent before and an outcome after it.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import count
from typing import Any

import pytest

from tests.engines import has_docker, require
from tests.kills import KILLS
from tests.real.docker.private_engine import DockerEngine, docker_engine
from tests.real.docker.proxy import proxy

SEED = 4
POLICY = """
mode: enforce
scope: {docker: {}}
retention: {succeeded: 0s, failed: 0s, stopped: 0s}
classes:
  unknown: {idle: none, max_runtime: 100ms, on_max_runtime: stop, never_started: 0s, grace: 1s, hold_after_stop: 0s}
  patient: {idle: none, max_runtime: 24h}
match: [{class: patient, name: "keep-running*"}]
exemptions: [{workload: "*/keep-exempt", reason: the policy keeps it}]
warnings: {runtime: [1%], lead: 0s, undelivered: 0s}
budget: {per_pass: 1000, per_hour: 100000}
breaker: {running: 100%, vanished: 100%, floor: 1000}
gpu: {settle: 100ms}
"""
HELD = {"gpukeeper.io/hold-until": "2999-01-01T00:00:00Z"}
KUBELETS = {"io.kubernetes.pod.uid": "1"}
# PID 1 of the overdue ones: holds its GPU and leaves at once on SIGTERM.
OVERDUE = 'exec 3<"$0"; trap "exit 0" 15; sleep 1000000 3<&- & while :; do wait; done'
Line = dict[str, Any]


class Fleet:
    """Containers that are due, made again as they go, beside some that the policy keeps. Hears all of Docker's events;
    in pieces, since the engine itself remembers only the last few hundred."""

    def __init__(self, engine: DockerEngine, due: Mapping[str, int], *, restarts: bool = False) -> None:
        """`restarts`: of the engine, which ends what runs; so what runs and is kept must be kept when it ended, too."""
        self.engine, self.due, self.restarts = engine, due, restarts
        self.kept: set[str] = set()
        self.may_go: set[str] = set()
        self.heard: dict[tuple[int, str, str], dict[str, Any]] = {}
        self._made = 0
        self._keep()
        self._began = self._since = time.time()  # the short ones among the kept have ended: from here on they rest
        self.refill()

    def refill(self) -> None:
        """As many of each kind as there should be."""
        left = Counter(name.partition("-")[0] for name in self.engine.containers())
        for kind, wanted in self.due.items():
            for _ in range(wanted - left[kind]):
                self._made += 1
                self._make(kind, f"{kind}-{self._made}")

    def listen(self) -> None:
        now = time.time()
        for event in self.engine.events(max(self._since - 1, self._began)):
            self.heard[event["timeNano"], event["Actor"]["ID"], event["Action"]] = event
        self._since = now

    def apply(self, codes: Sequence[int] = (0,)) -> None:
        """To its end, as often as it takes: an overdue one is warned, stopped and removed in three passes."""
        for _ in range(6):
            ran = self.engine.gpukeeper("apply", "--yes", policy=POLICY)
            assert ran.code in codes, ran
            if not {name for name in self.engine.containers() if not name.startswith("keep-")}:
                break
        self.listen()

    def lines(self) -> list[Line]:
        ran = self.engine.gpukeeper("ledger", "list", "--json", "--last", "1000000")
        assert ran.code == 0, ran
        found: list[Line] = json.loads(ran.out)["lines"]
        return found

    def check(self, *, engine_lived: bool = True) -> None:
        """An engine that goes down loses events, and ends what runs unless it has live-restore."""
        lines = self.lines()
        left = self.engine.containers()
        others = [(name, state, self._reasons(name, lines)) for name, state in left.items() if name not in KEPT]
        assert others == []
        assert {self.engine.id(name) for name in left} == self.kept  # what was due is gone, nothing else
        containers_lived = engine_lived or self.engine.live_restore
        self._check_kept(lines, containers_lived)
        self._check_removals(lines, engine_lived)
        if containers_lived:
            self._check_stops(lines)
        _check_intents(lines)

    def _reasons(self, name: str, lines: list[Line]) -> tuple[str, list[Line]]:
        """Why it is still there: what `explain` says, and its lines in the ledger."""
        ran = self.engine.gpukeeper("explain", name, policy=POLICY)
        return ran.out + ran.err, [line for line in lines if (line.get("ref") or {}).get("name") == name]

    def _check_kept(self, lines: list[Line], containers_lived: bool) -> None:
        assert [line for line in lines if line["type"] == "intent" and line["ref"]["uid"] in self.kept] == []
        resting = self.kept if containers_lived else self.kept - {self.engine.id("keep-running")}
        acts = {"kill", "stop", "die", "destroy", "pause", "restart", "update", "rename"}
        touched = [event for event in self.heard.values() if event["Actor"]["ID"] in resting]
        assert [event for event in touched if event["Action"].partition(":")[0] in acts] == []

    def _check_removals(self, lines: list[Line], all_heard: bool) -> None:
        destroyed = self._at("destroy")
        assert destroyed.keys() <= self.may_go
        assert not all_heard or destroyed.keys() == self.may_go
        steps = _steps(lines)
        for uid in self.may_go:
            removals = [one for one in steps[uid] if one["action"] == "remove"]
            done = [one for one in removals if one["result"] == "reclaimed"]
            assert len(done) == 1, f"{uid} is gone, and the ledger says how {len(done)} times: {removals}"
            assert done[0]["at"] <= destroyed.get(uid, time.time()), f"{uid} was removed before the intent"
            assert done[0]["evidence"], f"{uid} was removed without evidence"
            folder = self.engine.folder / "state" / "evidence" / done[0]["evidence"]
            assert any(folder.iterdir()), f"the evidence of {uid} is not where the ledger says"

    def _check_stops(self, lines: list[Line]) -> None:
        """What ran and was ended: an intent to stop it came before."""
        steps = _steps(lines)
        for uid, at in self._at("kill").items():
            stops = [one for one in steps[uid] if one["action"] == "stop" and one["at"] <= at]
            assert stops, f"{uid} was signalled without an intent: {steps[uid]}"

    def _at(self, action: str) -> dict[str, float]:
        """When it first happened, by id."""
        found: dict[str, float] = {}
        for (nano, uid, what), _event in sorted(self.heard.items()):
            if what.partition(":")[0] == action:
                found.setdefault(uid, nano / 1e9)
        return found

    def _keep(self) -> None:
        engine = self.engine
        engine.run("keep-exempt", gpus=[0], cmd=["true"])
        engine.run("keep-held", gpus=[0], cmd=["true"], labels=HELD)
        engine.create("keep-kubelets", gpus=[1], labels=KUBELETS)
        labels = HELD if self.restarts else {}
        engine.run("keep-running", gpus=[3], cmd=["sh", "-c", OVERDUE, engine.gpus[3].path], labels=labels)
        engine.run("keep-without", cmd=["false"])
        engine.until(lambda: list(engine.containers().values()).count("exited") == 3, "the short ones ended")
        self.kept = {engine.id(name) for name in KEPT}

    def _make(self, kind: str, name: str) -> None:
        """In two steps: what is created and not started yet is due already, and may be gone before its start."""
        how: dict[str, dict[str, Any]] = {
            "ended": {"gpus": [0], "cmd": ["true"]},
            "failed": {"gpus": [1], "cmd": ["false"]},
            "never": {"gpus": [1]},
            "overdue": {"gpus": [2], "cmd": ["sh", "-c", OVERDUE, self.engine.gpus[2].path]},
        }
        self.may_go.add(self.engine.create(name, **how[kind]))
        if kind != "never":
            self.engine.start_container(name)


KEPT = {"keep-exempt", "keep-held", "keep-kubelets", "keep-running", "keep-without"}


@pytest.mark.parametrize(
    ("due", "kills"),
    [({"ended": 1, "failed": 1, "never": 2}, KILLS * 7 // 10), ({"overdue": 1, "never": 1}, KILLS * 3 // 10)],
    ids=["removals", "stops"],
)
def test_gpukeeper_killed_at_random_moments_removes_nothing_wrong_or_twice(
    docker: DockerEngine, due: dict[str, int], kills: int
) -> None:
    """Any moment, start-up and the steps of the adapter included. The points between intent and outcome are not left
    to chance: `test_halts.py`."""
    rng = random.Random(SEED)
    fleet = Fleet(docker, due)
    began = time.monotonic()
    assert docker.gpukeeper("apply", "--yes", policy=POLICY).code == 0
    length = time.monotonic() - began
    fleet.listen()
    # One moment in each equal part of a whole run, in any order.
    moments = [(part + rng.random()) / kills * length for part in range(kills)]
    rng.shuffle(moments)
    for moment in moments:
        running = docker.popen("apply", "--yes", policy=POLICY)
        refill = threading.Thread(target=fleet.refill)  # while it starts up
        refill.start()
        _sleep_unless_done(running.poll, moment)
        running.kill()
        running.communicate()
        refill.join()
        fleet.listen()
    fleet.apply()
    fleet.check()


@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_an_engine_that_goes_down_in_the_middle_of_apply_costs_nothing_but_time(docker: DockerEngine, how: str) -> None:
    _go_down_in_the_middle(docker, how)


def test_with_live_restore_the_kept_one_does_not_even_notice() -> None:
    require("docker", has_docker())
    with docker_engine(live_restore=True) as engine:
        _go_down_in_the_middle(engine, "killed")
        found = engine.inspect("keep-running")
        assert found is not None
        assert (found["State"]["Status"], found["RestartCount"]) == ("running", 0)


def test_serve_hears_a_restarted_engine_again(docker: DockerEngine) -> None:
    docker.run("first", gpus=[0], cmd=["sh", "-c", OVERDUE, docker.gpus[0].path])
    serving = docker.popen("serve", policy=POLICY.replace("enforce", "plan"))
    docker.until(lambda: _noticed(docker, "first", "running"), "serve noticed it", 120)
    docker.restart()  # ends the containers, too
    docker.until(lambda: _noticed(docker, "first", "ended"), "serve noticed its end after the restart", 60)
    docker.run("second", gpus=[1], cmd=["sh", "-c", OVERDUE, docker.gpus[1].path])
    docker.until(lambda: _noticed(docker, "second", "running"), "serve noticed another one", 60)
    docker.signal_container("second", "TERM")
    ended = docker.until(lambda: _noticed(docker, "second", "ended"), "serve noticed its end", 60)
    assert ended["outcome"] == "stopped"
    assert serving.poll() is None


def _go_down_in_the_middle(engine: DockerEngine, how: str) -> None:
    """Twice: while removals go on, and while one is being stopped."""
    fleet = Fleet(engine, {"ended": 3, "never": 3, "overdue": 1}, restarts=True)
    removals = count()
    _go_down_at(fleet, how, lambda method, path: method == "DELETE" and next(removals) == 2)
    fleet.apply(codes=(0, 3))  # 3: the engine may still be removing one
    fleet.refill()
    assert engine.gpukeeper("apply", "--yes", policy=POLICY).code == 0  # warns, and stops in the next pass
    (overdue,) = [engine.id(name) for name in engine.containers() if name.startswith("overdue-")]
    _go_down_at(fleet, how, lambda method, path: method == "POST" and path.startswith(f"/containers/{overdue}/"))
    fleet.apply(codes=(0, 3))
    fleet.check(engine_lived=False)


def _go_down_at(fleet: Fleet, how: str, question: Callable[[str, str], object]) -> None:
    """The engine is gone before it hears this question of `apply`."""
    engine = fleet.engine
    with proxy(engine.folder / "p", engine.socket) as between:
        between.hold = question
        running = engine.popen("apply", "--yes", policy=POLICY, env={"DOCKER_HOST": between.host})
        assert between.held.wait(60), "it was not asked"
        fleet.listen()
        _take_down(engine, how)
        engine.start()
        between.go()
        out, err = running.communicate(timeout=200)
        assert running.returncode in (0, 1, 3), (running.returncode, out, err)


def _take_down(engine: DockerEngine, how: str) -> None:
    if how == "killed":
        engine.kill9()
    else:
        engine.shut_down()


def _sleep_unless_done(poll: Callable[[], int | None], seconds: float) -> None:
    """Until the moment of the kill."""
    ends = time.monotonic() + seconds
    while poll() is None and (left := ends - time.monotonic()) > 0:
        time.sleep(min(left, 0.02))


def _steps(lines: list[Line]) -> dict[str, list[Line]]:
    """By uid: every intent with its time, its evidence and its result; None where it has none."""
    captured = {line["step"]: line["evidence"] for line in lines if line["type"] == "evidence"}
    closed = {line["step"]: line["result"] for line in lines if line["type"] == "outcome"}
    found: dict[str, list[Line]] = defaultdict(list)
    for line in (one for one in lines if one["type"] == "intent"):
        step, at = line["step"], datetime.fromisoformat(line["at"]).timestamp()
        found[line["ref"]["uid"]].append(
            {"action": line["action"], "at": at, "evidence": captured.get(step), "result": closed.get(step)}
        )
    return found


def _check_intents(lines: list[Line]) -> None:
    """Each has one outcome, after it; steps never share a name."""
    intents = [line["step"] for line in lines if line["type"] == "intent"]
    outcomes = Counter(line["step"] for line in lines if line["type"] == "outcome")
    assert len(set(intents)) == len(intents)
    assert [step for step in intents if outcomes[step] != 1] == []
    at = {line["step"]: line["seq"] for line in lines if line["type"] == "intent"}
    early = [line for line in lines if line["type"] == "outcome" and line["seq"] < at.get(line["step"], 0)]
    assert early == []


def _noticed(engine: DockerEngine, name: str, state: str) -> Line | None:
    ran = engine.gpukeeper("ledger", "list", "--json", "--last", "100000", "--type", "noticed")
    lines = json.loads(ran.out)["lines"] if ran.code == 0 else []
    found = [line for line in lines if line["ref"]["name"] == name and line["state"] == state]
    return found[-1] if found else None
