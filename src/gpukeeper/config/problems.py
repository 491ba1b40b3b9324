"""One problem of a policy file, its position, and its message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """`paths`: every setting that takes part in it. It is reported at the first of them that the file itself sets."""

    paths: tuple[Path, ...]
    sentence: str
    name_setting: bool = True  # False where the sentence names the setting itself
    line: int | None = None  # if the reader knows it more exactly than the path
    once: str = ""  # of several with this word at one setting only the first is reported: fixing it fixes all

    def where(self, lines: Mapping[Path, int]) -> Path:
        return next((path for path in self.paths if path in lines), self.paths[0])

    def at(self, lines: Mapping[Path, int]) -> int:
        return self.line or line_of(self.where(lines), lines)

    def message(self, name: str, lines: Mapping[Path, int]) -> str:
        setting = f"{in_words(self.where(lines))}: " if self.name_setting and self.where(lines) else ""
        return f"{name}:{self.at(lines)}: {setting}{self.sentence}"


def line_of(path: Path, lines: Mapping[Path, int]) -> int:
    """The line of the setting, or of the nearest one around it that the file gives."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def in_words(path: Path) -> str:
    """classes.managed.idle, match[2].class"""
    words = ""
    for part in path:
        words += f"[{part}]" if isinstance(part, int) else f".{part}" if words else part
    return words


def messages_in_order(problems: Iterable[Problem], name: str, lines: Mapping[Path, int]) -> list[str]:
    """By line, each once."""
    chosen: dict[object, Problem] = {}
    for problem in problems:
        chosen.setdefault((problem.where(lines), problem.once or problem.sentence, problem.line), problem)
    return [problem.message(name, lines) for problem in sorted(chosen.values(), key=lambda one: one.at(lines))]


def nearest(word: str, known: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)), None)


def did_you_mean(word: str, known: Sequence[str], what: str = "values") -> str:
    """The nearest word, or all of them when none is near."""
    near = nearest(word, known)
    return f'Did you mean "{near}"?' if near else f"Valid {what}: {', '.join(known)}."
