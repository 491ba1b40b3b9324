"""Built-in ← preset ← file, deep by key, with the origin of every value. A list replaces a list."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpukeeper.config.presets import BUILT_IN, DEFAULT_PRESET, PRESETS
from gpukeeper.config.problems import Path, line_of

BUILT_IN_ORIGIN = "built-in"
_BY_OUTCOME = ("succeeded", "failed", "stopped")


@dataclass
class Layered:
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)

    def put(self, layer: Mapping[str, Any], origins: Mapping[Path, str]) -> None:
        """Lays `layer` over what is there. `origins` names where each of its values is written."""
        for path, value in leaves(layer):
            if value == {} and isinstance(_get(self.tree, path), dict):
                continue  # an empty mapping changes nothing
            for known in [known for known in self.origins if known[: len(path)] == path]:
                del self.origins[known]
            _set(self.tree, path, copy.deepcopy(value))
            self.origins[path] = origins.get(path, BUILT_IN_ORIGIN)
            self.origins |= {p: o for p, o in origins.items() if len(p) > len(path) and p[: len(path)] == path}


def layered(tree: Mapping[str, Any], lines: Mapping[Path, int], name: str) -> Layered:
    """The whole: the file's values over what it starts from."""
    preset = tree.get("preset", DEFAULT_PRESET)
    preset = (
        preset if isinstance(preset, str) and preset in PRESETS else DEFAULT_PRESET
    )  # a wrong name is reported by the schema
    result = Layered()
    result.put(BUILT_IN, {})
    result.put(PRESETS[preset], {path: f"preset {preset}" for path, _ in leaves(PRESETS[preset])})
    written = _spelt_out(tree)
    origins = {path: f"{name}:{line_of(path, lines)}" for path in _paths(written)} if lines else {}
    result.put(written, origins)
    _inherit_retention(result)
    return result


def leaves(tree: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything that is not a filled mapping; a list is one leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _paths(tree: Any, path: Path = ()) -> Iterator[Path]:
    """The path of everything, items of lists included."""
    if path:
        yield path
    inside = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield from _paths(value, (*path, key))


def _get(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _set(tree: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(tree.get(str(key)), dict):
            tree[str(key)] = {}
        tree = tree[str(key)]
    tree[str(path[-1])] = value


def _spelt_out(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`retention: manual` is short for the same word for every outcome."""
    written = dict(tree)
    if written.get("retention") == "manual":
        written["retention"] = dict.fromkeys(_BY_OUTCOME, "manual")
    if isinstance(written.get("environments"), Mapping):
        written["environments"] = {
            name: dict.fromkeys(_BY_OUTCOME, "manual") if kept == "manual" else kept
            for name, kept in written["environments"].items()
        }
    return written


def _inherit_retention(result: Layered) -> None:
    """What an environment does not set is as in the policy, not as in the built-in."""
    environments = result.tree.get("environments")
    for name, kept in environments.items() if isinstance(environments, dict) else ():
        for key in (*_BY_OUTCOME, "max"):
            origin = result.origins.get(("retention", key))
            if origin is not None and isinstance(kept, dict) and key not in kept:
                kept[key] = result.tree["retention"][key]
                result.origins["environments", name, key] = origin
