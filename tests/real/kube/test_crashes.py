"""Nobody gets to finish: gpukeeper and the API server go down in the middle of `apply`.

What was kept has the uid that it had; for everything that the API server removed the ledger has evidence and an intent
before and one outcome after it; nothing that is due is left once a plain `apply` has gone on.
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.model.decision import Result
from tests import forked
from tests.kills import KILLS
from tests.real.kube import objects
from tests.real.kube.api import Object, condition
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.endings import ended_pod, text, unplaced
from tests.real.kube.proxy import Held, proxy
from tests.real.kube.removals import Removals
from tests.real.kube.runs import SUCCEEDS, marked

SEED = 11
JOBS, PODS = 4, 3  # due ones that a run finds
APPLY = ("apply", "--yes", "--json", "--platform", "kubernetes")
Line = dict[str, Any]


def policy(namespace: str) -> str:
    made = {
        "mode": "enforce",
        "scope": {"kubernetes": {"namespaces": [namespace]}},
        "retention": {"succeeded": "0s", "failed": "0s", "stopped": "0s"},
        "budget": {"per_pass": 1000, "per_hour": 100000},
        "breaker": {"running": "100%", "vanished": "100%", "floor": 1000},
        "kubernetes": {"requests": 1000, "burst": 1000},
    }
    return json.dumps(made)


class Crowd:
    """Jobs and pods that are due, made again as they go, beside some that must stay."""

    def __init__(self, plane: ControlPlane, namespace: str, elsewhere: str, folder: Path) -> None:
        self.plane, self.api, self.namespace, self.elsewhere = plane, plane.api, namespace, elsewhere
        self.folder = folder
        self.server: str | None = None  # where gpukeeper finds the cluster, unless at its own address
        self.kept: dict[str, tuple[str, str, str]] = {}  # by uid: plural, namespace, name
        self.due: dict[str, tuple[str, str]] = {}  # by uid: plural, name
        self._made = 0
        self._policy = folder / "policy.yaml"
        self._policy.write_text(policy(namespace))

    # What is there.

    def keep_some(self) -> None:
        """What runs, what is held, what is not due for long, what nobody gave us."""
        api, inside = self.api, self.namespace
        far = text(datetime.now(UTC) + timedelta(hours=20))
        self._keep("jobs", inside, api.create(objects.job("keep-running"), inside))
        self._keep("pods", inside, api.create(objects.pod("keep-running-pod"), inside))
        for name, marks in (("keep-held", {"hold_until": far}), ("keep-young", {"ttl": "20h"})):
            self._keep("jobs", inside, api.create(marked(objects.job(name, annotations=SUCCEEDS), **marks), inside))
        held = ended_pod(api, inside, "keep-held-pod", annotations={"gpukeeper.io/hold-until": far})
        self._keep("pods", inside, held)
        self._keep("pods", inside, api.create(unplaced("keep-pending"), inside))
        self._keep("jobs", self.elsewhere, api.create(objects.job("keep-away", annotations=SUCCEEDS), self.elsewhere))
        for name, where in (("keep-held", inside), ("keep-young", inside), ("keep-away", self.elsewhere)):
            api.wait_condition("jobs", where, name, "Complete")
        self.plane.until(lambda: self._phase("keep-running-pod") == "Running", "what runs runs", 60)
        runs = {"labels": "batch.kubernetes.io/job-name=keep-running", "timeout": 60}
        (pod,) = api.wait_pods(inside, 1, **runs)  # type: ignore[arg-type]
        self._keep("pods", inside, pod)

    def refill(self, jobs: int = JOBS, pods: int = PODS) -> None:
        """As many finished ones as there should be. Jobs end by their controller."""
        there = Counter(what for what, _ in self.still_due())
        for what, wanted in (("jobs", jobs), ("pods", pods)):
            for _ in range(wanted - there[what]):
                self._made += 1
                name = f"due-{self._made}"
                if what == "pods":
                    made = ended_pod(self.api, self.namespace, name)
                else:
                    with_pod = {} if self._made % 2 else {"parallelism": 0}
                    made = self.api.create(objects.job(name, annotations=SUCCEEDS, **with_pod), self.namespace)
                self.due[made["metadata"]["uid"]] = (what, name)

    def still_due(self) -> list[tuple[str, str]]:
        return [self.due[uid] for what in ("jobs", "pods") for uid in self._uids(what) if uid in self.due]

    def all_ended(self) -> bool:
        ended = [condition(one, "Complete") == "True" for one in self._list("jobs") if self._is_due(one)]
        return all(ended)

    # Who acts.

    def environ(self) -> dict[str, str]:
        return {
            **forked.environment(),
            "HOME": str(self.folder),
            "KUBECONFIG": str(self.plane.kubeconfig(server=self.server)),
            "GPUKEEPER_STATE": str(self.folder / "state"),
            "GPUKEEPER_POLICY": str(self._policy),
        }

    def apply(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "gpukeeper", *APPLY]
        return subprocess.Popen(command, env=self.environ(), cwd=self.folder, stdout=pipe, stderr=pipe, text=True)

    def to_the_end(self, deadline: float = 120) -> None:
        """Plain runs, until nothing is due: a Job's pods may need a moment more than a run takes."""
        self.plane.until(self.all_ended, "what will be due ended", 60)
        ends = time.monotonic() + deadline
        while True:
            code, out, err = forked.run("gpukeeper", APPLY, self.environ(), timeout=deadline, folder=self.folder)
            assert code in (0, 3), (code, out, err)
            if not self.still_due() and not self._open_intents():
                return
            assert time.monotonic() < ends, f"still there: {self.still_due()}; {out}"

    def at_work(self, running: subprocess.Popen[str]) -> bool:
        """Its pass has begun: the place's lease has its number."""
        leases = (self.folder / "state" / "leases").glob("kubernetes~*")
        return any(one.read_text().startswith(f"pid {running.pid} ") for one in leases)

    # What is true afterwards.

    def lines(self) -> list[Line]:
        path = self.folder / "state" / "ledger.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
            rows = ledger.execute("SELECT seq, type, line FROM journal ORDER BY seq").fetchall()
        return [{**json.loads(line), "type": type_, "seq": seq} for seq, type_, line in rows]

    def check(self, gone: dict[str, float] | None = None) -> None:
        """`gone`: by uid, when the API server said so, of everything."""
        lines = self.lines()
        for uid, (what, where, name) in self.kept.items():
            found = self.api.get(what, where, name)
            assert found is not None, f"{what} {name} was to be kept and is gone"
            assert found["metadata"]["uid"] == uid, f"{what} {name} was to be kept and is another one"
            assert "deletionTimestamp" not in found["metadata"], f"{what} {name} was to be kept and is being removed"
        assert self._phase("keep-running-pod") == "Running"
        assert self.still_due() == []
        intents = [line for line in lines if line["type"] == "intent"]
        assert [line for line in intents if line["ref"]["uid"] in self.kept] == []
        # "Unknown" closes nothing: a server that was away is asked again, and the step is closed as found then.
        outcomes = Counter(
            line["step"] for line in lines if line["type"] == "outcome" and line["result"] != Result.UNKNOWN
        )
        assert len({line["step"] for line in intents}) == len(intents)
        assert [line for line in intents if outcomes[line["step"]] != 1] == []
        captured = {line["step"]: line for line in lines if line["type"] == "evidence"}
        reclaimed = {
            line["step"]: line for line in lines if line["type"] == "outcome" and line["result"] == "reclaimed"
        }
        for uid, (what, name) in self.due.items():
            own = [line for line in intents if line["ref"]["uid"] == uid and line["action"] == "remove"]
            assert own, f"{what} {name} is gone without an intent"
            done = [line for line in own if line["step"] in reclaimed]
            assert len(done) == 1, f"{what} {name} is gone, and the ledger says how {len(done)} times: {own}"
            folder = self.folder / "state" / "evidence" / captured[done[0]["step"]]["evidence"]
            assert any(folder.iterdir()), f"the evidence of {name} is not where the ledger says"
            if gone is not None:
                first = min(_at(line) for line in own)
                assert first <= gone[uid], f"{what} {name} was removed before the intent"

    # Below here: how.

    def _keep(self, what: str, where: str, made: Object) -> None:
        self.kept[made["metadata"]["uid"]] = (what, where, made["metadata"]["name"])

    def _list(self, what: str) -> list[Object]:
        return self.api.list(what, self.namespace)

    def _uids(self, what: str) -> list[str]:
        return [str(one["metadata"]["uid"]) for one in self._list(what)]

    def _is_due(self, one: Object) -> bool:
        return one["metadata"]["uid"] in self.due

    def _phase(self, name: str) -> str:
        return str((self.api.get("pods", self.namespace, name) or {}).get("status", {}).get("phase", ""))

    def _open_intents(self) -> int:
        lines = self.lines()
        closed = {line["step"] for line in lines if line["type"] == "outcome" and line["result"] != "unknown"}
        return len({line["step"] for line in lines if line["type"] == "intent"} - closed)


