"""The plan of another user's daemon, from its last passes: for `plan` and `workload list` of users who may not read its
ledger."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpukeeper.engine.outlook import Outlooks, PlaceOutlook
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.daemon import query_daemon
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.lifecycle.narrow import Narrow
from gpukeeper.model.errors import UsageError
from gpukeeper.views.plan import daemon_plan_notes, daemon_plan_summary, daemon_plan_view

NOT_HERE = {"label": "--label", "outcome": "--outcome", "older_than": "--older-than", "image": "--image"}


def read_daemon_plan(policy: Path | None, platform: str | None, narrow: Narrow) -> Outlooks | None:
    """None: no daemon of another user is running here."""
    found = query_daemon(Outlooks, "plan", policy)
    if found is None:
        return None
    for name, flag in NOT_HERE.items():
        if getattr(narrow, name) is not None:
            raise UsageError(f"the daemon does not support {flag}; remove it, or ask an admin")
    places = [one for one in found.places if platform in (None, one.platform, f"{one.platform}/{one.place}")]
    return msgspec.structs.replace(found, places=tuple(_narrowed(one, narrow) for one in places))


def _narrowed(place: PlaceOutlook, narrow: Narrow) -> PlaceOutlook:
    fits = [narrow.fits_ref(one.seen.ref, one.owner) and narrow.fits_class(one.class_) for one in place.decisions]
    fitting = tuple(one for one, fit in zip(place.decisions, fits, strict=True) if fit)
    return msgspec.structs.replace(place, decisions=fitting)


def show_plan(found: Outlooks, *, json: bool, verbose: bool, quiet: bool) -> None:
    view = daemon_plan_view(found)
    if json:
        show.as_json("plan", view)
        return
    show.table([show.plan_row(d, verbose=verbose) for d in view.listed(kept=verbose)])
    print_daemon_notes(found, quiet=quiet)
    if not quiet:
        print_message(daemon_plan_summary(view))


def print_daemon_notes(found: Outlooks, *, quiet: bool) -> None:
    for words in () if quiet else daemon_plan_notes(found):
        print_message(words)
