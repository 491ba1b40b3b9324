"""Removing one tree, or many closed files of one directory, from beginning to end: moved to the trash, checked again,
and only then deleted; and whether a user could remove a tree without our help, which root checks first for a
request. Whatever the second check finds (a user, a lock, a change, something it could not read) puts the tree back.
After it no process can reach the tree any more, so deleting cannot race. Blocks: call it in a thread.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

from gpukeeper.disk import kernel, measure, trash, worker_pool
from gpukeeper.disk.erase import TreeDeleter
from gpukeeper.disk.kernel import KERNEL
from gpukeeper.disk.open_files import OpenFiles, is_named_by_kernel, users_of_trash
from gpukeeper.disk.trash import Trash, TrashedTree
from gpukeeper.disk.walk import LOCKED, OPEN, Identity, TreeWalk, WalkStopped, WalkTotals, printable
from gpukeeper.model.decision import Changed, Refused
from gpukeeper.model.unknown import Unknown

UNDER_WAY = Refused("an earlier removal of it hangs, perhaps because the disk does not answer; nothing more was done")
_CLIMB = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ACL = "system.posix_acl_access"
_WRITE, _SEARCH = 0o3, 0o1  # as the last digit of a mode: removing an entry requires write and search permission
DEEPEST = 4096  # nested directories; a path of the kernel cannot have more
SHOWN = 3


def others_in(uids: Iterable[int], uid: int) -> str | None:
    """Why a tree with entries of these users may not be removed by that user. None: all of it is theirs."""
    foreign = sorted(set(uids) - {uid})
    if not foreign:
        return None
    named = ", ".join(map(str, foreign[:SHOWN])) + (f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else "")
    return f"not everything in it belongs to uid {uid}: entries of uid {named}. Ask an admin"


def why_not_removable(directory: int, entry_uid: int, uid: int) -> str | None:
    """Why that user may not remove an entry of the open directory that belongs to `entry_uid`. None: they may. They
    must own the entry, which a sticky directory requires as well, and must be able to write to the directory and reach
    it.
    """
    if entry_uid != uid:
        return f"it belongs to uid {entry_uid}, and the request is from uid {uid}. Ask an admin"
    if not _may(directory, uid, _WRITE):
        return f"uid {uid} may not write to its directory, and so may not remove it. Ask an admin"
    return None if _may_reach(directory, uid) else f"uid {uid} may not enter a directory above it. Ask an admin"


def _may_reach(directory: int, uid: int) -> bool:
    """Search permission on every parent directory, by descriptor up to the root."""
    at = os.dup(directory)
    try:
        for _ in range(DEEPEST):
            above = os.open("..", _CLIMB, dir_fd=at)
            here, there = os.fstat(at), os.fstat(above)
            os.close(at)
            at = above
            if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                return True
            if not _may(at, uid, _SEARCH):
                return False
        return False
    finally:
        os.close(at)


def _may(directory: int, uid: int, wanted: int) -> bool:
    found = os.fstat(directory)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == uid:
        return mode >> 6 & wanted == wanted
    # As one of the others. A member of its group gets only the group's permissions, so both must allow it.
    return mode & wanted == wanted and mode >> 3 & wanted == wanted and not _has_acl(directory)


def _has_acl(directory: int) -> bool:
    """An ACL may deny one user what all others have."""
    try:
        os.getxattr(f"/proc/self/fd/{directory}", _ACL)
    except OSError as error:
        return error.errno not in {errno.ENODATA, errno.EOPNOTSUPP}
    return True


ALONE = 2_000  # entries; larger trees are deleted by worker processes, so that this one stays responsive
SHARE = 5_000  # entries after which such a process returns what is left, and reports
_CREW = threading.Lock()  # one group of worker processes at a time, however many removals are in progress
StillFree: TypeAlias = Callable[[int], str | Unknown | None]


class ExpectedTree(msgspec.Struct, frozen=True):
    """What the read that decided saw: the tree, and the newest change of anything in it.

    Times have the resolution of the kernel's tick (some ms), so the tree must have been unchanged for longer than that
    when it was read.
    """

    identity: Identity
    ctime_ns: int
    uid: int | None = None  # requested by a user: every entry must be theirs, and its directory must let them remove it


class TreeRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes_back`: the blocks of everything whose last link was removed by us, unaffected by concurrent writes. A file
    with a link elsewhere returned nothing.
    """

    entries: int
    bytes_back: int | Unknown
    left: tuple[str, ...] = ()  # a sentence for each entry that could not be removed, the first 20 and a count


