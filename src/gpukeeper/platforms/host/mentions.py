"""Trees that a live process names: in its command line, or as the folder for its temporary files. Looks only.

A program with a temporary folder often has nothing of it open, for hours. By path, as it is called here: what a process
in another mount namespace names may be something else, and then keeps a little more. Of what may not be read nothing
is said; the list of open files says that already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec

from gpukeeper.disk.measure import printable

FOLDERS = (b"TMPDIR", b"TMP", b"TEMP", b"RAY_TMPDIR")
NAME_MAX = 255  # bytes of one name
ENDS = frozenset(b" \t\n\"'`:;,=|&<>()[]{}$?*#!\\")  # where a name in the middle of a text may end; or it goes on


class Text(msgspec.Struct, frozen=True, gc=False):
    pid: int
    words: bytes
    variable: str | None = None  # None: its command line

    def __str__(self) -> str:
        return "in its command line" if self.variable is None else f"as its {self.variable}"


Mentions: TypeAlias = dict[str, str]  # by name: who names it, in words
Mentioned: TypeAlias = Callable[[Iterable[str]], Mentions]


def below(folders: Iterable[str], proc: str = "/proc") -> Mentions:
    """The entries of one folder that anybody names. `folders`: that folder, in each way it may be written."""
    prefixes = [os.fsencode(folder.rstrip("/") + "/") for folder in dict.fromkeys(folders)]
    found: dict[bytes, Text] = {}
    for text in _texts(proc):
        for prefix in prefixes:
            for name in names_after(prefix, text.words):
                found.setdefault(name, text)
    return {
        os.fsdecode(name): f"pid {text.pid} ({_comm(text.pid, proc)}) names it {text}" for name, text in found.items()
    }


def names_after(prefix: bytes, words: bytes) -> Iterator[bytes]:
    """Each name that may stand after the prefix. A name may hold blanks and signs itself, so it may be several."""
    at = words.find(prefix)
    while at >= 0:
        start = at + len(prefix)
        rest = words[start : start + NAME_MAX + 1].lstrip(b"/").partition(b"/")[0]
        yield from (rest[:end] for end, sign in enumerate(rest) if sign in ENDS and end)
        if rest:
            yield rest
        at = words.find(prefix, start - 1)  # the sign between two names may begin the next one


def _texts(proc: str) -> Iterator[Text]:
    ours = _ours(proc)
    for home in Path(proc).iterdir():
        if not home.name.isdecimal():
            continue
        pid = int(home.name)
        if pid not in ours:
            yield from (Text(pid, word) for word in _read(home / "cmdline") if b"/" in word)
        for setting in _read(home / "environ"):
            name, _, value = setting.partition(b"=")
            if name in FOLDERS:
                yield Text(pid, value, name.decode())


def _ours(proc: str) -> set[int]:
    """Ourselves and whoever called us, a shell or sudo: what we were told to look at is not in use by that."""
    pid, found = os.getpid(), set[int]()
    while pid > 1 and pid not in found:
        found.add(pid)
        with suppress(OSError, ValueError):
            status = Path(proc, str(pid), "stat").read_text("utf-8", "replace")
            pid = int(status[status.rindex(")") + 2 :].split()[1])
    return found


def _read(path: Path) -> list[bytes]:
    with suppress(OSError):
        return path.read_bytes().split(b"\0")
    return []


def _comm(pid: int, proc: str) -> str:
    with suppress(OSError):
        return printable(Path(proc, str(pid), "comm").read_text("utf-8", "replace").rstrip("\n"))
    return "ended"
