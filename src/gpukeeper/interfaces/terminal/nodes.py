"""Nodes and disks in words, before and after."""

from __future__ import annotations

from collections.abc import Callable

from gpukeeper.model.durations import size_in_words
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.nodes import DISK, SubjectChange, bytes_of

HEAD = ("kind", "name", "temporary", "disk", "inodes", "sessions", "busy")


def change_in_words(change: SubjectChange, freed: int) -> str:
    """ "ray/lab/worker-1: 35.2 GiB -> 70.0 MiB temporary; disk /: 81% -> 64%; 35.1 GiB freed"."""
    before, after = change
    parts = [] if before.ref.kind == DISK else [f"{_then(before, after, _temporary)} temporary"]
    if before.disk is not None:
        parts.append(f"disk {before.disk.name}: {_then(before, after, _used)}")
    if freed:
        parts.append(f"{size_in_words(freed)} freed")
    where = (before.ref.platform, before.ref.place, before.ref.namespace)
    name = "/".join(part for part in where if part) if before.ref.kind == DISK else before.ref.path
    return f"{name}: {'; '.join(parts)}"


def _then(before: Subject, after: Subject | Unknown | None, words: Callable[[Subject], str]) -> str:
    return f"{words(before)} -> {words(after) if isinstance(after, Subject) else '?'}"


def _temporary(subject: Subject) -> str:
    return _size(subject.size)


def _used(subject: Subject) -> str:
    return "?" if subject.disk is None else _share(subject.disk.used)


def row(subject: Subject) -> tuple[str, ...]:
    """One line of the table of nodes and disks."""
    is_disk = subject.ref.kind == DISK
    return (
        subject.ref.kind,
        subject.ref.path,
        "-" if is_disk else _size(subject.size),
        _disk(subject),
        _share(subject.disk.inodes) if subject.disk is not None else "?",
        "-" if is_disk else _sessions(subject),
        "-" if is_disk else busy(subject),
    )


def busy(subject: Subject) -> str:
    if isinstance(subject.busy, Unknown):
        return f"unknown: {subject.busy.why}"
    return "no" if subject.busy is None else subject.busy


def _disk(subject: Subject) -> str:
    disk, size = subject.disk, bytes_of(subject).size
    if disk is None:
        return "?"
    of = "" if size is None else f" of {size_in_words(size)}"
    return f"{disk.used:.0%}{of}" + ("" if subject.ref.kind == DISK else f" ({disk.name})")


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _size(size: int | Unknown) -> str:
    return "?" if isinstance(size, Unknown) else size_in_words(size)


def _sessions(subject: Subject) -> str:
    """ "1 live, 3 dead", if its platform reports them."""
    counts = [(subject.labels.get(f"sessions_{word}"), word) for word in ("live", "dead")]
    return ", ".join(f"{number} {word}" for number, word in counts if number) or "-"