@pytest.fixture
def crowd(
    plane: ControlPlane, namespace: str, kwok_node: str, new_namespace: Callable[[], str], tmp_path: Path
) -> Crowd:
    made = Crowd(plane, namespace, new_namespace(), tmp_path)
    made.keep_some()
    return made


@pytest.mark.timeout(900)
def test_gpukeeper_killed_at_random_moments_removes_nothing_wrong_or_twice(crowd: Crowd) -> None:
    """Each run settles what the killed one before it left open, and may be killed while it does. The points between
    intent and outcome are not left to chance: `test_halts.py`."""
    rng = random.Random(SEED)
    api, inside = crowd.api, crowd.namespace
    with Removals(api, "jobs", inside) as jobs, Removals(api, "pods", inside) as pods:
        crowd.refill()
        crowd.plane.until(crowd.all_ended, "they ended", 60)
        length = _length_of_a_pass(crowd)
        # One moment in each equal part of a pass, in any order, as shares of its length.
        moments = [(part + rng.random()) / KILLS for part in range(KILLS)]
        rng.shuffle(moments)
        for moment in moments:
            running = crowd.apply()
            refill = threading.Thread(target=crowd.refill)  # while it starts up
            refill.start()
            while running.poll() is None and not crowd.at_work(running):
                time.sleep(0.002)
            began = time.monotonic()
            _sleep_unless_done(running.poll, moment * length)
            if running.poll() is not None:
                assert running.returncode in (0, 3), running.communicate()
                length = time.monotonic() - began  # how busy the machine is now
            running.kill()
            running.communicate()
            refill.join()
        crowd.to_the_end()
        assert jobs.wait({uid for uid, (what, _) in crowd.due.items() if what == "jobs"}, 20)
        crowd.check({**jobs.at, **pods.at})
        own_pods = {uid for uid, (what, _, _) in crowd.kept.items() if what == "pods"}
        assert not own_pods & pods.at.keys()


