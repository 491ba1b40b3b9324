"""What the machine shows about containers and the engine does not: GPUs, their holders, owners, counters, the
keep-alive file (read from outside; it counts if it exists and its ctime, which users cannot set, is not before the
container).

Only if the engine runs on this machine. Otherwise these facts are unknown, and unknown means keep.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TypeAlias, TypeVar

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.clients.docker import Inspected, when
from gpukeeper.devices import holders
from gpukeeper.devices.counters import Counters, read_counters
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.devices.gpus import opened_by
from gpukeeper.devices.holders import Holder, text_of
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.owners import UserDirectory, owned
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import (
    TTL,
    ContainerFacts,
    devices_of,
    incarnation,
    requested_gpus,
    slices_among,
)

T = TypeVar("T")

KEEPALIVE_FILE = "/workspace/.keep-alive"
KEEPALIVE_BYTES = 4096  # bytes that are read of it
_KEEPALIVE_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def has_keepalive(root: str, path: str, not_before: datetime) -> bool:
    """`root`: /proc/PID/root, or a directory of this machine that is mounted there. No link below it is followed.
    OSError if it could not be read.
    """
    facts = _keepalive_facts(root, path)
    # As numbers: a user's own filesystem may return a time that no calendar has.
    return facts is not None and stat.S_ISREG(facts.st_mode) and facts.st_ctime >= not_before.timestamp()


def keepalive_words(root: str, path: str) -> frozenset[str]:
    """The words in a regular file there. OSError if it could not be read."""
    text = b""

    def read(here: int, name: str) -> None:
        nonlocal text
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
        try:
            if stat.S_ISREG(os.fstat(file).st_mode):
                text = os.read(file, KEEPALIVE_BYTES)
        finally:
            os.close(file)

    _at_keepalive(root, path, read)
    return frozenset(text.decode("utf-8", "replace").split())


def _keepalive_facts(root: str, path: str) -> os.stat_result | None:
    return _at_keepalive(root, path, lambda here, name: os.stat(name, dir_fd=here, follow_symlinks=False))


def _at_keepalive(root: str, path: str, do: Callable[[int, str], T]) -> T | None:
    """`do` with its directory and name; None: it does not exist, or a link leads there."""
    *directories, name = PurePosixPath(path).relative_to("/").parts
    here = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for directory in directories:
            try:
                below = os.open(directory, _KEEPALIVE_FOLDER, dir_fd=here)
            except (FileNotFoundError, NotADirectoryError):
                return None  # a link does not count either
            os.close(here)
            here = below
        try:
            return do(here, name)
        except FileNotFoundError:
            return None
    finally:
        os.close(here)


Gpus: TypeAlias = tuple[GpuFacts, ...] | Unknown
Inventory: TypeAlias = Callable[[], Awaitable[Gpus]]
SCAN, PEEK = timedelta(seconds=30), timedelta(seconds=3)
SHORT_ID = 12  # characters of an id, as `docker ps` prints it
RETRY = 600.0  # seconds before a hanging filesystem is tried again
ELSEWHERE = Unknown("the engine runs on another machine, whose processes and GPUs cannot be read from here")


class HostSnapshot(msgspec.Struct, frozen=True):
    """One snapshot of the machine. `holders`: processes with a GPU open, by the outermost container id of their
    cgroup.
    """

    gpus: Gpus
    holders: Mapping[str, tuple[Holder, ...]]
    mig_minors: Mapping[int, tuple[int, int, int]] = {}
    blind: str | None = None  # why the holders of GPUs could not be read

    def held(self, container: str) -> tuple[str, ...]:
        """Uuids that its processes have open. A node that the driver does not report is skipped: it may be a control
        node.
        """
        if isinstance(self.gpus, Unknown) or container not in self.holders:
            return ()
        found: set[str] = set()
        for holder in self.holders[container]:
            for _, uuids in opened_by(holder, self.gpus, self.mig_minors):
                found.update(uuids)
        return tuple(sorted(found))

    def everyone(self) -> tuple[Holder, ...]:
        """Each holder once."""
        return tuple({holder.pid: holder for found in self.holders.values() for holder in found}.values())


class HostInspector:
    def __init__(
        self,
        records: Records,
        inventory: Inventory,
        *,
        local: bool,
        directory: UserDirectory,
        trusted_labels: Sequence[str] = (),
        proc: str = "/proc",
        keep_alive: str = KEEPALIVE_FILE,
    ) -> None:
        self._records, self._inventory, self._directory = records, inventory, directory
        self._local, self._proc = local, proc
        self.follow(trusted_labels, keep_alive)
        self._peeked: dict[str, bool] = {}
        self._dead: dict[str, float] = {}  # by container: when its filesystem last timed out

    def follow(self, trusted_labels: Sequence[str], keep_alive: str) -> None:
        self._trusted, self._keep_alive = tuple(trusted_labels), keep_alive

    async def snapshot(self) -> HostSnapshot:
        if not self._local:
            return HostSnapshot(ELSEWHERE, {})
        gpus = await self._inventory()
        found: dict[str, tuple[Holder, ...]] = {}
        blind = None
        if gpus != ():  # without a driver no process can hold a GPU
            scanned = await self._scan()
            blind = scanned.why if isinstance(scanned, Unknown) else None
            for holder in () if isinstance(scanned, Unknown) else scanned:
                # Under every id: if one engine runs inside another, either may be the one that is queried.
                for id_ in container_ids(holder, self._proc):
                    found[id_] = (*found.get(id_, ()), holder)
        return HostSnapshot(gpus, found, holders.mig_minors(self._proc), blind)

    async def facts(self, container: Inspected, around: HostSnapshot) -> ContainerFacts:
        asks = requested_gpus(container, self._records.info.default_runtime)
        mine = holders_of(container, around, self._proc)
        held = HostSnapshot(around.gpus, {container.id: mine}, around.mig_minors).held(container.id)
        devices = devices_of(container, asks, held, around.gpus)
        nothing = devices == () and not asks
        uids = tuple(sorted({holder.uid for holder in mine}))
        wanted = not nothing or not container.labels.keys().isdisjoint((TTL, *self._trusted))
        inherited = await self._inherited(container) if wanted else {}
        people = await self._directory.people(container, uids, self._trusted, directories=self._local and not nothing)
        keep_alive = None if nothing else await self._kept_alive(container)
        shared = self._sharing(container) if keep_alive is True else ()
        if shared and await self._is_for_another(container, shared):
            keep_alive, shared = False, ()
        return ContainerFacts(
            asks=asks,
            devices=devices,
            slices=slices_among(devices, around.gpus),
            owned=owned(container, people, self._trusted, inherited),
            image_labels=inherited,
            stopped_at=self._records.stopped_at(container),
            crashes=self._records.crashes(container),
            keep_alive=keep_alive,
            keep_alive_shared=shared,
        )

    def _sharing(self, container: Inspected) -> tuple[str, ...]:
        """The names of other containers in which the same keep-alive file is visible."""
        mine = _source_of(container, self._keep_alive)
        others = [one for one in self._records.all_known() if one.id != container.id] if mine is not None else []
        return tuple(sorted(one.plain_name for one in others if _source_of(one, self._keep_alive) == mine))

    async def _is_for_another(self, container: Inspected, shared: Sequence[str]) -> bool:
        """It names one of the others, and not this one. What it says otherwise, or cannot be read, keeps."""
        place = self._where(container)
        if not isinstance(place, tuple):
            return False
        try:
            found = await in_thread(lambda: keepalive_words(*place), PEEK)
        except (TimeoutError, OSError):
            return False
        mine = container.plain_name in found or any(
            len(one) >= SHORT_ID and container.id.startswith(one) for one in found
        )
        return not mine and not found.isdisjoint(shared)

    async def peek(self, containers: Sequence[Inspected], around: HostSnapshot) -> None:
        """Checks many keep-alive files in one thread; those behind one that hangs are checked one by one."""
        runtime = self._records.info.default_runtime
        wanted = []
        for one in containers if self._local else ():
            if self._is_dead(one.id) or (one.id not in around.holders and not requested_gpus(one, runtime)):
                continue
            place, created = self._where(one), when(one.created)
            if isinstance(place, tuple) and isinstance(created, datetime):
                wanted.append((one.id, *place, created))
        found: dict[str, bool] = {}
        looked_at: list[str] = []

        def check_files() -> None:
            for id_, root, path, created in wanted:
                looked_at.append(id_)
                with suppress(OSError):
                    found[id_] = has_keepalive(root, path, created)

        try:
            await in_thread(check_files, PEEK)
        except TimeoutError:
            self._skip_for_a_while(looked_at[-1:])
        self._peeked = dict(found)

    async def _inherited(self, container: Inspected) -> Mapping[str, str] | Unknown:
        return await self._records.image_labels(container.image) if container.labels else {}

    async def _scan(self) -> tuple[Holder, ...] | Unknown:
        """Without it the requests of a container still count; but no container is stopped whose processes would not get
        SIGTERM.
        """
        try:
            return (await in_thread(lambda: holders.scan(self._proc), SCAN)).found
        except TimeoutError:
            return Unknown("the processes of this machine could not be listed in time")
        except OSError as error:
            return Unknown(f"the processes of this machine could not be listed: {error.strerror}")

    async def _kept_alive(self, container: Inspected) -> bool | Unknown | None:
        if not self._local:
            return ELSEWHERE
        created = when(container.created)
        place = self._where(container)
        if place is None or isinstance(place, Unknown) or not isinstance(created, datetime):
            return place if isinstance(place, Unknown) else None
        if container.id in self._peeked:
            return self._peeked.pop(container.id)
        root, path = place
        if self._is_dead(container.id):
            return Unknown(f"whether {self._keep_alive} exists is unknown: the filesystem did not answer")
        try:
            return await in_thread(lambda: has_keepalive(root, path, created), PEEK)
        except TimeoutError:
            self._skip_for_a_while([container.id])
            return Unknown(f"whether {self._keep_alive} exists is unknown: the filesystem did not answer")
        except (FileNotFoundError, ProcessLookupError):
            return None  # it ended, or its directory is gone
        except OSError as error:
            return Unknown(f"whether {self._keep_alive} exists is unknown: {error.strerror}")

    def _is_dead(self, id_: str) -> bool:
        return id_ in self._dead and time.monotonic() - self._dead[id_] < RETRY

    def _skip_for_a_while(self, ids: Sequence[str]) -> None:
        """Not tried again for a while: each attempt costs a thread that never ends."""
        steady = time.monotonic()
        recent = {id_: at for id_, at in self._dead.items() if steady - at < RETRY}
        self._dead = recent | dict.fromkeys(ids, steady)

    def _where(self, container: Inspected) -> tuple[str, str] | Unknown | None:
        """A directory of this machine and the file's path below it."""
        pid = container.state.pid
        if pid and belongs(pid, container.id, self._proc):
            return f"{self._proc}/{pid}/root", self._keep_alive
        if pid:
            return Unknown(f"whether {self._keep_alive} exists is unknown: its first process cannot be read from here")
        wanted = Path(self._keep_alive)
        binds = [one for one in container.mounts or () if one.type == "bind" and wanted.is_relative_to(one.destination)]
        if not binds:
            return None
        nearest = max(binds, key=lambda one: len(one.destination))
        if Path(nearest.destination) == wanted:  # the file itself is mounted, not a directory
            return str(Path(nearest.source).parent), f"/{Path(nearest.source).name}"
        return nearest.source, f"/{wanted.relative_to(nearest.destination)}"


