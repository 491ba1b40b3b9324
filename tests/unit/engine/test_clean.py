"""After the end: GPUs are looked at until they are clean, in virtual time; who is found dirty is quarantined."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.engine import clean, requests
from gpukeeper.engine.clean import ReleasedGpus, gpu_ref, learn_baselines, prove_clean, remembered
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.engine.requests import Request
from gpukeeper.model.decision import Accepted, Refused
from gpukeeper.model.errors import LedgerError, PlatformError
from gpukeeper.model.event import BaselineSeen, GpuChecked, Passed, Paused, Quarantined, ResetTried, Returned
from gpukeeper.model.gpu import Advice, CheckResult, Condition, GpuHolder
from gpukeeper.model.policy import GpuSettings, Mode
from gpukeeper.model.subject import Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.world import Thing
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, virtual

SECOND = timedelta(seconds=1)


class FakeGpus:
    """GPUs with holders and memory that the test moves; `resets` are counted and give back the memory."""

    def __init__(self, b: Harness) -> None:
        self.b = b
        self.facts: dict[str, dict[str, Any]] = {"GPU-0": {}, "GPU-1": {}}
        self.looks: list[float] = []
        self.resets: list[str] = []
        self.answer: Accepted | Refused | Unknown = Accepted()
        self.cures = True
        self.blind = False
        self.slow = timedelta()

    async def shares(self) -> dict[str, float] | Unknown:
        return Unknown("silent") if self.blind else dict.fromkeys(self.facts, 1.0)

    async def condition(self, uuid: str, since: datetime) -> Condition | Unknown:
        await asyncio.sleep(self.slow.total_seconds())
        self.looks.append(self.b.loop.time())
        if self.blind:
            return Unknown("the driver did not answer")
        known = {"memory_used_mib": 615, "advice": Advice.NONE, "remap_pending": False, "remap_failed": False}
        known |= {"sliced": False, "reset_alone": True}
        return Condition(uuid=uuid, at=self.b.now(), **(known | self.facts[uuid]))

    async def reset(self, uuid: str) -> Accepted | Refused | Unknown:
        self.resets.append(uuid)
        if self.cures:
            self.facts[uuid] = {}
        return self.answer

    def hold(self, thing: Thing | None, uuid: str = "GPU-0", **facts: Any) -> None:
        workload_id = thing.ref.uid if thing is not None else None
        known = {"pid": 41, "starttime": 7, "uid": 1001, "comm": "python", "workload_id": workload_id}
        mine = GpuHolder(**(known | facts))
        self.facts[uuid]["holders"] = (*self.facts[uuid].get("holders", ()), mine)
        self.facts[uuid]["memory_used_mib"] = 9455

    def free(self, uuid: str = "GPU-0") -> None:
        self.facts[uuid] = {}


def gpus_of(b: Harness) -> FakeGpus:
    gpus = FakeGpus(b)
    b.change_ports(gpus=gpus, host="node-3")
    return gpus


async def after_end(b: Harness, *things: Thing) -> list[GpuChecked]:
    given = [ReleasedGpus(t.ref, t.incarnation, t.devices) for t in things]
    return await prove_clean(b.keeper, b.book, given)


def allow_reset(b: Harness) -> None:
    b.set_policy(gpu=GpuSettings(reset=True))


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)


@virtual
async def test_a_stop_that_gave_its_gpu_back_is_recorded_as_cleaned(b: Harness) -> None:
    gpus = gpus_of(b)
    thing = await b.overdue("train")
    report = await reclaim(b.keeper, b.platform, b.book)
    (line,) = b.lines(GpuChecked)
    assert report.checks == [line]
    assert (line.result, line.workload) == (CheckResult.CLEANED, thing.ref.path)
    assert line.ref == gpu_ref(b.keeper, "GPU-0")
    assert line.ref.path == "host/node-3/GPU-0"
    assert len(gpus.looks) == 1
    assert [one.memory_used_mib for one in b.lines(BaselineSeen)] == [615]
    assert b.lines(Quarantined) == []


@virtual
async def test_work_that_ended_by_itself_is_checked_once(b: Harness) -> None:
    gpus_of(b)
    b.ended("eval", ago=MINUTE)
    await reclaim(b.keeper, b.platform, b.book)
    await reclaim(b.keeper, b.platform, b.book)
    assert [one.result for one in b.lines(GpuChecked)] == [CheckResult.CLEANED]


@virtual
async def test_work_that_ended_long_ago_says_nothing_about_its_gpu_of_today(b: Harness) -> None:
    gpus = gpus_of(b)
    b.ended("eval", ago=2 * HOUR)
    await reclaim(b.keeper, b.platform, b.book)
    assert gpus.looks == []


@virtual
async def test_what_we_stopped_is_not_checked_again_when_it_is_noticed_to_have_ended(b: Harness) -> None:
    gpus_of(b)
    await b.overdue("train")
    await reclaim(b.keeper, b.platform, b.book)
    await reclaim(b.keeper, b.platform, b.book)
    assert len(b.lines(GpuChecked)) == 1


@virtual
async def test_without_gpus_nothing_is_read(b: Harness) -> None:
    await b.overdue("train")
    report = await reclaim(b.keeper, b.platform, b.book)
    assert report.reclaimed
    assert report.given_back == []
    assert b.lines(GpuChecked) == []


@virtual
async def test_work_without_gpus_is_not_checked(b: Harness) -> None:
    gpus = gpus_of(b)
    b.ended("eval", ago=MINUTE, devices=())
    await reclaim(b.keeper, b.platform, b.book)
    assert gpus.looks == []


@virtual
async def test_an_orphan_that_goes_in_time_leaves_the_gpu_clean(b: Harness) -> None:
    gpus, thing = gpus_of(b), b.ended("eval")
    gpus.hold(thing)
    b.loop.call_later(20, gpus.free)
    (line,) = await after_end(b, thing)
    assert line.result is CheckResult.CLEANED
    assert gpus.looks == [0, 1, 5, 30]


@virtual
async def test_a_gpu_that_stays_dirty_is_quarantined_after_two_minutes(b: Harness) -> None:
    gpus, thing = gpus_of(b), b.ended("eval")
    gpus.hold(thing)
    (line,) = await after_end(b, thing)
    assert gpus.looks == [0, 1, 5, 30, 120]
    assert line.result is CheckResult.DIRTY
    assert "pid 41 (python)" in line.reason
    (out,) = b.lines(Quarantined)
    assert (out.ref, out.reason) == (line.ref, line.reason)
    known = await remembered(b.keeper, "GPU-0")
    assert (known.result, known.quarantined) == (CheckResult.DIRTY, out.at)


@virtual
async def test_a_quarantine_stays_until_it_is_returned_and_is_not_begun_twice(b: Harness) -> None:
    gpus, thing = gpus_of(b), b.ended("eval")
    gpus.hold(thing)
    await after_end(b, thing)
    await after_end(b, thing)
    gpus.free()
    await after_end(b, thing)
    assert len(b.lines(GpuChecked)) == 3
    assert len(b.lines(Quarantined)) == 1
    assert (await remembered(b.keeper, "GPU-0")).quarantined is not None
    assert await clean.give_back(b.keeper, "GPU-0", "root", "looked at it")
    assert (await remembered(b.keeper, "GPU-0")).quarantined is None
    assert not await clean.give_back(b.keeper, "GPU-0", "root", "")
    assert [one.by for one in b.lines(Returned)] == ["root"]


@virtual
async def test_a_gpu_shared_with_live_work_is_settled_at_once(b: Harness) -> None:
    gpus, thing, other = gpus_of(b), b.ended("eval"), b.running("train")
    gpus.hold(other)
    (line,) = await after_end(b, thing)
    assert line.result is CheckResult.CLEANED
    assert "shared with pid 41" in line.reason
    assert gpus.looks == [0]
    assert b.lines(BaselineSeen) == []


@virtual
async def test_an_orphan_beside_live_work_is_orphaned_shared_and_no_quarantine(b: Harness) -> None:
    gpus, thing, other = gpus_of(b), b.ended("eval"), b.running("train")
    gpus.hold(other)
    gpus.hold(thing, pid=42)
    (line,) = await after_end(b, thing)
    assert line.result is CheckResult.ORPHANED_SHARED
    assert b.lines(Quarantined) == []


@virtual
async def test_work_that_was_started_again_is_live_and_no_orphan(b: Harness) -> None:
    gpus, thing = gpus_of(b), b.ended("eval")
    gpus.hold(thing)
    thing.state = State.RUNNING
    (line,) = await after_end(b, thing)
    assert line.result is CheckResult.CLEANED


@virtual
async def test_a_remainder_of_removed_work_is_an_orphan_because_the_journal_knew_it(b: Harness) -> None:
    gpus, thing, gone = gpus_of(b), b.ended("eval"), b.ended("old")
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(gone.ref) is None
    gpus.hold(gone)
    (line,) = await after_end(b, thing)
    assert line.result is CheckResult.DIRTY


@virtual
async def test_who_belongs_to_something_nobody_knows_leaves_it_unknown(b: Harness) -> None:
    gpus, thing = gpus_of(b), b.ended("eval")
    gpus.hold(thing, workload_id="f" * 64)
    (line,) = await after_end(b, thing)
    assert line.result is CheckResult.UNKNOWN
    assert "another engine" in line.reason
    assert b.lines(Quarantined) == []


class Exact(SimulatedPlatform):
    """Asked for a thing of the wrong kind, an engine does not know."""

    async def read(self, ref: Any) -> Any:
        found = await super().read(ref)
        wrong = isinstance(found, Subject) and found.ref.kind != ref.kind
        return Unknown("the engine has no such kind") if wrong else found


@virtual
async def test_after_an_orphan_was_ended_other_workloads_are_still_told_apart(b: Harness) -> None:
    b.platform = Exact(b.world, HERE)
    gpus, other = gpus_of(b), b.running("train")
    b.add("41@7", kind="process", shape=Shape.ORPHAN, state=State.RUNNING, proof="eval ended", devices=("GPU-0",))
    gpus.hold(other)
    report = await reclaim(b.keeper, b.platform, b.book)
    assert [one.ref.name for one in report.reclaimed if one.ref] == ["41@7"]
    (line,) = b.lines(GpuChecked)
    assert "shared with pid 41" in line.reason


@virtual
async def test_an_orphan_alone_leaves_nobody_to_ask(b: Harness) -> None:
    gpus = gpus_of(b)
    b.add("41@7", kind="process", shape=Shape.ORPHAN, state=State.RUNNING, proof="eval ended", devices=("GPU-0",))
    gpus.hold(None, workload_id="f" * 64)
    await reclaim(b.keeper, b.platform, b.book)
    (line,) = b.lines(GpuChecked)
    assert line.result is CheckResult.UNKNOWN


class Silent(SimulatedPlatform):
    async def read(self, ref: Any) -> Any:
        raise PlatformError("docker/node-3 did not answer")


@virtual
async def test_a_platform_that_does_not_answer_leaves_it_unknown(b: Harness) -> None:
    b.platform = Silent(b.world, HERE)
    gpus, thing = gpus_of(b), b.ended("eval")
    gpus.hold(thing)
    (line,) = await after_end(b, thing)
    assert line.result is CheckResult.UNKNOWN
    assert "did not answer" in line.reason


@virtual
async def test_a_driver_that_does_not_answer_leaves_it_unknown(b: Harness) -> None:
    gpus, thing = gpus_of(b), b.ended("eval")
    gpus.blind = True
    (line,) = await after_end(b, thing)
    assert line.result is CheckResult.UNKNOWN
    assert b.lines(Quarantined) == []


@virtual
async def test_a_driver_that_is_slow_beyond_measure_is_given_up(b: Harness) -> None:
    gpus, thing = gpus_of(b), b.ended("eval")
    gpus.slow = HOUR
    (line,) = await after_end(b, thing)
    assert line.result is CheckResult.UNKNOWN
    assert b.loop.time() < 10 * 60


@virtual
async def test_all_gpus_are_read_at_once(b: Harness) -> None:
    gpus, thing = gpus_of(b), b.ended("eval", devices=("GPU-0", "GPU-1"))
    gpus.hold(thing, "GPU-0")
    gpus.hold(thing, "GPU-1")
    seen: list[GpuChecked] = []
    given = [ReleasedGpus(thing.ref, thing.incarnation, thing.devices)]
    lines = await prove_clean(b.keeper, b.book, given, seen.append)
    assert len(lines) == 2
    assert seen == b.lines(GpuChecked)
    assert b.loop.time() == 120


@virtual
async def test_two_that_ended_on_one_gpu_make_one_check(b: Harness) -> None:
    gpus_of(b)
    one, two = b.ended("one"), b.ended("two")
    (line,) = await after_end(b, one, two)
    assert line.workload == "docker/node-3/one, docker/node-3/two"


# Baselines


@virtual
async def test_baselines_are_learned_of_gpus_that_nobody_holds(b: Harness) -> None:
    gpus = gpus_of(b)
    gpus.hold(None, "GPU-1")
    await learn_baselines(b.keeper)
    await learn_baselines(b.keeper)
    assert [(one.ref, one.memory_used_mib) for one in b.lines(BaselineSeen)] == [(gpu_ref(b.keeper, "GPU-0"), 615)]
    gpus.blind = True
    b.change_ports(gpus=None)
    await learn_baselines(b.keeper)
    assert len(b.lines(BaselineSeen)) == 1


@virtual
async def test_memory_that_does_not_come_back_is_dirty_although_nobody_holds_it(b: Harness) -> None:
    gpus, thing = gpus_of(b), b.ended("eval")
    await learn_baselines(b.keeper)
    gpus.facts["GPU-0"] = {"memory_used_mib": 700}
    (line,) = await after_end(b, thing)
    assert line.result is CheckResult.DIRTY
    assert "700 MiB are in use by no process" in line.reason


# The daemon


async def serve(b: Harness, span: timedelta) -> None:
    stop = asyncio.Event()
    b.loop.call_later(span.total_seconds(), stop.set)
    await watch(Watch(b.keeper, lambda: b.book, stop))


@virtual
async def test_a_daemon_passes_on_while_gpus_are_read(b: Harness) -> None:
    b.set_policy(schedule=msgspec.structs.replace(b.policy.schedule, every=MINUTE))
    gpus, thing = gpus_of(b), b.ended("eval", ago=MINUTE)
    gpus.hold(thing)
    await serve(b, 3 * MINUTE)
    (line,) = b.lines(GpuChecked)
    assert line.result is CheckResult.DIRTY
    before = [one for one in b.lines(Passed) if one.at < line.at]
    assert len(before) >= 2
    assert all(c.task and c.task.done() for c in b.keeper.gpu_checks.under_way.values())


@virtual
async def test_a_daemon_that_is_stopped_records_what_it_did_not_find_out(b: Harness) -> None:
    gpus, thing = gpus_of(b), b.ended("eval", ago=MINUTE)
    gpus.hold(thing)
    await serve(b, 10 * SECOND)
    assert b.loop.time() < 20
    (line,) = b.lines(GpuChecked)
    assert line.result is CheckResult.UNKNOWN
    assert "was stopped before" in line.reason


@virtual
async def test_more_work_that_ends_meanwhile_joins_the_check_in_progress(b: Harness) -> None:
    gpus, one = gpus_of(b), b.ended("one")
    gpus.hold(one)
    b.keeper.uptime.serving = True
    assert await after_end(b, one) == []
    await asyncio.sleep(10)
    assert await after_end(b, b.ended("two")) == []
    await asyncio.sleep(200)
    (line,) = b.lines(GpuChecked)
    assert line.workload == "docker/node-3/one, docker/node-3/two"


@virtual
async def test_a_check_that_could_not_be_recorded_is_an_error_of_the_next_pass(b: Harness) -> None:
    gpus_of(b)
    b.keeper.uptime.serving = True

    async def full(lines: Any) -> None:
        raise LedgerError("the disk is full")

    append, b.ledger.append = b.ledger.append, full  # type: ignore[method-assign]
    await after_end(b, b.ended("eval"))
    await asyncio.sleep(200)
    b.ledger.append = append  # type: ignore[method-assign]
    with pytest.raises(LedgerError):
        await prove_clean(b.keeper, b.book, [])
    assert await prove_clean(b.keeper, b.book, []) == []


# Resets


async def residue(b: Harness) -> tuple[FakeGpus, Thing]:
    gpus, thing = gpus_of(b), b.ended("eval")
    await learn_baselines(b.keeper)
    gpus.facts["GPU-0"] = {"memory_used_mib": 5000, "listed": (4711,)}
    return gpus, thing


@pytest.mark.usefixtures("root")
def test_residue_is_reset_once_and_read_again() -> None:
    @virtual
    async def story(b: Harness) -> None:
        allow_reset(b)
        gpus, thing = await residue(b)
        (line,) = await after_end(b, thing)
        assert gpus.resets == ["GPU-0"]
        assert line.result is CheckResult.CLEANED
        assert b.lines(Quarantined) == []
        assert b.order()[-2:] == ["ResetTried", "GpuChecked"]
        gpus.facts["GPU-0"] = {"memory_used_mib": 5000}
        (line,) = await after_end(b, thing)
        assert gpus.resets == ["GPU-0"]
        assert "the limit is once a day" in line.reason
        assert line.result is CheckResult.DIRTY

    story()


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("answer", "cures"),
    [(Accepted(), False), (Refused("not permitted"), True), (Unknown("it did not end"), True)],
)
def test_a_reset_without_effect_is_reset_failed_and_quarantined(answer: Any, cures: bool) -> None:
    @virtual
    async def story(b: Harness) -> None:
        allow_reset(b)
        gpus, thing = await residue(b)
        gpus.answer, gpus.cures = answer, cures
        (line,) = await after_end(b, thing)
        assert line.result is CheckResult.RESET_FAILED
        assert len(b.lines(Quarantined)) == 1
        assert len(b.lines(ResetTried)) == 1

    story()


async def _off(b: Harness, gpus: FakeGpus) -> None:
    b.set_policy(gpu=GpuSettings())


async def _plan(b: Harness, gpus: FakeGpus) -> None:
    b.set_policy(mode=Mode.PLAN)


async def _pause(b: Harness, gpus: FakeGpus) -> None:
    await b.ledger.append([Paused(at=b.now(), by="root", reason="maintenance")])


async def _stop(b: Harness, gpus: FakeGpus) -> None:
    b.keeper.permission.stopping = True


async def _tenant(b: Harness, gpus: FakeGpus) -> None:
    b.running("train")  # has GPU-0 and has not opened it yet


async def _stop_hold(b: Harness, gpus: FakeGpus) -> None:
    from gpukeeper.model.subject import Outcome

    b.ended("mine", ago=MINUTE, outcome=Outcome.STOPPED)


async def _exporter(b: Harness, gpus: FakeGpus) -> None:
    gpus.facts["GPU-0"]["holders"] = (GpuHolder(pid=9, starttime=1, uid=0, comm="nv-hostengine"),)


async def _vague(b: Harness, gpus: FakeGpus) -> None:
    b.running("train", devices=Unknown("not told"))


async def _sliced(b: Harness, gpus: FakeGpus) -> None:
    gpus.facts["GPU-0"]["sliced"] = True  # a slice is no reset target, and the whole would take all of them


async def _peers(b: Harness, gpus: FakeGpus) -> None:
    gpus.facts["GPU-0"]["reset_alone"] = False


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    "prevent",
    [_off, _plan, _pause, _stop, _tenant, _stop_hold, _exporter, _vague, _sliced, _peers],
    ids=lambda one: one.__name__,
)
def test_a_reset_does_not_happen_when(prevent: Any) -> None:
    """C11.2: it is quarantined, and an admin is told why it was not reset."""

    @virtual
    async def story(b: Harness) -> None:
        allow_reset(b)
        gpus, thing = await residue(b)
        await prevent(b, gpus)
        (line,) = await after_end(b, thing)
        assert gpus.resets == []
        assert line.result is CheckResult.DIRTY
        assert b.lines(ResetTried) == []
        (out,) = b.lines(Quarantined)
        assert out.reason == line.reason
        assert out.reason

    story()


@pytest.mark.usefixtures("root")
def test_a_reset_does_not_happen_when_a_place_could_not_be_seen() -> None:
    class Hidden(SimulatedPlatform):
        async def observe(self, scope: Any) -> Any:
            raise PlatformError("docker/node-3 did not answer")
            yield

    @virtual
    async def story(b: Harness) -> None:
        b.platform = Hidden(b.world, HERE)
        allow_reset(b)
        gpus, thing = await residue(b)
        (line,) = await after_end(b, thing)
        assert gpus.resets == []
        assert "did not answer" in line.reason

    story()


def test_a_reset_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    @virtual
    async def story(b: Harness) -> None:
        allow_reset(b)
        gpus, thing = await residue(b)
        (line,) = await after_end(b, thing)
        assert gpus.resets == []
        assert "a reset needs root" in line.reason

    story()


@pytest.mark.usefixtures("root")
def test_residue_of_a_moment_is_not_reset() -> None:
    """An orphan that was ended at last leaves some behind; the driver may need a little time."""

    @virtual
    async def story(b: Harness) -> None:
        allow_reset(b)
        gpus, thing = gpus_of(b), b.ended("eval")
        await learn_baselines(b.keeper)
        gpus.hold(thing)
        b.loop.call_later(100, lambda: gpus.facts["GPU-0"].update(holders=()))
        (line,) = await after_end(b, thing)
        assert gpus.resets == []
        assert "no residue stayed for two minutes" in line.reason

    story()


@virtual
async def test_an_orphan_is_never_a_reason_to_reset(b: Harness) -> None:
    allow_reset(b)
    gpus, thing = gpus_of(b), b.ended("eval")
    gpus.hold(thing)
    await after_end(b, thing)
    assert gpus.resets == []


# What an admin asks for


@virtual
async def test_an_admin_quarantines_and_returns_and_nobody_else(b: Harness) -> None:
    gpus_of(b)
    for verb in ("quarantine", "return"):
        refused = await requests.fulfil(b.keeper, b.book, "ann", Request(verb=verb, workload="GPU-0"))
        assert not refused.done
        assert "only an admin" in refused.words
    assert b.ledger.lines == []
    reply = await requests.fulfil(b.keeper, b.book, "root", Request(verb="quarantine", workload="GPU-0"))
    assert reply.done
    (line,) = b.lines(Quarantined)
    assert (line.by, line.reason) == ("root", "requested by root")
    assert (await requests.fulfil(b.keeper, b.book, "root", Request(verb="return", workload="GPU-0"))).done
    assert (await remembered(b.keeper, "GPU-0")).quarantined is None


@virtual
async def test_what_is_no_uuid_is_refused(b: Harness) -> None:
    gpus_of(b)
    reply = await requests.fulfil(b.keeper, b.book, "root", Request(verb="quarantine", workload="GPU-0\nx"))
    assert not reply.done
    assert b.ledger.lines == []
