"""Moving a tree out of the reach of all processes in one step, so that it can be checked again, and put back; and
which names may be deleted at all. The trash is a directory of ours beside the tree that no other user may enter. A
link in it names the tree, and whether it was only moved (a crash puts it back) or is being deleted (a crash leaves
it to be finished). Meanwhile an empty file of ours has the name of the tree, so that it is not taken; a tree whose
name is taken is put back under a visible name beside it. All names around it are untrusted.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from gpukeeper.disk import kernel
from gpukeeper.disk.walk import Identity, printable
from gpukeeper.model.decision import Changed, Refused

TRASH = ".gpukeeper-trash-"  # and 16 hexadecimal digits; such names are never offered as trees themselves
TAKEN, DELETING = ".gpukeeper", ".gpukeeper-deleting"  # the name of the link in it
# The link about the file at the tree's name; that file, back here.
PLACE, FREED = ".gpukeeper-place", ".gpukeeper-freed"
# and 8 hexadecimal digits, after the name of a tree that could not have its name back
RETURNED = ".gpukeeper-returned-"
SEVERAL = "*"
_NAME = re.compile(re.escape(TRASH) + r"[0-9a-f]{16}")
_PLACE = re.compile(r"1 (\d+) (.+)", re.DOTALL)
_PROOF = re.compile(r"1 \d+:(\d+) (?:\d+:(\d+)|\*)")
# Several removals of this process may be in progress in one directory: none must take the trash of another that is just
# being created, or read, for an abandoned one. By directory, so that a disk that hangs blocks few others.
_ALONE = tuple(threading.Lock() for _ in range(64))

# Why a rename is refused, to explain why a tree is kept.
_NO_LOCKS = "directories of its filesystem cannot be locked, so two runs could collide; reclaim it by hand"
_REFUSALS = {
    errno.EBADF: _NO_LOCKS,
    errno.ENOLCK: _NO_LOCKS,
    errno.EOPNOTSUPP: _NO_LOCKS,
    errno.EBUSY: "something is mounted on it",
    errno.EXDEV: "it cannot be moved within its directory: it comes from a read-only layer below, or is a mount",
    errno.EPERM: "it may not be moved: it is immutable, or its directory is sticky and it belongs to another user",
    errno.EACCES: "its directory is not writable; run as root or as the owner",
    errno.EROFS: "its filesystem is mounted read-only",
    errno.ENOSPC: (
        "its filesystem has no space for even an empty directory; run as root, for whom some is reserved, or free "
        "some space by hand"
    ),
    errno.EDQUOT: "the disk quota is used up; run as root, or free some space by hand",
    errno.EINVAL: "its filesystem cannot rename without replacing an existing entry",
    errno.ENOSYS: "this kernel cannot rename without replacing an existing entry",
    errno.EEXIST: "its name is reserved for the trash",
}


class TrashedTree(msgspec.Struct, frozen=True, kw_only=True):
    """A tree in our trash."""

    trash: str  # name of the trash directory, beside the tree
    name: str  # of the tree, before and after
    identity: Identity
    deleting: bool = False  # its deletion began: it may be incomplete


def is_trash(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def holds_a_name(found: os.stat_result) -> bool:
    """Whether it looks like the empty file of ours that has the name of a tree while that is checked. The content at
    that name cannot be learned from it.
    """
    ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode) and not found.st_mode & 0o7777
    return ours and found.st_size == 0


def take(parent: int, name: str, identity: Identity) -> TrashedTree | Changed | Refused:
    """Out of reach, or left where it is."""
    with making(parent, f"{identity[0]}:{identity[1]}") as trash:
        return trash if isinstance(trash, Refused) else trash.take(name, identity)


def put_back(parent: int, taken: TrashedTree) -> Refused | None:
    """Under its old name, and the trash directory is removed when it is empty. Refused: it is still in the trash."""
    try:
        with opening(parent, taken.trash) as trash:
            return trash.put_back(taken)
    except OSError as error:
        return _not_put_back(taken, error.strerror or str(error))


class Trash:
    """An open trash directory of ours. By descriptor, so that it stays the same whatever is renamed around it."""

    def __init__(self, parent: int, name: str, fd: int, holds_place: bool = False) -> None:
        """`holds_place`: whether a tree that is moved leaves a file of ours at its name."""
        self.parent, self.name, self.fd, self.holds_place = parent, name, fd, holds_place

    def take(self, name: str, identity: Identity) -> TrashedTree | Changed | Refused:
        try:
            # Checked first, only to spare an unrelated entry of the same name the move there and back.
            if _identity(self.parent, name) != identity:
                return Changed("another entry has its name now")
            self._move_in(name)
        except FileNotFoundError:
            return Changed("it is gone already")
        except OSError as error:
            return Refused(_refusal(error))
        taken = TrashedTree(trash=self.name, name=name, identity=identity)
        if _identity(self.fd, name) == identity:
            return taken
        return self.put_back(taken) or Changed("another entry had its name; that entry was put back")

    def put_back(self, taken: TrashedTree) -> Refused | None:
        """Under its name, or beside it if another entry has that. Refused names its place then."""
        if self._put_in_place(taken):
            return None
        try:
            kernel.rename_inside(self.fd, taken.name, self.parent, taken.name)
        except FileExistsError:
            return self._put_beside(taken)
        except OSError as error:
            return _not_put_back(taken, error.strerror or str(error))
        self._forget_place()
        return None

    def mark_for_deletion(self) -> None:
        """From here on a crash leads to deletion and not to putting back. By a rename, since that needs no space at
        all. Its name is free again.
        """
        with suppress(FileNotFoundError):  # it was before
            kernel.rename_inside(self.fd, TAKEN, self.fd, DELETING)
        self.free_place()

    def free_place(self) -> None:
        """Removes our file from the name of the tree, and nothing else: another entry is put back at once."""
        place = self._place()
        if place is None:
            return
        inode, name = place
        if _is_place(self.parent, name, inode):
            with suppress(OSError):
                kernel.rename_inside(self.parent, name, self.fd, FREED)
        if not _is_place(self.fd, FREED, inode):
            with suppress(OSError):
                kernel.rename_inside(self.fd, FREED, self.parent, name)
        self._forget_place()

    def _move_in(self, name: str) -> None:
        if self._make_place(name):
            try:
                kernel.exchange_inside(self.parent, name, self.fd, name)
            except OSError:
                os.unlink(name, dir_fd=self.fd)  # ours; whether the tree may be moved at all is checked below
                self._forget_place()
            else:
                return
        kernel.rename_inside(self.parent, name, self.fd, name)

    def _make_place(self, name: str) -> bool:
        """First under a name of ours: after a crash a file without the link is recognized by it."""
        if not self.holds_place:
            return False
        try:
            fd = os.open(FREED, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0, dir_fd=self.fd)
        except OSError:
            return False
        try:
            os.symlink(f"1 {os.fstat(fd).st_ino} {name}", PLACE, dir_fd=self.fd)
            kernel.rename_inside(self.fd, FREED, self.fd, name)
        except OSError:
            self._forget_place()
            self._forget_freed()
            return False
        finally:
            os.close(fd)
        return True

    def _put_in_place(self, taken: TrashedTree) -> bool:
        place = self._place()
        if place is None or place[1] != taken.name or not _is_place(self.parent, taken.name, place[0]):
            return False
        try:
            kernel.exchange_inside(self.fd, taken.name, self.parent, taken.name)
        except OSError:
            return False
        if not _is_place(self.fd, taken.name, place[0]):  # another process was faster: its entry stays
            with suppress(OSError):
                kernel.rename_inside(self.fd, taken.name, self.parent, _beside(taken.name))
        self._forget_place()
        return True

    def _put_beside(self, taken: TrashedTree) -> Refused:
        name = _beside(taken.name)
        try:
            kernel.rename_inside(self.fd, taken.name, self.parent, name)
        except OSError as error:
            return _not_put_back(taken, error.strerror or str(error))
        self._forget_place()
        return Refused(
            "it was not removed, and could not have its name back: another entry of that name was created "
            "while it was checked. It is complete and has the same owner as before, beside its old place as "
            f"{printable(name)}. Rename it by hand"
        )

    def _place(self) -> tuple[int, str] | None:
        """The inode of our file, and the name it has or had."""
        try:
            match = _PLACE.fullmatch(os.readlink(PLACE, dir_fd=self.fd))
        except OSError:
            return None
        return None if match is None else (int(match[1]), match[2])

    def _forget_place(self) -> None:
        """The link, and our file if it is in here by now."""
        place = self._place()
        if place is not None:
            for name in (FREED, place[1]):
                if _is_place(self.fd, name, place[0]):
                    os.unlink(name, dir_fd=self.fd)
        with suppress(FileNotFoundError):
            os.unlink(PLACE, dir_fd=self.fd)

    def _forget_freed(self) -> None:
        """Our file, if no link about it was made yet."""
        with suppress(FileNotFoundError):
            if self._place() is None and holds_a_name(os.stat(FREED, dir_fd=self.fd, follow_symlinks=False)):
                os.unlink(FREED, dir_fd=self.fd)

    def close(self) -> None:
        """Removes it if only the link is left in it."""
        with suppress(OSError):  # then an empty directory stays, for the next sweep
            self.remove()
        os.close(self.fd)

    def remove(self) -> bool:
        if not self._holds_tree():
            self.free_place()
        self._forget_freed()
        names = set(_names(self.fd))
        if names - {TAKEN, DELETING}:
            return False
        for name in names:
            os.unlink(name, dir_fd=self.fd)
        found = os.fstat(self.fd)
        if _identity(self.parent, self.name) != (found.st_dev, found.st_ino):
            return False  # another process renamed it
        os.rmdir(self.name, dir_fd=self.parent)
        return True

    def _holds_tree(self) -> bool:
        """Something other than our own file."""
        place = self._place()
        names = set(_names(self.fd)) - {TAKEN, DELETING, PLACE, FREED}
        return any(place is None or not _is_place(self.fd, name, place[0]) for name in names)


@contextmanager
def making(parent: int, bound: str) -> Iterator[Trash | Refused]:
    """A new trash directory, with the link that proves it. Removed afterwards if nothing was put into it."""
    name = TRASH + secrets.token_hex(8)
    try:
        trash = Trash(parent, name, _made(parent, name), holds_place=bound != SEVERAL)
    except OSError as error:
        yield Refused(_refusal(error))
        return
    try:
        refused = _prove(trash.fd, bound)
        yield trash if refused is None else refused
    finally:
        trash.close()


@contextmanager
def opening(parent: int, name: str) -> Iterator[Trash]:
    """An existing trash directory. PermissionError if it is not ours, or not private; BlockingIOError if another run is
    working in it.
    """
    with _alone(parent):
        trash = Trash(parent, name, _private(parent, name))
    try:
        yield trash
    finally:
        trash.close()


def leftovers(parent: int) -> tuple[TrashedTree, ...]:
    """The rest of an interrupted run in trash of our own. Other entries are ignored."""
    names = sorted(name for name in _names(parent) if is_trash(name))
    with _alone(parent):
        return tuple(taken for name in names for taken in _contents(parent, name))


def sweep(parent: int) -> int:
    """Removes empty trash directories of our own, as a crash leaves them. Returns their number."""
    names = [name for name in _names(parent) if is_trash(name)]
    with _alone(parent):
        return sum(_swept(parent, name) for name in names)


def _made(parent: int, name: str) -> int:
    """Nothing stays of one that cannot be used: no sweep would recognize it as ours."""
    with _alone(parent):
        os.mkdir(name, 0o700, dir_fd=parent)
        try:
            return _private(parent, name)
        except OSError:
            with suppress(OSError):
                os.rmdir(name, dir_fd=parent)
            raise


def _alone(parent: int) -> threading.Lock:
    found = os.fstat(parent)
    return _ALONE[hash((found.st_dev, found.st_ino)) % len(_ALONE)]


def _private(parent: int, name: str) -> int:
    """Opened and locked: what a run is working on is not left over, and no other run may put it back."""
    fd = kernel.open_inside(parent, name)
    found = os.fstat(fd)
    try:
        if found.st_uid != os.geteuid() or found.st_mode & 0o777 != 0o700:
            raise PermissionError(errno.EPERM, "its trash directory is not ours any more", name)
        if not kernel.lock(fd):
            raise BlockingIOError(errno.EAGAIN, "another run is working in its trash directory", name)
    except OSError:
        os.close(fd)
        raise
    return fd


def _prove(trash: int, bound: str) -> Refused | None:
    """Empty, too: in a directory where all users may rename, ours may have been swapped for another of our own."""
    found = os.fstat(trash)
    try:
        if _names(trash):
            return Refused("it was not removed: its trash directory was swapped for another")
        os.symlink(f"1 {found.st_dev}:{found.st_ino} {bound}", TAKEN, dir_fd=trash)
    except OSError as error:
        return Refused(_refusal(error))
    return None


def _not_put_back(taken: TrashedTree, why: str) -> Refused:
    place = f"{taken.trash}/{printable(taken.name)}"
    return Refused(f"it could not be put back: {why}; it is complete, in {place} beside its old place. Move it by hand")


def _beside(name: str) -> str:
    """A name that cannot exist yet."""
    return os.fsdecode(os.fsencode(name)[:200]) + RETURNED + secrets.token_hex(4)


def _is_place(directory: int, name: str, inode: int) -> bool:
    """Our own empty file, which no user may open."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return holds_a_name(found) and found.st_ino == inode


