"""A list of hosts, as people write it: one per line, USER@HOST:PORT, comments. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import msgspec

from gpukeeper.model.errors import UsageError

_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})@)?"
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


class Host(msgspec.Struct, frozen=True, order=True):
    """`node`: its name in reports, without the user. The port counts: two servers may share an address."""

    node: str
    address: str
    user: str = ""
    port: int | None = None

    @property
    def words(self) -> str:
        return f"{self.user}@{self.node}" if self.user else self.node


def host(text: str) -> Host:
    """ValueError: it is no host. What begins with a dash is none: ssh would take it for an option."""
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found["port"] or 22) < 65536:
        raise ValueError(f'"{text}" is not a host; write it as HOST, USER@HOST or USER@HOST:PORT')
    port = None if found["port"] is None else int(found["port"])
    node = found["host"] if port is None else f"{found['host']}:{port}"
    return Host(node, found["host"].strip("[]"), found["user"] or "", port)


def read_hosts(lines: Iterable[str], source: str) -> tuple[Host, ...]:
    """All problems at once."""
    found: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            one = host(text)
        except ValueError as error:
            problems.append(f"{source}:{number}: {error}")
            continue
        if one.node in found:
            problems.append(f"{source}:{number}: {one.node} is in the list twice")
        found[one.node] = one
    if problems:
        raise UsageError("\n".join((*problems, "Nothing was started.")))
    return tuple(found.values())


def selected(known: Sequence[Host], names: Sequence[str]) -> tuple[Host, ...]:
    """Those of a list; without a list the names themselves are hosts."""
    if not known:
        return read_hosts(names, "--nodes")
    by_name = {one.node: one for one in known} | {one.words: one for one in known}
    missing = [name for name in names if name not in by_name]
    if missing:
        near = get_close_matches(missing[0], by_name, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"not in the list of hosts: {', '.join(missing)}.{hint} Nothing was started.")
    return tuple(dict.fromkeys(by_name[name] for name in names)) or tuple(known)
