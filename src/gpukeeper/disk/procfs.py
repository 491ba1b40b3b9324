r"""Reading files of /proc: as bytes, up to a limit, and split only at what the kernel itself writes.

Names in these files are chosen by any user who may run a program or mount something. They may contain any byte except
NUL and what the kernel escapes, so only b"\n" ends a line and only b" " or b"\t" ends a field.
"""

from __future__ import annotations

import os
import re

STATUS = 64 * 1024
TABLE = 32 * 1024 * 1024  # of maps and mountinfo: more than 65,530 mappings with usual names
_ESCAPED = re.compile(rb"\\([0-7]{3})")


class TooLong(OSError):
    """The file is longer than what is read of one process."""


def read(path: str, limit: int) -> bytes:
    """The whole file, or TooLong."""
    found = read_part(path, limit + 1)
    if len(found) > limit:
        raise TooLong(0, f"more than {limit:,} bytes", path)
    return found


def read_part(path: str, limit: int) -> bytes:
    """Its beginning. The kernel returns such files in pieces, whatever size is requested."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces, size = [], 0
        while size < limit and (piece := os.read(fd, min(limit - size, 1 << 18))):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def stat_fields(stat: bytes) -> list[bytes]:
    """Of /proc/PID/stat, from the state on. The name before it is in brackets and may contain brackets itself."""
    return stat[stat.rindex(b")") + 2 :].split()


def status_value(status: bytes, key: bytes) -> bytes | None:
    """Of /proc/PID/status and fdinfo: what follows `key:` and a tab."""
    for line in status.split(b"\n"):
        if line.startswith(key + b":"):
            return line[len(key) + 1 :].strip()
    return None


def unescaped(field: bytes) -> str:
    """A name as the kernel writes it in tables: blank, tab, newline and backslash are \\040, \\011, \\012, \\134."""
    return os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field))
