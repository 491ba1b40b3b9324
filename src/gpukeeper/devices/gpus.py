"""The GPUs of this machine: the share that each slice is, the condition of one (who has it open by descriptors, what
the driver reports, which Xids the kernel logged), who occupies each, and the reset of one. All but the reset reads
only. The driver's own list of processes is kept apart: it misses forked children and may name the dead. A reset is
off unless the policy enables it; it always names a whole GPU's uuid: without one nvidia-smi resets every GPU of the
machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from gpukeeper.blocking import in_thread
from gpukeeper.devices import holders
from gpukeeper.devices.driver.client import CHILD, gpus_in, query_once
from gpukeeper.devices.driver.client import inventory as read_inventory
from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.holders import Holder
from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, Refused
from gpukeeper.model.gpu import IN_A_WORKLOAD, INFRASTRUCTURE, OF_A_SESSION, Condition, GpuHolder, Xid
from gpukeeper.model.unknown import Unknown, is_known
from gpukeeper.model.words import in_words

LONGEST_RECORD = 8192
MOST_RECORDS = 200_000  # a log that is written faster than we read must not keep us forever
BOOT_SLACK = timedelta(seconds=2)  # the time of boot is known to the second
FROM_USERS = 8  # priority and, times eight, its origin: 0 is the kernel
XID_WORDS = 120  # characters; the rest of a record is ignored
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:]{1,40})\): ([0-9]{1,9})(?:, (.*))?")


def logged_xids(pci: str, since: datetime, boot: datetime, path: str = "/dev/kmsg") -> tuple[Xid, ...] | Unknown:
    """Of the GPU at that PCI address, logged since then."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Unknown(f"the kernel log cannot be read: {error.strerror}", by_design=True)
    try:
        return parse_xids(_log_records(log), pci, since - BOOT_SLACK - boot)
    except OSError as error:
        return Unknown(f"the kernel log cannot be read: {error.strerror}", by_design=True)
    finally:
        os.close(log)


def parse_xids(records: list[str], pci: str, since_boot: timedelta) -> tuple[Xid, ...]:
    found = []
    for record in records:
        match = _XID.search(record) if by_kernel(record) else None
        if match and same_address(match[1], pci) and logged_at(record) >= since_boot:
            found.append(Xid(int(match[2]), (match[3] or "").strip()[:XID_WORDS]))
    return tuple(found)


def by_kernel(record: str) -> bool:
    """A process with root permissions in a workload may write there, too; the kernel marks that as written by a
    user.
    """
    priority = record.partition(",")[0]
    return not (priority.isdecimal() and int(priority[:9]) >= FROM_USERS)


def same_address(logged: str, pci: str) -> bool:
    """The log writes 0000:1b:00, the driver 00000000:1B:00.0."""
    return _address(logged) == _address(pci)


def logged_at(record: str) -> timedelta:
    """Since boot. A record begins: priority, number, microseconds."""
    fields = record.partition(";")[0].split(",")
    try:
        return timedelta(microseconds=reading.whole(fields[2]))
    except (IndexError, ValueError):
        return timedelta.max


def _address(words: str) -> tuple[int, ...]:
    parts = words.partition(".")[0].split(":")
    return tuple(int(part, 16) for part in parts) if all(parts) else ()


def _log_records(log: int) -> list[str]:
    """One read gives one record."""
    found: list[str] = []
    for _ in range(MOST_RECORDS):
        try:
            record = os.read(log, LONGEST_RECORD)
        except BlockingIOError:
            break
        except BrokenPipeError:
            continue  # records were overwritten before we read them; the next read continues after them
        if not record:
            break
        found.append(record.decode("utf-8", "replace"))
    return found


CONDITION_DEADLINE = timedelta(seconds=20)
SCAN_MOMENT = timedelta(seconds=10)  # for the scan of processes, beyond the driver's deadline


async def condition(uuid: str, since: datetime, deadline: timedelta = CONDITION_DEADLINE) -> Condition | Unknown:
    """`since`: earlier Xids are ignored."""
    try:
        return await in_thread(lambda: examine(uuid, since, deadline), deadline + SCAN_MOMENT)
    except TimeoutError:
        return Unknown(f"reading it took longer than {in_words(deadline + SCAN_MOMENT)}")


