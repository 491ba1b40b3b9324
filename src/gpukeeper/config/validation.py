"""A merged tree → PolicyFile, with every mistake the schema finds, in our words.

What is wrong is taken out and the rest validated again, so that one mistake does not hide the others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpukeeper.config import hints
from gpukeeper.config.layers import Layered, layered
from gpukeeper.config.problems import Path, Problem, did_you_mean
from gpukeeper.config.sections import PolicyFile
from gpukeeper.config.units import shown

# In the place of an entry that cannot be used, so that the others keep their numbers and are checked. Each is valid;
# a result of the checks there is not reported, since a mistake there was.
_STAND_INS: dict[str | int, dict[str, Any]] = {
    "match": {"class": "docker", "name": "-"},
    "exemptions": {"owner": "-", "reason": "-"},
    "temporary": {"root": "/-", "names": ["-"]},
}


def validated(tree: dict[str, Any], lines: Mapping[Path, int], name: str) -> tuple[PolicyFile, Layered, list[Problem]]:
    """The file without its mistakes, and the mistakes."""
    problems: list[Problem] = []
    tree = copy.deepcopy(tree)
    while True:
        whole = layered(tree, lines, name)
        try:
            return PolicyFile.model_validate(whole.tree), whole, problems
        except ValidationError as error:
            before = copy.deepcopy(tree)
            reported = {path for one in problems for path in one.paths}
            for mistake in error.errors(include_url=False):
                if _inherited(mistake["loc"], before):
                    continue  # reported where it is written
                taken_out = mistake["type"] == "missing" and mistake["loc"] in reported
                if mistake["input"] is not None and not taken_out:  # a missing value was reported by the reader
                    problems.append(_in_our_words(mistake))
                _take_out(tree, mistake["loc"])
            assert tree != before, "what is built in does not fit the schema"


def schema_problems(kind: type[BaseModel], value: object, *, of_policy: bool = True) -> list[Problem]:
    """The mistakes in one value of a section, or in a file that is no policy."""
    try:
        kind.model_validate(value)
    except ValidationError as error:
        return [_in_our_words(mistake, kind, of_policy=of_policy) for mistake in error.errors(include_url=False)]
    return []


def _in_our_words(mistake: ErrorDetails, root: type[BaseModel] = PolicyFile, *, of_policy: bool = True) -> Problem:
    path, value = mistake["loc"], mistake["input"]
    match mistake["type"]:
        case "extra_forbidden":
            return _unknown_setting(path, value, root, of_policy=of_policy)
        case "missing":
            return Problem((path[:-1],), _missing(path, root))
        case "value_error":
            return Problem((path,), hints.with_modes(path, str(mistake["ctx"]["error"])))
        case "string_type":
            quote = f' Put it in quotes: "{value}".' if isinstance(value, int | float) else " Write one name."
            return Problem((path,), f"{shown(value)} is not text.{quote}")
        case "bool_type":
            return Problem((path,), f"{shown(value)} is neither true nor false. Write true or false.")
        case "list_type":
            example = f"[{value}]" if isinstance(value, str) and value.isidentifier() else "[a, b]"
            return Problem((path,), f"{shown(value)} is not a list. Write it in brackets, like {example}.")
        case "dict_type" | "model_type" | "model_attributes_type":
            return Problem((path,), f"{shown(value)} is not a mapping. {hints.for_no_mapping(path)}")
        case _:
            return Problem((path,), f"{shown(value)} cannot be used: {mistake['msg']}.")


def _unknown_setting(path: Path, value: Any, root: type[BaseModel], *, of_policy: bool) -> Problem:
    known = _settings(_section(path[:-1], root))
    hint = hints.for_unknown(path, value, known) if of_policy else did_you_mean(str(path[-1]), known, "settings")
    return Problem((path,), f'unknown setting "{path[-1]}". {hint}', name_setting=False)


def _missing(path: Path, root: type[BaseModel]) -> str:
    section, name = _section(path[:-1], root), str(path[-1])
    about = next(f.description or "" for key, f in section.model_fields.items() if (f.alias or key) == name)
    return f'"{name}" is missing. Add it: {about[:1].lower()}{about[1:]}'


def _settings(section: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in section.model_fields.items()]


def _section(path: Path, root: type[BaseModel]) -> type[BaseModel]:
    """The section at this path. A name in an open mapping is stepped over, even when a setting is called so too."""
    section, step_over = root, False
    for part in path:
        if step_over:
            step_over = False
            continue
        annotation = next(f.annotation for name, f in section.model_fields.items() if (f.alias or name) == part)
        section, step_over = _inner(annotation), get_origin(annotation) in (dict, list)
    return section


def _inner(annotation: Any) -> type[BaseModel]:
    """The section inside list[…], dict[str, …] or … | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(_inner(part) for part in reversed(get_args(annotation)) if part not in (type(None), str))


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
    if isinstance(entry, dict) and setting in entry and not _is_required(path[:2], str(setting)):
        del entry[setting]
    else:
        entries[number] = dict(_STAND_INS[path[0]])


def _is_required(section: Path, setting: str) -> bool:
    fields = _section(section, PolicyFile).model_fields
    return any(info.is_required() for name, info in fields.items() if (info.alias or name) == setting)
