"""The TrainJob `ttl-race-test` on Kubeflow Trainer v2.3.0 and a real kubelet: five seconds of sleep, then its end, then
gone when its TTL is over. And its failing twin, minute by minute. Real time, the real loop, no clock is set forward."""

from __future__ import annotations

import asyncio
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest

from gpukeeper.engine.loop import Watch, watch
from gpukeeper.model.decision import Action, Result
from tests.engines import has_kubelet, require
from tests.real.kube import objects
from tests.real.kube.api import Api, Object, condition
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness
from tests.real.kube.runs import CHAIN, marked

RACE, TWIN = "ttl-race-test", "ttl-race-twin"
TTL, TWIN_TTL = 5, 56  # seconds after the end
LONGEST = 250  # seconds; it ends as soon as both are gone
LATE = 60  # seconds on a busy machine; the next pass would come after five minutes
ALL = "TrainJob JobSet Job Pod"
PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "why-a-trainjob-stays.md"


@dataclass(frozen=True)
class Moment:
    at: float  # seconds since its pod began to run; before that 0
    there: str  # which of its chain
    over: str  # its terminal condition, if any


@dataclass
class Story:
    """What the API server said about one run, as time passed."""

    name: str
    moments: list[Moment] = field(default_factory=list)
    pods: set[str] = field(default_factory=set)
    began: float | None = None  # when its pod was first seen running
    ended: datetime | None = None  # by its own condition

    def read(self, api: Api, namespace: str) -> bool:
        """Is anything of it there?"""
        root = api.get("trainjobs", namespace, self.name)
        found = {"TrainJob": root is not None, "JobSet": api.get("jobsets", namespace, self.name) is not None}
        labels = f"jobset.sigs.k8s.io/jobset-name={self.name}"
        found["Job"] = bool(api.names("jobs", namespace, labels=labels))
        pods = api.list("pods", namespace, labels=labels)
        found["Pod"] = bool(pods)
        self.pods |= {str(pod["metadata"]["uid"]) for pod in pods}
        if self.began is None and any(pod["status"].get("phase") == "Running" for pod in pods):
            self.began = time.monotonic()
        over = next((one for one in ("Complete", "Failed") if condition(root, one) == "True"), "")
        if over and self.ended is None:
            assert root is not None
            times = {one["type"]: one["lastTransitionTime"] for one in root["status"]["conditions"]}
            self.ended = datetime.fromisoformat(times[over])
        there = " ".join(kind for kind, is_there in found.items() if is_there)
        if not self.moments or (self.moments[-1].there, self.moments[-1].over) != (there, over):
            at = 0.0 if self.began is None else time.monotonic() - self.began
            self.moments.append(Moment(at, there, over))
        return bool(there)

    def in_phase(self, begin: float, end: float) -> list[str]:
        """What was seen between these seconds, one after the other; first of all what it was at the beginning."""
        before = [one for one in self.moments if one.at < begin][-1:]
        during = [one for one in self.moments if begin <= one.at < end]
        return [f"{one.there or 'nothing'}{f' ({one.over})' if one.over else ''}" for one in (*before, *during)]


@dataclass
class Race:
    harness: Harness
    stories: dict[str, Story]
    left: dict[str, set[str]]


def run_of(name: str, exit_code: int, ttl: int, placement: Object) -> tuple[Object, Object]:
    command = ["sh", "-c", f"echo {name} begins; sleep 5; echo {name} ends with {exit_code}; exit {exit_code}"]
    runtime = objects.training_runtime(name, command=command, **placement)
    return runtime, marked(objects.train_job(name, name), ttl=f"{ttl}s")


@contextmanager
def keeping(harness: Harness) -> Iterator[None]:
    """`serve` in a thread: watches, timers and passes, by the real clock."""
    problems: list[BaseException] = []
    ends: queue.Queue[Callable[[], object]] = queue.Queue()

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        ends.put(lambda: loop.call_soon_threadsafe(stop.set))
        await watch(Watch(harness.keeper, lambda: harness.book, stop))

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as problem:  # told to the test, which cannot see into a thread
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.get(timeout=60)()
        thread.join(60)
        assert not thread.is_alive()
        assert not problems, problems


