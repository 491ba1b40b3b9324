"""Hints for a setting in the wrong place, or a value of another tool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpukeeper.config.presets import BUILT_IN
from gpukeeper.config.problems import Path, did_you_mean
from gpukeeper.config.section import Entries, Section, section_in, settings_of
from gpukeeper.config.sections import PLATFORMS, PolicyFile
from gpukeeper.model.policy import ClassSettings

MANY = 3  # homes of a word; with more of them it gives no hint about what was meant
# Words that people bring along and whose nearest neighbour by letters is the wrong setting.
_OTHER_WORDS = {"stop_grace": "grace", "idle_after": "idle", "idle_timeout": "idle", "namespace": "namespaces"}
_OTHER_WORDS["podman"] = "docker"  # by the same API

# Settings that a policy may still have, and why they are gone.
_REMOVED = {
    "gpu_shares": "The setting had no effect and was removed. Delete the line.",
    "coverage": "The setting was removed: a gap in the measurements always ends the idle time. Delete the line.",
}


def for_unknown(path: Path, value: Any, known: list[str]) -> str:
    """For a setting that is unknown in its section."""
    word = str(path[-1])
    if word in _REMOVED:
        return _REMOVED[word]
    other = _OTHER_WORDS.get(word)
    if other in known:
        return f'Did you mean "{other}"?'
    if len(path) == 1 and word in PLATFORMS:
        return f"Platforms belong under scope. Write {_covered(word)}."
    if len(path) == 1 and _is_class(word, value):
        return f"Classes belong under classes. Write classes: {{{word}: {{idle: 30m}}}}."
    homes = [in_words for in_words, section in _sections(PolicyFile, "") if word in settings_of(section)]
    if homes and len(homes) <= MANY:
        return f"It belongs under {' or '.join(homes)}."
    return did_you_mean(word, known, "settings")


def with_modes(path: Path, sentence: str) -> str:
    """Where a mode of another tool was written, such as dry-run."""
    foreign = path == ("mode",) and "Did you mean" not in sentence
    return f"{sentence} plan is a dry run; enforce acts unattended." if foreign else sentence


def for_no_mapping(path: Path) -> str:
    """For a value where settings should be."""
    if path == ("scope",):
        return "Write it like scope: {docker: {}}."
    if len(path) == 2 and path[0] == "scope":
        return f"To cover it, write {_covered(str(path[1]))}."
    return "Write its settings as {name: value}."


def _covered(platform: str) -> str:
    inner = "kubernetes: {namespaces: [research]}" if platform == "kubernetes" else f"{platform}: {{}}"
    return f"scope: {{{inner}}}"


def _is_class(word: str, value: Any) -> bool:
    return word in BUILT_IN["classes"] or (
        isinstance(value, dict) and bool(value) and set(value) <= set(settings_of(ClassSettings))
    )


def _sections(section: Section, at: str) -> Iterator[tuple[str, Section]]:
    """Every section below this one, by where it is in a file; NAME is a name of the user's choice."""
    for name, setting in settings_of(section).items():
        inside = section_in(setting.shape)
        if inside is not None:
            here = f"{at}.{name}".lstrip(".")
            place = f"{here}.NAME" if isinstance(setting.shape, Entries) else here
            yield place, inside
            yield from _sections(inside, place)
