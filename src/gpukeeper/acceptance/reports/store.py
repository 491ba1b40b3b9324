"""The directory of reports: one directory for a run, complete or absent.

Retention removes only what is certainly ours and nothing else: a directory with a report of this schema, a manifest
that names all files in it, no KEEP. Links are never followed, and what cannot be read is named.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import accumulate
from pathlib import Path

import msgspec

from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import formats, legacy, merge
from gpukeeper.acceptance.reports.html import page_of_report
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.gpu import Grade

KEEP, MANIFEST = "KEEP", "MANIFEST.sha256"
HTML, CSV, JUNIT, METRICS = "report.html", "results.csv", "junit.xml", "metrics.prom"
OLDEST = timedelta(days=90)
_KEEP_TEXT = b"This report is excluded from automatic deletion. Delete this file to end that.\n"
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNFINISHED = ".unfinished-"
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644
_LARGEST = 256 << 20  # bytes; samples of a day on eight GPUs are a fifth of it


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the directory. `problem`: why nothing else is known of it."""

    run: str
    path: str
    node: str = ""
    started: datetime | None = None
    ended: datetime | None = None
    verdict: Grade | None = None
    reason: str = ""
    device: str = ""
    profile: str = ""
    kept: bool = False
    problem: str = ""


class RetentionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What retention did: `removed` are gone, `spared` would have been due, with the reason why they stay."""

    removed: tuple[str, ...] = ()
    spared: Mapping[str, str] = {}


class ReportFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(
        self,
        report: Report,
        *,
        keep: bool = False,
        with_legacy: bool = False,
        summary: str = legacy.SUMMARY,
        extra: Mapping[str, bytes] | None = None,
        name: str = "",
    ) -> Path:
        """All views of a report; the path of its directory. `extra`: logs to keep with it. A run is never
        overwritten. `name`: of the directory, instead of the run's."""
        final = self.path / _run_name(name or report.run)
        if os.path.lexists(final):
            raise UsageError(f"{final} exists already; a report is never overwritten. Nothing was written.")
        report = formats.encodable(report)
        contents = {**_views(report), **_old(report, summary, with_legacy), **(extra or {})}
        if keep:
            contents[KEEP] = _KEEP_TEXT
        self._place(final, contents)
        return final

    def add(self, name: str, text: bytes, extra: Mapping[str, bytes]) -> Path:
        """A report as another machine sent it, byte for byte. The same one again changes nothing; another one under
        this name is written beside it."""
        for number in range(1, 1000):
            final = self.path / (_run_name(name) if number == 1 else f"{name}.{number}")
            if not os.path.lexists(final):
                self._place(final, {formats.REPORT: text, **extra})
                return final
            with suppress(KeeperError):  # one that cannot be read stays as it is
                if read(final / formats.REPORT) == text:
                    return final
        raise KeeperError(f"{self.path} has too many reports of {name}. Nothing was written.")

    def _place(self, final: Path, contents: Mapping[str, bytes]) -> None:
        """Complete or not at all, and durable."""
        made = self.path / f"{_UNFINISHED}{final.name}-{secrets.token_hex(4)}"
        try:
            self.path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            _write_all(made, contents)
            made.rename(final)  # the system refuses if another process wrote this run meanwhile
            _sync(self.path)
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            raise KeeperError(
                f"The report {final.name} could not be written to {self.path}: {error}. Nothing was kept."
            ) from error

    def keep(self, wanted: str, *, kept: bool = True) -> Path:
        """Take a run out of retention, or give it back."""
        marker = self.find(wanted) / KEEP
        if kept:
            _write_one(marker, _KEEP_TEXT, anew=False)
        else:
            marker.unlink(missing_ok=True)
        return marker.parent

    def list(self) -> Sequence[StoredRun]:
        """Newest first; those that cannot be read first of all, each with its problem."""
        entries = [entry for path in self._folders() if (entry := _entry(path)) is not None]
        readable = sorted((one for one in entries if one.started), key=_when, reverse=True)
        return [*(one for one in entries if not one.started), *readable]

    def find(self, wanted: str) -> Path:
        """The directory of a run: by its name, by how its name begins, or by a path to it or to its report.json."""
        given = Path(wanted)
        if given.name == formats.REPORT and given.is_file():
            return given.parent
        if (given / formats.REPORT).is_file():
            return given
        names = [path.name for path in self._folders() if not path.name.startswith(".")]
        found = [wanted] if wanted in names else [name for name in names if wanted and name.startswith(wanted)]
        if len(found) == 1:
            return self.path / found[0]
        if found:
            raise UsageError(f"{wanted} is ambiguous: {', '.join(sorted(found))}. Use a longer prefix.")
        known = ", ".join(sorted(names, reverse=True)[:5]) or "none"
        raise UsageError(f"Report {wanted} not found in {self.path}. Newest reports: {known}.")

    def load(self, wanted: str, *, samples: bool = True) -> Report:
        """`samples`: with timeline and records, where their file is still there."""
        directory = self.find(wanted)
        report = load_file(directory / formats.REPORT)
        beside = directory / formats.SAMPLES
        if not samples or not beside.exists():
            return report
        return formats.with_samples(report, formats.read_samples(read(beside), str(beside)), str(beside))

    def verify(self, wanted: str) -> Sequence[str]:
        """Differences from the manifest, a sentence each; empty if there are none."""
        directory = self.find(wanted)
        listed = _manifest(directory)
        if listed is None:
            return [f"{directory / MANIFEST} could not be read; nothing was compared."]
        there = {path.name for path in directory.iterdir()} - {MANIFEST, KEEP}
        wrong = [f"{name} is missing." for name in sorted(listed.keys() - there)]
        wrong += [f"{name} is not in the manifest." for name in sorted(there - listed.keys())]
        both = sorted(there & listed.keys())
        return wrong + [f"{name} was changed." for name in both if _digest(read(directory / name)) != listed[name]]

    def prune(
        self,
        now: datetime,
        *,
        older_than: timedelta = OLDEST,
        keep_last: int = 1,
        most: int | None = None,
        quota: int | None = None,
    ) -> RetentionResult:
        """Remove runs that ended before then, and the oldest beyond `most` runs and beyond `quota` bytes; never the
        newest `keep_last`."""
        runs = [entry for entry in self.list() if not entry.problem]
        together = list(accumulate(_size(Path(entry.path)) for entry in runs)) if quota is not None else []
        due = [
            entry
            for place, entry in enumerate(runs)
            if place >= keep_last
            and (
                (entry.ended and now - entry.ended > older_than)
                or (most is not None and place >= most)
                or (quota is not None and together[place] > quota)
            )
        ]
        spared = {entry.run: entry.problem for entry in self.list() if entry.problem}
        removed = []
        for entry in due:
            why = _why_not_removed(Path(entry.path), entry)
            if why:
                spared[entry.run] = why
            else:
                removed.append(entry.run)
        return RetentionResult(removed=tuple(removed), spared=spared)

    def _folders(self) -> Iterable[Path]:
        """Real directories only: a link may lead anywhere."""
        try:
            with os.scandir(self.path) as entries:
                return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise KeeperError(f"The report directory {self.path} could not be read: {error}.") from error


