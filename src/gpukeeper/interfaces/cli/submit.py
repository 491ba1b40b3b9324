"""A request of a person: to the daemon when one runs (it sees who asks), else directly, with one's own rights.

`gpukeeper pause`, `resume` and `restore` are such requests and no more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from gpukeeper.engine.requests import Reply, Request, fulfil
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.daemon import exchange, failed, read_reply
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import opened, print_unreachable
from gpukeeper.ledger.files import ledger_path
from gpukeeper.model.errors import UsageError
from gpukeeper.model.words import plain

Confirm: TypeAlias = Callable[[str], bool]  # gets what would be done
_GONE = Reply(
    done=False, words="the daemon ended before it processed the request; nothing was done. Try again", exit_code=1
)


def submit(verb: str, *, policy: Path | None, json: bool, confirm_action: Confirm | None = None, **fields: Any) -> None:
    """`agreed`: asks the user for confirmation. None: do not ask."""
    request = Request(verb=verb, confirm=confirm_action is not None, **fields)
    show.progress_line(f"{verb} {request.workload} …".replace("  ", " "))  # a stop gives its programs time to save
    try:
        reply = reply_to(request, policy, confirm_action)
    finally:
        show.progress_line("")
    if not reply.done:
        raise failed(reply)
    if json:
        show.as_json("request", {"verb": verb, "reply": reply})
    else:
        typer.echo(plain(reply.words))


def reply_to(request: Request, policy: Path | None, confirm_action: Confirm | None) -> Reply:
    """Asks for it. Where that is answered with what would be done, the person is shown that; with a yes it is asked for
    once more with the token of that answer."""
    reply = _through_daemon(request)
    if reply is None:
        return _directly(request, policy, confirm_action)
    if not reply.token:
        return reply
    return _through_daemon(_confirmed(request, reply, confirm_action)) or _GONE


def _confirmed(request: Request, reply: Reply, confirm_action: Confirm | None) -> Request:
    if confirm_action is None:
        raise UsageError(
            "mode is plan, and only mode: enforce acts unattended. Nothing was done. "
            "Confirm on a terminal, without --yes"
        )
    if not confirm_action(reply.words):
        raise typer.Exit(1)
    return msgspec.structs.replace(request, token=reply.token)


def _through_daemon(request: Request) -> Reply | None:
    """None when no daemon listens."""
    answer = exchange(request)
    return None if answer is None else read_reply(answer, Reply)


def _directly(request: Request, policy: Path | None, confirm_action: Confirm | None = None) -> Reply:
    with opened(policy, write=True) as session:
        if os.geteuid() != 0:
            # Root's passes read root's ledger; a hold in another ledger must not appear to protect from them.
            print_message(
                f"No daemon is running, so this affects only passes that use your own ledger, {ledger_path()}."
            )

        async def story() -> Reply:
            one = partial(fulfil, session.keeper, session.book, session.user, uid=os.getuid())
            async with session.owners_notified():
                reply = await one(request)
                return await one(_confirmed(request, reply, confirm_action)) if reply.token else reply

        reply = asyncio.run(story())
        if not reply.done and reply.exit_code == UsageError.exit_code:  # what was requested may be out of reach
            print_unreachable(session)
        return reply


def pause(
    reason: Annotated[str, typer.Argument(metavar="REASON", help="Reason, shown to all users.")] = "",
    policy: o.PolicyFile = None,
    json: o.Json = False,
) -> None:
    """Pause all actions at every place of this machine's ledger. Observing continues."""
    submit("pause", policy=policy, json=json, reason=reason)


def resume(policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Allow actions again after a pause."""
    submit("resume", policy=policy, json=json)


def restore(workload: o.Workload, policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Restore what gpukeeper stopped, or removed after capturing it. WORKLOAD: path or uid from the ledger."""
    submit("restore", policy=policy, json=json, workload=workload)
