"""Which processes have each GPU and slice open, except the driver's own services. Reads only.

By descriptors, as `holders` finds them, whatever the age or the user of a process. If descriptors of others cannot be
read, the driver's list of processes counts instead; if neither is available, the result is Unknown. Whether memory is
at its baseline is not judged here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from gpukeeper.devices import holders
from gpukeeper.devices.condition import holds
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.devices.holders import Holder
from gpukeeper.model.condition import IN_A_WORKLOAD, INFRASTRUCTURE, OF_A_SESSION
from gpukeeper.model.unknown import Unknown

# By uuid. None: only driver services have it open. Unknown by design: the driver lists nothing, but not every
# process could be read.
Occupied: TypeAlias = Mapping[str, str | Unknown | None]
OURS = b"gpukeeper.devices."
FIRST_PERSON_UID = 1000
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
    if one.comm in INFRASTRUCTURE and (one.uid < FIRST_PERSON_UID or one.comm in OF_A_SESSION):
        return one.container is None or one.comm in IN_A_WORKLOAD  # root in a container may be any user
    return one.uid in (0, os.geteuid()) and _is_ours(one.pid, proc)


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
            return _all([*words, *(one for one in seen.values() if one)])
        lost = [pid for pid in more if pid not in seen]
        if lost:
            return Unknown(f"the driver lists pid {lost[0]}, which cannot be seen from here")
        return None if blind is None else Unknown(f"{blind}; the driver lists no process", by_design=True)
    if here:
        return _all([called(one.pid, one.comm, user_name(one.uid)) for one in here])
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


def _all(words: Sequence[str]) -> str:
    more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return ", ".join(words[:MOST_NAMED]) + more


def _blind(found: holders.Holders, proc: str) -> str | None:
    if found.hidden:
        return f"the open files of {len(found.hidden)} processes could not be read; that needs root (CAP_SYS_PTRACE)"
    if not holders.shows_everyone(proc):
        return "this /proc hides the processes of other users; run it as root"
    return WALLED if holders.is_walled(proc) else None