@pytest.fixture(scope="module")
def race(the_plane: ControlPlane) -> Race:
    """Both at once, and everything that was seen of them."""
    require("kubelet", has_kubelet())
    the_plane.need("trainer-v2.3.0")
    node, api, namespace = the_plane.real_node(), the_plane.api, the_plane.new_namespace()
    harness = Harness(the_plane.keeper_kubeconfig(), namespace, retention={"succeeded": "1d", "failed": "7d"})
    stories = {RACE: Story(RACE), TWIN: Story(TWIN)}
    with keeping(harness):
        for name, code, ttl in ((RACE, 0, TTL), (TWIN, 1, TWIN_TTL)):
            for made in run_of(name, code, ttl, node.placement):
                api.create(made, namespace)
        began = time.monotonic()
        there = set(stories)
        while there and time.monotonic() - began < LONGEST:
            there = {name for name in there if stories[name].read(api, namespace)}
            time.sleep(0.1)
        time.sleep(3)  # that nothing is made anew has no moment to wait for; where it is, that takes a second
        for story in stories.values():
            story.read(api, namespace)
    found = {what: api.names(what, namespace) for what in CHAIN}
    the_plane.drop_namespace(namespace)
    return Race(harness, stories, found)


def log_of(race: Race, name: str) -> str:
    (captured,) = [one for key, one in race.harness.evidence.saved.items() if key.endswith(name)]
    (log,) = [text for file, text in captured.files.items() if file.startswith("logs/") and file.endswith(".log")]
    return log.decode()


def gone_after(race: Race, name: str) -> float:
    """Seconds between its own end and the ledger's word that it is gone."""
    (line,) = [one for one in race.harness.outcomes() if one.ref is not None and one.ref.name == name]
    assert (line.action, line.rule, line.result) == (Action.REMOVE, "own_ttl", Result.RECLAIMED), line.reason
    ended = race.stories[name].ended
    assert ended is not None
    return (line.at - ended).total_seconds()


def test_it_is_there_until_its_ttl_is_over_and_then_all_of_it_is_gone(race: Race) -> None:
    """C17.3"""
    story = race.stories[RACE]
    seen = [(one.there, one.over) for one in story.moments]
    assert (ALL, "") in seen, "it ran"
    assert (ALL, "Complete") in seen, "it was complete and still there as a whole"
    assert TTL <= gone_after(race, RACE) < TTL + LATE, story.moments
    assert seen[-1] == ("", ""), story.moments
    assert not race.left[CHAIN[0]], race.left
    assert len(story.pods) == 1, "nothing ran a second time"


def test_its_log_was_taken_from_the_real_pod_before(race: Race) -> None:
    text = log_of(race, RACE)
    assert f"{RACE} begins\n" in text
    assert f"{RACE} ends with 0\n" in text


def expected_of_the_twin() -> list[tuple[float, float, str]]:
    """The table of the page: from second, to second, what is there then."""
    rows = re.findall(r"^\| (\d+)–(\d+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return [(float(begin), float(end), words) for begin, end, words in rows]


def test_the_failing_twin_phase_by_phase(race: Race) -> None:
    """C17.4, expected against seen. A TrainJob of this release forgets its failure only when its JobSet goes first."""
    story, expected = race.stories[TWIN], expected_of_the_twin()
    assert [(begin, end) for begin, end, _ in expected] == [(0, 10), (10, 60), (60, 70)]
    failed = next(one.at for one in story.moments if one.over)
    late = max(0.0, failed - 9)  # a slow machine: Kubernetes itself saw the end of the pod so much later
    seen = [story.in_phase(0, 10 + late), story.in_phase(10 + late, 60 + late), story.in_phase(70 + late, LONGEST)]
    rows = [
        f"{begin:3.0f}-{end:.0f} s | {words:34} | {', then '.join(during)}"
        for (begin, end, words), during in zip(expected, seen, strict=True)
    ]
    table = "\n".join(["phase    | expected at its end                | seen", *rows])
    print(f"\n{table}")
    assert [during[-1] for during in seen] == [words for _, _, words in expected], table
    assert ALL in seen[0], table
    assert seen[1] == [f"{ALL} (Failed)"], "nothing happens to it in between\n" + table
    assert TWIN_TTL <= gone_after(race, TWIN) < TWIN_TTL + LATE, table
    assert race.left == {what: set() for what in CHAIN}, table
    assert len(story.pods) == 1, "it was not trained again"
    assert f"{TWIN} ends with 1\n" in log_of(race, TWIN)
