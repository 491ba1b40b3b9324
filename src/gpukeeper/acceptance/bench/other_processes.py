"""Other processes on a GPU under test. Only reads; a measurement next to other work is not valid.

By descriptors, as `holders` finds them, without our own processes and without those that only watch: a program that
computes also has /dev/nvidia-uvm open. What cannot be seen from here is Unknown with the reason.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gpukeeper.devices import holders
from gpukeeper.devices.condition import holds
from gpukeeper.devices.driver.facts import GpuFacts, Listed
from gpukeeper.devices.holders import Holder
from gpukeeper.devices.supervisor import descendants
from gpukeeper.model.condition import FIRST_BASELINE_MIB, INFRASTRUCTURE, OF_A_SESSION
from gpukeeper.model.gpu import Fact
from gpukeeper.model.unknown import Unknown

COMPUTES = "/dev/nvidia-uvm"
BUSY_PERCENT = 10.0  # of use before our first program started: another program computes on it
LONGEST_COMMAND = 80
OURS_MIB = 4096  # a worker that rests between probes keeps its context and some kernels, never that much


Name: TypeAlias = tuple[int, int]  # pid and start time: a pid alone is reused


@dataclass(frozen=True)
class OtherProcesses:
    """One scan of all processes."""

    computing: tuple[Holder, ...]  # ours among them
    ours: frozenset[int]
    minors: Mapping[int, tuple[int, int, int]]  # which capability opens which slice
    blind: str | None = None  # why processes of other users could not be inspected
    walled: bool = False  # in a pid namespace of our own: processes outside are not visible
    proc: str = "/proc"

    @property
    def own(self) -> set[Name]:
        """Those of ours that have a GPU open."""
        return {(one.pid, one.starttime) for one in self.computing if one.pid in self.ours}

    def others(self, whole: GpuFacts, uuid: str) -> set[int]:
        """By open descriptors alone: pids of others that compute on that GPU, or on that slice of it."""
        return {one.pid for one in self.computing if one.pid not in self.ours and self._holds(one, whole, uuid)}

    def on(
        self,
        whole: GpuFacts,
        uuid: str,
        listed: Listed,
        memory_used_mib: Fact,
        used_before_us_mib: Fact = None,
        busy_before_us: Fact = None,
    ) -> tuple[int, ...] | Unknown:
        """Pids of others that compute on that GPU, or on that slice of it. What was in use before we began there, and
        how busy it was then, shows other programs where our own use hides them."""
        here = [one.pid for one in self.computing if self._holds(one, whole, uuid)]
        others = self.others(whole, uuid)
        if not self.walled and not isinstance(listed, Unknown):
            others |= {pid for pid in listed if pid not in self.ours and self._is_alive(pid)}
        if others:
            return tuple(sorted(others))
        hidden = self.walled or self.blind is not None
        if hidden and isinstance(busy_before_us, int | float) and busy_before_us >= BUSY_PERCENT:
            return Unknown(
                f"it was {busy_before_us:.0f} % busy before the run started, and the process is not visible from here"
            )
        if self.walled:
            theirs = _besides_ours(memory_used_mib, used_before_us_mib) if here else memory_used_mib
            return self._behind_the_wall(theirs)
        if self.blind is not None:
            reason = listed.why if isinstance(listed, Unknown) else "the driver lists no other process"
            return Unknown(f"{self.blind}; {reason}", by_design=not isinstance(listed, Unknown))
        return ()

    def _behind_the_wall(self, used_mib: Fact) -> Unknown:
        """The driver lists pids of the machine, ours too: nothing to compare with. Memory can still be compared."""
        if isinstance(used_mib, int) and used_mib > FIRST_BASELINE_MIB:
            return Unknown(f"{used_mib} MiB of its memory are in use by a process that is not visible from here")
        return Unknown("processes outside this PID namespace are not visible from here", by_design=True)

    def _holds(self, one: Holder, whole: GpuFacts, uuid: str) -> bool:
        slices = () if isinstance(whole.slices, Unknown) else whole.slices
        part = next((each for each in slices if each.uuid == uuid), None)
        return holds(one, whole, part, self.minors)

    def _is_alive(self, pid: int) -> bool:
        """The driver still lists ended processes. Monitors and display servers do not count."""
        try:
            found = holders.look_up(pid, self.proc)
        except (OSError, ValueError):
            return True
        return found is not None and not watches(found)


def _besides_ours(now_mib: Fact, before_us_mib: Fact) -> Fact:
    """The most that is surely not ours: what was there before us, and what we never keep between probes."""
    above = now_mib - OURS_MIB if isinstance(now_mib, int) else None
    return max((one for one in (before_us_mib, above) if isinstance(one, int)), default=None)


def scan(proc: str = "/proc", root: int | None = None, known: Collection[Name] = ()) -> OtherProcesses:
    """`root`: the process that ours are below. `known`: ours as earlier scans found them; one that lost its parent
    while it ends is still ours. Blocks for the time of a scan."""
    mine = os.getpid() if root is None else root
    before = descendants(mine)
    scanned = holders.scan(proc)
    ended = {one.pid for one in scanned.found if (one.pid, one.starttime) in known}
    ours = frozenset({mine, *before, *descendants(mine), *ended})
    hidden = [pid for pid in scanned.hidden if pid not in ours]
    blind = f"{len(hidden)} processes of other users could not be inspected: run as root" if hidden else None
    if not holders.shows_everyone(proc):
        blind = "this /proc hides the processes of other users: run as root"
    return OtherProcesses(
        computing=tuple(one for one in scanned.found if not watches(one) and computes(one.pid, proc)),
        ours=ours,
        minors=holders.mig_minors(proc),
        blind=blind,
        walled=holders.is_walled(proc),
        proc=proc,
    )


def describe(pid: int, proc: str = "/proc") -> str:
    """ "pid 4242 (ann: python train.py)"; less where it cannot be read. The command line is untrusted text."""
    try:
        uid = holders.parse_uid(Path(proc, str(pid), "status").read_text("utf-8", "replace"))
    except (OSError, ValueError):
        return f"pid {pid}"
    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = f"uid {uid}"
    try:
        with Path(proc, str(pid), "cmdline").open("rb") as file:
            arguments = file.read(4 * LONGEST_COMMAND).decode("utf-8", "replace").replace("\0", " ").strip()
    except OSError:
        arguments = ""
    shown = "".join(sign if sign.isprintable() else "?" for sign in arguments)
    command = shown if len(shown) <= LONGEST_COMMAND else f"{shown[:LONGEST_COMMAND]}…"
    return f"pid {pid} ({owner}: {command or 'command unknown'})"


def watches(one: Holder) -> bool:
    return one.comm in INFRASTRUCTURE and (one.uid == 0 or one.comm in OF_A_SESSION)


def computes(pid: int, proc: str = "/proc") -> bool:
    """In doubt yes."""
    try:
        return any(str(link.readlink()).startswith(COMPUTES) for link in Path(proc, str(pid), "fd").iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True
