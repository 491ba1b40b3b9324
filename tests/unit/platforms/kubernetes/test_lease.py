"""Who leads, in virtual time: several candidates over one lease that behaves as the API server's does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import msgspec

from gpukeeper.clients.kubernetes.exchange import ApiError, ClusterUnavailable
from gpukeeper.model.errors import PlatformError
from gpukeeper.platforms.kubernetes.lease import Leadership
from gpukeeper.platforms.simulated.world import VirtualClock, VirtualLoop, run_virtually

HOME = "/apis/coordination.k8s.io/v1/namespaces/keeper/leases"


class Server:
    """One lease with a version that grows by one at each write, and faults that are asked for."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] | None = None
        self.version = 0
        self.asked: list[str] = []

    @property
    def spec(self) -> dict[str, Any]:
        assert self.stored is not None
        spec: dict[str, Any] = self.stored["spec"]
        return spec

    def write(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.stored = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        return self.stored


class Line:
    """One candidate's connection to it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.silent = self.loses_answers = False
        self.says: ApiError | None = None
        self.garbled = False

    async def get(self, path: str, type_: Any) -> Any:
        self._hear("get", path == f"{HOME}/gpukeeper")
        if self.server.stored is None:
            raise ApiError(404, "NotFound", 'leases "gpukeeper" not found', name="gpukeeper")
        return {"kind": "Something"} if self.garbled else msgspec.json.decode(msgspec.json.encode(self.server.stored))

    async def post(self, path: str, body: Any) -> bytes:
        self._hear("post", path == HOME)
        if self.server.stored is not None:
            raise ApiError(409, "AlreadyExists", 'leases "gpukeeper" already exists')
        return self._answer(self.server.write(body))

    async def put(self, path: str, body: Any) -> bytes:
        self._hear("put", path == f"{HOME}/gpukeeper")
        if self.server.stored is None:
            raise ApiError(404, "NotFound", 'leases "gpukeeper" not found', name="gpukeeper")
        if body["metadata"]["resourceVersion"] != str(self.server.version):
            raise ApiError(409, "Conflict", "the object has been modified")
        return self._answer(self.server.write(body))

    def _hear(self, verb: str, right: bool) -> None:
        assert right
        if self.silent:
            raise ClusterUnavailable("nobody answers")
        if self.says is not None:
            raise self.says
        self.server.asked.append(verb)

    def _answer(self, written: dict[str, Any]) -> bytes:
        if self.loses_answers:
            raise ClusterUnavailable("the answer was lost")
        return b"<html>" if self.garbled else msgspec.json.encode(written)


class Scene:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.clock, self.server = loop, VirtualClock(loop), Server()
        self.lines: dict[str, Line] = {}
        self.stops: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.candidates: dict[str, Leadership] = {}

    def candidate(self, name: str, clock: Any = None, steady: Callable[[], float] | None = None) -> Leadership:
        line = self.lines[name] = Line(self.server)
        made = Leadership(line, "keeper", "gpukeeper", name, clock or self.clock, steady=steady or self.loop.time)
        self.candidates[name] = made
        return made

    def enter(self, name: str, **how: Any) -> Leadership:
        made = self.candidate(name, **how)
        self.stops[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(made.campaign(self.stops[name]))
        return made

    async def leave(self, name: str) -> None:
        self.stops[name].set()
        await self.tasks[name]

    def crash(self, name: str) -> None:
        self.tasks[name].cancel()

    def leaders(self) -> list[str]:
        return [name for name, one in self.candidates.items() if one.why_not() is None]


def scene(story: Callable[[Scene], Awaitable[None]]) -> Callable[[], None]:
    def test() -> None:
        loop = VirtualLoop()

        async def tell() -> None:
            await story(Scene(loop))

        run_virtually(tell(), loop)

    test.__name__, test.__doc__ = story.__name__, story.__doc__
    return test


@scene
async def test_the_first_one_makes_the_lease_and_holds_it(s: Scene) -> None:
    one = s.enter("one")
    assert "its holder is unknown" in str(one.why_not())
    await one.won.wait()
    assert one.why_not() is None
    assert s.server.spec["holderIdentity"] == "one"
    assert s.server.spec["leaseDurationSeconds"] == 15
    assert s.server.spec["leaseTransitions"] == 0
    assert s.server.spec["renewTime"] == "2026-03-02T08:00:00.000000Z"
    await asyncio.sleep(61)
    assert one.why_not() is None
    assert s.server.spec["acquireTime"] == "2026-03-02T08:00:00.000000Z"
    assert s.server.spec["renewTime"] == "2026-03-02T08:01:00.000000Z"


@scene
async def test_renewing_is_one_request_every_two_seconds(s: Scene) -> None:
    s.enter("one")
    await asyncio.sleep(1)
    s.server.asked.clear()
    await asyncio.sleep(20)
    assert s.server.asked == ["put"] * 10


@scene
async def test_a_second_one_waits_and_names_who_leads(s: Scene) -> None:
    s.enter("one")
    await asyncio.sleep(1)
    two = s.enter("two")
    await asyncio.sleep(3600)
    assert s.leaders() == ["one"]
    assert two.why_not() == "this instance does not hold the lease keeper/gpukeeper; one holds it"


@scene
async def test_after_a_crash_the_other_takes_over_when_the_lease_ran_out_and_not_before(s: Scene) -> None:
    s.enter("one")
    await asyncio.sleep(1)
    two = s.enter("two")
    await asyncio.sleep(100)
    s.crash("one")
    died = s.loop.time()
    await two.won.wait()
    assert 13 <= s.loop.time() - died <= 15 + 2 * 2.4
    assert s.server.spec["holderIdentity"] == "two"
    assert s.server.spec["leaseTransitions"] == 1


@scene
async def test_who_leaves_hands_over_at_once(s: Scene) -> None:
    one = s.enter("one")
    await asyncio.sleep(1)
    two = s.enter("two")
    await asyncio.sleep(10)
    await s.leave("one")
    left = s.loop.time()
    assert one.why_not() is not None
    assert s.server.spec["holderIdentity"] == ""
    await two.won.wait()
    assert s.loop.time() - left <= 2.4


@scene
async def test_who_does_not_lead_gives_nothing_back(s: Scene) -> None:
    s.enter("one")
    await asyncio.sleep(1)
    s.enter("two")
    await asyncio.sleep(10)
    await s.leave("two")
    assert s.server.spec["holderIdentity"] == "one"


@scene
async def test_a_leader_whom_nobody_answers_stops_before_another_may_begin(s: Scene) -> None:
    """The time between is what a step that is under way has to end in; conditions of the acts do the rest."""
    one = s.enter("one")
    await asyncio.sleep(1)
    two = s.enter("two")
    await asyncio.sleep(10)
    s.lines["one"].silent = True
    stopped = None
    while not two.won.is_set():
        assert len(s.leaders()) <= 1
        if stopped is None and one.why_not() is not None:
            stopped = s.loop.time()
        await asyncio.sleep(0.1)
    assert stopped is not None
    assert s.loop.time() - stopped >= 3
    assert "nobody answers" in str(one.why_not())
    await one.lost.wait()


@scene
async def test_a_short_silence_costs_nothing(s: Scene) -> None:
    one = s.enter("one")
    await asyncio.sleep(1)
    s.lines["one"].silent = True
    await asyncio.sleep(7)
    s.lines["one"].silent = False
    await asyncio.sleep(7)
    assert one.why_not() is None
    assert s.server.spec["leaseTransitions"] == 0


@scene
async def test_a_refusal_that_is_no_conflict_is_no_loss_before_the_deadline(s: Scene) -> None:
    one = s.enter("one")
    await asyncio.sleep(1)
    s.lines["one"].says = ApiError(500, "InternalError", "etcd is slow")
    await asyncio.sleep(6)
    assert one.why_not() is None
    await asyncio.sleep(5)
    assert "etcd is slow" in str(one.why_not())


@scene
async def test_a_conflict_means_lost(s: Scene) -> None:
    one = s.enter("one")
    await asyncio.sleep(1)
    s.server.write({**(s.server.stored or {}), "spec": {**s.server.spec, "holderIdentity": "two"}})
    await asyncio.sleep(2)
    assert one.why_not() == "this instance does not hold the lease keeper/gpukeeper; two holds it"
    assert one.lost.is_set()
    assert not one.won.is_set()


@scene
async def test_an_edit_by_another_user_that_leaves_it_ours_is_no_loss(s: Scene) -> None:
    one = s.enter("one")
    await asyncio.sleep(1)
    assert s.server.stored is not None
    s.server.write({**s.server.stored, "metadata": {**s.server.stored["metadata"], "labels": {"team": "a"}}})
    await asyncio.sleep(4)
    assert one.why_not() is None
    assert s.server.stored["metadata"]["labels"] == {"team": "a"}


@scene
async def test_an_answer_that_was_lost_is_found_out(s: Scene) -> None:
    one = s.enter("one")
    s.lines["one"].loses_answers = True
    await asyncio.sleep(1)
    assert one.why_not() is not None
    assert s.server.spec["holderIdentity"] == "one"
    s.lines["one"].loses_answers = False
    await asyncio.sleep(3)
    assert one.why_not() is None
    assert s.server.spec["leaseTransitions"] == 0


@scene
async def test_expiry_is_counted_from_when_we_saw_it_change_whatever_its_clock_says(s: Scene) -> None:
    wrong = VirtualClock(s.loop)
    wrong.skew = timedelta(days=-3)
    s.enter("one", clock=wrong)
    await asyncio.sleep(1)
    s.enter("two")
    await asyncio.sleep(600)
    assert s.leaders() == ["one"]


@scene
async def test_a_newcomer_waits_a_whole_duration_for_a_lease_it_never_saw_change(s: Scene) -> None:
    """However old the times in it are."""
    s.enter("one")
    await asyncio.sleep(1)
    s.crash("one")
    await asyncio.sleep(3600)
    two, came = s.enter("two"), s.loop.time()
    await two.won.wait()
    assert 15 <= s.loop.time() - came <= 15 + 2.4


@scene
async def test_a_holder_who_requested_longer_gets_it(s: Scene) -> None:
    s.enter("one")
    await asyncio.sleep(1)
    s.crash("one")
    s.server.write({**(s.server.stored or {}), "spec": {**s.server.spec, "leaseDurationSeconds": 60}})
    two, came = s.enter("two"), s.loop.time()
    await two.won.wait()
    assert s.loop.time() - came >= 60


@scene
async def test_a_holder_who_requested_less_is_given_our_own_duration(s: Scene) -> None:
    """As one whose lease was edited, or that shuts down and wrote a second: it may still be acting."""
    s.enter("one")
    await asyncio.sleep(1)
    s.crash("one")
    s.server.write({**(s.server.stored or {}), "spec": {**s.server.spec, "leaseDurationSeconds": 1}})
    two, came = s.enter("two"), s.loop.time()
    await two.won.wait()
    assert 15 <= s.loop.time() - came <= 15 + 2.4


@scene
async def test_a_machine_that_slept_does_not_believe_that_it_leads(s: Scene) -> None:
    slept = 0.0
    one = s.enter("one", steady=lambda: s.loop.time() + slept)
    await asyncio.sleep(1)
    assert one.why_not() is None
    slept = 60
    assert "was not renewed for 1m" in str(one.why_not())


@scene
async def test_a_lease_that_a_user_deleted_is_made_again(s: Scene) -> None:
    one = s.enter("one")
    await asyncio.sleep(1)
    s.server.stored = None
    await asyncio.sleep(4)
    assert one.why_not() is None
    assert s.server.spec["holderIdentity"] == "one"


@scene
async def test_two_who_begin_at_once_are_one_leader(s: Scene) -> None:
    for name in ("one", "two", "three"):
        s.enter(name)
    for _ in range(600):
        await asyncio.sleep(0.1)
        assert len(s.leaders()) <= 1
    assert len(s.leaders()) == 1


@scene
async def test_a_missing_right_shows_what_is_missing(s: Scene) -> None:
    one = s.candidate("one")
    s.lines["one"].says = ApiError(403, "Forbidden", "leases is forbidden")
    await one.attempt()
    assert "gpukeeper needs get, create and update on leases in that namespace" in str(one.why_not())


@scene
async def test_a_missing_namespace_is_reported(s: Scene) -> None:
    class Homeless(Line):
        async def post(self, path: str, body: Any) -> bytes:
            raise ApiError(404, "NotFound", 'namespaces "keeper" not found', name="keeper")

    one = s.candidate("one")
    one._cluster = Homeless(s.server)
    await one.attempt()
    assert 'namespaces "keeper" not found' in str(one.why_not())


@scene
async def test_what_is_no_lease_makes_nobody_a_leader(s: Scene) -> None:
    one = s.candidate("one")
    s.lines["one"].garbled = True
    await one.attempt()
    assert "the response of the cluster is not a Lease" in str(one.why_not())
    await one.attempt()
    assert one.why_not() is not None


@scene
async def test_an_answer_that_never_comes_is_not_waited_for(s: Scene) -> None:
    class Stuck(Line):
        async def get(self, path: str, type_: Any) -> Any:
            await asyncio.sleep(10**6)

    one = s.candidate("one")
    one._cluster = Stuck(s.server)
    await one.attempt()
    assert s.loop.time() == 5
    assert "timeout: the cluster did not answer" in str(one.why_not())


@scene
async def test_a_lease_that_cannot_be_given_back_runs_out(s: Scene) -> None:
    one = s.enter("one")
    await asyncio.sleep(1)
    s.lines["one"].silent = True
    await s.leave("one")
    assert one.why_not() is not None
    two = s.enter("two")
    await two.won.wait()
    assert s.server.spec["holderIdentity"] == "two"


def test_a_silent_cluster_is_a_platforms_error() -> None:
    """What `attempt` relies on."""
    assert issubclass(ClusterUnavailable, PlatformError)
    assert issubclass(ApiError, PlatformError)
