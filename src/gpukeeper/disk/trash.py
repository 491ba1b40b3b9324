"""Taking a tree out of everybody's reach in one step, so that it can be looked at once more, and put back.

The trash is a folder of ours beside the tree, which nobody else may enter, with a random name. A link in it says which
folder and which tree it was made for; the name of that link says whether the tree was only taken (a crash puts it
back) or is being deleted (a crash leaves it to be finished). A link needs no data block, so this works on a full disk.
Every name around it is hostile: a folder that looks like our trash and does not prove it is left alone.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from gpukeeper.disk import kernel
from gpukeeper.disk.walk import Identity, printable
from gpukeeper.model.decision import Changed, Refused

TRASH = ".gpukeeper-trash-"  # and 16 hexadecimal digits; such names are never offered as trees themselves
TAKEN, DOOMED = ".gpukeeper", ".gpukeeper-deleting"  # what the link in it is called
SEVERAL = "*"
_NAME = re.compile(re.escape(TRASH) + r"[0-9a-f]{16}")
_PROOF = re.compile(r"1 \d+:(\d+) (?:\d+:(\d+)|\*)")

# Why a rename is refused, for whoever wonders that a tree stays.
_NO_LOCKS = "folders of its filesystem cannot be locked, so two runs could meet in it; reclaim it by hand"
_REFUSALS = {
    errno.EBADF: _NO_LOCKS,
    errno.ENOLCK: _NO_LOCKS,
    errno.EOPNOTSUPP: _NO_LOCKS,
    errno.EBUSY: "something is mounted on it",
    errno.EXDEV: "it cannot be moved within its folder: it comes from a read-only layer below, or is a mount",
    errno.EPERM: "it may not be moved: it is immutable, or its folder is sticky and it belongs to somebody else",
    errno.EACCES: "its folder may not be written to; run as root or as the owner",
    errno.EROFS: "its filesystem is mounted read-only",
    errno.ENOSPC: "its filesystem has no room for even an empty folder; run as root, for whom some is reserved, or "
    "make a little room by hand",
    errno.EDQUOT: "the disk quota is used up; run as root, or make a little room by hand",
    errno.EINVAL: "its filesystem cannot rename without replacing what is there",
    errno.ENOSYS: "this kernel cannot rename without replacing what is there",
    errno.EEXIST: "its name is one that the trash needs for itself",
}


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A tree in our trash."""

    trash: str  # name of the trash folder, beside the tree
    name: str  # of the tree, before and after
    identity: Identity
    doomed: bool = False  # its deletion began: it may not be whole any more