def _size(directory: Path) -> int:
    """Bytes of its files. What cannot be read counts as 0; whether it may be removed is checked later."""
    size = 0
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                size += entry.stat(follow_symlinks=False).st_size
    return size


def _views(report: Report) -> dict[str, bytes]:
    return {
        formats.REPORT: formats.report_json(report),
        formats.SAMPLES: formats.samples_json(report),
        HTML: page_of_report(report).encode(),
        CSV: merge.report_csv(report).encode(),
        JUNIT: formats.junit_xml(report).encode(),
        METRICS: formats.metrics(report).encode(),
    }


def refuse_summary(name: str) -> None:
    """Also checked before a run: an hour of testing must not end without its report."""
    taken = {formats.REPORT, formats.SAMPLES, HTML, CSV, JUNIT, METRICS, KEEP, MANIFEST}
    if not _RUN_NAME.fullmatch(name) or name in taken:
        raise UsageError(f"--report-name {name!r}: not a plain file name. Use for example summary.json.")


def _old(report: Report, summary: str, with_legacy: bool) -> dict[str, bytes]:
    refuse_summary(summary)
    return {name: text.encode() for name, text in legacy.files(report, summary).items()} if with_legacy else {}


def folder_name(run: str, node: str) -> str:
    """Of one node of a run over many: several nodes may share a report directory."""
    name = f"{run}.{re.sub('[^A-Za-z0-9._-]', '-', node)}"
    return name if len(name) <= 128 else f"{name[:110]}-{_digest(name.encode())[:16]}"


def _run_name(run: str) -> str:
    if not _RUN_NAME.fullmatch(run):
        raise UsageError(
            f"{run!r} is not a valid directory name: only letters, digits, dots, dashes and underscores are allowed."
        )
    return run


