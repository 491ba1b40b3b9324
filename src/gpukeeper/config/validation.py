"""A merged tree → PolicyFile, with every mistake that its declaration shows, in our words and with a hint.

What is wrong is taken out and the rest read again, so that one mistake does not hide the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from gpukeeper.config.fields import Form
from gpukeeper.config.layers import BUILT_IN, Layered, layered
from gpukeeper.config.problems import Path, Problem, did_you_mean
from gpukeeper.config.sections import (
    PLATFORMS,
    Entries,
    Items,
    Maybe,
    PolicyFile,
    Section,
    Shape,
    section_in,
    settings_of,
)
from gpukeeper.config.units import shown
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


# In the place of an entry that cannot be used, so that the others keep their numbers and are checked. Each is valid;
# a result of the checks there is not reported, since a mistake there was.
_STAND_INS: dict[str | int, dict[str, Any]] = {
    "match": {"class": "docker", "name": "-"},
    "exemptions": {"owner": "-", "reason": "-"},
    "temporary": {"root": "/-", "names": ["-"]},
}
S = TypeVar("S", bound=msgspec.Struct)


class _Mistake(NamedTuple):
    path: Path  # of a missing setting: where it should be
    value: Any
    problem: Problem
    missing: bool = False


def validated(tree: dict[str, Any], lines: Mapping[Path, int], name: str) -> tuple[PolicyFile, Layered, list[Problem]]:
    """The file without its mistakes, and the mistakes."""
    problems: list[Problem] = []
    tree = copy.deepcopy(tree)
    while True:
        whole = layered(tree, lines, name)
        reader = _Reader()
        file = reader.section(PolicyFile, whole.tree, ())
        if not reader.mistakes:
            assert isinstance(file, PolicyFile)
            return file, whole, problems
        before = copy.deepcopy(tree)
        reported = {path for one in problems for path in one.paths}
        for mistake in reader.mistakes:
            if _inherited(mistake.path, before):
                continue  # reported where it is written
            taken_out = mistake.missing and mistake.path in reported
            if mistake.value is not None and not taken_out:  # a missing value was reported by the reader
                problems.append(mistake.problem)
            _take_out(tree, mistake.path)
        assert tree != before, "what is built in does not fit its declaration"


def read_section(section: type[S], value: object, *, of_policy: bool = True) -> tuple[S | None, list[Problem]]:
    """One section, or a file that is no policy. None: it has mistakes."""
    reader = _Reader(of_policy=of_policy)
    found = reader.section(section, value, ())
    return found, [mistake.problem for mistake in reader.mistakes]


class _Reader:
    def __init__(self, *, of_policy: bool = True) -> None:
        self.mistakes: list[_Mistake] = []
        self._of_policy = of_policy

    def section(self, section: type[S], value: Any, path: Path) -> S | None:
        if not isinstance(value, dict):
            self._no_mapping(value, path)
            return None
        settings, before = settings_of(section), len(self.mistakes)
        given = {}
        for name, setting in settings.items():
            if name in value:
                given[setting.field] = self._value(setting.shape, value[name], (*path, name))
            elif setting.required:
                sentence = f'"{name}" is missing. Add it: {setting.about[:1].lower()}{setting.about[1:]}'
                self.mistakes.append(_Mistake((*path, name), value, Problem((path,), sentence), missing=True))
        for name in value:
            if name not in settings:
                self._unknown((*path, name), value[name], list(settings))
        return section(**given) if len(self.mistakes) == before else None

    def _value(self, shape: Shape, value: Any, path: Path) -> Any:
        match shape:
            case Form(read):
                try:
                    return read(value)
                except ValueError as error:
                    return self._complain(path, value, with_modes(path, str(error)))
            case Maybe(of):
                return None if value is None else self._value(of, value, path)
            case Items(of) if isinstance(value, list):
                return tuple(self._value(of, one, (*path, i)) for i, one in enumerate(value))
            case Items():
                example = f"[{value}]" if isinstance(value, str) and value.isidentifier() else "[a, b]"
                return self._complain(
                    path, value, f"{shown(value)} is not a list. Write it in brackets, like {example}."
                )
            case Entries(of) if isinstance(value, dict):
                return {name: self._value(of, one, (*path, name)) for name, one in value.items()}
            case Entries():
                return self._no_mapping(value, path)
            case section:
                return self.section(section, value, path)

    def _no_mapping(self, value: Any, path: Path) -> None:
        self._complain(path, value, f"{shown(value)} is not a mapping. {for_no_mapping(path)}")

    def _unknown(self, path: Path, value: Any, known: list[str]) -> None:
        name = str(path[-1])
        hint = for_unknown(path, value, known) if self._of_policy else did_you_mean(name, known, "settings")
        self._complain(path, value, f'unknown setting "{name}". {hint}', name_setting=False)

    def _complain(self, path: Path, value: Any, sentence: str, *, name_setting: bool = True) -> None:
        self.mistakes.append(_Mistake(path, value, Problem((path,), sentence, name_setting=name_setting)))


def _inherited(path: Path, tree: dict[str, Any]) -> bool:
    """An environment has it from the policy's own retention."""
    if path[0] != "environments" or len(path) < 3:
        return False
    return path[2] not in tree["environments"][path[1]]


def _take_out(tree: dict[str, Any], path: Path) -> None:
    """Removes the value at the path, or what is left of the way to it. An entry of a list of sections that cannot be
    used without it is replaced; of other lists nothing is left."""
    if len(path) > 1 and path[0] in _STAND_INS and isinstance(tree.get(str(path[0])), list):
        _take_out_of(tree[str(path[0])], path)
        return
    here: Any = tree
    for i, part in enumerate(path):
        inside = here.get(part) if isinstance(here, dict) else None
        next_part = path[i + 1] if i + 1 < len(path) else None
        if not isinstance(inside, dict) or next_part not in inside:
            if isinstance(here, dict):
                here.pop(part, None)
            return
        here = inside


def _take_out_of(entries: list[Any], path: Path) -> None:
    number, setting = int(path[1]), path[2] if len(path) > 2 else None
    entry = entries[number]
    if isinstance(entry, dict) and setting in entry and not _is_required(str(path[0]), str(setting)):
        del entry[setting]
    else:
        entries[number] = dict(_STAND_INS[path[0]])


def _is_required(entries: str, setting: str) -> bool:
    section = section_in(settings_of(PolicyFile)[entries].shape)
    assert section is not None
    known = settings_of(section).get(setting)
    return known is not None and known.required
