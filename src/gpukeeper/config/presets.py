"""What every policy starts from, in the words of a policy file: the classes, and the presets a file can name."""

from __future__ import annotations

from typing import Any

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
        "groups": {
            "student": {"max_runtime": "24h"},
            "researcher": {"max_runtime": "48h"},
            "faculty": {"max_runtime": "72h"},
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
        "groups": {
            "student": {"idle": "30m", "max_runtime": "24h"},
            "researcher": {"idle": "1h", "max_runtime": "48h"},
            "faculty": {"idle": "2h", "max_runtime": "72h"},
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
