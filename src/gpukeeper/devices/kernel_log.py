"""The errors of a GPU (Xids) in the kernel log. Reading it needs permissions that not every user has: then unknown."""

from __future__ import annotations

import os
import re
from datetime import datetime, timedelta

from gpukeeper.model import reading
from gpukeeper.model.condition import Xid
from gpukeeper.model.unknown import Unknown

LONGEST_RECORD = 8192
MOST_RECORDS = 200_000  # a log that is written faster than we read must not keep us forever
SLACK = timedelta(seconds=2)  # the time of boot is known to the second
FROM_USERS = 8  # priority and, times eight, its origin: 0 is the kernel
WORDS = 120  # characters; the rest of a record is ignored
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:]{1,40})\): ([0-9]{1,9})(?:, (.*))?")


def xids(pci: str, since: datetime, boot: datetime, path: str = "/dev/kmsg") -> tuple[Xid, ...] | Unknown:
    """Of the GPU at that PCI address, logged since then."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Unknown(f"the kernel log cannot be read: {error.strerror}", by_design=True)
    try:
        return parse(_records(log), pci, since - SLACK - boot)
    except OSError as error:
        return Unknown(f"the kernel log cannot be read: {error.strerror}", by_design=True)
    finally:
        os.close(log)


def parse(records: list[str], pci: str, since_boot: timedelta) -> tuple[Xid, ...]:
    found = []
    for record in records:
        match = _XID.search(record) if by_kernel(record) else None
        if match and same_address(match[1], pci) and logged_at(record) >= since_boot:
            found.append(Xid(int(match[2]), (match[3] or "").strip()[:WORDS]))
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


def _records(log: int) -> list[str]:
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