def _write_all(directory: Path, contents: Mapping[str, bytes]) -> None:
    directory.mkdir(mode=0o700)
    for name, content in contents.items():
        _write_one(directory / name, content)
    digests = sorted((name, _digest(content)) for name, content in contents.items() if name != KEEP)
    _write_one(directory / MANIFEST, "".join(f"{digest}  {name}\n" for name, digest in digests).encode())
    directory.chmod(_FOLDER_MODE)
    _sync(directory)


def _write_one(path: Path, content: bytes, *, anew: bool = True) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_EXCL if anew else os.O_TRUNC)
    with os.fdopen(os.open(path, flags, _FILE_MODE), "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), _FILE_MODE)
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read(path: Path) -> bytes:
    """Of a regular file only: a pipe in its place would make us wait for ever, a device would fill the memory."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
                raise KeeperError(
                    f"{path} could not be read: it is not a regular file of at most {_LARGEST >> 20} MiB."
                )
            return file.read(_LARGEST)
    except OSError as error:
        raise KeeperError(f"{path} could not be read: {error}.") from error


def load_file(path: Path) -> Report:
    """The report in this file. One that the manifest beside it does not confirm accepts no node."""
    text = read(path)
    return formats.read_report(text, str(path), _unlisted(path, text))


def _unlisted(path: Path, text: bytes) -> Iterable[str]:
    listed = _manifest(path.parent)
    if listed is None:
        yield (
            f"whether {path} was changed is unknown: there is no readable {MANIFEST} next to it; copy the whole"
            " directory of a run"
        )
    elif path.name not in listed:
        yield f"{path} is not in the {MANIFEST} next to it"
    elif listed[path.name] != _digest(text):
        yield f"{path} was changed after it was written: its digest is not the one in {MANIFEST}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entry(directory: Path) -> StoredRun | None:
    """None: nothing of ours, as far as can be seen."""
    if directory.name.startswith(_UNFINISHED):
        words = "incomplete: the run ended while its report was written. Delete it manually"
        return StoredRun(run=directory.name, path=str(directory), problem=words)
    path = directory / formats.REPORT
    if not os.path.lexists(path):
        return None
    try:
        report = load_file(path)
    except (KeeperError, OSError) as error:
        return StoredRun(run=directory.name, path=str(directory), problem=str(error))
    fields = ("node", "started", "ended", "verdict", "reason", "device", "profile")
    found = {name: getattr(report, name) for name in fields}
    return StoredRun(run=directory.name, path=str(directory), kept=os.path.lexists(directory / KEEP), **found)


def _when(entry: StoredRun) -> tuple[datetime, str]:
    assert entry.started is not None, "only readable entries are ordered by time"
    return entry.started, entry.run


def _manifest(directory: Path) -> dict[str, str] | None:
    try:
        lines = read(directory / MANIFEST).decode().splitlines()
    except (KeeperError, UnicodeError):
        return None
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines) if name}


def _why_not_removed(directory: Path, entry: StoredRun) -> str:
    """Removes it, or returns why not."""
    if entry.kept:
        return "it is kept"
    listed = _manifest(directory)
    if listed is None:
        return f"its {MANIFEST} could not be read, so its files may not belong to gpukeeper"
    elsewhere = [name for name in listed if "/" in name or name in {".", ".."}]
    if elsewhere:
        return f"its {MANIFEST} lists files outside this directory: {elsewhere[0]}"
    try:
        number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return _remove(directory, number, listed)
        finally:
            os.close(number)
    except OSError as error:
        return f"it could not be removed: {error}"


def _remove(directory: Path, number: int, listed: Mapping[str, str]) -> str:
    """What is unlinked are names seen in this very directory, never names from a file."""
    with os.scandir(number) as entries:
        there = {one.name: stat.S_ISREG(one.stat(follow_symlinks=False).st_mode) for one in entries}
    foreign = sorted(name for name, plain in there.items() if not plain or name not in {*listed, MANIFEST})
    if foreign:
        return f"it contains files that gpukeeper did not write: {', '.join(foreign[:3])}"
    gone = directory.with_name(f"{_UNFINISHED}{directory.name}-{secrets.token_hex(4)}")
    directory.rename(gone)  # from here on a part of it is not taken for a report
    for name in there:
        os.unlink(name, dir_fd=number)
    gone.rmdir()
    return ""
