"""What the shell offers after TAB. Fast and silent: no platform is queried, no policy is read, an error offers nothing.

Each function gets what was typed so far and gives the words that continue it, and imports only what it reads: every
command imports this module.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

Complete = Callable[[str], list[str]]
MOST = 200  # more than is useful in a list
PATIENCE = 0.5  # seconds, for a daemon
PLATFORMS = ("docker", "host", "kubernetes", "ray")
# The sections of a policy. A test compares them: the policy's own schema takes too long to load here.
SECTIONS = (
    *("preset", "mode", "scope", "retention", "environments", "at_finish", "ttl", "classes", "groups", "admins"),
    *("owner_labels", "match", "exemptions", "exemptions_from", "warnings", "activity", "demand", "budget", "breaker"),
    *("temporary", "disk", "reports", "ray", "images", "build_cache", "volumes", "networks"),
    *("orphans", "loops", "holds", "capture", "gpu"),
    *("kubernetes", "acceptance", "notify", "web", "schedule", "ledger", "prices", "backtest", "metrics", "fleet"),
)


def _silent(complete: Complete) -> Complete:
    """A message would stand in the middle of the command line."""

    @wraps(complete)
    def quietly(incomplete: str) -> list[str]:
        try:
            return complete(incomplete)[:MOST]
        except Exception:
            return []

    return quietly


def _continuing(words: Iterable[str], incomplete: str) -> list[str]:
    return sorted({word for word in words if word.startswith(incomplete)})


@_silent
def workloads(incomplete: str) -> list[str]:
    """By name where that is enough, else by path; a path once the user typed a part of one."""
    paths = _known_paths()
    if "/" in incomplete:
        return _continuing(paths, incomplete)
    counts = Counter(path.rpartition("/")[2] for path in paths)
    short = [name if counts[name := path.rpartition("/")[2]] == 1 else path for path in paths]
    return _continuing([*short, *(paths if incomplete else ())], incomplete)


def _known_paths() -> list[str]:
    """Of the daemon here, if its ledger is another user's; else of one's own ledger."""
    from gpukeeper.ledger.files import ledger_path, socket_path
    from gpukeeper.ledger.names import known_workloads

    listens = socket_path()
    if listens.exists() and os.geteuid() not in (0, listens.stat().st_uid):
        return _paths_of_daemon(str(listens))
    return known_workloads(ledger_path())


def _paths_of_daemon(address: str) -> list[str]:
    """What it sends to every user; see interfaces/terminal/daemon.py, which takes too long to load here."""
    import socket

    from gpukeeper.model import reading
    from gpukeeper.model.subject import Ref

    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(address)
        connection.sendall(b'{"verb":"plan"}\n')
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    places = reading.decode(answer, type=dict[str, Any])["body"]["places"]
    return [Ref(**one["seen"]["ref"]).path for place in places for one in place["decisions"]]


@_silent
def checks(incomplete: str) -> list[str]:
    """The last of several with commas between."""
    from gpukeeper.acceptance.suite import CHECKS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _continuing((one.name for one in CHECKS), last)]


@_silent
def runs(incomplete: str) -> list[str]:
    """Acceptance runs, newest first."""
    from gpukeeper.ledger.files import ledger_path, reports_folder

    names = [entry.name for entry in os.scandir(reports_folder(ledger_path())) if entry.is_dir()]
    return sorted((name for name in names if name.startswith(incomplete) and not name.startswith(".")), reverse=True)


@_silent
def sections(incomplete: str) -> list[str]:
    from gpukeeper.config.layers import BUILT_IN

    return _continuing([*SECTIONS, *(f"classes.{name}" for name in BUILT_IN["classes"])], incomplete)


@_silent
def presets(incomplete: str) -> list[str]:
    from gpukeeper.config.layers import PRESETS

    return _continuing(PRESETS, incomplete)


@_silent
def rules(incomplete: str) -> list[str]:
    """Those that a hold can suspend."""
    from gpukeeper.lifecycle.holds import SUSPENDABLE

    return _continuing(SUSPENDABLE - {"*"}, incomplete)


@_silent
def line_types(incomplete: str) -> list[str]:
    from gpukeeper.ledger.lines import TYPES

    return _continuing(TYPES, incomplete)


@_silent
def platforms(incomplete: str) -> list[str]:
    return _continuing(PLATFORMS, incomplete)


@_silent
def outcomes(incomplete: str) -> list[str]:
    from gpukeeper.model.subject import OUTCOMES

    return _continuing(OUTCOMES, incomplete)