def _contents(parent: int, trash: str) -> list[TrashedTree]:
    try:
        fd = _private(parent, trash)
    except OSError:
        return []
    try:
        proof = _proof(fd)
        if proof is None:
            return []
        names = sorted(set(_names(fd)) - {TAKEN, DELETING, PLACE, FREED})
        found = [(name, _identity(fd, name)) for name in names]
    except OSError:
        return []
    finally:
        os.close(fd)
    deleting, inode = proof
    mine = [(name, identity) for name, identity in found if inode is None or identity[1] == inode]
    return [TrashedTree(trash=trash, name=name, identity=identity, deleting=deleting) for name, identity in mine]


def _proof(trash: int) -> tuple[bool, int | None] | None:
    """Whether deletion began, and the inode of the one tree it was made for (None: several). None: no proof.

    By inode, without the device: its number may be another after a reboot, and nothing gets in here by rename from
    another filesystem.
    """
    for name, deleting in ((TAKEN, False), (DELETING, True)):
        try:
            if os.stat(name, dir_fd=trash, follow_symlinks=False).st_uid != os.geteuid():
                return None
            text = os.readlink(name, dir_fd=trash)
        except OSError:
            continue
        match = _PROOF.fullmatch(text)
        if match is None or int(match[1]) != os.fstat(trash).st_ino:
            return None
        return deleting, None if match[2] is None else int(match[2])
    return None


