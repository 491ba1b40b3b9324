"""`gpukeeper observe`: look, change nothing; with --gpus, who has which; with --waste, who does not use what they have.
With --watch, look again and again.

What does not fit together is said as a finding. Nothing is repaired here: that is `apply`, or a person.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from gpukeeper.interfaces.terminal import options as o

if TYPE_CHECKING:
    from datetime import datetime

    from gpukeeper.engine.ports import Platform
    from gpukeeper.lifecycle.claims import Claim, Finding
    from gpukeeper.lifecycle.narrow import Narrow
    from gpukeeper.lifecycle.waste import Waste
    from gpukeeper.model.decision import Action, Unseen, View
    from gpukeeper.model.identity import Ref
    from gpukeeper.model.memory import Memory
    from gpukeeper.model.subject import Subject
    from gpukeeper.wiring import Session

HEAD = ("state", "what", "owner", "class", "gpus", "size", "since")
WASTE_HEAD = ("unused for", "workload", "owner", "class", "gpus")
GPUS_HEAD = ("state", "gpu", "held by", "owner", "since", "use", "next")


def observe(
    policy: o.PolicyFile = None,
    platform: o.OnPlatform = None,
    namespace: o.Namespace = None,
    label: o.Label = None,
    kind: o.Kind = None,
    owner: o.Owner = None,
    outcome: o.OutcomeIs = None,
    older_than: o.OlderThan = None,
    name: o.Name = None,
    image: o.Image = None,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Who has which GPU or slice, since when, and what happens next.")
    ] = False,
    waste: Annotated[
        bool,
        typer.Option("--waste", help="Running workloads whose GPUs were below 5 % for 30m. Nothing follows from it."),
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every few seconds until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option("--every", help="How often, with --watch.")] = "5s",
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Show what is there: workloads, leftovers and GPUs, what does not fit together, and what could not be seen."""
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.interfaces.terminal.session import narrowed, opened, span
    from gpukeeper.model.errors import UsageError

    if gpus and waste:
        raise UsageError("--gpus and --waste are two reports. Nothing was looked at. Choose one.")
    narrow = narrowed(None, namespace, label, kind, owner, outcome, older_than, name, image)
    pause = span(every, "--every")
    assert pause is not None
    with opened(policy, write=False, only=platform, quiet=quiet or json) as session:
        while True:
            found = asyncio.run(look(session))
            if json:
                _print_json(session, found, narrow, gpus=gpus, waste=waste)
            else:
                show.clear(when=watch)
                _print(session, found, narrow, gpus=gpus, waste=waste, quiet=quiet)
            if not watch:
                return
            asyncio.run(asyncio.sleep(max(1.0, pause.total_seconds())))


@dataclass
class Looked:
    """What one look at every place found, joined with what the ledger had before it."""

    views: list[View] = field(default_factory=list)
    unseen: list[tuple[Platform, Unseen]] = field(default_factory=list)
    recorded: dict[str, Memory] = field(default_factory=dict)
    absent: list[Ref] = field(default_factory=list)
    offers: dict[tuple[str, str], frozenset[Action]] = field(default_factory=dict)

    @property
    def doubtful(self) -> frozenset[str]:
        return frozenset(platform.place for platform, _ in self.unseen)


async def look(session: Session) -> Looked:
    from gpukeeper.engine.failures import bug_words
    from gpukeeper.model.decision import Unseen
    from gpukeeper.model.errors import KeeperError, PlatformError

    found = Looked()
    for platform in session.keeper.platforms:
        found.offers[platform.name, platform.place] = frozenset(platform.guards)
        try:
            await _look_at(session, platform, found)
        except PlatformError as problem:
            found.unseen.append((platform, Unseen("everything", str(problem))))
        except KeeperError:
            raise
        except Exception as bug:  # of one adapter: the other places are shown
            found.unseen.append((platform, Unseen("everything", bug_words(bug))))
    return found


async def _look_at(session: Session, platform: Platform, found: Looked) -> None:
    from gpukeeper.engine.view import views
    from gpukeeper.lifecycle.rules.target import in_scope

    keeper, book = session.keeper, session.book
    scope = book.policy.scope.get(platform.name)
    if scope is None:
        return
    before = await keeper.ledger.present(platform.name, platform.place)
    listed: set[str] = set()
    complete = True
    async for page in platform.observe(scope):
        keys = [subject.ref.key for subject in page.subjects]
        listed.update(keys)
        complete = complete and not page.unseen
        found.unseen += ((platform, one) for one in page.unseen)
        found.recorded.update(await keeper.ledger.memories(keys))
        found.views += await views(keeper, platform, page.subjects, book, [], keeper.clock.now())
    if complete:  # only a complete list can tell what is missing
        found.absent += [r for key, r in before.items() if key not in listed and in_scope(book.policy, r)]


