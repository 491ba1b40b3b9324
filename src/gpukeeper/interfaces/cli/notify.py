"""`gpukeeper notify test`: sends a test message over each channel, and reports which delivered it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from gpukeeper.config.load import load_policy
from gpukeeper.devices.holders import user_name
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Notify
from gpukeeper.model.ports import Delivered, Message, MessageKind
from gpukeeper.model.words import plain
from gpukeeper.notify.catalog import Channel, admin_channels, owner_services
from gpukeeper.notify.messages import TO_ADMINS, end_channel, send_in_time
from gpukeeper.notify.terminals import Terminals

app = typer.Typer(no_args_is_help=True)
SOME_FAILED = 3  # exit code
TEXT = "This is a test message of gpukeeper, sent with `gpukeeper notify test`. Nothing has happened."


@app.callback()
def notify() -> None:
    """Test the channels for messages to owners and admins."""


@app.command("test")
def send_test(
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="NAME", help="Only the channels for owners, to this owner.")
    ] = None,
    admins: Annotated[bool, typer.Option("--admins", help="Only the channels for admins.")] = False,
    policy: o.PolicyFile = None,
    json: o.Json = False,
) -> None:
    """Send a test message over each channel. Default: to admins, and to you as an owner. Exit code 3: some failed."""
    if owner is not None and admins:
        raise UsageError("--owner and --admins exclude each other. Nothing was sent.")
    settings = load_policy(policy).policy.notify
    to = None if admins else owner or user_name(os.getuid())
    rows = asyncio.run(_try_all(settings, to, admins=owner is None))
    if json:
        fields = ("audience", "channel", "delivered", "why_not")
        show.as_json("notify-test", {"channels": [dict(zip(fields, row, strict=True)) for row in rows]})
    else:
        show.table([(who, name, "delivered" if delivered else why) for who, name, delivered, why in rows])
    if not_delivered(rows):
        raise typer.Exit(SOME_FAILED)


Row = tuple[str, str, bool, str]


def not_delivered(rows: Sequence[Row]) -> bool:
    """A channel failed, or nothing reached somebody. That an owner is not logged in now is no failure of a channel."""
    reached = {who for who, _, delivered, _ in rows if delivered}
    return any(not delivered and (name != Terminals.name or who not in reached) for who, name, delivered, _ in rows)


async def _try_all(settings: Notify, owner: str | None, *, admins: bool) -> list[Row]:
    rows: list[Row] = []
    if admins:
        rows += await _try("admins", admin_channels(settings, print_message), None)
    if owner is not None:
        rows += await _try(plain(owner), (Terminals(), *owner_services(settings)), owner)
    return rows


async def _try(audience: str, channels: Sequence[Channel], owner: str | None) -> list[Row]:
    message = Message(kind=MessageKind.TEST, about="test", text=TEXT, at=datetime.now(UTC), owner=owner)
    rows: list[Row] = []
    for channel in channels:
        answer = await send_in_time(channel, message, TO_ADMINS)
        why = "" if isinstance(answer, Delivered) else f"not delivered: {plain(answer.why)}"
        rows.append((audience, channel.name, isinstance(answer, Delivered), why))
        await end_channel(channel)
    return rows
