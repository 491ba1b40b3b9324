"""The whole log of a container, in parts: a server sends only so many bytes at once."""

from __future__ import annotations

from gpukeeper.acceptance.launchers.kubernetes.api import Api

PART = 8 * 1024 * 1024  # bytes of one request
MOST = 64  # requests for one log


async def read(
    api: Api, name: str, namespace: str, container: str, *, previous: bool = False, part: int = PART
) -> bytes:
    """Asks again from the time of the last whole line on, and drops the lines that it has already."""
    lines: list[bytes] = []
    since = ""
    for _ in range(MOST):
        found = await api.log(
            name, namespace=namespace, container=container, previous=previous, since=since, timestamps=True, limit=part
        )
        new = found.splitlines(keepends=True)
        cut = len(found) >= part
        if cut and len(new) > 1:
            new.pop()  # a part of a line; it comes again
        overlap = _overlap(lines, new)
        lines += new[overlap:]
        if not cut or overlap == len(new):
            break
        since = lines[-1].partition(b" ")[0].decode("ascii", "replace")
    return b"".join(line.partition(b" ")[2] for line in lines)


def _overlap(have: list[bytes], new: list[bytes]) -> int:
    """How many lines at the beginning of `new` are those at the end of `have`. `since` has a precision of seconds."""
    if not have or not new:
        return 0
    most = min(len(have), len(new))
    for count in range(most, 0, -1):
        if have[-count] == new[0] and have[-count:] == new[:count]:
            return count
    return 0