RemovalResult: TypeAlias = TreeRemoval | Changed | Refused | Unknown


def no_check(tree: int) -> None:
    return None


def no_progress(entries: int) -> None:
    return None


def remove(
    directory: int,
    name: str,
    expected: ExpectedTree,
    *,
    scan: Callable[[], OpenFiles],
    until: float,
    still_free: StillFree = no_check,
    progress: Callable[[int], None] = no_progress,
    sockets: bool = False,
) -> RemovalResult:
    """The entry `name` of the open directory. Removal if it was deleted, as far as possible; otherwise it is where it
    was, and the result has the reason, or where it is now.

    `still_free` gets the tree's descriptor (of a directory) and returns what uses it. `sockets`: dead sockets and pipes
    in it may be removed. `until`: of the monotonic clock.
    """
    before = as_expected(directory, name, expected)
    if not isinstance(before, os.stat_result):
        return before
    device, inode = expected.identity
    with trash.making(directory, f"{device}:{inode}") as bin_:
        if isinstance(bin_, Refused):
            return bin_
        taken = bin_.take(name, expected.identity)
        if not isinstance(taken, TrashedTree):
            return taken
        act = _Act(bin_, taken, until, progress)
        was_at = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), name)  # noqa: PTH115, PTH118
        checks = _Checks(scan, still_free, sockets, before, expected.ctime_ns, expected.uid, was_at)
        try:
            return act.run(checks)
        except OSError as error:
            return act.undo(Unknown(f"the check before deleting failed: {error.strerror}"))
        except BaseException:
            act.undo(Unknown("interrupted"))  # whatever it was, the tree is not the cause
            raise


def finish(
    directory: int,
    taken: TrashedTree,
    *,
    scan: Callable[[], OpenFiles],
    until: float,
    still_free: StillFree = no_check,
    progress: Callable[[int], None] = no_progress,
) -> RemovalResult:
    """The rest of an interrupted run, as `trash.leftovers` returns it. Only moved: it is put back, and decided again.
    Half deleted: the rest is deleted, unless it is in use; it never gets its own name again.
    """
    try:
        with trash.opening(directory, taken.trash) as bin_:
            if not taken.deleting:
                return bin_.put_back(taken) or Changed("an interrupted run had moved it to the trash; it was put back")
            bin_.free_place()
            act = _Act(bin_, taken, until, progress)
            return act.run(_Checks(scan, still_free, True, None, None))
    except OSError as error:
        return Unknown(f"{taken.trash} could not be finished: {error.strerror}")


class _Checks(msgspec.Struct, frozen=True):
    """What is checked of a tree in the trash. Without `before` it is half deleted: then times prove nothing."""

    scan: Callable[[], OpenFiles]
    still_free: StillFree
    sockets: bool
    before: os.stat_result | None
    ctime_ns: int | None
    uid: int | None = None
    was_at: str | None = None  # its path before the move


