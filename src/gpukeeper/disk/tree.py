"""A tree as a subject, the same on every platform: what it is named and known by, how it is found again whatever its
name is by then, what a removal must find, and how the result of a removal is described. Which directories are read,
and who may use what is in them, is known to the platform.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TypeAlias

import msgspec

from gpukeeper.disk import access_times, trash
from gpukeeper.disk.access_times import LastUse
from gpukeeper.disk.measure import TreeMeasurement, printable
from gpukeeper.disk.remove import ExpectedTree, RemovalResult, TreeRemoval
from gpukeeper.disk.trash import TrashedTree
from gpukeeper.disk.walk import Identity
from gpukeeper.model.decision import Accepted, ActResult, Refused
from gpukeeper.model.subject import Category, Disk, Ref, Seen, Shape, State, Subject
from gpukeeper.model.unknown import Unknown, is_known

TREE = "tree"
NOT_RECORDED = Unknown("the creation time of a tree is not recorded everywhere", by_design=True)
FILESYSTEM = Unknown("a disk neither begins nor ends", by_design=True)


class PlaceAndTime(msgspec.Struct, frozen=True):
    """Where and when it was read. `node`: the part of the place that it is on, if the place has several."""

    platform: str
    place: str
    now: datetime
    node: str = ""

    def seen(self, kind: str, name: str, uid: str, incarnation: str, version: str | None = None) -> Seen:
        """`version`: that of the incarnation, unless it has another."""
        ref = Ref(self.platform, self.place, kind, printable(name), uid, self.node)
        return Seen(ref, incarnation, incarnation if version is None else version, self.now)


class TreeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a tree besides its files. `kept`: why it is kept anyway. `of_users`: whether users of this
    machine can reach it, so that the owners of its entries are users of this machine. `last_use`: None for what no
    process can read. `labels`: what this platform adds.
    """

    path: str
    root: str
    owner: str
    kind: str = TREE
    category: Category = Category.TEMPORARY
    in_use: bool | Unknown
    kept: str | None = None
    disk: Disk | None = None
    findings: tuple[str, ...] = ()
    of_users: bool = False
    last_use: LastUse | None = None
    labels: Mapping[str, str] = {}


def tree_subject(tree: TreeFacts, measured: TreeMeasurement, at: PlaceAndTime) -> Subject:
    used = tree.last_use or access_times.recorded(measured, at.now)
    owners_known = tree.of_users and tree.category is not Category.UNFINISHED and not measured.problems
    return Subject(
        seen=at.seen(tree.kind, tree.path, measured.tree_uid, measured.incarnation),
        shape=Shape.TREE,
        state=State.ENDED,
        owner=tree.owner,
        class_=tree.kind,
        created=NOT_RECORDED,
        size=measured.size,
        last_used=used.at,
        use_evidence=used.how,
        in_use=tree.in_use,
        category=tree.category,
        uids=measured.uids if owners_known else None,
        kept=tree.kept,
        disk=tree.disk,
        findings=tree.findings,
        labels={**({"node": at.node} if at.node else {}), "root": tree.root, **tree.labels},
    )


def contains(path: str) -> str:
    """Why a tree is kept that is, or contains, that path."""
    return f"it contains {printable(path)}, which gpukeeper needs or the policy names"


def together(trees: Iterable[Subject]) -> int:
    """A lower bound: a tree that could not be measured adds nothing, so the sum is never a reason to act."""
    return sum(tree.size for tree in trees if is_known(tree.size))


# Known by


def two_numbers(uid: str, sign: str = ":") -> tuple[int, int] | None:
    first, _, second = uid.partition(sign)
    return (int(first), int(second)) if first.isdecimal() and second.isdecimal() else None


def change_of(subject: Subject) -> int | None:
    """The newest change that this walk saw, in nanoseconds. None: it was not measured."""
    numbers = two_numbers(subject.seen.incarnation)
    return None if numbers is None else numbers[1]


def expected(fresh: Subject, uid: int | None) -> ExpectedTree | None:
    """What a removal must find. None: it was not measured, so nothing may be done. `uid`: of the user who requests it,
    if not an admin.
    """
    identity, change = two_numbers(fresh.ref.uid), change_of(fresh)
    return None if identity is None or change is None else ExpectedTree(identity, change, uid)


# Found again

Counts: TypeAlias = Callable[[int], bool]  # whether entries of that owner are considered
Stat: TypeAlias = Callable[[int, str], os.stat_result]


def anyone(owner: int) -> bool:
    return True


def stat_entry(directory: int, name: str) -> os.stat_result:
    """Of what has that name now, also if that is mounted there."""
    return os.stat(name, dir_fd=directory, follow_symlinks=False)


def names_of(directory: int, wanted: Identity, stat: Stat, counts: Counts = anyone) -> list[str]:
    """The names of that tree in the open directory, by identity: a listing returns the inode below a mount point, only
    a stat returns what is there now. Not the entries that removals in progress create, which may get the inode of a
    tree that was just deleted. `stat`: whether what is mounted is looked at (`stat_entry`), or is not it
    (`kernel.stat_inside`).
    """
    names = []
    with os.scandir(directory) as listing:
        for entry in listing:
            if entry.inode() != wanted[1]:
                continue
            try:
                found = stat(directory, entry.name)
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.EXDEV}:
                    continue
                raise
            ours = trash.is_trash(entry.name) or trash.holds_a_name(found)
            if (found.st_dev, found.st_ino) == wanted and counts(found.st_uid) and not ours:
                names.append(entry.name)
    return names


def taken_in(directory: int, wanted: Identity, counts: Counts = anyone) -> TrashedTree | None:
    """The same tree, if an interrupted removal left it in the trash of the open directory."""
    found = (one for one in trash.leftovers(directory) if one.identity == wanted)
    return next((one for one in found if counts is anyone or _counts(directory, one, counts)), None)


def _counts(directory: int, taken: TrashedTree, counts: Counts) -> bool:
    try:
        return counts(stat_entry(directory, f"{taken.trash}/{taken.name}").st_uid)
    except FileNotFoundError:
        return False


# Removed


class UnderWay:
    """Trees that are being removed: a thread that hangs may still continue later."""

    def __init__(self) -> None:
        self._uids: set[str] = set()

    def claim(self, uid: str) -> bool:
        """False: an earlier removal of that tree has not ended."""
        if uid in self._uids:
            return False
        self._uids.add(uid)
        return True

    @contextmanager
    def ending(self, uid: str) -> Iterator[None]:
        """Around the work itself, in its thread: when it ends, however it does, so does the claim."""
        try:
            yield
        finally:
            self._uids.discard(uid)


def answered(result: RemovalResult, not_all: Callable[[TreeRemoval], Refused]) -> ActResult:
    """`not_all`: if a part of it is left."""
    if isinstance(result, Unknown):
        # Nothing was done, and the reason is known: another read would not add anything.
        return Refused(f"it was not removed: {result.why}")
    if not isinstance(result, TreeRemoval):
        return result
    return not_all(result) if result.left else Accepted(result.bytes_back)
