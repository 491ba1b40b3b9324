"""Trees that a running process names: in its command line, or as its directory for temporary files. Reads only.

A program with a temporary directory often has no file of it open, for hours. By path, as seen here: the path of a
process in another mount namespace may mean another file, and then a little more is kept. What may not be read is not
reported here; the list of open files does that. A process with more text than is read may name anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import msgspec

from gpukeeper.disk import procfs
from gpukeeper.disk.measure import printable

FOLDERS = (b"TMPDIR", b"TMP", b"TEMP", b"RAY_TMPDIR")
NAME_MAX = 255  # bytes of one name
WORDS_MAX = 256 * 1024  # bytes read of a command line, and of an environment
NAMES_MAX = 2_000  # names that one process may mention: many texts are ambiguous
ENDS = frozenset(b" \t\n\"'`:;,=|&<>()[]{}$?*#!\\")  # where a name in the middle of a text may end; or it continues


class ProcessText(msgspec.Struct, frozen=True, gc=False):
    pid: int
    words: bytes
    variable: str | None = None  # None: its command line
    cut: bool = False  # there is more text

    def __str__(self) -> str:
        return "in its command line" if self.variable is None else f"as its {self.variable}"

    @property
    def where(self) -> str:
        return "in its command line" if self.variable is None else "in its environment"


class Mentions(dict[str, str]):
    """By name: the process that names it, as text. `anything`: a process that may name every entry, since it was not
    read completely.
    """

    anything: str | None = None

    def and_also(self, whys: Mapping[str, str]) -> Mentions:
        """With other paths that are needed, each with a clause that names the user of it."""
        both = Mentions({**whys, **self})
        both.anything = self.anything
        return both

    def who(self, name: str) -> str | None:
        return self.get(name, self.anything)


Mentioned: TypeAlias = Callable[[tuple[str, ...]], Mentions]


def below(directories: Iterable[str], proc: str = "/proc") -> Mentions:
    """The entries of one directory that a process names. `directories`: that directory, in each way it may be
    written."""
    prefixes = [os.fsencode(directory.rstrip("/") + "/") for directory in dict.fromkeys(directories)]
    found: dict[bytes, ProcessText] = {}
    too_much: ProcessText | None = None
    for _, texts in groupby(_texts(proc), key=attrgetter("pid")):
        named: dict[bytes, ProcessText] = {}
        for text in texts:
            names = chain.from_iterable(names_after(prefix, text.words) for prefix in prefixes)
            named |= dict.fromkeys(islice(names, NAMES_MAX + 1 - len(named)), text)
            if text.cut or len(named) > NAMES_MAX:
                too_much, named = text, {}
                break
        found = named | found
    mentions = Mentions(
        {os.fsdecode(name): f"pid {text.pid} ({_comm(text.pid, proc)}) names it {text}" for name, text in found.items()}
    )
    if too_much is not None:
        who = f"pid {too_much.pid} ({_comm(too_much.pid, proc)})"
        mentions.anything = f"{who} has more text {too_much.where} than is read of one process, and may name it there"
    return mentions


def names_after(prefix: bytes, words: bytes) -> Iterator[bytes]:
    """Each name that may follow the prefix. A name may contain blanks and punctuation, so there may be several."""
    at = words.find(prefix)
    while at >= 0:
        start = at + len(prefix)
        rest = words[start : start + NAME_MAX + 1].lstrip(b"/").partition(b"/")[0]
        yield from (rest[:end] for end, sign in enumerate(rest) if sign in ENDS and end)
        if rest:
            yield rest
        at = words.find(prefix, start - 1)  # the character between two names may begin the next one


def _texts(proc: str) -> Iterator[ProcessText]:
    ours = _ours(proc)
    for home in Path(proc).iterdir():
        if not home.name.isdecimal():
            continue
        pid = int(home.name)
        if pid in ours:
            line, cut = b"", False
        else:
            line, cut = _read(home / "cmdline")
        yield from (ProcessText(pid, word) for word in line.split(b"\0") if b"/" in word)
        settings, more = _read(home / "environ")
        for setting in settings.split(b"\0"):
            name, _, value = setting.partition(b"=")
            if name in FOLDERS:
                yield ProcessText(pid, value, name.decode())
        if cut or more:
            yield ProcessText(pid, b"", "" if more and not cut else None, cut=True)


def _ours(proc: str) -> set[int]:
    """This process and its callers, a shell or sudo: their arguments name the paths to read, and do not use them."""
    pid, found = os.getpid(), set[int]()
    while pid > 1 and pid not in found:
        found.add(pid)
        with suppress(OSError, ValueError):
            pid = int(procfs.stat_fields(procfs.read(f"{proc}/{pid}/stat", procfs.STATUS))[1])
    return found


def _read(path: Path) -> tuple[bytes, bool]:
    """And whether there is more."""
    with suppress(OSError):
        found = procfs.read_part(str(path), WORDS_MAX + 1)
        return found[:WORDS_MAX], len(found) > WORDS_MAX
    return b"", False


def _comm(pid: int, proc: str) -> str:
    with suppress(OSError):
        return printable(os.fsdecode(procfs.read(f"{proc}/{pid}/comm", procfs.STATUS).removesuffix(b"\n")))
    return "ended"
