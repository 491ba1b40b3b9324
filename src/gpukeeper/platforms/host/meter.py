"""Counters of a process on the bare host."""

from __future__ import annotations

from gpukeeper.devices.counters import Counters, read_process
from gpukeeper.model.subject import Subject
from gpukeeper.platforms.host.translate import PROCESS, two_numbers


def count(subject: Subject, proc: str = "/proc") -> Counters | None:
    wanted = two_numbers(subject.ref.uid, "@") if subject.ref.kind == PROCESS else None
    found = read_process(wanted[0], proc) if wanted is not None else None
    return found if wanted is not None and found is not None and found.starttime == wanted[1] else None
