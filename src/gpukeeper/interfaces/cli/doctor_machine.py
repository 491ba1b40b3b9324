"""What `gpukeeper doctor` checks of the machine itself: clock, space for the ledger, time of the last pass."""

from __future__ import annotations

import ctypes
import os
from datetime import datetime, timedelta
from pathlib import Path

from gpukeeper.engine.loop import TOO_SLOW
from gpukeeper.model.durations import in_words, size_in_words
from gpukeeper.model.event import Complaint, Event, Passed

LITTLE = 64 << 20  # bytes; the reserve of the ledger is 8 MiB
STALE = timedelta(hours=1)
_UNSYNCHRONIZED, _ERROR = 0x40, 5  # STA_UNSYNC; TIME_ERROR

Row = tuple[str, ...]


class _Timex(ctypes.Structure):
    """As the kernel fills it: only the status is read, and the rest is room for it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock() -> Row:
    """Ages, windows and expiry depend on it."""
    found = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(found))
    if state < 0:
        return ("note", "clock", f"whether it is synchronized could not be read: {os.strerror(ctypes.get_errno())}")
    if state == _ERROR or found.status & _UNSYNCHRONIZED:
        return ("note", "clock", "not synchronized. Start a time service: systemctl enable --now systemd-timesyncd")
    return ("ok", "clock", "synchronized")


def space(state: Path) -> Row:
    """Without space nothing can be recorded, and what cannot be recorded is not done."""
    place = next(one for one in (state, *state.parents) if one.exists())
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    words = f"{size_in_words(free)} free for the ledger at {place}"
    if free < LITTLE:
        return ("problem", "disk", f"only {words}. Nothing is reclaimed when nothing can be recorded. Free some space")
    return ("ok", "disk", words)


def measuring(lines: list[tuple[int, Event]], now: datetime) -> list[Row]:
    """Whether the daemon found that it measures too slowly, by its complaints of the last day."""
    slow = [line.at for _, line in lines if isinstance(line, Complaint) and line.what.startswith(TOO_SLOW)]
    return [("note", "measuring", f"{in_words(max(now - slow[-1], timedelta()))} ago: {TOO_SLOW}")] if slow else []


def last_pass(lines: list[tuple[int, Event]], now: datetime) -> Row:
    passes = [line for _, line in lines if isinstance(line, Passed)]
    if not passes:
        return ("note", "pass", "none is recorded yet. The daemon makes one at each interval of the policy")
    last = passes[-1]
    where, ago = f"{last.platform}/{last.place}", now - last.at
    if ago < -timedelta(minutes=5):
        return ("problem", "pass", f"the last one, at {where}, is {in_words(-ago)} in the future. Check the clock")
    verdict = "note" if ago > STALE else "ok"
    advice = ". Is the daemon running? systemctl status gpukeeper" if ago > STALE else ""
    failed = f", {last.failed} failed" if last.failed else ""
    return (verdict, "pass", f"the last one was {in_words(ago)} ago at {where}: {last.seen} seen{failed}{advice}")