def _swept(parent: int, name: str) -> bool:
    try:
        fd = _private(parent, name)
    except OSError:
        return False
    try:
        # Completely empty: a crash came before the link.
        return (not _names(fd) or _proof(fd) is not None) and Trash(parent, name, fd).remove()
    except OSError:
        return False
    finally:
        os.close(fd)


def _names(directory: int) -> list[str]:
    with os.scandir(directory) as listing:
        return [entry.name for entry in listing]


def _identity(directory: int, name: str) -> Identity:
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    return found.st_dev, found.st_ino


def _refusal(error: OSError) -> str:
    known = _REFUSALS.get(error.errno or 0)
    if error.errno == errno.EPERM and error.strerror != os.strerror(errno.EPERM):
        known = error.strerror  # ours, and more specific
    return f"it was not removed: {known or error.strerror}"


# Names that others rely on, with root's trust: a user who could create them again after a removal would gain that
# trust.
WELL_KNOWN = (
    *("lost+found", "ray", "_ray_lockfiles", "session_latest", "ray_current_cluster"),
    *(".X11-unix", ".XIM-unix", ".ICE-unix", ".font-unix", ".Test-unix"),
    *(".snap", "snap-private-tmp", "systemd-private-*"),
)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """As in a shell: a hidden name needs a pattern that begins with a dot. A well-known name is never matched, nor is
    the trash of a removal in progress.
    """
    if is_trash(name) or any(fnmatch.fnmatchcase(name, known) for known in WELL_KNOWN):
        return False
    return any(
        fnmatch.fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
        for pattern in patterns
    )
