"""What every policy starts from, in the words of a policy file: the classes, and the presets a file can name; and the
whole: built-in ← preset ← file, deep by key, with the origin of every value. A list replaces a list.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpukeeper.config.problems import Path, line_of
from gpukeeper.model.subject import OUTCOMES

DEFAULT_PRESET = "development"

# Idle work is stopped after five hours, and kept like other stopped work; long runtimes are reported (ADR 51).
_IDLE = {"idle": "5h", "after_idle": "keep", "on_max_runtime": "report"}
_REPORTED = {"idle": "5h", "on_idle": "report"}

BUILT_IN: dict[str, Any] = {
    "classes": {
        "managed": {**_IDLE, "max_runtime": "24h"},
        "devcontainer": {
            "idle": "none",
            "max_runtime": "168h",
            "on_max_runtime": "report",
            "tell_when_large": True,
        },
        "compose": {**_IDLE, "max_runtime": "72h"},
        "docker": {**_IDLE, "max_runtime": "48h"},
        "api": {"idle": "none", "max_runtime": "24h", "on_max_runtime": "report"},
        "serving": {**_REPORTED, "max_runtime": "none"},
        # There is no owner to warn.
        "unknown": {**_IDLE, **_REPORTED, "max_runtime": "24h"},
        "infrastructure": {"idle": "none", "max_runtime": "none", "never_started": "none", "untouchable": True},
        # What neither holds nor requests a GPU is out of scope.
        "without-gpu": {"idle": "none", "max_runtime": "none", "never_started": "none", "untouchable": True},
        # A user's program on the machine itself: reported, never touched.
        "bare": {**_REPORTED, "max_runtime": "none", "never_started": "none"},
        # On a cluster idle work is reported, not stopped, until a site's own class sets otherwise.
        "cluster": {**_REPORTED, "max_runtime": "none", "never_started": "none"},
        "ray": {**_REPORTED, "max_runtime": "none"},
    }
}

_BY_OWNER = ["managed", "compose", "docker"]
_STOPPED = {"idle": "30m", "on_idle": "stop", "after_idle": "remove", "on_max_runtime": "stop"}

PRESETS: dict[str, dict[str, Any]] = {
    "development": {"retention": {"succeeded": "1d", "failed": "7d"}},
    "ci": {"retention": {"succeeded": "0s", "failed": "1d"}, "at_finish": "Running"},
    "production": {
        "retention": {"succeeded": "7d", "failed": "30d"},
        "at_finish": "None",
        "reports": {"older_than": "30d"},
    },
    "shared-host": {
        "retention": {"succeeded": "1d", "failed": "7d"},
        # One host has few workloads: two or three that are idle overnight are no sign of a broken world.
        "breaker": {"floor": 3},
        # The members of a group are defined by the site.
        # Not of dev containers, which a person uses, and not of jobs that end by themselves.
        "groups": {
            "student": {"max_runtime": "24h", "classes": _BY_OWNER},
            "researcher": {"max_runtime": "48h", "classes": _BY_OWNER},
            "faculty": {"max_runtime": "72h", "classes": _BY_OWNER},
            "admin": {"hold_after_stop": "1h"},
        },
    },
    # A university server whose users know short limits: idle work is stopped, then removed.
    "ds01": {
        "retention": {"succeeded": "1d", "failed": "7d"},
        "classes": {
            "managed": _STOPPED,
            "compose": _STOPPED,
            "docker": _STOPPED,
            "unknown": {**_STOPPED, "idle": "15m"},
            **{name: {"on_max_runtime": "stop"} for name in ("devcontainer", "api")},
            **{name: {"idle": "30m"} for name in ("serving", "bare", "cluster", "ray")},
        },
        "warnings": {"idle": ["80%", "95%"], "require_delivery": False},
        "demand": {"idle_factor": "50%"},
        "breaker": {"floor": 3},
        # There the limits of a person are those of containers that its own commands made; other types have their own.
        "groups": {
            "student": {"idle": "30m", "max_runtime": "24h", "classes": ["managed"]},
            "researcher": {"idle": "1h", "max_runtime": "48h", "classes": ["managed"]},
            "faculty": {"idle": "2h", "max_runtime": "72h", "classes": ["managed"]},
            "admin": {"hold_after_stop": "1h"},
        },
    },
}


def without_a_file(platforms: list[str]) -> dict[str, Any]:
    """The policy of a machine without a file: observes everything, changes nothing."""
    everything = {"kubernetes": {"namespaces": ["*"]}}
    return {
        "preset": "shared-host",
        "mode": "plan",
        "scope": {platform: everything.get(platform, {}) for platform in platforms},
        "temporary": [
            {"root": "/tmp", "names": ["ray_tmp_*", "pip-*", "tmp*"], "above": "5GB", "older_than": "1h"}  # noqa: S108
        ],
    }


BUILT_IN_ORIGIN = "built-in"


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
        written["retention"] = dict.fromkeys(OUTCOMES, "manual")
    if isinstance(written.get("environments"), Mapping):
        written["environments"] = {
            name: dict.fromkeys(OUTCOMES, "manual") if kept == "manual" else kept
            for name, kept in written["environments"].items()
        }
    return written


def _inherit_retention(result: Layered) -> None:
    """What an environment does not set is as in the policy, not as in the built-in."""
    environments = result.tree.get("environments")
    for name, kept in environments.items() if isinstance(environments, dict) else ():
        for key in (*OUTCOMES, "max"):
            origin = result.origins.get(("retention", key))
            if origin is not None and isinstance(kept, dict) and key not in kept:
                kept[key] = result.tree["retention"][key]
                result.origins["environments", name, key] = origin
