"""The operator in virtual time: terms of leading, hand-over, and what probes are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.operator import Operator
from gpukeeper.interfaces.telemetry.metrics import CountedEvidence, Metrics
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.event import Closed
from gpukeeper.model.policy import Mode
from gpukeeper.platforms.kubernetes.lease import Leadership
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, virtual
from tests.unit.platforms.kubernetes.test_lease import Line, Server


class Fixed:
    """A policy that is what the test says."""

    def __init__(self, b: Harness) -> None:
        self._b = b
        self.problem: str | None = None
        self.asked = 0

    @property
    def last(self) -> Rulebook:
        return self._b.book

    def __call__(self) -> Rulebook:
        return self._b.book

    async def refresh(self) -> None:
        self.asked += 1


class Slow(SimulatedPlatform):
    """Takes so many seconds for an act."""

    takes = 0.0

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self.acting = asyncio.Event()

    async def act(self, step: Any, fresh: Any) -> Any:
        self.acting.set()
        await asyncio.sleep(self.takes)
        return await super().act(step, fresh)


class Counting(SimulatedPlatform):
    """Counts its lists."""

    lists = 0

    async def observe(self, scope: Any) -> Any:
        self.lists += 1
        async for page in super().observe(scope):
            yield page


class One:
    """One operator with its connection to the lease, over the harness's world and a ledger."""

    def __init__(self, b: Harness, server: Server | None, name: str = "one") -> None:
        self.b, self.line = b, Line(server) if server is not None else None
        self.reports: list[PassReport] = []
        self.said: list[str] = []
        self.unreachable: str | None = None
        leadership = (
            Leadership(self.line, "keeper", "gpukeeper", name, b.clock, steady=b.loop.time)
            if self.line is not None
            else None
        )
        self.metrics = Metrics(b.clock)
        self.book = Fixed(b)
        b.change_ports(evidence=CountedEvidence(b.evidence, self.metrics))
        self.operator = Operator(
            b.keeper, self.book, self.metrics, leadership, self.reach, self.reports.append, self.said.append
        )
        self.task: asyncio.Task[None] | None = None

    def start(self) -> One:
        self.task = asyncio.create_task(self.operator.run())
        return self

    async def stop(self) -> None:
        assert self.task is not None
        self.operator.stop.set()
        await self.task

    async def reach(self) -> object:
        if self.unreachable:
            raise PlatformError(self.unreachable)
        return {}

    def exposed(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def another(b: Harness) -> Harness:
    """A second machine in the same world, with a ledger of its own."""
    two = Harness(b.loop)
    two.world, two.platform, two.clock, two.policy = b.world, type(b.platform)(b.world, HERE), b.clock, b.policy
    return two


def removed(b: Harness) -> list[str]:
    return [line.ref.name for line in b.lines(Closed) if line.ref is not None and line.action is Action.REMOVE]


@virtual
async def test_who_leads_reclaims_and_who_stands_by_lists_nothing(b: Harness) -> None:
    b.platform = Counting(b.world, HERE)
    server, second = Server(), another(b)
    b.ended("old")
    one = One(b, server).start()
    await asyncio.sleep(1)
    two = One(second, server, "two").start()
    await asyncio.sleep(600)
    assert removed(b) == ["old"]
    assert one.exposed("gpukeeper_leader") == 1
    assert (second.platform.lists, two.reports, two.exposed("gpukeeper_leader")) == (0, [], 0)
    assert two.exposed("gpukeeper_overdue") is None
    await one.stop()
    await two.stop()


@virtual
async def test_after_a_crash_the_other_goes_on(b: Harness) -> None:
    server, second = Server(), another(b)
    one = One(b, server).start()
    await asyncio.sleep(1)
    two = One(second, server, "two").start()
    await asyncio.sleep(60)
    assert one.task is not None
    one.task.cancel()
    b.ended("old")
    await asyncio.sleep(25)
    assert removed(second) == ["old"]
    assert two.said[-1] == "leader: two holds the lease keeper/gpukeeper"
    await two.stop()


@virtual
async def test_being_stopped_ends_the_step_in_progress_and_then_hands_over(b: Harness) -> None:
    b.platform = slow = Slow(b.world, HERE)
    slow.takes = 7.0
    server, second = Server(), another(b)
    b.ended("a")
    b.ended("b")
    one = One(b, server).start()
    await slow.acting.wait()
    two = One(second, server, "two").start()
    await asyncio.sleep(1)
    asked = b.loop.time()
    await one.stop()
    assert b.loop.time() - asked <= 7.0
    assert server.spec["holderIdentity"] == ""
    assert len(removed(b)) == 1
    await asyncio.sleep(12)
    assert sorted(removed(b) + removed(second)) == ["a", "b"]
    await two.stop()


@virtual
async def test_a_leader_that_cannot_renew_takes_no_further_step_and_leads_again_later(b: Harness) -> None:
    b.platform = slow = Slow(b.world, HERE)
    slow.takes = 20.0
    for name in ("a", "b", "c"):
        b.ended(name)
    one = One(b, Server()).start()
    assert one.line is not None
    await slow.acting.wait()
    one.line.silent = True
    await asyncio.sleep(60)
    assert len(removed(b)) == 1
    assert "was not renewed for" in one.said[-1]
    assert one.exposed("gpukeeper_leader") == 0
    one.line.silent = False
    await asyncio.sleep(120)
    assert sorted(removed(b)) == ["a", "b", "c"]
    await one.stop()


@virtual
async def test_two_operators_never_act_on_the_same_thing(b: Harness) -> None:
    """Leaders fall silent again and again; every removal has one outcome, in one ledger."""
    server, second = Server(), another(b)
    one, two = One(b, server).start(), One(second, server, "two").start()
    for round_ in range(12):
        b.ended(f"run-{round_}")
        silent = (one, two)[round_ % 2].line
        assert silent is not None
        silent.silent = True
        await asyncio.sleep(45)
        silent.silent = False
        await asyncio.sleep(300)
    assert sorted(removed(b) + removed(second)) == sorted(f"run-{n}" for n in range(12))
    assert removed(b)
    assert removed(second)
    await one.stop()
    await two.stop()


@virtual
async def test_without_election_it_leads_at_once(b: Harness) -> None:
    b.ended("old")
    one = One(b, None).start()
    await asyncio.sleep(1)
    assert removed(b) == ["old"]
    await one.stop()


@virtual
async def test_a_bug_of_a_platform_does_not_end_the_operator(b: Harness) -> None:
    class Buggy(SimulatedPlatform):
        async def observe(self, scope: Any) -> Any:
            raise AssertionError("a bug")
            yield

    b.platform = Buggy(b.world, HERE)
    server = Server()
    one = One(b, server).start()
    await asyncio.sleep(1200)
    assert one.task is not None
    assert not one.task.done()
    assert len(one.reports) > 1
    assert all("a bug" in (report.stopped or "") for report in one.reports)
    assert server.spec["holderIdentity"] == "one"
    await one.stop()


@virtual
async def test_an_operator_that_is_ended_midway_leaves_the_lease_to_run_out(b: Harness) -> None:
    server = Server()
    one = One(b, server).start()
    await asyncio.sleep(60)
    assert one.task is not None
    one.task.cancel()
    await asyncio.wait([one.task])
    assert one.task.cancelled()
    assert server.spec["holderIdentity"] == "one"


# Probes


async def text(page: Callable[[], Awaitable[Any]]) -> tuple[int, str]:
    answer = await page()
    return answer.status, answer.body.decode()


@virtual
async def test_a_loop_that_is_stuck_is_not_healthy(b: Harness) -> None:
    class Stuck(SimulatedPlatform):
        async def observe(self, scope: Any) -> Any:
            await asyncio.sleep(10**6)
            yield

    b.platform = Stuck(b.world, HERE)
    one = One(b, None).start()
    await asyncio.sleep(15 * 60)
    assert await text(one.operator.healthz) == (200, "ok\n")
    await asyncio.sleep(25 * 60)  # the loop's own complaint, 20 minutes after the start, counts as a sign of life
    assert await text(one.operator.healthz) == (503, "no pass finished for 40m\n")


@virtual
async def test_a_long_pass_that_takes_steps_is_healthy(b: Harness) -> None:
    b.platform = slow = Slow(b.world, HERE)
    slow.takes = 10 * 60
    for number in range(6):
        b.ended(f"run-{number}")
    one = One(b, None).start()
    for _ in range(55):
        await asyncio.sleep(60)
        assert await text(one.operator.healthz) == (200, "ok\n")
    assert not one.reports


@virtual
async def test_who_stands_by_is_healthy_and_ready(b: Harness) -> None:
    server = Server()
    server.write({"metadata": {}, "spec": {"holderIdentity": "two", "leaseDurationSeconds": 10**6}})
    one = One(b, server).start()
    await asyncio.sleep(7200)
    assert await text(one.operator.healthz) == (200, "ok\n")
    assert await text(one.operator.readyz) == (200, "ok\n")
    await one.stop()


@virtual
async def test_it_is_not_ready_while_the_cluster_cannot_be_reached(b: Harness) -> None:
    one = One(b, None).start()
    await asyncio.sleep(1)
    assert await text(one.operator.readyz) == (200, "ok\n")
    one.unreachable = "nobody answers"
    assert (await text(one.operator.readyz))[0] == 200  # just asked
    await asyncio.sleep(6)
    assert await text(one.operator.readyz) == (503, "nobody answers\n")
    await one.stop()


@virtual
async def test_without_the_right_to_write_its_lease_it_is_not_ready_and_says_which_right_is_missing(b: Harness) -> None:
    """It would do nothing, in silence."""
    server = Server()
    one = One(b, server)
    assert one.line is not None
    one.line.says = ApiError(403, "Forbidden", 'leases "gpukeeper" is forbidden: cannot update resource "leases"')
    one.start()
    await asyncio.sleep(60)
    assert await text(one.operator.healthz) == (200, "ok\n")  # a restart does not help
    status, said = await text(one.operator.readyz)
    assert status == 503
    assert "the lease keeper/gpukeeper cannot be written" in said
    assert 'cannot update resource "leases"' in said
    assert "needs get, create and update on leases" in said
    await one.operator.metrics_page()
    assert (one.exposed("gpukeeper_lease_denied"), one.exposed("gpukeeper_leader")) == (1, 0)
    assert [line.partition(":")[0] for line in one.said] == ["cannot lead"], "once"
    one.line.says = None
    await asyncio.sleep(10)
    assert await text(one.operator.readyz) == (200, "ok\n")
    await one.operator.metrics_page()
    assert (one.exposed("gpukeeper_lease_denied"), one.exposed("gpukeeper_leader")) == (0, 1)
    assert "the lease keeper/gpukeeper can be written again" in one.said
    await one.stop()


@virtual
async def test_it_is_not_ready_while_the_policy_is_broken_or_about_something_else(b: Harness) -> None:
    one = One(b, None).start()
    one.book.problem = "line 3: mode: enforced"
    assert await text(one.operator.readyz) == (503, "the policy is not valid: line 3: mode: enforced\n")
    one.book.problem = None
    b.set_policy(scope={})
    await asyncio.sleep(6)
    status, said = await text(one.operator.readyz)
    assert (status, said) == (503, "the policy's scope does not include docker, so nothing is read\n")
    await one.stop()


@virtual
async def test_who_stands_by_reads_the_policy_when_asked_whether_it_is_ready(b: Harness) -> None:
    server = Server()
    server.write({"metadata": {}, "spec": {"holderIdentity": "two", "leaseDurationSeconds": 10**6}})
    one = One(b, server).start()
    await asyncio.sleep(1)
    assert one.book.asked == 0
    await one.operator.readyz()
    assert one.book.asked == 1
    await one.stop()


@virtual
async def test_mode_plan_leads_and_touches_nothing(b: Harness) -> None:
    b.set_policy(mode=Mode.PLAN)
    b.ended("old", 3 * HOUR)
    one = One(b, Server()).start()
    await asyncio.sleep(1)
    assert removed(b) == []
    assert one.exposed("gpukeeper_overdue") == 1
    assert one.exposed("gpukeeper_acting") == 0
    assert one.exposed("gpukeeper_oldest_overdue_seconds") == timedelta(hours=2, seconds=1).total_seconds()
    await asyncio.sleep(5 * 60)
    last = one.exposed("gpukeeper_last_pass_timestamp_seconds")
    assert last is not None
    assert (b.now() - 5 * MINUTE).timestamp() <= last <= b.now().timestamp()
    await one.stop()