def _source_of(container: Inspected, path: str) -> str | None:
    """Where a file of it lies on this machine, if in a mounted directory."""
    wanted = Path(path)
    over = [one for one in container.mounts or () if one.source and wanted.is_relative_to(one.destination)]
    if not over:
        return None
    nearest = max(over, key=lambda one: len(one.destination))
    return str(Path(nearest.source, wanted.relative_to(nearest.destination)))


def holders_of(container: Inspected, around: HostSnapshot, proc: str = "/proc") -> tuple[Holder, ...]:
    """Those in exactly the control group of its first process. A user who may create groups can give one the id of
    another user's container, and would pass for its owner, or add a GPU to it. A container that is not running holds
    none.
    """
    found, state = around.holders.get(container.id, ()), container.state
    if not found or not (state.running or state.paused or state.restarting):
        return ()
    groups = _groups_of(state.pid, container.id, proc) if state.pid else frozenset()
    if not groups:
        return found  # its first process cannot be read from here: nothing to compare with
    return tuple(one for one in found if frozenset() < _groups_of(one.pid, container.id, proc) <= groups)


def _groups_of(pid: int, container: str, proc: str) -> frozenset[str]:
    """The paths of its control groups down to the id, one for each hierarchy that contains it."""
    try:
        cgroup = text_of(Path(proc, str(pid), "cgroup"))
    except OSError:
        return frozenset()
    paths = (line.split(":", 2)[-1].partition(container) for line in cgroup.split("\n"))
    return frozenset(before for before, found, _ in paths if found)


def container_ids(holder: Holder, proc: str = "/proc") -> tuple[str, ...]:
    """The ids in its cgroup, outermost first; none on the bare host."""
    if not isinstance(holder.container, str):
        return ()
    try:
        cgroup = text_of(Path(proc, str(holder.pid), "cgroup"))
    except OSError:
        return (holder.container,)
    return holders.parse_containers(cgroup) or (holder.container,)


def belongs(pid: int, container: str, proc: str = "/proc") -> bool:
    """A pid from the engine belongs to this container only if its cgroup confirms it: the engine may run in a virtual
    machine, and a pid may have been reused.
    """
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as cgroup:  # noqa: PTH123  (called often)
            return container in holders.parse_containers(cgroup.read())
    except OSError:
        return False


def count_container(subject: Subject, records: Records, proc: str = "/proc") -> Counters | None:
    """None: it is not the run that was read, or its processes are not on this machine."""
    container = records.known(subject.ref.uid)
    if container is None or incarnation(container) != subject.seen.incarnation or not container.state.pid:
        return None
    pid = container.state.pid
    if not belongs(pid, container.id, proc):
        return None
    return read_counters(pid, proc=proc, host_network=container.host_config.network_mode == "host")