def _print_json(session: Session, found: Looked, narrow: Narrow, *, gpus: bool, waste: bool = False) -> None:
    from gpukeeper.interfaces.terminal import show

    now = session.keeper.clock.now()
    about = {
        "at": now,
        "findings": [
            {"kind": one.kind, "about": [ref.path for ref in one.about], "words": one.words}
            for one in _findings(session, found, narrow, now)
        ],
        "unseen": [{"platform": p.name, "place": p.place, "what": u.what, "why": u.why} for p, u in found.unseen],
    }
    if gpus:
        show.as_json("observe-gpus", {**about, "gpus": _claims(session, found, narrow, now)})
    elif waste:
        show.as_json("observe-waste", {**about, "waste": _wasted(session, found, narrow, now)})
    else:
        subjects = [view.subject for view in found.views if narrow.fits(view.subject, now)]
        show.as_json("observe", {**about, "subjects": subjects})


def _print(session: Session, found: Looked, narrow: Narrow, *, gpus: bool, quiet: bool, waste: bool = False) -> None:
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.interfaces.terminal.session import say

    now = session.keeper.clock.now()
    if gpus:
        rows = [show.claim_row(claim, now) for claim in _claims(session, found, narrow, now)]
        show.table(rows, head=GPUS_HEAD)
    elif waste:
        rows = [_waste_row(one, now) for one in _wasted(session, found, narrow, now)]
        show.table(rows, head=WASTE_HEAD)
    else:
        rows = _print_subjects([view.subject for view in found.views if narrow.fits(view.subject, now)])
    if quiet:
        return
    for finding in _findings(session, found, narrow, now):
        say(f"finding: {finding.words}")
    for platform in session.keeper.platforms:
        for words in show.unseen_words(platform, [one for where, one in found.unseen if where is platform]):
            say(words)
    what = "line" if gpus or waste else "thing"
    say(
        f"{len(rows)} {what if len(rows) == 1 else f'{what}s'} at {now:%Y-%m-%d %H:%M:%S} UTC"
        + (", and some were not seen" if found.unseen else "")
    )


def _print_subjects(subjects: list[Subject]) -> list[tuple[str, ...]]:
    """Work and what it left, and below that the nodes and disks it is on."""
    from gpukeeper.interfaces.terminal import nodes, show
    from gpukeeper.model.subject import Shape

    things = [_row(one) for one in subjects if one.shape is not Shape.NODE]
    below = [nodes.row(one) for one in subjects if one.shape is Shape.NODE]
    show.table(things, head=HEAD)
    if things and below:
        typer.echo("")
    show.table(below, head=nodes.HEAD)
    return [*things, *below]


def _claims(session: Session, found: Looked, narrow: Narrow, now: datetime) -> list[Claim]:
    """Those of what was asked for. A free device is nobody's, so it is shown only when nothing was narrowed."""
    from gpukeeper.lifecycle.claims import claims
    from gpukeeper.lifecycle.narrow import Narrow

    everything = claims(found.views, session.book, now, recorded=found.recorded, offers=found.offers)
    fitting = _fitting(found, narrow, now)
    alone = narrow == Narrow()
    return [one for one in everything if (one.holder.key in fitting if one.holder is not None else alone)]


def _wasted(session: Session, found: Looked, narrow: Narrow, now: datetime) -> list[Waste]:
    """The longest unused first."""
    from gpukeeper.lifecycle.waste import wasted

    fitting = [view for view in found.views if narrow.fits(view.subject, now)]
    told = [one for view in fitting if (one := wasted(view, session.book, now)) is not None]
    return sorted(told, key=lambda one: (one.since, one.ref.path))


def _waste_row(one: Waste, now: datetime) -> tuple[str, ...]:
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.model.durations import in_words

    span = ("at least " if one.at_least else "") + in_words(now - one.since)
    return (span, one.ref.path, show.fact(one.owner), show.fact(one.class_), ", ".join(one.devices))


def _findings(session: Session, found: Looked, narrow: Narrow, now: datetime) -> list[Finding]:
    """Found among all, so that a narrowed look does not miss the other half; said of what was asked for."""
    from gpukeeper.lifecycle.claims import findings
    from gpukeeper.lifecycle.narrow import Narrow

    everything = findings(
        found.views, session.book, now, recorded=found.recorded, absent=found.absent, doubtful=found.doubtful
    )
    if narrow == Narrow():
        return list(everything)
    fitting = _fitting(found, narrow, now)
    return [one for one in everything if any(ref.key in fitting for ref in one.about)]


def _fitting(found: Looked, narrow: Narrow, now: datetime) -> set[str]:
    return {view.subject.ref.key for view in found.views if narrow.fits(view.subject, now)}


def _row(s: Subject) -> tuple[str, ...]:
    from datetime import datetime

    from gpukeeper.interfaces.terminal import show
    from gpukeeper.model.durations import size_in_words
    from gpukeeper.model.subject import Shape
    from gpukeeper.model.unknown import Unknown

    devices = "?" if isinstance(s.devices, Unknown) else str(len(s.devices) or "-")
    size = "?" if isinstance(s.size, Unknown) else size_in_words(s.size) if s.size else "-"
    since = next((t for t in (s.ended, s.last_used, s.started, s.created) if isinstance(t, datetime)), None)
    if s.shape is Shape.DEVICE:
        model = s.labels.get("model", "")
        return ("gpu", s.ref.path, "-", model or "-", "-", "-", "-")
    state = show.fact(s.state) if s.shape is Shape.WORKLOAD else s.shape.value
    return (state, s.ref.path, show.fact(s.owner), show.fact(s.class_), devices, size, show.when(since, s.seen.at))
