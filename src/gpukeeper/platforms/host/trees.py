"""The trees of this machine: temporary ones, reports (the newest of a directory are kept), and the rest of interrupted
removals; and which of them a running process names, in its command line or as its directory for temporary files: it
often has no file there open, for hours. By path, as seen here: in another mount namespace it may mean another file,
and then a little more is kept. A process with more text than is read may name anything. Reads only.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import msgspec

from gpukeeper.blocking import A_MOMENT, in_thread
from gpukeeper.devices.holders import user_name
from gpukeeper.disk import access_times, measure, mounts, open_files, tree
from gpukeeper.disk.access_times import FileWatcher, LastUse, ReadRecording, Reads
from gpukeeper.disk.kernel import STATUS_MAX, read_proc, read_proc_part, stat_fields
from gpukeeper.disk.measure import MeasureLimits, TreeMeasurement, printable
from gpukeeper.disk.mounts import Responsiveness
from gpukeeper.disk.open_files import why_unseen
from gpukeeper.disk.trash import is_trash
from gpukeeper.disk.tree import PlaceAndTime
from gpukeeper.model.decision import Unseen, too_slow
from gpukeeper.model.subject import Category, Gone, Ref, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import roots, translate
from gpukeeper.platforms.host.connect import (
    NEVER_FROM_HERE,
    PAGE,
    Needed,
    Page,
    Scan,
    Timeouts,
    in_time,
    nothing_needed,
    opened,
    unreadable,
)
from gpukeeper.platforms.host.roots import MeasurementCache, RootDirectory, TreeEntry, TreeScope

FOLDERS = (b"TMPDIR", b"TMP", b"TEMP", b"RAY_TMPDIR")
NAME_MAX = 255  # bytes of one name
WORDS_MAX = 256 * 1024  # bytes read of a command line, and of an environment
NAMES_MAX = 2_000  # names that one process may mention: many texts are ambiguous
ENDS = frozenset(b" \t\n\"'`:;,=|&<>()[]{}$?*#!\\")  # where a name in the middle of a text may end; or it continues


class ProcessText(msgspec.Struct, frozen=True, gc=False):
    pid: int
    words: bytes
    variable: str | None = None  # None: its command line
    cut: bool = False  # there is more text

    def __str__(self) -> str:
        return "in its command line" if self.variable is None else f"as its {self.variable}"

    @property
    def where(self) -> str:
        return "in its command line" if self.variable is None else "in its environment"


class Mentions(dict[str, str]):
    """By name: the process that names it, as text. `anything`: a process that may name every entry, since it was not
    read completely.
    """

    anything: str | None = None

    def and_also(self, whys: Mapping[str, str]) -> Mentions:
        """With other paths that are needed, each with a clause that names the user of it."""
        both = Mentions({**whys, **self})
        both.anything = self.anything
        return both

    def who(self, name: str) -> str | None:
        return self.get(name, self.anything)


Mentioned: TypeAlias = Callable[[tuple[str, ...]], Mentions]


def mentioned_below(directories: Iterable[str], proc: str = "/proc") -> Mentions:
    """The entries of one directory that a process names. `directories`: that directory, in each way it may be
    written."""
    prefixes = [os.fsencode(directory.rstrip("/") + "/") for directory in dict.fromkeys(directories)]
    found: dict[bytes, ProcessText] = {}
    too_much: ProcessText | None = None
    for _, texts in groupby(_texts(proc), key=attrgetter("pid")):
        named: dict[bytes, ProcessText] = {}
        for text in texts:
            names = chain.from_iterable(names_after(prefix, text.words) for prefix in prefixes)
            named |= dict.fromkeys(islice(names, NAMES_MAX + 1 - len(named)), text)
            if text.cut or len(named) > NAMES_MAX:
                too_much, named = text, {}
                break
        found = named | found
    mentions = Mentions(
        {os.fsdecode(name): f"pid {text.pid} ({_comm(text.pid, proc)}) names it {text}" for name, text in found.items()}
    )
    if too_much is not None:
        who = f"pid {too_much.pid} ({_comm(too_much.pid, proc)})"
        mentions.anything = f"{who} has more text {too_much.where} than is read of one process, and may name it there"
    return mentions


def names_after(prefix: bytes, words: bytes) -> Iterator[bytes]:
    """Each name that may follow the prefix. A name may contain blanks and punctuation, so there may be several."""
    at = words.find(prefix)
    while at >= 0:
        start = at + len(prefix)
        rest = words[start : start + NAME_MAX + 1].lstrip(b"/").partition(b"/")[0]
        yield from (rest[:end] for end, sign in enumerate(rest) if sign in ENDS and end)
        if rest:
            yield rest
        at = words.find(prefix, start - 1)  # the character between two names may begin the next one


def _texts(proc: str) -> Iterator[ProcessText]:
    ours = _ours(proc)
    for home in Path(proc).iterdir():
        if not home.name.isdecimal():
            continue
        pid = int(home.name)
        if pid in ours:
            line, cut = b"", False
        else:
            line, cut = _read(home / "cmdline")
        yield from (ProcessText(pid, word) for word in line.split(b"\0") if b"/" in word)
        settings, more = _read(home / "environ")
        for setting in settings.split(b"\0"):
            name, _, value = setting.partition(b"=")
            if name in FOLDERS:
                yield ProcessText(pid, value, name.decode())
        if cut or more:
            yield ProcessText(pid, b"", "" if more and not cut else None, cut=True)


def _ours(proc: str) -> set[int]:
    """This process and its callers, a shell or sudo: their arguments name the paths to read, and do not use them."""
    pid, found = os.getpid(), set[int]()
    while pid > 1 and pid not in found:
        found.add(pid)
        with suppress(OSError, ValueError):
            pid = int(stat_fields(read_proc(f"{proc}/{pid}/stat", STATUS_MAX))[1])
    return found


def _read(path: Path) -> tuple[bytes, bool]:
    """And whether there is more."""
    with suppress(OSError):
        found = read_proc_part(str(path), WORDS_MAX + 1)
        return found[:WORDS_MAX], len(found) > WORDS_MAX
    return b"", False


def _comm(pid: int, proc: str) -> str:
    with suppress(OSError):
        return printable(os.fsdecode(read_proc(f"{proc}/{pid}/comm", STATUS_MAX).removesuffix(b"\n")))
    return "ended"


class ReportRanking(msgspec.Struct, frozen=True):
    """The reports of one directory whose times are known, newest first, as of the last observe."""

    uids: tuple[str, ...]

    def why_kept(self, uid: str, there: frozenset[str], keep_last: int) -> str | None:
        """`there`: what is in the directory now. Reports only get newer, so those that were newer than this one and
        still exist still are. A report created since then is not counted, so more is kept.
        """
        newer = self.uids[: self.uids.index(uid)] if uid in self.uids else ()
        if keep_last == 0 or len(there.intersection(newer)) >= keep_last:
            return None
        return "it is the newest of its root" if keep_last == 1 else f"it is among the {keep_last} newest of its root"


def rank_reports(reports: Sequence[Subject], contents: Mapping[str, datetime | Unknown]) -> ReportRanking:
    """By content, not by the time of a read or a move. A report that could not be measured is not ranked; it is kept
    anyway.
    """
    uids = [one.ref.uid for one in reports]
    timed = [(at, uid) for uid in uids if isinstance(at := contents.get(uid), datetime)]
    return ReportRanking(tuple(uid for _, uid in sorted(timed, reverse=True)))


def report_uids_in(root: roots.TreeRoot) -> frozenset[str]:
    found = (roots.top_of(entry) for entry in roots.entries_of(root))
    return frozenset(measure.tree_uid(one.st_dev, one.st_ino) for one in found if one is not None)


class LargeTree:
    """A tree with so many entries that it is walked only if it could be due."""


HEAVY = LargeTree()


class RootUse(msgspec.Struct, frozen=True):
    """What is in use below one directory, and which of its entries a process names."""

    below: open_files.DirectoryUse
    named: Mentions
    reads: Reads = Reads(ReadRecording.NEVER)  # how reads of its entries are recorded


InUse: TypeAlias = RootUse | Unknown
Found: TypeAlias = Subject | Unseen | LargeTree | None
NOT_SUMMED = Unknown("the other trees of its root were not measured yet")
NOT_RANKED = Unknown("the newest reports of its root could not be determined")
STAYS = Unknown("not measured, because it is kept anyway")
FAR_BELOW = Unknown("not measured, because all such trees together are far below the threshold")
LIGHT = 5_000  # entries; a tree with more is heavy
AT_ONCE = 1_000  # paths of one estimate


class Trees:
    def __init__(
        self,
        at: Callable[[], PlaceAndTime],
        named: TreeScope,
        scan: Scan,
        limits: MeasureLimits,
        timeouts: Timeouts,
        mentioned: Mentioned = mentioned_below,
        needed: Needed = nothing_needed,
    ) -> None:
        self._at, self._scan, self._limits, self._timeouts = at, scan, limits, timeouts
        self._mentioned, self._needed, self.watch = mentioned, needed, FileWatcher()
        self._answering = Responsiveness()
        self.follow(named)

    def follow(self, named: TreeScope) -> None:
        """What was cached under another policy is dropped."""
        self.named = self._all = named
        # by directory, of the last observe; a read of one tree measures only that tree
        self._together: dict[str, int] = {}
        self._ranked: dict[str, ReportRanking] = {}  # by directory, the same
        self._contents: dict[str, datetime | Unknown] = {}  # of reports, by uid: when their content last changed
        self._remembered = MeasurementCache()

    async def unresponsive_roots(self) -> tuple[Unseen, ...]:
        """Roots whose filesystem does not answer are skipped until it does."""
        self.named, unseen = await roots.answering(self._all, self._answering, self._timeouts.tree)
        return unseen

    async def observe(self) -> AsyncIterator[Page]:
        """Directory by directory: the total size of its trees is known only when all of them were measured."""
        listed, unseen = await roots.list_all(self.named, self._timeouts.tree)
        if unseen:
            yield (), unseen
        until = time.monotonic() + self._timeouts.trees.total_seconds()
        there: set[str] = set()
        for path, entries in listed.items():
            trees, missed = await self._observe_folder(path, entries, until)
            there.update(one.ref.uid for one in trees)
            for start in range(0, len(trees), PAGE):
                yield trees[start : start + PAGE], ()
            if missed:
                yield (), missed
        self._remembered.forget_all_but(there, listed.keys())
        self._together = {path: size for path, size in self._together.items() if path in listed}
        self._ranked = {path: ranked for path, ranked in self._ranked.items() if path in listed}
        self._contents = {uid: at for uid, at in self._contents.items() if uid in there}

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        wanted = tree.two_numbers(ref.uid)
        if wanted is None:
            return Unknown(f"{ref.uid!r} does not identify a tree")
        deadline = self._timeouts.tree
        try:
            entry = await in_thread(lambda: roots.find(self.named.roots, wanted), deadline)
        except TimeoutError:
            return Unknown(too_slow(ref.name, deadline).why)
        except OSError as error:
            return Unknown(f"its root {unreadable(ref.name, error).why}")
        if entry is None:
            return Gone(ref, self._at().now)
        return entry if isinstance(entry, Unknown) else await self._read_entry(entry, ref)

    async def _read_entry(self, entry: TreeEntry, ref: Ref) -> Subject | Unknown:
        directory = await roots.learn(self.named, entry.folder, [entry], self._timeouts.tree)
        if isinstance(directory, Unseen):
            return Unknown(directory.why)
        until = time.monotonic() + self._timeouts.tree.total_seconds()
        found = await self._measure(entry, directory, await self._in_use(entry.inside), until, self._limits)
        if isinstance(found, Unseen):
            return Unknown(found.why)
        if not isinstance(found, Subject) or found.ref.uid != ref.uid:
            return Unknown(f"it {measure.CHANGED}")  # the next read shows its state
        if entry.taken is not None:
            return found
        if entry.kind == translate.REPORT:
            return await self._ranked_again(found, entry)
        return msgspec.structs.replace(found, together=self._together.get(entry.folder, NOT_SUMMED))

    async def _ranked_again(self, report: Subject, entry: TreeEntry) -> Subject:
        """According to the last observe, and what still exists of what was newer then."""
        root = next(one for one in self.named.roots if one.path == entry.root)
        deadline = self._timeouts.tree
        if entry.folder not in self._ranked:
            listed = await roots.list_one(root, deadline)
            if not isinstance(listed, Unseen):
                until = time.monotonic() + self._timeouts.trees.total_seconds()
                await self._observe_folder(entry.folder, listed, until)
        ranked = self._ranked.get(entry.folder)
        try:
            there = await in_thread(lambda: report_uids_in(root), deadline)
        except (OSError, TimeoutError):
            ranked = None
        if ranked is None:
            return msgspec.structs.replace(report, last_used=NOT_RANKED)
        return _with_rank(report, ranked, there, self.named.keep_last)

    async def _observe_folder(self, path: str, entries: Sequence[TreeEntry], until: float) -> Page:
        directory = await roots.learn(self.named, path, entries, self._timeouts.tree)
        if isinstance(directory, Unseen):
            return (), (directory,)
        left = [entry for entry in entries if entry.taken is not None]
        found = await self._measure_all(directory, [entry for entry in entries if entry.taken is None], until)
        found += [
            await self._measure(one, directory, await self._in_use(one.inside), until, self._limits) for one in left
        ]
        trees = self._compared(directory, [one for one in found if isinstance(one, Subject)])
        return trees, tuple(one for one in found if isinstance(one, Unseen))

    def _compared(self, directory: RootDirectory, trees: Sequence[Subject]) -> tuple[Subject, ...]:
        """What is known only of all together: the total size, and which are the newest."""
        found = [one for one in trees if one.ref.kind == translate.REPORT]
        ranked = self._ranked[directory.path] = rank_reports(found, self._contents)
        there = frozenset(one.ref.uid for one in found)
        total = self._together[directory.path] = self._total(directory, trees)
        return tuple(
            _with_rank(one, ranked, there, self.named.keep_last)
            if one.ref.kind == translate.REPORT
            else one
            if one.category is Category.UNFINISHED
            else msgspec.structs.replace(one, together=total)
            for one in trees
        )

    def _total(self, directory: RootDirectory, trees: Sequence[Subject]) -> int:
        now = self._at().now
        # What is kept anyway adds nothing either.
        counted = tree.together(one for one in trees if one.category is Category.TEMPORARY and one.kept is None)
        if any(one.size is FAR_BELOW for one in trees):
            return max(counted, self._remembered.total(directory))
        if not self._remembered.is_far_below(directory, now):
            self._remembered.learn_total(directory, counted, now)
        return counted

    # Measuring

    async def _measure_all(self, directory: RootDirectory, entries: Sequence[TreeEntry], until: float) -> list[Found]:
        """Small trees, and those with a valid cached measurement, first; the rest only where it could be due."""
        light = msgspec.structs.replace(self._limits, entries=min(self._limits.entries, LIGHT))
        first = await self._measure_some(directory, entries, until, light)
        heavy = [entry for entry, one in zip(entries, first, strict=True) if one is HEAVY]
        if heavy and await self._is_far_below(directory):
            again = await self._measure_some(directory, heavy, until, None)
        else:
            again = await self._measure_some(directory, heavy, until, self._limits)
        return [one for one in first if one is not HEAVY] + again

    async def _measure_some(
        self, directory: RootDirectory, entries: Sequence[TreeEntry], until: float, limits: MeasureLimits | None
    ) -> list[Found]:
        found: list[Found] = []
        for start in range(0, len(entries), PAGE):
            in_use = await self._in_use(directory.path)  # the current time: measuring takes a while
            some = entries[start : start + PAGE]
            found += [await self._measure(entry, directory, in_use, until, limits, fresh=False) for entry in some]
        return found

    async def _measure(
        self,
        entry: TreeEntry,
        directory: RootDirectory,
        in_use: InUse,
        until: float,
        limits: MeasureLimits | None,
        *,
        fresh: bool = True,
    ) -> Found:
        """None: it is gone since it was listed. `fresh`: not from the cache. Without limits it is not walked."""
        return await in_time(
            lambda: self._weigh(entry, directory, in_use, until, limits, fresh=fresh),
            printable(entry.path),
            self._timeouts.tree,
            A_MOMENT,
        )

    def _weigh(
        self,
        entry: TreeEntry,
        directory: RootDirectory,
        in_use: InUse,
        until: float,
        limits: MeasureLimits | None,
        *,
        fresh: bool,
    ) -> Subject | LargeTree | None:
        top = roots.top_of(entry)
        if top is None:
            return None
        now = self._at().now
        found = None if fresh else self._recall(entry, top, directory, in_use)
        if found is None and limits is None:
            found = _unmeasured(top, FAR_BELOW)
        elif found is None and limits is not None:
            found = self._walk(entry, in_use, until, limits, top)
            if found is None:
                return None
            if limits.entries < self._limits.entries and found.entries > limits.entries:
                return HEAVY
            self._remembered.learn(found, now)
        assert found is not None
        return self._subject(entry, found, in_use, directory)

    def _recall(
        self, entry: TreeEntry, top: os.stat_result, directory: RootDirectory, in_use: InUse
    ) -> TreeMeasurement | None:
        below = in_use if isinstance(in_use, Unknown) else in_use.below
        known = self._remembered.recall(
            entry, top, directory, below, self._at().now, lambda found: self._last_use(entry, found, in_use)
        )
        stays = entry.kind == tree.TREE and entry.name in directory.kept
        return _unmeasured(top, STAYS) if known is None and stays else known

    def _walk(
        self, entry: TreeEntry, in_use: InUse, until: float, limits: MeasureLimits, top: os.stat_result
    ) -> TreeMeasurement | None:
        """A tree that contains a mount is not walked: a single file mounted inside escapes a walk, or may hang it."""
        known = mounts.own_mounts() if isinstance(in_use, Unknown) else in_use.below.open_files.own_mounts
        if mounts.has_mount_inside(entry.real_path, known):
            return _unmeasured(top, Unknown(measure.MOUNT_POINT))
        end = min(until, time.monotonic() + self._timeouts.tree.total_seconds())
        files = {} if isinstance(in_use, Unknown) else in_use.below.open_files.files
        with opened(entry.inside) as directory:
            return measure.measure(entry.name, directory, files, limits, lambda: time.monotonic() > end)

    def _subject(self, entry: TreeEntry, found: TreeMeasurement, in_use: InUse, directory: RootDirectory) -> Subject:
        used: bool | Unknown
        findings: tuple[str, ...] = ()
        if isinstance(in_use, Unknown):
            used, held_by, named_by = in_use, None, None
        else:
            if entry.kind == translate.REPORT and (unseen := _why_unseen(entry, in_use)) is not None:
                findings = (f"{unseen.why}, {NEVER_FROM_HERE}",)
            used = _is_in_use(entry, found, in_use)
            held_by = open_files.user_of(entry.name, found, in_use.below)
            named_by = in_use.named.who(entry.name) if held_by is None else None
        standing = tree.TreeFacts(
            path=entry.path,
            root=entry.root,
            owner=user_name(found.uid),
            kind=entry.kind,
            category=_category(entry),
            in_use=used,
            kept=None if entry.taken is not None else directory.kept.get(entry.name, named_by),
            findings=findings,
            disk=directory.disk,
            of_users=True,
            last_use=self._last_use(entry, found, in_use),
            labels={"held_by": f"pid {held_by}"} if held_by else {},
        )
        subject = tree.tree_subject(standing, found, self._at())
        if entry.kind == translate.REPORT:
            self._contents[subject.ref.uid] = found.content
        return subject

    def _last_use(self, entry: TreeEntry, found: TreeMeasurement, in_use: InUse) -> LastUse:
        """The rest of an interrupted removal is unused: no process can reach it."""
        now = self._at().now
        if entry.taken is not None or isinstance(in_use, Unknown):
            return access_times.recorded(found, now)
        return access_times.last_use(found, in_use.reads, self.watch.watched(entry.folder, entry.name, now), now)

    async def _in_use(self, directory: str) -> InUse:
        what = "the list of open files"
        needed = await self._needed()
        if isinstance(needed, Unknown):
            return Unknown(f"whether a stopped container needs it is unknown: {needed.why}")
        used = await in_time(lambda: self._used(directory, needed), what, self._timeouts.processes)
        return Unknown(f"{what} {used.why}") if isinstance(used, Unseen) else used

    def _used(self, directory: str, needed: Mapping[str, str]) -> RootUse:
        if not is_trash(Path(directory).name):
            self.watch.add(directory)
        found = self._scan()
        reads = access_times.reads_of(directory, found.own_mounts, found.tables)
        named = self._mentioned(roots.spellings(self.named, directory))
        entries = {name: why for path, why in needed.items() if (name := _entry_of(directory, path)) is not None}
        return RootUse(open_files.below(directory, found), named.and_also(entries), reads)

    async def _is_far_below(self, directory: RootDirectory) -> bool:
        """By an estimate, which takes half the time of a walk and is used for nothing else."""
        now = self._at().now
        if directory.may_be_too_full or directory.above == 0 or self._remembered.is_far_below(directory, now):
            return self._remembered.is_far_below(directory, now)
        known = mounts.own_mounts()
        paths = [one.real_path for one in directory.entries if not mounts.has_mount_inside(one.real_path, known)]
        total = 0
        for start in range(0, len(paths), AT_ONCE):
            some, deadline = paths[start : start + AT_ONCE], self._timeouts.tree
            try:
                held = await in_thread(lambda: measure.estimate(some, deadline), deadline + A_MOMENT)  # noqa: B023
            except TimeoutError:
                return False
            if isinstance(held, Unknown):
                return False  # so it is measured
            total += held
        self._remembered.learn_total(directory, total, now)
        return self._remembered.is_far_below(directory, now)


def _entry_of(directory: str, path: str) -> str | None:
    """The entry of a directory that contains a path; links resolved, like the directory's."""
    real, prefix = os.path.realpath(path), directory.rstrip("/") + "/"
    return real[len(prefix) :].split("/", 1)[0] if real.startswith(prefix) else None


def _is_in_use(entry: TreeEntry, found: TreeMeasurement, used: RootUse) -> bool | Unknown:
    if used.named.who(entry.name) is not None:
        return True
    in_use = open_files.is_in_use(entry.name, found, used.below)
    unseen = _why_unseen(entry, used) if in_use is False else None
    return in_use if unseen is None else unseen


def _why_unseen(entry: TreeEntry, used: RootUse) -> Unknown | None:
    found = used.below.open_files
    return why_unseen(entry.real_path, found.own_mounts, found.exports)


def _category(entry: TreeEntry) -> Category:
    if entry.taken is not None:
        return Category.UNFINISHED
    return Category.REPORT if entry.kind == translate.REPORT else Category.TEMPORARY


def _unmeasured(top: os.stat_result, why: Unknown) -> TreeMeasurement:
    return measure.unmeasured(top.st_dev, top.st_ino, top.st_uid, why)


def _with_rank(report: Subject, ranked: ReportRanking, there: frozenset[str], keep_last: int) -> Subject:
    if report.kept is not None:
        return report
    return msgspec.structs.replace(report, kept=ranked.why_kept(report.ref.uid, there, keep_last))
