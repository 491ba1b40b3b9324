"""The story of a run over many nodes: targets, start, poll, collect, write, remove, verify.

What a node has sent is written to disk before anything is removed, and an engine that cannot be read removes nothing.
Killed at any moment, the engine still has the run by its id: `rescue` and `remove_run` continue from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec

from gpukeeper.acceptance.fleet.collect import Collected, RunReport, read_sent, run_report
from gpukeeper.acceptance.fleet.frames import MARK, FrameReader
from gpukeeper.acceptance.fleet.ports import Launcher
from gpukeeper.acceptance.fleet.spec import RunSpec, Target, flags
from gpukeeper.acceptance.fleet.status import LOST, NodeStatus, Phase, Removal, RunSummary
from gpukeeper.acceptance.launchers.archive import RunArchive
from gpukeeper.acceptance.record import Report
from gpukeeper.model.errors import KeeperError, PlatformError, UsageError
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown

POLL_S, POLL_TOGETHER_S = 5.0, 10.0
READS = 16  # outputs at the same time
ATTEMPTS = 3  # to read the output of a node that has ended; then its log counts as lost
SLACK_S = 60.0  # after the deadline: the engine ends what runs, and the ends are collected
LOST_READS = 3  # a node that is lost is not waited for any longer; if it comes back meanwhile, its report counts
GONE_READS = 2  # a run that the engine does not have is gone when a second read confirms it
STAYS = frozenset({"daemonset", "statefulset"})  # forms whose programs stay after they have reported


class Notice(msgspec.Struct, frozen=True):
    """Something that is not about one node."""

    words: str


class Reported(msgspec.Struct, frozen=True):
    """A report has arrived and is on disk."""

    report: Report
    done: int
    of: int


Progress = Callable[[Notice | Reported | NodeStatus], None]


@dataclass
class Setting:
    """What a story needs besides its run."""

    launcher: Launcher
    archive: RunArchive
    clock: Clock
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    progress: Progress = lambda step: None
    stop: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Ended:
    """`problems`: what was not removed or could not be read, a sentence each."""

    report: RunReport
    removal: Removal | None = None
    problems: tuple[str, ...] = ()


async def launch(setting: Setting, spec: RunSpec, targets: Sequence[Target], *, keep_objects: bool = False) -> Ended:
    """From the start to the verified removal. PlatformError only before anything was started."""
    found = Collected(spec, tuple(targets))
    # Before the description is written: a run that cannot start must not look like one in progress.
    await _clear_same(setting, found)
    setting.archive.begin(spec, found.targets)
    collecting = _Collecting(setting, found)
    try:
        await setting.launcher.start(spec, [one for one in targets if not one.excluded])
    except (PlatformError, UsageError) as problem:
        found.failed = str(problem)
        setting.progress(Notice(f"The run could not be launched completely: {problem}"))
    if found.failed:
        await collecting.once()
    else:
        await collecting.poll()
    return await _finish(setting, collecting, remove=not keep_objects)


async def rescue(setting: Setting, summary: RunSummary) -> Ended:
    """Collect what the engine still has of a run, whichever machine launched it. Removes nothing."""
    known = setting.archive.description()
    names = [one.node for one in summary.nodes]
    targets = known.targets if known is not None else ()
    targets += tuple(Target(node=name) for name in names if name not in {one.node for one in targets})
    found = Collected(summary.spec, targets, reports=setting.archive.reports(summary.spec.run))
    setting.archive.begin(summary.spec, targets)
    collecting = _Collecting(setting, found)
    await collecting.once(summary)
    return await _finish(setting, collecting, remove=False)


async def remove_run(setting: Setting, summary: RunSummary) -> Ended:
    """Collect, then remove, then read again. What could not be read is not removed."""
    ended = await rescue(setting, summary)
    if ended.problems:
        return ended
    removal, problems = await _removed(setting, summary.spec)
    return Ended(ended.report, removal, problems)


def is_over(summary: RunSummary, now: datetime) -> bool:
    """Past its deadline: its launcher would have removed it, so its launcher is gone."""
    return now > summary.spec.created + timedelta(seconds=summary.spec.deadline_s + 2 * SLACK_S + 600)


async def _clear_same(setting: Setting, found: Collected) -> None:
    """Leftovers of an earlier start under the same id. Their reports are kept."""
    run = found.spec.run
    there = await setting.launcher.run(run)
    if there is None:
        return
    setting.progress(Notice(f"Run {run} exists already: its reports are collected, then it is removed."))
    collecting = _Collecting(setting, Collected(there.spec, found.targets))
    await collecting.once(there)
    unread = [f"The output of {node} could not be read: {why}" for node, why in collecting.found.unread.items()]
    problems = tuple(unread) or (await _removed(setting, there.spec))[1]
    if problems:
        raise PlatformError(f"Leftovers of run {run} are still there. Nothing was started. {' '.join(problems)}")


class _Collecting:
    """Reads the output of nodes until each has reported, or cannot any more."""

    def __init__(self, setting: Setting, found: Collected) -> None:
        self.setting, self.found = setting, found
        self._readers = {one.node: FrameReader(found.spec.run, one.node) for one in found.targets}
        self._attempts: dict[str, int] = {}
        self._lost: dict[str, int] = {}  # reads in a row in which a node was lost
        self._limit = asyncio.Semaphore(READS)
        self.unread_engine = ""  # why the last read of the run failed

    async def poll(self) -> None:
        """Until every node is settled, the deadline, or an interruption."""
        setting, spec = self.setting, self.found.spec
        until = setting.clock.now() + timedelta(seconds=spec.deadline_s + SLACK_S)
        gone = 0
        while True:
            summary = await self._read()
            gone = gone + 1 if summary is None and not self.unread_engine else 0
            if summary is not None:
                await self._take(summary)
            if self._settled() or gone >= GONE_READS:
                return
            if setting.stop.is_set() or setting.clock.now() >= until:
                await self.once()
                return
            await self._pause(POLL_TOGETHER_S if spec.together else POLL_S)

    async def once(self, summary: RunSummary | None = None) -> None:
        """Whatever phase a node is in: this is the last read before the report is written."""
        summary = summary or await self._read()
        if summary is not None:
            await self._take(summary, last=True)

    async def _read(self) -> RunSummary | None:
        try:
            summary = await self.setting.launcher.run(self.found.spec.run)
        except PlatformError as problem:
            if not self.unread_engine:
                self.setting.progress(Notice(f"{problem} Trying again until the deadline."))
            self.unread_engine = str(problem)
            return None
        self.unread_engine = ""
        return summary

    async def _take(self, summary: RunSummary, *, last: bool = False) -> None:
        due = []
        for status in summary.nodes:
            before = self.found.statuses.get(status.node)
            self.found.statuses[status.node] = status
            self._lost[status.node] = self._lost.get(status.node, 0) + 1 if status.code in LOST else 0
            if before is not None and before.phase is Phase.GONE and status.phase is not Phase.GONE:
                self._attempts.pop(status.node, None)  # it is back: what was asked of it meanwhile does not count
            if status.node not in self._readers or status.node in self.found.reports:
                continue
            if before is None or (before.phase, before.reason) != (status.phase, status.reason):
                self.setting.progress(status)
            if last or self._is_due(status):
                due.append(status)
        await asyncio.gather(*(self._collect(one) for one in due))

    def _is_due(self, status: NodeStatus) -> bool:
        """Worth a request: 512 nodes that compute need not be asked for their output every five seconds."""
        if status.phase is Phase.RUNNING:
            return bool(status.message) or self.found.spec.form in STAYS
        return status.phase is not Phase.WAITING and self._attempts.get(status.node, 0) < ATTEMPTS

    async def _collect(self, status: NodeStatus) -> None:
        """A part that is missing is asked for again with the next read: a log may arrive later than an end."""
        node, found = status.node, self.found
        async with self._limit:
            try:
                output = await self.setting.launcher.output(found.spec, node)
            except PlatformError as problem:
                output = Unknown(str(problem))
        if status.phase is not Phase.RUNNING:
            self._attempts[node] = self._attempts.get(node, 0) + 1
        if isinstance(output, Unknown):
            if _may_have_output(status):
                found.unread[node] = output.why
            return
        found.unread.pop(node, None)
        self._readers[node].feed(output)
        self._keep(node, output)

    def _keep(self, node: str, output: bytes) -> None:
        decoded, run = self._readers[node].result(), self.found.spec.run
        problems = list(decoded.problems)
        if decoded.missing:
            some = ", ".join(str(one) for one in decoded.missing[:8])
            problems.append(f"parts {some} of {decoded.total} of its report are missing")
        for text in decoded.reports:
            try:
                report = read_sent(text, run, node)
            except KeeperError as problem:
                problems.append(str(problem).rstrip("."))
                continue
            self.setting.archive.add(report, text, _without_frames(output))
            self.found.reports.setdefault(node, []).append(report)
        if problems:
            self.found.problems[node] = tuple(problems)
        else:
            self.found.problems.pop(node, None)
        if node in self.found.reports:
            reports = self.found.reports
            self.setting.progress(Reported(reports[node][-1], len(reports), len(self._readers)))

    def _settled(self) -> bool:
        return all(self._is_settled(one) for one in self.found.targets)

    def _is_settled(self, target: Target) -> bool:
        status = self.found.statuses.get(target.node)
        if target.excluded or target.node in self.found.reports:
            return True
        if self._lost.get(target.node, 0) >= LOST_READS:
            return True
        over = status is not None and status.phase in (Phase.ENDED, Phase.GONE)
        return over and self._attempts.get(target.node, 0) >= ATTEMPTS

    async def _pause(self, seconds: float) -> None:
        """Shorter, if the run is interrupted meanwhile."""
        sleeping = asyncio.ensure_future(self.setting.sleep(seconds))
        stopping = asyncio.ensure_future(self.setting.stop.wait())
        try:
            await asyncio.wait((sleeping, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (sleeping, stopping):
                one.cancel()
            await asyncio.gather(sleeping, stopping, return_exceptions=True)


def _may_have_output(status: NodeStatus) -> bool:
    """A node that is gone has none any more, and one that has never started has none yet."""
    never_started = status.phase is Phase.WAITING and status.attempt == 0
    return status.phase is not Phase.GONE and not never_started


async def _finish(setting: Setting, collecting: _Collecting, *, remove: bool) -> Ended:
    """The report is on disk before the first object goes."""
    found, run = collecting.found, collecting.found.spec.run
    report = run_report(found, setting.clock.now(), interrupted=setting.stop.is_set())
    setting.archive.finish(report)
    kept = []
    if collecting.unread_engine:
        kept.append(f"The engine could not be read ({collecting.unread_engine.rstrip('.')})")
    if found.unread:
        names = ", ".join(sorted(found.unread)[:5])
        kept.append(f"The output of {names} could not be read and may hold a report")
    if kept:
        again = f"gpukeeper accept fetch {run} {flags(found.spec)}"
        words = f"{'. '.join(kept)}. So nothing of the run was removed. Later: {again}, then accept remove."
        return Ended(report, None, (words,))
    if not remove:
        return Ended(report)
    removal, problems = await _removed(setting, found.spec)
    return Ended(report, removal, problems)


async def _removed(setting: Setting, spec: RunSpec) -> tuple[Removal | None, tuple[str, ...]]:
    """Verified by another read. Tried again: objects take a moment to go, and engines answer late."""
    run, removal, problem = spec.run, None, ""
    for attempt in range(ATTEMPTS):
        try:
            removal = await setting.launcher.remove(run)
            if not removal.left and await setting.launcher.run(run) is None:
                return removal, ()
            problem = "; ".join(f"{name}: {why}" for name, why in removal.left[:5]) or "its objects are still listed"
        except PlatformError as error:
            problem = str(error).rstrip(".")
        if attempt + 1 < ATTEMPTS:
            await setting.sleep(POLL_S)
    words = f"Run {run} was not removed completely: {problem}. Try again: gpukeeper accept remove {run} {flags(spec)}"
    return removal, (words,)


def _without_frames(output: bytes) -> bytes:
    """What people read of the log. The report itself is beside it."""
    mark = MARK.encode()
    return b"".join(line for line in output.splitlines(keepends=True) if mark not in line)
