"""The part of the checks that is about trees of files: what would delete too much, or never anything."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from gpukeeper.config.problems import Path, Problem
from gpukeeper.config.sections import PolicyFile
from gpukeeper.config.units import share_in_words
from gpukeeper.config.units import span_in_words as words
from gpukeeper.model.policy import HOUR, Temporary
from gpukeeper.platforms.ray.settings import RaySettings

_PRESSED = RaySettings().under_pressure


def check_trees(file: PolicyFile) -> Iterator[Problem]:
    for i, entry in enumerate(file.temporary):
        yield from _names(entry, ("temporary", i))
    yield from _names(file.ray, ("ray",))
    yield from _images(file)
    yield from _sessions(file)
    yield from _logs(file)
    yield from _marks(file)
    for i, root in enumerate(file.reports.roots):
        yield from _apart(file, root, ("reports", "roots", i))


def _names(entry: Temporary | RaySettings, at: Path) -> Iterator[Problem]:
    if not entry.names:
        yield Problem(((*at, "names"),), 'no name is given, so nothing would be deleted. Write names, like ["tmp*"].')
    elif set(entry.names) <= set(entry.keep) or "*" in entry.keep:
        yield Problem(
            ((*at, "keep"), (*at, "names")),
            "every name is also listed under keep, so nothing would be deleted. Remove names from keep.",
        )
    # The built-in value may well be more than a short age; the shorter of the two holds.
    if entry.under_pressure != _PRESSED:
        yield from _sooner(entry.under_pressure, entry.older_than, at, "older_than")


def _images(file: PolicyFile) -> Iterator[Problem]:
    if file.images.unused is not None and file.images.under_pressure is not None:
        yield from _sooner(file.images.under_pressure, file.images.unused, ("images",), "unused")


def _sooner(pressed: timedelta, usual: timedelta, at: Path, name: str) -> Iterator[Problem]:
    if pressed > usual:
        yield Problem(
            ((*at, "under_pressure"), (*at, name)),
            f"under_pressure ({words(pressed)}) must not be longer than {name}"
            f" ({words(usual)}). Write at most {words(usual)}.",
        )


def _sessions(file: PolicyFile) -> Iterator[Problem]:
    if file.ray.sessions is not None and file.ray.sessions < HOUR:
        yield Problem(
            (("ray", "sessions"),),
            f"{words(file.ray.sessions)} is too short: a session that is just starting has directories but no"
            " processes yet. Write at least 1h, or none to only report dead sessions.",
        )


def _logs(file: PolicyFile) -> Iterator[Problem]:
    if file.ray.logs is not None and file.ray.logs < HOUR:
        yield Problem(
            (("ray", "logs"),),
            f"{words(file.ray.logs)} is too short: the age of logs has a resolution of one hour."
            " Write at least 1h, or none to only report them.",
        )


def _marks(file: PolicyFile) -> Iterator[Problem]:
    low, high = file.disk.low, file.disk.high
    if low >= high:
        yield Problem(
            (("disk", "low"), ("disk", "high")),
            f"low is {share_in_words(low)} and high is {share_in_words(high)}, but low must be smaller"
            " than high. Write them like 70% and 80%.",
        )


def _apart(file: PolicyFile, root: str, at: Path) -> Iterator[Problem]:
    """Reports have ages and archives of their own, which a temporary root around or inside them would undo."""
    for path, called, other, names in _temporary_roots(file):
        reports, temporary = PurePosixPath(root), PurePosixPath(other)
        taken = _is_named(reports, temporary, names) or temporary.is_relative_to(reports)
        if taken:
            yield Problem(
                (at, path),
                f"{root} and {called} {other} overlap, so reports would be deleted as temporary trees, or"
                " the reverse. Use a separate directory for reports.",
            )


def _temporary_roots(file: PolicyFile) -> Iterator[tuple[Path, str, str, tuple[str, ...]]]:
    """Its position, its name, the root, and the names of trees there. Of nodes only if any are covered."""
    for i, entry in enumerate(file.temporary):
        yield ("temporary", i, "root"), f"temporary[{i}].root", entry.root, entry.names
    for i, root in enumerate(file.ray.roots if file.scope.ray is not None else ()):
        yield ("ray", "roots", i), f"ray.roots[{i}]", root, file.ray.names


def _is_named(reports: PurePosixPath, temporary: PurePosixPath, names: tuple[str, ...]) -> bool:
    """It lies in a tree that may be deleted as a whole."""
    if reports == temporary or not reports.is_relative_to(temporary):
        return False
    return any(fnmatchcase(reports.relative_to(temporary).parts[0], pattern) for pattern in names)