class _Act:
    """One tree in the trash, until it is deleted or put back."""

    def __init__(self, bin_: Trash, taken: TrashedTree, until: float, progress: Callable[[int], None]) -> None:
        self.bin, self.taken, self.until, self.progress = bin_, taken, until, progress

    def run(self, checks: _Checks) -> RemovalResult:
        # Before we open anything of it ourselves, so that any process found is another one.
        open_files = checks.scan()
        why = _first(lambda: self._users(open_files, checks.was_at), lambda: self._moved(checks))
        if why is not None:
            return self.undo(why)
        if not stat.S_ISDIR(os.stat(self.taken.name, dir_fd=self.bin.fd, follow_symlinks=False).st_mode):
            return self._run_file(checks, open_files)
        try:
            tree = kernel.open_inside(self.bin.fd, self.taken.name)
        except OSError as error:
            return self.undo(Unknown(f"it could not be opened: {error.strerror}"))
        try:
            tally = WalkTotals(open_files.files)
            why = _first(
                lambda: self._lock(tree),
                lambda: _refused_by_check(checks.still_free(tree)),
                lambda: self._walk(tree, checks, tally),
            )
            if why is not None:
                return self.undo(why)
            return self._delete(tree, tally.entries)
        finally:
            os.close(tree)

    def undo(self, why: Changed | Unknown) -> Changed | Refused | Unknown:
        """Puts it back. What is half deleted stays in the trash, so that it is not taken for complete."""
        if self.taken.deleting:
            return Unknown(f"the rest of it is in {self.taken.trash}: {why.why}")
        return self.bin.put_back(self.taken) or why

    def _users(self, open_files: OpenFiles, was_at: str | None) -> Changed | Unknown | None:
        # By identity too: where all users may rename, our trash may have another name by now.
        user: int | Unknown | None = open_files.user_of(self.taken.identity)
        if user is None:
            user = users_of_trash(self.taken.trash, open_files)
        # The layers of an overlay keep the names that they had when it was mounted.
        if not isinstance(user, int) and was_at is not None and is_named_by_kernel(was_at, open_files):
            user = KERNEL
        if isinstance(user, Unknown):
            return Unknown(f"whether it is in use is unknown: {user.why}")
        return None if user is None else Changed(used_by(user))

    def _moved(self, checks: _Checks) -> Changed | None:
        """The rename itself changes only the change time of the tree's own entry; everything else must be as before."""
        if checks.before is None:
            return None
        now = os.stat(self.taken.name, dir_fd=self.bin.fd, follow_symlinks=False)
        same = all(
            getattr(now, field) == getattr(checks.before, field)
            for field in ("st_mtime_ns", "st_size", "st_mode", "st_uid", "st_gid", "st_nlink")
        )
        return None if same else Changed("it changed since it was read")

    def _lock(self, tree: int) -> Changed | Unknown | None:
        try:
            return None if kernel.lock(tree) else Changed(LOCKED)
        except OSError as error:
            return Unknown(f"whether it is locked could not be determined: {error.strerror}")

    def _walk(self, tree: int, checks: _Checks, tally: WalkTotals) -> Changed | Unknown | None:
        walk = TreeWalk(tally, is_time_up=lambda: time.monotonic() > self.until, locking=True)
        try:
            measure.measure_below(walk, tree)
        except WalkStopped as enough:
            return Unknown(f"it {enough}")
        return _found(tally, checks)

    def _run_file(self, checks: _Checks, open_files: OpenFiles) -> RemovalResult:
        found = os.stat(self.taken.name, dir_fd=self.bin.fd, follow_symlinks=False)
        tally = WalkTotals(open_files.files)
        tally.add([found])
        if stat.S_ISREG(found.st_mode) and kernel.is_open(self.bin.fd, self.taken.name):
            tally.problem(OPEN)
        why = _found(tally, msgspec.structs.replace(checks, ctime_ns=None))
        if why is not None:
            return self.undo(why)
        self._mark_for_deletion()
        eraser = TreeDeleter(self.until)
        eraser.remove_file(self.bin.fd, self.taken.name)
        return removal_of(eraser, self.bin)

    def _delete(self, tree: int, entries: int) -> TreeRemoval:
        self._mark_for_deletion()
        eraser = TreeDeleter(self.until)
        if entries < ALONE:
            eraser.empty(tree)
        else:
            with _CREW:
                self._share_out(tree, eraser)
        if eraser.stopped is None and not eraser.left_count:
            eraser.remove_empty(self.bin.fd, os.fsencode(self.taken.name))
        return removal_of(eraser, self.bin)

    def _share_out(self, tree: int, eraser: TreeDeleter) -> None:
        later: list[bytes] = []

        def accept(answer: dict[str, Any]) -> None:
            eraser.merge(answer)
            later.extend(path.encode("latin-1") for path in answer["later"])
            self.progress(eraser.entries)

        settings = {"until": self.until, "quantum": SHARE}
        # They watch the clock themselves and report their result; we wait a little longer for that.
        with worker_pool.WorkerPool("erase", tree, settings) as programs:
            left, unfinished = eraser.empty(tree, quantum=worker_pool.MEANWHILE)
            later += unfinished
            while left and eraser.stopped is None and not programs.is_ready():
                more, unfinished = eraser.remove(tree, left.pop()[0], worker_pool.MEANWHILE)
                left += more
                later += unfinished
            why = programs.share_out(left, accept, lambda: _is_past(self.until + 5))
        if why is not None:
            eraser.stopped = why
        if eraser.stopped is not None:
            return
        for path in sorted(set(later), key=lambda path: path.count(b"/"), reverse=True):
            eraser.remove_empty(tree, path)

    def _mark_for_deletion(self) -> None:
        self.bin.mark_for_deletion()
        self.taken = msgspec.structs.replace(self.taken, deleting=True)


