"""`gpukeeper observe`: look, change nothing. With --watch, look again and again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from gpukeeper.interfaces.terminal import options as o

if TYPE_CHECKING:
    from gpukeeper.lifecycle.narrow import Narrow
    from gpukeeper.model.decision import Snapshot
    from gpukeeper.model.subject import Subject
    from gpukeeper.wiring import Session

CLEAR = "\x1b[H\x1b[2J"


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
    watch: Annotated[bool, typer.Option("--watch", help="Look again every few seconds until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option("--every", help="How often, with --watch.")] = "5s",
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Show what is there: workloads, leftovers and GPUs, and what could not be seen."""
    from gpukeeper.interfaces.terminal.session import narrowed, opened, span

    narrow = narrowed(None, namespace, label, kind, owner, outcome, older_than, name)
    pause = span(every, "--every")
    assert pause is not None
    with opened(policy, write=False, only=platform, quiet=quiet or json) as session:
        while True:
            snapshots = asyncio.run(look(session))
            _print(session, snapshots, narrow, json=json, watch=watch, quiet=quiet)
            if not watch:
                return
            asyncio.run(asyncio.sleep(max(1.0, pause.total_seconds())))


async def look(session: Session) -> list[Snapshot]:
    from gpukeeper.model.decision import Snapshot, Unseen
    from gpukeeper.model.errors import PlatformError

    pages: list[Snapshot] = []
    for platform in session.keeper.platforms:
        scope = session.book.policy.scope.get(platform.name)
        try:
            if scope is not None:
                pages += [page async for page in platform.observe(scope)]
        except PlatformError as problem:
            unseen = (Unseen("everything", str(problem)),)
            pages.append(Snapshot(platform.name, platform.place, session.keeper.clock.now(), (), unseen))
    return pages


def _print(
    session: Session, snapshots: list[Snapshot], narrow: Narrow, *, json: bool, watch: bool, quiet: bool
) -> None:
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.interfaces.terminal.session import say

    now = session.keeper.clock.now()
    subjects = [s for page in snapshots for s in page.subjects if narrow.fits(s, now)]
    unseen = [(page, one) for page in snapshots for one in page.unseen]
    if json:
        told = [{"platform": page.platform, "place": page.place, "what": u.what, "why": u.why} for page, u in unseen]
        show.as_json("observe", {"at": now, "subjects": subjects, "unseen": told})
        return
    if watch and show.on_terminal():
        typer.echo(CLEAR, nl=False)
    show.table([_row(s) for s in subjects], head=("state", "what", "owner", "class", "gpus", "size", "since"))
    if not quiet:
        for page, one in unseen:
            say(f"{page.platform}/{page.place}: not seen: {one.what} ({one.why})")
        say(f"{len(subjects)} things at {now:%Y-%m-%d %H:%M:%S} UTC" + (", and some were not seen" if unseen else ""))


def _row(s: Subject) -> tuple[str, ...]:
    from datetime import datetime

    from gpukeeper.interfaces.terminal import show
    from gpukeeper.model.durations import size_in_words
    from gpukeeper.model.subject import Shape
    from gpukeeper.model.unknown import Unknown

    def said(fact: object) -> str:
        return "?" if isinstance(fact, Unknown) else "-" if fact is None else str(fact)

    devices = "?" if isinstance(s.devices, Unknown) else str(len(s.devices) or "-")
    size = "?" if isinstance(s.size, Unknown) else size_in_words(s.size) if s.size else "-"
    since = next((t for t in (s.ended, s.last_used, s.started, s.created) if isinstance(t, datetime)), None)
    if s.shape is Shape.DEVICE:
        model = s.labels.get("model", "")
        return ("gpu", s.ref.path, "-", model or "-", "-", "-", "-")
    state = said(s.state) if s.shape is Shape.WORKLOAD else s.shape.value
    return (state, s.ref.path, said(s.owner), said(s.class_), devices, size, show.when(since, s.seen.at))