def examine(
    uuid: str,
    since: datetime,
    deadline: timedelta = CONDITION_DEADLINE,
    *,
    child: Sequence[str] = CHILD,
    proc: str = "/proc",
    log: str = "/dev/kmsg",
) -> Condition | Unknown:
    """Blocks, for the deadline and the time of a scan."""
    gpus = gpus_in(query_once("condition", deadline, child), driver_loaded=True)
    if isinstance(gpus, Unknown):
        return gpus
    # After the query: our driver process has ended by now and is no holder.
    try:
        scanned = holders.scan(proc)
        minors, boot = holders.mig_minors(proc), holders.boot_time(proc)
    except OSError as error:
        return Unknown(f"the processes that have it open could not be read: {error.strerror}")
    found = find_gpu(gpus, uuid)
    if isinstance(found, Unknown):
        return found
    whole, part = found
    here = [holder for holder in scanned.found if holds(holder, whole, part, minors)]
    xids = whole.pci if isinstance(whole.pci, Unknown) else logged_xids(whole.pci, since, boot, log)
    hidden = len(scanned.hidden) + (not holders.shows_everyone(proc))
    return Condition(
        uuid=uuid,
        at=datetime.now(UTC),
        holders=tuple(_holder(one, proc) for one in here),
        unread=hidden,
        listed=(part or whole).listed,
        memory_used_mib=(part or whole).memory_used_mib,
        advice=whole.advice,
        remap_pending=whole.remap_pending,
        remap_failed=whole.remap_failed,
        xids=xids,
        sliced=whole.sliced,
        reset_alone=whole.reset_alone,
    )


def find_gpu(gpus: Sequence[GpuFacts], uuid: str) -> tuple[GpuFacts, SliceFacts | None] | Unknown:
    """The GPU of that uuid; or, for a slice, the GPU it belongs to and itself."""
    for gpu in gpus:
        if gpu.uuid == uuid:
            return gpu, None
        for part in () if isinstance(gpu.slices, Unknown) else gpu.slices:
            if part.uuid == uuid:
                unknown = [one for one in (part.gpu_instance, part.compute_instance) if isinstance(one, Unknown)]
                return unknown[0] if unknown else (gpu, part)
    silent = [gpu.uuid.why for gpu in gpus if isinstance(gpu.uuid, Unknown)]
    return Unknown(f"the driver reports no {uuid}" + (f"; one GPU does not answer: {silent[0]}" if silent else ""))


def holds(
    holder: holders.Holder, whole: GpuFacts, part: SliceFacts | None, minors: Mapping[int, tuple[int, int, int]]
) -> bool:
    """Whether it has this GPU or slice open. In doubt yes: one holder too many only makes us more careful."""
    if isinstance(whole.minor, Unknown):
        return bool(holder.minors)
    if whole.minor not in holder.minors:
        return False
    opened = [minors[number] for number in holder.capabilities if number in minors]
    if part is None or not opened or not is_known(part.gpu_instance) or not is_known(part.compute_instance):
        return True
    return (whole.minor, part.gpu_instance, part.compute_instance) in opened


