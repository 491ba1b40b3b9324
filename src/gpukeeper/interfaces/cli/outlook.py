"""The plan as a daemon of somebody else tells it, from its last passes: for `plan` and `workload list` of people who
may not read its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpukeeper.model.errors import UsageError

if TYPE_CHECKING:
    from gpukeeper.engine.outlook import Outlooks, PlaceOutlook
    from gpukeeper.lifecycle.narrow import Narrow
    from gpukeeper.model.decision import Decision

NOT_HERE = {"label": "--label", "outcome": "--outcome", "older_than": "--older-than", "image": "--image"}


def told(policy: Path | None, platform: str | None, narrow: Narrow) -> Outlooks | None:
    """None: no daemon of somebody else answers here."""
    from gpukeeper.engine.outlook import Outlooks
    from gpukeeper.interfaces.terminal.daemon import from_daemon

    found = from_daemon(Outlooks, "plan", policy)
    if found is None:
        return None
    for name, flag in NOT_HERE.items():
        if getattr(narrow, name) is not None:
            raise UsageError(f"the daemon here does not tell by {flag}; leave it out, or ask an admin")
    places = [one for one in found.places if platform in (None, one.platform, f"{one.platform}/{one.place}")]
    return msgspec.structs.replace(found, places=tuple(_narrowed(one, narrow) for one in places))


def _narrowed(place: PlaceOutlook, narrow: Narrow) -> PlaceOutlook:
    fits = [narrow.fits_ref(one.seen.ref, one.owner) and narrow.fits_class(one.class_) for one in place.decisions]
    fitting = tuple(one for one, fit in zip(place.decisions, fits, strict=True) if fit)
    return msgspec.structs.replace(place, decisions=fitting)


def show_plan(found: Outlooks, *, json: bool, verbose: bool, quiet: bool) -> None:
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.interfaces.terminal.session import say

    if json:
        _print_json(found)
        return
    due = [d for place in found.places for d in place.due]
    kept = [d for place in found.places for d in place.decisions if d.action.value == "keep"]
    rest = [d for d in kept if verbose or d.verdict.value == "report"]
    show.table([show.plan_row(d, verbose=verbose) for d in [*due, *rest]])
    say_the_rest(found, quiet=quiet)
    if not quiet:
        say(_sentence(found, due, kept))


def say_the_rest(found: Outlooks, *, quiet: bool) -> None:
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.interfaces.terminal.session import say
    from gpukeeper.views.fleet import unseen_lines, untouched

    if quiet:
        return
    for place in found.places:
        for words in untouched(unseen_lines(place.platform, place.place, place.unseen)):
            say(words)
        if place.breaker:
            say(place.breaker)
        if place.left_out:
            say(f"{place.platform}/{place.place}: {place.left_out} more things are not listed.")
        say(f"{place.platform}/{place.place}: as of the daemon's look {show.when(place.at, found.now)}.")
    if found.paused is not None:
        say(f"Everything is paused: {found.paused}.")
    if not found.admin:
        say(f"Why, only of work that belongs to {found.who}: gpukeeper explain WORKLOAD")


def _sentence(found: Outlooks, due: list[Decision], kept: list[Decision]) -> str:
    from gpukeeper.interfaces.terminal import show

    count = f"{len(due)} due" if due else "Nothing is due"
    policy = found.policy
    tail = f"Policy: {policy.source} ({policy.preset}, mode {policy.mode})."
    return f"{count}; {show.kept_summary(kept)}.\n{tail}"


def _print_json(found: Outlooks) -> None:
    """The same document as a look of one's own; what only a whole look has is empty."""
    from gpukeeper.interfaces.terminal import show

    places = [
        {
            "platform": one.platform,
            "place": one.place,
            "at": one.at,
            "seen": one.seen,
            "running": one.running,
            "unseen": one.unseen,
            "breaker": one.breaker,
            "paused": found.paused,
            "stopped": None,
            "steps": one.due,
            "deferred": [],
            "decisions": one.decisions,
            "trees": [],
        }
        for one in found.places
    ]
    show.as_json("plan", {"policy": found.policy, "places": places})
