"""`gpukeeper stop-all`: the emergency stop of running GPU work, of one owner or of all.

Each stop is a request of its own with the rights, evidence, re-check and record of `workload stop`; protected work and
what an admin exempted is skipped and listed.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpukeeper.engine.requests import Reply, Request
from gpukeeper.engine.view import observe_fleet
from gpukeeper.interfaces.cli.submit import reply_to
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import confirmed, narrowed, opened, own_only
from gpukeeper.lifecycle.claims import left_alone, runs_on_gpus
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import Subject

if TYPE_CHECKING:
    from gpukeeper.wiring.session import Session


def stop_all(
    policy: o.PolicyFile = None,
    platform: o.OnPlatform = None,
    owner: o.Owner = None,
    yes: o.Yes = False,
    json: o.Json = False,
) -> None:
    """Stop all running GPU workloads, or one owner's. Asks for confirmation. Exit code 3: some were not stopped."""
    with opened(policy, write=False, only=platform, quiet=json) as session:
        _may_act(session, owner, yes=yes, json=json)
        found = asyncio.run(_look(session, owner))
    if not json:
        _announce(found)
    if found.running and not yes and not confirmed(_question(found, owner)):
        raise typer.Exit(1)
    replies = [(subject, _stop(subject, policy, attended=not yes, quiet=json)) for subject in found.running]
    _print(found, replies, json=json)
    stopped = sum(reply.done for _, reply in replies)
    if not json:
        print_message(
            f"{stopped} of {len(replies)} stopped, {len(found.left)} skipped. To see the record: gpukeeper ledger list"
        )
    if stopped < len(replies) or found.unseen:
        raise typer.Exit(3)


@dataclass
class Targets:
    """What runs and holds GPUs, what of it is skipped and why, and what could not be read."""

    running: list[Subject] = field(default_factory=list)
    left: list[tuple[Subject, str]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def _may_act(session: Session, owner: str | None, *, yes: bool, json: bool) -> None:
    if not is_admin(session.book, session.user) and owner != session.user:
        raise UsageError(
            f"{session.user} is not an admin of this policy and may stop only their own work: "
            f"gpukeeper stop-all --owner {session.user}"
        )
    if yes and session.book.policy.mode is Mode.PLAN:
        raise UsageError(
            f"{session.loaded.source}: mode is plan, and only mode: enforce acts unattended. Nothing was done. "
            "Confirm on a terminal, without --yes"
        )
    if not yes and (json or not sys.stdin.isatty()):
        raise UsageError(
            "stop-all needs a confirmation, and stdin is not a terminal. Nothing was done. For scripts: --yes"
        )


async def _look(session: Session, owner: str | None) -> Targets:
    narrow, now = own_only(session, narrowed(Narrow(owner=owner))), session.keeper.clock.now()
    looked = await observe_fleet(session.keeper, session.book)
    found = Targets(unseen=[f"{p.platform}/{p.place}: {p.what} could not be read ({p.why})" for p in looked.unseen])
    for view in looked.views:
        subject = view.subject
        if not runs_on_gpus(subject) or not narrow.fits(subject, now):
            continue
        why = left_alone(view, session.book, now, looked.offers)
        if why is None:
            found.running.append(subject)
        else:
            found.left.append((subject, why))
    return found


def _announce(found: Targets) -> None:
    rows = [("stop", s.ref.path, show.fact(s.owner), "") for s in found.running]
    rows += [("skip", s.ref.path, show.fact(s.owner), why) for s, why in found.left]
    show.table(rows)
    for words in found.unseen:
        print_message(words)


def _question(found: Targets, owner: str | None) -> str:
    whose = f"of {owner}" if owner is not None else "of all owners"
    count = len(found.running)
    return f"Stop {count} running workload{'s' if count != 1 else ''} {whose} now?"


def _stop(subject: Subject, policy: Path | None, *, attended: bool, quiet: bool) -> Reply:
    """By uid: exactly what was listed, even if the name was reused since. The confirmation covers the whole list."""
    if not quiet:
        show.progress_line(f"stopping {subject.ref.path}")
    request = Request(verb="stop", workload=subject.ref.uid, confirm=attended)
    try:
        return reply_to(request, policy, (lambda words: True) if attended else None)
    except KeeperError as problem:  # the others must be stopped all the same
        return Reply(done=False, words=str(problem), exit_code=problem.exit_code)


def _print(found: Targets, replies: list[tuple[Subject, Reply]], *, json: bool) -> None:
    if json:
        body = {
            "outcomes": [{"workload": s.ref.path, "owner": s.owner, "reply": reply} for s, reply in replies],
            "left": [{"workload": s.ref.path, "owner": s.owner, "why": why} for s, why in found.left],
            "unseen": found.unseen,
        }
        show.as_json("stop-all", body)
        return
    show.progress_line("")
    show.table([_outcome(subject, reply) for subject, reply in replies])


def _outcome(subject: Subject, reply: Reply) -> tuple[str, ...]:
    path = subject.ref.path
    return ("stopped" if reply.done else "failed", path, reply.words.removeprefix(f"{path}: "))