def as_expected(directory: int, name: str, expected: ExpectedTree) -> os.stat_result | Changed | Refused:
    """Checked again before it is moved, so that a tree that changed is not even touched."""
    if not name or "/" in name or name in {".", ".."} or trash.is_trash(name):
        return Refused(f"{printable(name)!r} is not a valid name of a tree")
    try:
        found = kernel.stat_inside(directory, name)
    except FileNotFoundError:
        return Changed("it is gone already")
    except OSError as error:
        mounted = error.errno == errno.EXDEV
        return Refused(f"it was not removed: {'something is mounted on it' if mounted else error.strerror}")
    if (found.st_dev, found.st_ino) != expected.identity:
        return Changed("another entry has its name now")
    if expected.uid is not None:
        why = why_not_removable(directory, found.st_uid, expected.uid)
        if why is not None:
            return Refused(f"it was not removed: {why}")
    if found.st_ctime_ns > expected.ctime_ns:
        return Changed("it changed since it was read")
    return found


def _found(tally: WalkTotals, checks: _Checks) -> Changed | Unknown | None:
    """What the walk over a tree in the trash finds against deleting it."""
    if tally.held_by is not None:
        return Changed(used_by(tally.held_by))
    for used in (LOCKED, OPEN):
        if used in tally.problems:
            return Changed(used)
    if tally.problems:
        return Unknown(measure.in_short(tally.problems))
    if checks.uid is not None and (why := others_in(tally.uids, checks.uid)) is not None:
        return Changed(why)
    if checks.ctime_ns is not None and tally.ctime_ns > checks.ctime_ns:
        return Changed("something in it changed since it was read")
    if tally.devices or ((tally.sockets or tally.fifos) and not checks.sockets):
        return Unknown("it contains a socket, a pipe or a device, and their users cannot be determined by open files")
    return None


def _first(*questions: Callable[[], Changed | Unknown | None]) -> Changed | Unknown | None:
    """The first reason against it; later checks are skipped then."""
    for ask in questions:
        why = ask()
        if why is not None:
            return why
    return None


def _refused_by_check(answer: str | Unknown | None) -> Changed | Unknown | None:
    return Changed(answer) if isinstance(answer, str) else answer


def used_by(pid: int) -> str:
    return "it is in use: mounted somewhere, or by the kernel itself" if pid == KERNEL else f"it is in use by pid {pid}"


