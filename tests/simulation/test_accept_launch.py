"""The launcher of a run over many nodes is killed at any await, engines fail and lie about being empty: nothing is left
after the next pass, no report is lost that a node had sent, and no node is accepted without a report."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from gpukeeper.acceptance.fleet.collect import RunReport, decode_frames
from gpukeeper.acceptance.fleet.launcher import Phase, Removal, RunSpec, RunSummary, Target
from gpukeeper.acceptance.launchers import story
from gpukeeper.acceptance.launchers.simulated import Script, SimulatedLauncher
from gpukeeper.acceptance.launchers.story import RunArchive
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports.formats import report_json
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.simulation.seeds import failing_with
from tests.unit.acceptance.reports import examples

pytestmark = pytest.mark.slow

T = TypeVar("T")
RUN = "r-1"
GOOD, BAD = examples.one_good_gpu(), examples.eight_gpus()


class Killed(BaseException):
    """kill -9: no handler runs after it, as far as Python allows."""


class VirtualClock:
    def __init__(self) -> None:
        self.time = datetime(2026, 11, 17, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


class FaultyLauncher:
    """The simulated engine; every call may fail before or after it took effect, and may be the last one."""

    engine = "simulated"

    def __init__(
        self, inner: SimulatedLauncher, rng: random.Random, archive: RunArchive, *, faults: float, kill_at: int
    ) -> None:
        self._inner, self._rng, self._archive, self._faults, self._left = inner, rng, archive, faults, kill_at

    async def _call(self, act: Callable[[], Awaitable[T]]) -> T:
        self._left -= 1
        early, fails = self._rng.random() < 0.5, self._rng.random() < self._faults
        if self._left == 0 and early:
            raise Killed
        if fails and early:
            raise PlatformError("The engine did not answer within 10 s.")
        result = await act()
        if self._left == 0:
            raise Killed
        if fails:
            raise PlatformError("The answer of the engine was lost.")
        return result

    async def targets(self, spec: RunSpec) -> tuple[Target, ...]:
        return await self._inner.targets(spec)

    def render(self, spec: RunSpec, targets: Sequence[Target]) -> str:
        return self._inner.render(spec, targets)

    async def start(self, spec: RunSpec, targets: Sequence[Target]) -> None:
        for one in targets:  # object by object
            await self._call(lambda one=one: self._inner.start(spec, [one]))  # type: ignore[misc]

    async def runs(self) -> tuple[RunSummary, ...] | Unknown:
        return await self._call(self._inner.runs)

    async def run(self, run: str) -> RunSummary | None:
        return await self._call(lambda: self._inner.run(run))

    async def output(self, spec: RunSpec, node: str) -> bytes | Unknown:
        if self._rng.random() < self._faults:
            return Unknown("the node did not answer")
        return await self._call(lambda: self._inner.output(spec, node))

    async def remove(self, run: str) -> Removal:
        """Whatever goes with it is on disk already."""
        there = await self._inner.run(run)
        for one in there.nodes if there is not None else ():
            output = await self._inner.output(there.spec, one.node) if there is not None else b""
            if not isinstance(output, Unknown) and decode_frames(output, run, one.node).reports:
                assert one.node in self._archive.reports(run), f"the report of {one.node} would be lost"
        return await self._call(lambda: self._inner.remove(run))

    async def close(self) -> None:
        """Nothing is open."""


def report_of(spec: RunSpec, node: str, fault: bool) -> Report:
    return examples.replace(BAD if fault else GOOD, run=spec.run, node=node)


class World:
    """One engine, its clock and one report directory; launchers come and go."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder, self.clock = random.Random(seed), folder, VirtualClock()
        scripts = [self.rng.choice(list(Script)) for _ in range(self.rng.randrange(1, 9))]
        self.scripts = {f"sim-{number:02}": script for number, script in enumerate(scripts, start=1)}
        self.objects: dict[str, bytes] = {}
        self.engine = SimulatedLauncher(
            scripts, self.objects, self.clock, report_of, seconds=self.rng.choice((1, 30, 300))
        )
        self.archive = RunArchive(folder, RUN)

    def setting(self, *, faults: float, kill_at: int) -> story.Setting:
        launcher = FaultyLauncher(self.engine, self.rng, self.archive, faults=faults, kill_at=kill_at)
        return story.Setting(launcher, self.archive, self.clock, self.clock.sleep)

    def spec(self) -> RunSpec:
        return RunSpec(run=RUN, owner="ann", created=self.clock.now(), engine="simulated", deadline_s=600)

    async def launch(self, *, faults: float, kill_at: int) -> story.Ended | None:
        spec = self.spec()
        targets = await self.engine.targets(spec)
        try:
            return await story.launch(self.setting(faults=faults, kill_at=kill_at), spec, targets)
        except (Killed, PlatformError):
            return None

    async def next_pass(self) -> story.Ended | None:
        """A later launcher on the same machine, of an engine that answers: what is past its deadline goes."""
        self.clock.time += timedelta(hours=2)
        there = await self.engine.run(RUN)
        if there is None:
            return None
        assert story.is_over(there, self.clock.now())
        return await story.remove_run(self.setting(faults=0, kill_at=-1), there)