def is_trash(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def take(parent: int, name: str, identity: Identity) -> Taken | Changed | Refused:
    """Out of everybody's reach, or left where it is."""
    with making(parent, f"{identity[0]}:{identity[1]}") as trash:
        return trash if isinstance(trash, Refused) else trash.take(name, identity)


def put_back(parent: int, taken: Taken) -> Refused | None:
    """Under its old name, and the trash folder is removed when it is empty. Refused: it is still in the trash."""
    try:
        with opening(parent, taken.trash) as trash:
            return trash.put_back(taken)
    except OSError as error:
        return _not_put_back(taken, error.strerror or str(error))


class Trash:
    """An open trash folder of ours. By descriptor, so that it stays the same whatever is renamed around it."""

    def __init__(self, parent: int, name: str, fd: int) -> None:
        self.parent, self.name, self.fd = parent, name, fd

    def take(self, name: str, identity: Identity) -> Taken | Changed | Refused:
        try:
            # Looked at first, only to spare an innocent neighbour of the same name the way there and back.
            if _identity(self.parent, name) != identity:
                return Changed("another entry has its name now")
            kernel.rename_inside(self.parent, name, self.fd, name)
        except FileNotFoundError:
            return Changed("it is gone already")
        except OSError as error:
            return Refused(_refusal(error))
        taken = Taken(trash=self.name, name=name, identity=identity)
        if _identity(self.fd, name) == identity:
            return taken
        return self.put_back(taken) or Changed("another entry had its name just now; that was put back")

    def put_back(self, taken: Taken) -> Refused | None:
        try:
            kernel.rename_inside(self.fd, taken.name, self.parent, taken.name)
        except FileExistsError:
            return _not_put_back(taken, "somebody made another of that name meanwhile")
        except OSError as error:
            return _not_put_back(taken, error.strerror or str(error))
        return None

    def doom(self) -> None:
        """From here on a crash leads to deletion and not to putting back. Renamed, since that needs no room at all."""
        with suppress(FileNotFoundError):  # it was before
            kernel.rename_inside(self.fd, TAKEN, self.fd, DOOMED)

    def close(self) -> None:
        """Removes it if nothing but the link is left in it."""
        with suppress(OSError):  # then an empty folder stays, for the next sweep
            self.remove()
        os.close(self.fd)

    def remove(self) -> bool:
        names = set(_names(self.fd))
        if names - {TAKEN, DOOMED}:
            return False
        for name in names:
            os.unlink(name, dir_fd=self.fd)
        found = os.fstat(self.fd)
        if _identity(self.parent, self.name) != (found.st_dev, found.st_ino):
            return False  # somebody renamed it away
        os.rmdir(self.name, dir_fd=self.parent)
        return True


@contextmanager
def making(parent: int, bound: str) -> Iterator[Trash | Refused]:
    """A new trash folder, with the link that proves it. Gone afterwards if nothing was put into it."""
    name = TRASH + secrets.token_hex(8)
    try:
        trash = Trash(parent, name, _made(parent, name))
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
    """A trash folder that is there. PermissionError when it is not ours, or not private; BlockingIOError when another
    run is at work in it."""
    trash = Trash(parent, name, _private(parent, name))
    try:
        yield trash
    finally:
        trash.close()


def leftovers(parent: int) -> tuple[Taken, ...]:
    """What an interrupted run left in trash of our own. Whatever does not prove that is not there for us."""
    names = sorted(name for name in _names(parent) if is_trash(name))
    return tuple(taken for name in names for taken in _contents(parent, name))


def sweep(parent: int) -> int:
    """Removes empty trash folders of our own, as a crash leaves them. How many there were."""
    return sum(_swept(parent, name) for name in _names(parent) if is_trash(name))


def _made(parent: int, name: str) -> int:
    """Nothing stays of one that cannot be used: no sweep would know it for ours."""
    os.mkdir(name, 0o700, dir_fd=parent)
    try:
        return _private(parent, name)
    except OSError:
        with suppress(OSError):
            os.rmdir(name, dir_fd=parent)
        raise


def _private(parent: int, name: str) -> int:
    """Opened and locked: what a run is at work on is nothing left over, and no other run may put it back."""
    fd = kernel.open_inside(parent, name)
    found = os.fstat(fd)
    try:
        if found.st_uid != os.geteuid() or found.st_mode & 0o777 != 0o700:
            raise PermissionError(errno.EPERM, "its trash folder is not ours any more", name)
        if not kernel.lock(fd):
            raise BlockingIOError(errno.EAGAIN, "another run is at work in its trash folder", name)
    except OSError:
        os.close(fd)
        raise
    return fd


def _prove(trash: int, bound: str) -> Refused | None:
    """Empty, too: in a folder where everybody may rename, ours may have been swapped for another of our own."""
    found = os.fstat(trash)
    try:
        if _names(trash):
            return Refused("it was left where it is: its trash folder was swapped for another")
        os.symlink(f"1 {found.st_dev}:{found.st_ino} {bound}", TAKEN, dir_fd=trash)
    except OSError as error:
        return Refused(_refusal(error))
    return None


def _not_put_back(taken: Taken, why: str) -> Refused:
    place = f"{taken.trash}/{printable(taken.name)}"
    return Refused(f"it could not be put back: {why}; it is whole, in {place} beside its old place. Move it by hand")


def _contents(parent: int, trash: str) -> list[Taken]:
    try:
        fd = _private(parent, trash)
    except OSError:
        return []
    try:
        proof = _proof(fd)
        if proof is None:
            return []
        names = sorted(set(_names(fd)) - {TAKEN, DOOMED})
        found = [(name, _identity(fd, name)) for name in names]
    except OSError:
        return []
    finally:
        os.close(fd)
    doomed, inode = proof
    mine = [(name, identity) for name, identity in found if inode is None or identity[1] == inode]
    return [Taken(trash=trash, name=name, identity=identity, doomed=doomed) for name, identity in mine]


def _proof(trash: int) -> tuple[bool, int | None] | None:
    """Whether deletion began, and the inode of the one tree it was made for (None: several). None: no proof.

    By inode, without the device: its number may be another after a reboot, and nothing gets in here by rename
    from another filesystem.
    """
    for name, doomed in ((TAKEN, False), (DOOMED, True)):
        try:
            if os.stat(name, dir_fd=trash, follow_symlinks=False).st_uid != os.geteuid():
                return None
            text = os.readlink(name, dir_fd=trash)
        except OSError:
            continue
        match = _PROOF.fullmatch(text)
        if match is None or int(match[1]) != os.fstat(trash).st_ino:
            return None
        return doomed, None if match[2] is None else int(match[2])
    return None


def _swept(parent: int, name: str) -> bool:
    try:
        fd = _private(parent, name)
    except OSError:
        return False
    try:
        # Wholly empty: a crash came before the link.
        return (not _names(fd) or _proof(fd) is not None) and Trash(parent, name, fd).remove()
    except OSError:
        return False
    finally:
        os.close(fd)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as listing:
        return [entry.name for entry in listing]


def _identity(folder: int, name: str) -> Identity:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return found.st_dev, found.st_ino


def _refusal(error: OSError) -> str:
    known = _REFUSALS.get(error.errno or 0)
    if error.errno == errno.EPERM and error.strerror != os.strerror(errno.EPERM):
        known = error.strerror  # ours, and it says more
    return f"it was left where it is: {known or error.strerror}"
