"""The story of a run over many nodes: targets, start, poll, collect, write, remove, verify; and its directory.

What a node has sent is written to disk before anything is removed, and an engine that cannot be read removes nothing.
Killed at any moment, the engine still has the run by its id: `rescue` and `remove_run` continue from there.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper.acceptance.fleet.collect import (
    FRAME_MARK,
    NCCL_MARK,
    Collected,
    FrameReader,
    RunReport,
    read_sent,
    run_report,
)
from gpukeeper.acceptance.fleet.launcher import (
    LOST,
    RUN_ID,
    STAYING,
    Launcher,
    NodeStatus,
    Phase,
    Removal,
    RunSpec,
    RunSummary,
    Target,
    flags,
)
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import formats, legacy, merge
from gpukeeper.acceptance.reports.formats import REPORT
from gpukeeper.acceptance.reports.html import page_of_fleet, page_of_report
from gpukeeper.acceptance.reports.store import HTML, JUNIT, ReportFolder, load_file, read
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, PlatformError, UsageError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown

DESCRIPTION, FLEET, PAGE, NODES_CSV, GPUS_CSV = "run.json", "fleet.json", "fleet.html", "nodes.csv", "gpus.csv"
LOG, NCCL_LOG, LOG_MAX = "log.txt", "nccl.log", 256 << 10


class Description(msgspec.Struct, frozen=True, kw_only=True):
    spec: RunSpec
    targets: tuple[Target, ...] = ()


class RunArchive:
    def __init__(self, reports: Path, run: str, *, summary: str = "") -> None:
        """`summary`: also write the files of the older test kits for each node, with this name for the summary."""
        if not RUN_ID.fullmatch(run):
            raise UsageError(f"{run!r} is not a run id. To list runs: gpukeeper accept list")
        self.path, self._summary = reports / run, summary
        self.nodes = ReportFolder(self.path / "nodes")

    def exists(self) -> bool:
        return os.path.lexists(self.path / DESCRIPTION)

    def begin(self, spec: RunSpec, targets: tuple[Target, ...]) -> None:
        _write(self.path / DESCRIPTION, msgspec.json.encode(Description(spec=spec, targets=targets)))

    def description(self) -> Description | None:
        """None: this machine has not seen the run before."""
        if not self.exists():
            return None
        try:
            return reading.decode(read(self.path / DESCRIPTION), type=Description)
        except ValueError as error:
            raise KeeperError(f"{self.path / DESCRIPTION} is damaged: {error}.") from error

    def add(self, report: Report, text: bytes, log: bytes) -> Path:
        """As soon as it arrives, and durable. The same again changes nothing."""
        parts: dict[str, list[bytes]] = {LOG: [], NCCL_LOG: []}
        for line in log.splitlines(keepends=True):
            parts[NCCL_LOG if line.startswith(NCCL_MARK.encode()) else LOG].append(line)
        extra = {name: b"".join(lines)[-LOG_MAX:] for name, lines in parts.items() if lines}
        if self._summary:
            extra |= {name: words.encode() for name, words in legacy.files(report, self._summary).items()}
        if report.verdict is not Grade.PASS:
            extra[HTML] = page_of_report(report).encode()
        return self.nodes.add(_directory(report.node), text, extra)

    def reports(self, run: str) -> dict[str, list[Report]]:
        """What was collected before, by node. One that cannot be read is none: it is collected again."""
        found: dict[str, list[Report]] = {}
        for directory in self._directories():
            try:
                report = load_file(directory / REPORT)
            except KeeperError:
                continue
            if report.run == run:
                found.setdefault(report.node, []).append(report)
        return found

    def finish(self, report: RunReport) -> Path:
        """Written again when more is known."""
        pages = self._pages(report)
        for name, content in views(report, pages).items():
            _write(self.path / name, content)
        return self.path

    def _pages(self, report: RunReport) -> dict[str, str]:
        """Relative to the run's page. Nodes that passed have none; `accept show` prints their reports."""
        names = {one.node: _directory(one.node) for one in report.fleet.nodes}
        return {
            node: f"nodes/{name}/{HTML}" for node, name in names.items() if (self.nodes.path / name / HTML).is_file()
        }

    def _directories(self) -> Iterator[Path]:
        if not self.nodes.path.is_dir():
            return
        for path in sorted(self.nodes.path.iterdir()):
            if not path.name.startswith(".") and path.is_dir() and not path.is_symlink():
                yield path


def _directory(node: str) -> str:
    return re.sub("[^A-Za-z0-9._-]", "-", node).lstrip("._-")[:100] or "node"


def views(report: RunReport, pages: Mapping[str, str]) -> dict[str, bytes]:
    about = {"run": report.run, "engine": f"{report.engine} {report.form}".strip(), "owner": report.owner}
    head = ("node", "gpu", "identity", "verdict", "reason")
    gpus = [(one.node, one.gpu, one.identity, one.verdict.value, one.reason) for one in report.gpus]
    return {
        FLEET: msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n",
        PAGE: page_of_fleet(report.fleet, about, pages).encode(),
        NODES_CSV: merge.fleet_csv(report.fleet).encode(),
        GPUS_CSV: merge.rows(head, gpus).encode(),
        JUNIT: formats.fleet_junit_xml(report.fleet, report.run).encode(),
    }


def stored_runs(reports: Path) -> list[tuple[Path, RunReport | KeeperError | None]]:
    """Runs over many nodes in a report directory. None: it has no report yet; its launcher runs, or was killed."""
    found: list[tuple[Path, RunReport | KeeperError | None]] = []
    for path in sorted(reports.iterdir()) if reports.is_dir() else ():
        if not path.is_symlink() and (path / DESCRIPTION).is_file():
            try:
                found.append((path, load_run(path) if (path / FLEET).exists() else None))
            except KeeperError as problem:
                found.append((path, problem))
    return found


def load_run(path: Path) -> RunReport:
    try:
        return reading.decode(read(path / FLEET), type=RunReport)
    except ValueError as error:
        raise KeeperError(f"{path / FLEET} is damaged: {error}. Nothing was read from it.") from error


def _write(path: Path, content: bytes) -> None:
    """Complete or not at all, and durable."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with made.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
        number = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        with suppress(OSError):  # its directory may be the problem
            made.unlink()
        raise KeeperError(f"{path} could not be written: {error}. Nothing of the run was removed.") from error


POLL_S, POLL_TOGETHER_S = 5.0, 10.0
READS = 16  # outputs at the same time
ATTEMPTS = 3  # to read the output of a node that has ended; then its log counts as lost
SLACK_S = 60.0  # after the deadline: the engine ends what runs, and the ends are collected
LOST_READS = 3  # a node that is lost is not waited for any longer; if it comes back meanwhile, its report counts
GONE_READS = 2  # a run that the engine does not have is gone when a second read confirms it


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
            return bool(status.message) or self.found.spec.form in STAYING
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
    mark = FRAME_MARK.encode()
    return b"".join(line for line in output.splitlines(keepends=True) if mark not in line)