def accepted(report: RunReport) -> set[str]:
    return {one.node for one in report.fleet.nodes if one.verdict in (Grade.PASS, Grade.WARN)}


def test_killed_at_any_moment_nothing_is_left_and_no_report_is_lost(tmp_path: Path) -> None:
    for seed in range(60):
        with failing_with(seed):
            asyncio.run(_killed(seed, tmp_path / str(seed)))


async def _killed(seed: int, folder: Path) -> None:
    world = World(seed, folder)
    ended = await world.launch(faults=world.rng.choice((0, 0.02, 0.2)), kill_at=world.rng.randrange(1, 60))
    started = {key.partition("/")[2] for key in world.objects}
    after = await world.next_pass() or ended
    assert not world.objects, f"left: {sorted(world.objects)}"
    collected = world.archive.reports(RUN)
    sends = {node for node in started if world.scripts[node] in (Script.GOOD, Script.FAIL)}
    if ended is None or ended.removal is None:
        # Whatever was still on the engine when the next pass came has been collected by it.
        assert sends <= set(collected), f"lost: {sends - set(collected)}"
    if after is None:
        return
    for node in accepted(after.report):
        assert world.scripts[node] in (Script.GOOD, Script.CUT_LOG), node
        [report] = collected[node]
        assert report_json(report) == report_json(report_of(world.spec(), node, False))
    names = {one.node for one in after.report.fleet.nodes} | {one.node for one in after.report.missing}
    assert names == set(world.scripts)
    assert all(one.reason for one in after.report.missing)


def test_undisturbed_every_node_gets_what_its_script_says(tmp_path: Path) -> None:
    for seed in range(1000, 1020):
        with failing_with(seed):
            _undisturbed(seed, tmp_path / str(seed))


def _undisturbed(seed: int, folder: Path) -> None:
    world = World(seed, folder)
    ended = asyncio.run(world.launch(faults=0, kill_at=-1))
    assert ended is not None
    assert ended.problems == ()
    assert not world.objects
    codes = {one.node: one.code for one in ended.report.missing}
    reported = {one.node for one in ended.report.fleet.nodes}
    expected = {
        Script.HANG: "deadline",
        Script.WAIT: "taint",
        Script.IMAGE: "image",
        Script.EVICTED: "evicted",
        Script.VANISH: "node-not-ready",
        Script.LOST_LOG: "log-lost",
        Script.CRASH: "no-report",
    }
    assert codes == {node: expected[script] for node, script in world.scripts.items() if script in expected}
    assert reported == {node for node, script in world.scripts.items() if script not in expected}