def removal_of(eraser: TreeDeleter, bin_: Trash) -> TreeRemoval:
    left = tuple(eraser.left)
    if eraser.left_count > len(left):
        left += (f"and {eraser.left_count - len(left):,} more",)
    if eraser.stopped is not None:
        left += (f"it {eraser.stopped}; the rest is in {bin_.name}, and the next pass continues",)
    return TreeRemoval(entries=eraser.entries, bytes_back=eraser.back(), left=left)


def _is_past(until: float) -> bool:
    return time.monotonic() > until


_NOTHING = TreeRemoval(entries=0, bytes_back=0)


class FileRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """Of many files: what was removed, and for each of the others why it was not."""

    removal: TreeRemoval
    removed: tuple[str, ...]
    kept: dict[str, Changed | Refused | Unknown]


def remove_files(
    directory: int,
    files: Sequence[tuple[str, ExpectedTree]],
    *,
    scan: Callable[[], OpenFiles],
    until: float,
) -> FileRemoval:
    """Many closed files of one directory, with one read of open files."""
    kept: dict[str, Changed | Refused | Unknown] = {}
    with trash.making(directory, trash.SEVERAL) as bin_:
        if isinstance(bin_, Refused):
            return FileRemoval(removal=_NOTHING, removed=(), kept={name: bin_ for name, _ in files})
        taken: list[tuple[TrashedTree, os.stat_result]] = []
        for name, expected in files:
            before = as_expected(directory, name, expected)
            got = bin_.take(name, expected.identity) if isinstance(before, os.stat_result) else before
            if isinstance(got, TrashedTree) and isinstance(before, os.stat_result):
                taken.append((got, before))
            elif not isinstance(got, TrashedTree):
                kept[name] = got
        try:
            free = _keep_used(bin_, taken, scan, kept)
        except BaseException:
            for one, _ in taken:
                bin_.put_back(one)
            raise
        if not free:
            return FileRemoval(removal=_NOTHING, removed=(), kept=kept)
        bin_.mark_for_deletion()
        eraser = TreeDeleter(until)
        for name in free:
            eraser.remove_file(bin_.fd, name)
        gone = tuple(name for name in free if not _is_there(bin_.fd, name))
        return FileRemoval(removal=removal_of(eraser, bin_), removed=gone, kept=kept)


def _keep_used(
    bin_: Trash,
    taken: list[tuple[TrashedTree, os.stat_result]],
    scan: Callable[[], OpenFiles],
    kept: dict[str, Changed | Refused | Unknown],
) -> list[str]:
    """Puts back what is used or changed, and returns the names of the others."""
    open_files = scan()
    inside = f"/{bin_.name}/"
    used = {path.partition(inside)[2]: pid for path, pid in open_files.paths.items() if inside in path}
    seen_through = users_of_trash(bin_.name, open_files)
    free = []
    for one, before in taken:
        why: Changed | Unknown | None = None
        found = os.stat(one.name, dir_fd=bin_.fd, follow_symlinks=False)
        user = used.get(one.name, open_files.user_of(one.identity))
        if user is not None:
            why = Changed(used_by(user))
        elif seen_through == KERNEL:
            why = Changed(used_by(KERNEL))
        elif open_files.hidden:
            why = Unknown(f"whether it is in use is unknown: {open_files.hidden}")
        elif not stat.S_ISREG(found.st_mode):
            why = Changed("it is not a regular file")
        elif (found.st_mtime_ns, found.st_size) != (before.st_mtime_ns, before.st_size):
            why = Changed("it changed since it was read")
        elif kernel.is_open(bin_.fd, one.name):
            why = Changed(OPEN)
        if why is None:
            free.append(one.name)
        else:
            kept[one.name] = bin_.put_back(one) or why
    return free


def _is_there(directory: int, name: str) -> bool:
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=directory, follow_symlinks=False)
        return True
    return False