def opened_by(
    holder: Holder, gpus: Sequence[GpuFacts], minors: Mapping[int, tuple[int, int, int]]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Each GPU that it has open, by minor, as uuids: of the slices that it opened, otherwise of the whole GPU. None if
    the driver reports no GPU with that minor.
    """
    by_minor = {gpu.minor: gpu for gpu in gpus if is_known(gpu.minor) and is_known(gpu.uuid)}
    opened = {minors[number] for number in holder.capabilities if number in minors}
    for minor in holder.minors:
        gpu = by_minor.get(minor)
        if gpu is None:
            yield minor, ()
            continue
        parts = () if isinstance(gpu.slices, Unknown) else gpu.slices
        mine = tuple(part.uuid for part in parts if (minor, part.gpu_instance, part.compute_instance) in opened)
        yield minor, mine or (str(gpu.uuid),)


def _holder(one: holders.Holder, proc: str) -> GpuHolder:
    try:
        state, parent = parse_parent(holders.text_of(Path(proc, str(one.pid), "stat")))
    except OSError:
        state, parent = "", 0
    return GpuHolder(
        pid=one.pid,
        starttime=one.starttime,
        uid=one.uid,
        comm=one.comm,
        state=state,
        workload_id=one.container,
        ours=os.getpid() in (one.pid, parent),  # the processes that query the driver for us are our children
    )


def parse_parent(stat: str) -> tuple[str, int]:
    """The kernel's letter for its state, and the pid of its parent."""
    state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
    return state, int(parent)


# By uuid. None: only driver services have it open. Unknown by design: the driver lists nothing, but not every
# process could be read.
Occupied: TypeAlias = Mapping[str, str | Unknown | None]
OURS = b"gpukeeper.devices."
MOST_NAMED = 3
LONGEST_COMMAND = 4096
WALLED = "processes outside this pid namespace cannot be seen from here; run it in the machine's pid namespace"


def occupied(
    gpus: Sequence[GpuFacts], found: holders.Holders, user_name: Callable[[int], str], proc: str = "/proc"
) -> Occupied:
    """Of every GPU and slice with a known uuid."""
    minors, blind = holders.mig_minors(proc), _blind(found, proc)
    others = [one for one in found.found if not is_service(one, proc)]
    services = {one.pid for one in found.found} - {one.pid for one in others}
    occupied: dict[str, str | Unknown | None] = {}
    for gpu in gpus:
        if isinstance(gpu.uuid, Unknown):
            continue
        for part in (None, *(() if isinstance(gpu.slices, Unknown) else gpu.slices)):
            here = [one for one in others if holds(one, gpu, part, minors)]
            occupied[gpu.uuid if part is None else part.uuid] = _occupants(
                here, (part or gpu).listed, services, blind, user_name, proc
            )
    return occupied


def is_service(one: Holder, proc: str = "/proc") -> bool:
    """The driver's services, GPU monitors, and gpukeeper's own processes that query the driver. Only of system users:
    users can give a program one of these names.
    """
    if one.comm in INFRASTRUCTURE and (one.uid < holders.FIRST_PERSON_UID or one.comm in OF_A_SESSION):
        return one.container is None or one.comm in IN_A_WORKLOAD  # root in a container may be any user
    return one.uid in (0, os.geteuid()) and _is_ours(one.pid, proc)


def services_on(gpu: GpuFacts, found: holders.Holders, proc: str = "/proc") -> tuple[str, ...]:
    """Services that have this GPU open, by pid and name. Without ours, which close it before a reset."""
    minors = holders.mig_minors(proc)
    here = [one for one in found.found if one.comm in INFRASTRUCTURE and is_service(one, proc)]
    return tuple(f"pid {one.pid} ({one.comm})" for one in here if holds(one, gpu, None, minors))


def _is_ours(pid: int, proc: str) -> bool:
    try:
        with Path(proc, str(pid), "cmdline").open("rb") as file:
            words = file.read(LONGEST_COMMAND).split(b"\0")
    except OSError:
        return False
    return any(a == b"-m" and b.startswith(OURS) for a, b in pairwise(words))


def _occupants(
    here: Sequence[Holder],
    listed: tuple[int, ...] | Unknown,
    services: set[int],
    blind: str | None,
    user_name: Callable[[int], str],
    proc: str,
) -> str | Unknown | None:
    known = {one.pid for one in here}
    if not isinstance(listed, Unknown):
        more = [pid for pid in listed if pid not in known and pid not in services]
        # From a pid namespace of our own, the driver's pids are those of other processes.
        numbers = [] if blind == WALLED else more
        seen = {pid: found for pid in numbers if (found := _named(pid, user_name, proc)) is not None}
        if here or any(seen.values()):
            words = [called(one.pid, one.comm, user_name(one.uid)) for one in here]
            return _all_of_them([*words, *(one for one in seen.values() if one)])
        lost = [pid for pid in more if pid not in seen]
        if lost:
            return Unknown(f"the driver lists pid {lost[0]}, which cannot be seen from here")
        return None if blind is None else Unknown(f"{blind}; the driver lists no process", by_design=True)
    if here:
        return _all_of_them([called(one.pid, one.comm, user_name(one.uid)) for one in here])
    return None if blind is None else Unknown(f"{blind}; the processes that the driver lists are unknown: {listed.why}")


def _named(pid: int, user_name: Callable[[int], str], proc: str) -> str | None:
    """Of a pid that the driver lists. None: it does not exist. Empty: a service. Needs no permissions."""
    home = Path(proc, str(pid))
    try:
        stat = holders.parse_stat((home / "stat").read_text("utf-8", "replace"))
        uid = holders.parse_uid((home / "status").read_text("utf-8", "replace"))
    except (OSError, ValueError):
        return None
    if stat.holds_nothing:
        return None
    one = Holder(pid=pid, starttime=stat.starttime, uid=uid, comm=stat.comm, stopped=False, minors=())
    return "" if is_service(one, proc) else called(pid, stat.comm, user_name(uid))


def called(pid: int, comm: str, user: str) -> str:
    plain = "".join(sign if sign.isprintable() else "?" for sign in comm)
    return f"pid {pid} ({plain}, {user})"


def _all_of_them(words: Sequence[str]) -> str:
    more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return ", ".join(words[:MOST_NAMED]) + more


def _blind(found: holders.Holders, proc: str) -> str | None:
    if found.hidden:
        return f"the open files of {len(found.hidden)} processes could not be read; that needs root (CAP_SYS_PTRACE)"
    if not holders.shows_everyone(proc):
        return "this /proc hides the processes of other users; run it as root"
    return WALLED if holders.is_walled(proc) else None


RESET_DEADLINE, RESET_MOMENT = timedelta(minutes=2), timedelta(seconds=5)
NVIDIA_SMI = ("nvidia-smi",)
_WHOLE_GPU = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CODES = {3: "not available on this GPU", 4: "not permitted", 15: "the GPU fell off the bus"}
_LAST_WORDS = 200


async def reset_unheld(
    uuid: str,
    look: Callable[[str, datetime], Awaitable[Condition | Unknown]] = condition,
    program: Sequence[str] = NVIDIA_SMI,
) -> Accepted | Refused | Unknown:
    """One more check at the last moment: a process that opened the GPU since the previous check would lose everything
    on it.
    """
    found = await look(uuid, datetime.now(UTC))
    if isinstance(found, Unknown):
        return Refused(f"it could not be read just before ({found.why}); nothing was reset")
    if found.sliced is not False:
        return Refused("it is, or may be, split into slices; nothing was reset")
    if found.unread or found.holders:
        who = ", ".join(f"pid {one.pid} ({one.comm})" for one in found.holders) or "a process, perhaps,"
        return Refused(f"{who} has it open; nothing was reset")
    return await reset(uuid, program=program)


async def reset(
    uuid: str, deadline: timedelta = RESET_DEADLINE, program: Sequence[str] = NVIDIA_SMI
) -> Accepted | Refused | Unknown:
    """One GPU, by its uuid. Accepted is the result of nvidia-smi; only a read shows whether the GPU works again."""
    if not _WHOLE_GPU.fullmatch(uuid):
        return Refused(f"{uuid!r} is not the uuid of a whole GPU; nothing was reset")
    try:
        return await in_thread(lambda: _run_nvidia_smi((*program, "-r", "-i", uuid), deadline), deadline + RESET_MOMENT)
    except TimeoutError:
        return Unknown(f"nvidia-smi did not end within {in_words(deadline)}")


def _run_nvidia_smi(command: Sequence[str], deadline: timedelta) -> Accepted | Refused | Unknown:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=deadline.total_seconds(),
            check=False,
        )
    except OSError as error:
        return Refused(f"nvidia-smi could not be started: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Unknown(f"nvidia-smi did not end within {in_words(deadline)}")
    if done.returncode == 0:
        return Accepted()
    output = " ".join(done.stdout.decode("utf-8", "replace").split())[:_LAST_WORDS]
    meaning = f", {_CODES[done.returncode]}" if done.returncode in _CODES else ""
    return Refused(f"nvidia-smi refused (exit {done.returncode}{meaning}): {output}")


Facts: TypeAlias = tuple[GpuFacts, ...] | Unknown

DEADLINE, A_MOMENT = timedelta(seconds=10), timedelta(seconds=2)
REMEMBERED_FOR = timedelta(seconds=30)
_PROFILE = re.compile(r"\bMIG (?:(\d+)c\.)?(\d+)g\.")
# Compute slices of a whole GPU, by its model name; all others that can be split have 7.
_SLICES = ((re.compile(r"\bA30\b"), 4), (re.compile(r"\bRTX PRO 6000\b"), 4), (re.compile(r"\bRTX PRO 5000\b"), 2))
_MOST_SLICES = 7


class LocalGpus:
    """The engine's port. A result is cached for half a minute; a failure is not."""

    def __init__(
        self,
        deadline: timedelta = DEADLINE,
        inventory: Callable[[timedelta], Facts] = read_inventory,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline, self._inventory, self._ticks = deadline, inventory, ticks
        self._remembered: tuple[float, tuple[GpuFacts, ...]] | None = None
        self.let_go: Callable[[], Awaitable[None]] | None = None  # how our own sampling of GPUs is interrupted

    async def inventory(self) -> Facts:
        if self._remembered is not None:
            at, remembered = self._remembered
            if self._ticks() - at < REMEMBERED_FOR.total_seconds():
                return remembered
        found = await self._query()
        self._remembered = None if isinstance(found, Unknown) else (self._ticks(), found)
        return found

    async def shares(self) -> Mapping[str, float] | Unknown:
        found = await self.inventory()
        return found if isinstance(found, Unknown) else shares_of(found)

    async def condition(self, uuid: str, since: datetime) -> Condition | Unknown:
        return await condition(uuid, since)

    async def reset(self, uuid: str) -> Accepted | Refused | Unknown:
        if self.let_go is not None:
            await self.let_go()
        return await reset_unheld(uuid)

    async def _query(self) -> Facts:
        try:
            return await in_thread(lambda: self._inventory(self._deadline), self._deadline + A_MOMENT)
        except TimeoutError:
            return Unknown(f"the NVIDIA driver did not answer within {in_words(self._deadline)}")


def shares_of(gpus: tuple[GpuFacts, ...]) -> Mapping[str, float] | Unknown:
    """Pure. One that has no known share makes the whole unknown: a sum without it would be wrong."""
    shares: dict[str, float] = {}
    for gpu in gpus:
        if isinstance(gpu.uuid, Unknown):
            return Unknown(f"GPU {gpu.index} does not report its uuid: {gpu.uuid.why}")
        if isinstance(gpu.slices, Unknown):
            return Unknown(f"the slices of GPU {gpu.index} are unknown: {gpu.slices.why}")
        if not gpu.slices:
            shares[gpu.uuid] = 1.0
        for part in gpu.slices:
            share = share_of(part, gpu)
            if isinstance(share, Unknown):
                return share
            shares[part.uuid] = share
    return shares


def share_of(part: SliceFacts, gpu: GpuFacts) -> float | Unknown:
    """Compute slices ÷ the maximum of its model: `MIG 1g.5gb` is 1 of 7 on an A100; in `1c.2g.10gb` the first
    counts.
    """
    if isinstance(part.name, Unknown):
        return Unknown(f"the profile of slice {part.uuid} is unknown: {part.name.why}")
    profile = _PROFILE.search(part.name)
    if profile is None:
        return Unknown(f"{part.name!r} does not contain the size of slice {part.uuid}")
    model = f"{part.name} {'' if isinstance(gpu.name, Unknown) else gpu.name}"
    most = next((count for words, count in _SLICES if words.search(model)), _MOST_SLICES)
    return min(int(profile[1] or profile[2]) / most, 1.0)