def test_an_engine_that_cannot_be_read_removes_nothing(tmp_path: Path) -> None:
    world = World(3, tmp_path)
    asyncio.run(world.engine.start(world.spec(), asyncio.run(world.engine.targets(world.spec()))))
    before = dict(world.objects)
    world.clock.time += timedelta(hours=1)
    there = asyncio.run(world.engine.run(RUN))
    assert there is not None
    setting = world.setting(faults=0, kill_at=-1)

    async def unknown(spec: RunSpec, node: str) -> bytes | Unknown:
        return Unknown("the node did not answer")

    setting.launcher.output = unknown  # type: ignore[method-assign]
    ended = asyncio.run(story.remove_run(setting, there))
    if any(one.phase.value != "gone" for one in there.nodes):
        assert "nothing of the run was removed" in ended.problems[0]
        assert world.objects == before


def test_a_node_that_is_lost_is_not_waited_for_until_the_deadline(tmp_path: Path) -> None:
    """The wait went on until the timeout of the run, hours later. The others are waited for."""
    world = World(7, tmp_path)
    world.scripts = {"sim-01": Script.HANG, "sim-02": Script.GOOD}
    world.engine = SimulatedLauncher(list(world.scripts.values()), {}, world.clock, report_of, seconds=300)
    setting, read = world.setting(faults=0, kill_at=-1), world.engine.run
    began, back = world.clock.now(), timedelta(seconds=40)

    async def lost(run: str) -> RunSummary | None:
        summary = await read(run)
        if summary is None or timedelta(seconds=20) < world.clock.now() - began < back:  # a blip is no loss
            return summary
        why = "its node is not ready (NodeStatusUnknown): Kubelet stopped posting"
        nodes = tuple(
            msgspec.structs.replace(one, code="node-not-ready", reason=why) if one.node == "sim-01" else one
            for one in summary.nodes
        )
        return msgspec.structs.replace(summary, nodes=nodes)

    setting.launcher.run = lost  # type: ignore[method-assign]
    spec = world.spec()
    ended = asyncio.run(story.launch(setting, spec, asyncio.run(world.engine.targets(spec))))
    assert world.clock.now() - began < timedelta(seconds=spec.deadline_s)
    (missing,) = ended.report.missing
    assert (missing.node, missing.code) == ("sim-01", "node-not-ready")
    assert missing.reason.startswith("Its node was lost before it reported. Its node is not ready (NodeStatusUnknown)")
    assert {one.node for one in ended.report.fleet.nodes} >= {"sim-02"}, "the others go on"
    assert ended.problems == ()


def test_a_host_that_was_unreachable_for_a_minute_still_reports(tmp_path: Path) -> None:
    world = World(7, tmp_path)
    world.engine = SimulatedLauncher([Script.GOOD, Script.GOOD], {}, world.clock, report_of, seconds=300)
    setting, read, began = world.setting(faults=0, kill_at=-1), world.engine.run, world.clock.now()

    async def silent(run: str) -> RunSummary | None:
        summary = await read(run)
        if summary is None or world.clock.now() - began > timedelta(minutes=1):
            return summary
        first, second = summary.nodes
        gone = msgspec.structs.replace(second, phase=Phase.GONE, code="unreachable")
        return msgspec.structs.replace(summary, nodes=(first, gone))

    setting.launcher.run = silent  # type: ignore[method-assign]
    spec = world.spec()
    ended = asyncio.run(story.launch(setting, spec, asyncio.run(world.engine.targets(spec))))
    assert ended.report.missing == ()


def test_a_launch_that_fails_in_the_middle_gives_a_report_and_leaves_nothing(tmp_path: Path) -> None:
    """C3.3"""
    world = World(1, tmp_path)
    spec = world.spec()
    targets = asyncio.run(world.engine.targets(spec))
    assert len(targets) > 1
    setting = world.setting(faults=0, kill_at=-1)

    async def one_only(spec: RunSpec, targets: Sequence[Target]) -> None:
        await world.engine.start(spec, targets[:1])
        raise PlatformError("The quota of the namespace is used up.")

    setting.launcher.start = one_only  # type: ignore[method-assign]
    ended = asyncio.run(story.launch(setting, spec, targets))
    assert not world.objects
    assert ended.report.verdict is Grade.INCONCLUSIVE
    codes = [one.code for one in ended.report.missing]
    assert codes.count("launch-failed") == len(targets) - 1
    assert "The quota of the namespace is used up." in ended.report.missing[-1].reason
