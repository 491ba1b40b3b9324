"""Exemptions that other tools write. An invalid entry keeps the work and is reported; it never ends a protection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukeeper.config import document
from gpukeeper.config.checks import RULE_NAMES, check_exemption
from gpukeeper.config.problems import Problem
from gpukeeper.config.validation import read_section
from gpukeeper.model.policy import Exemption
from gpukeeper.model.unknown import Unknown


@dataclass(frozen=True)
class FromFile:
    """`origins` has one entry for each exemption; `complaints` are for an admin."""

    exemptions: tuple[Exemption, ...] | Unknown
    origins: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()


def read_exemptions(path: Path, classes: Iterable[str]) -> FromFile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        return _everything_kept(f"{path} could not be read: {why}")
    read = document.read(text)
    broken = next((problem for problem in read.problems if not problem.paths[0]), None)
    if broken:
        return _everything_kept(broken.message(str(path), read.lines))
    if not isinstance(read.tree, list):
        return _everything_kept(f"{path}: not a list of exemptions (an empty list is written [])")
    return _entries(read, str(path), list(classes))


def _everything_kept(why: str) -> FromFile:
    return FromFile(Unknown(why), complaints=(f"{why}. Everything is kept until it is fixed.",))


def _entries(read: document.Document, name: str, classes: list[str]) -> FromFile:
    exemptions, origins, complaints = [], [], []
    for i, entry in enumerate(read.tree):
        given, mistakes = _checked(entry, classes)
        problems = [problem for problem in read.problems if problem.paths[0][0] == i] or mistakes
        line = read.lines.get((i,), 1)
        if problems or given is None:
            why = f"{name}:{problems[0].line or line}: {problems[0].sentence}"
            understood = _as_far_as_understood(entry, why, classes)
            if understood is None:
                return _everything_kept(f"{why} The exempted owner, workload or class is unknown")
            complaints.append(f"{why} Kept until it is fixed.")
            exemptions.append(understood)
        else:
            exemptions.append(given)
        origins.append(f"{name}:{line}")
    return FromFile(tuple(exemptions), tuple(origins), tuple(complaints))


def _checked(entry: Any, classes: list[str]) -> tuple[Exemption | None, list[Problem]]:
    given, problems = read_section(Exemption, entry)
    return given, problems if given is None else list(check_exemption(given, (), classes))


def _as_far_as_understood(entry: Any, why: str, classes: list[str]) -> Exemption | None:
    """None: it is unknown what it would protect. If not all rules are valid, all rules are suspended."""
    fields = entry if isinstance(entry, dict) else {}
    owner, workload, class_ = (_text(fields.get(key)) for key in ("owner", "workload", "class"))
    class_ = class_ if class_ in classes else None
    if owner is workload is class_ is None:
        return None
    rules = fields.get("rules")
    understood = isinstance(rules, list) and all(rule in RULE_NAMES for rule in rules)
    return Exemption(
        reason=_text(fields.get("reason")) or "",
        owner=owner,
        workload=workload,
        class_=class_,
        rules=tuple(rules) if understood and isinstance(rules, list) else (),
        until=Unknown(why),
    )


def _text(value: Any) -> str | None:
    """A number is a name without quotes."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None
