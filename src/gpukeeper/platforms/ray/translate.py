"""From the facts of Ray nodes to subjects. Pure: no reads, no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from gpukeeper.disk.measure import printable, tree_uid
from gpukeeper.disk.tree import FILESYSTEM, NOT_RECORDED, PlaceAndTime, two_numbers
from gpukeeper.model.subject import Category, Disk, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import size_in_words

PLATFORM = "ray"
NODE, DISK, SESSION, LOGS = "node", "disk", "session", "logs"
LIVES = Unknown("a live session is not measured file by file", by_design=True)
LONG_LOG = 10_000_000_000  # bytes


class LogFile(msgspec.Struct, frozen=True):
    """A log of an ended process. `folder`: below the directory of logs, empty for that one itself."""

    folder: str
    name: str
    device: int
    inode: int
    ctime_ns: int
    size: int  # bytes allocated
    newest: datetime
    uid: int
    read: datetime | None = None  # after its last change, as far as that is recorded


class NodeDisk(msgspec.Struct, frozen=True):
    uid: str
    disk: Disk
    size: int  # bytes
    free: int


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of a node."""

    name: str
    uid: str
    incarnation: str
    size: int | Unknown
    busy: str | Unknown | None
    disk: Disk | None = None
    disk_size: int | None = None  # bytes
    disk_free: int | None = None
    live: int = 0  # sessions
    dead: int = 0
    cpu: float | Unknown = Unknown("not measured")  # percent of one core
    versions: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


def logs_uid(device: int, inode: int) -> str:
    return f"{device}:{inode}:{LOGS}"


def identity_in(uid: str) -> tuple[int, int] | None:
    """The device and inode of a tree or of the directory of logs."""
    return two_numbers(uid.removesuffix(f":{LOGS}"))


def live_session(
    path: str, identity: tuple[int, int], why: str, owner: str, disk: Disk | None, at: PlaceAndTime
) -> Subject:
    device, inode = identity
    return Subject(
        seen=at.seen(SESSION, path, tree_uid(device, inode), f"{inode}:alive"),
        shape=Shape.TREE,
        state=State.RUNNING,
        owner=owner,
        class_=SESSION,
        created=NOT_RECORDED,
        size=LIVES,
        last_used=LIVES,
        in_use=True,
        category=Category.DEAD_SESSION,
        disk=disk,
        labels={"node": at.node, "kept_by": why},
    )


def logs_subject(
    path: str,
    identity: tuple[int, int],
    files: Sequence[LogFile],
    owner: str,
    disk: Disk | None,
    at: PlaceAndTime,
    *,
    in_use: bool | Unknown = False,
) -> Subject:
    device, inode = identity
    return Subject(
        seen=at.seen(LOGS, path, logs_uid(device, inode), logs_incarnation(inode, files)),
        shape=Shape.TREE,
        state=State.ENDED,
        owner=owner,
        class_=LOGS,
        created=NOT_RECORDED,
        size=sum(one.size for one in files),
        last_used=max(one.newest for one in files),
        in_use=in_use,
        category=Category.DEAD_LOGS,
        disk=disk,
        evidence=(f"{len(files):,} log files of ended processes, of a live session",),
        labels={"node": at.node, "files": str(len(files))},
    )


def logs_incarnation(inode: int, files: Iterable[LogFile]) -> str:
    """Of exactly this set of files: one more or less, or one that was written to, is another."""
    digest = hashlib.sha256()
    for one in sorted(files, key=lambda one: (one.folder, one.name)):
        digest.update(repr((one.folder, one.name, one.device, one.inode, one.ctime_ns)).encode("utf-8", "replace"))
    return f"{inode}:{digest.hexdigest()[:16]}"


def node_subject(facts: NodeFacts, at: PlaceAndTime) -> Subject:
    labels = {"sessions_live": str(facts.live), "sessions_dead": str(facts.dead)}
    labels |= {} if isinstance(facts.size, Unknown) else {"temporary": str(facts.size)}
    labels |= {} if isinstance(facts.cpu, Unknown) else {"cpu": f"{facts.cpu:.1f}"}
    labels |= {} if facts.disk_size is None else {"disk_size": str(facts.disk_size)}
    labels |= {} if facts.disk_free is None else {"disk_free": str(facts.disk_free)}
    for name, values in (("ray", facts.versions), ("session", facts.sessions), ("address", facts.addresses)):
        labels |= {name: ", ".join(values)} if values else {}
    return Subject(
        seen=at.seen(NODE, facts.name, facts.uid, facts.incarnation),
        shape=Shape.NODE,
        state=State.RUNNING,
        owner=None,
        class_=NODE,
        created=Unknown("when it became a node is not recorded", by_design=True),
        size=facts.size,
        busy=facts.busy,
        disk=facts.disk,
        findings=facts.findings,
        labels=labels,
    )


def disk_subject(facts: NodeDisk, at: PlaceAndTime) -> Subject:
    """A disk of a node besides its first one."""
    return Subject(
        seen=at.seen(DISK, printable(facts.disk.name), facts.uid, facts.uid),
        shape=Shape.NODE,
        state=FILESYSTEM,
        owner=None,
        class_=DISK,
        created=FILESYSTEM,
        size=facts.size - facts.free,
        disk=facts.disk,
        labels={"disk_size": str(facts.size), "disk_free": str(facts.free)},
    )


def busy_by(
    ray: str | Unknown | None,
    titles: str | None,
    cpu: float | Unknown,
    cpu_max: float,
    gpu: str | Unknown | None,
) -> str | Unknown | None:
    """What runs on a node: Ray's own report, the titles of its processes, their use of CPU and GPUs. One sign is enough
    to be busy; idle only if all of them are known.
    """
    if isinstance(ray, str) or isinstance(titles, str):
        return ray if isinstance(ray, str) else titles
    if not isinstance(cpu, Unknown) and cpu > cpu_max:
        return f"its programs use {cpu:.0f} % of a CPU core, allowed {cpu_max:g} %"
    if isinstance(gpu, str):
        return gpu
    return next((one for one in (ray, cpu, gpu) if isinstance(one, Unknown)), None)


def long_log(name: str, size: int) -> str:
    return f"{printable(name)} has {size_in_words(size)} and is being written; limit it with RAY_ROTATION_MAX_BYTES"