@contextmanager
def in_the_middle(crowd: Crowd) -> Iterator[tuple[subprocess.Popen[str], Callable[[], None]]]:
    """An `apply` that has removed some and is held just before its next removal. It goes on when told to, at the latest
    after the block."""
    removals = count()
    held = Held(lambda asked: asked.method == "DELETE" and next(removals) == 3)
    with proxy(crowd.plane, held) as between:
        crowd.server = between.address
        running = crowd.apply()
        try:
            held.wait()
            yield running, held.go
        finally:
            held.go()
        out, err = running.communicate(timeout=200)
        assert running.returncode in (0, 3), (running.returncode, out, err)
        crowd.plane.healthy()
        crowd.to_the_end()
        crowd.check()


def test_an_api_server_that_is_restarted_during_apply_costs_nothing_but_time(crowd: Crowd) -> None:
    crowd.refill(4, 8)
    crowd.plane.until(crowd.all_ended, "they ended", 60)
    with in_the_middle(crowd):
        crowd.plane.restart_apiserver()
        assert crowd.still_due()


def test_an_api_server_that_hangs_is_unseen_after_a_deadline_and_nothing_goes(crowd: Crowd) -> None:
    crowd.refill(2, 2)
    crowd.plane.until(crowd.all_ended, "they ended", 60)
    there = set(crowd.still_due())
    crowd.plane.apiserver.pause()
    try:
        running = crowd.apply()
        out, err = running.communicate(timeout=100)  # the server hangs until the pass has given it up
    finally:
        crowd.plane.apiserver.resume()
    report = json.loads(out)
    (place,) = report["places"]
    assert place["unseen"], (running.returncode, out, err)
    assert "did not answer" in json.dumps(place["unseen"])
    assert place["outcomes"] == []
    assert set(crowd.still_due()) == there
    crowd.to_the_end()
    crowd.check()


def test_an_api_server_that_begins_to_hang_during_apply_ends_it_in_time(crowd: Crowd) -> None:
    """Steps that were planned find out by themselves that nothing can be looked at: it ends while the server hangs."""
    crowd.refill(0, 8)
    with in_the_middle(crowd) as (running, go):
        crowd.plane.apiserver.pause()
        go()
        try:
            running.wait(timeout=200)
        finally:
            crowd.plane.apiserver.resume()


def _length_of_a_pass(crowd: Crowd) -> float:
    running = crowd.apply()
    while running.poll() is None and not crowd.at_work(running):
        time.sleep(0.002)
    began = time.monotonic()
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, (running.returncode, out, err)
    return time.monotonic() - began


def _sleep_unless_done(poll: Callable[[], int | None], seconds: float) -> None:
    """Until the moment of the kill."""
    ends = time.monotonic() + seconds
    while poll() is None and (left := ends - time.monotonic()) > 0:
        time.sleep(min(left, 0.02))


def _at(line: Line) -> float:
    return datetime.fromisoformat(line["at"]).timestamp()
