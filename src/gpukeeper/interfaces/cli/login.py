"""`gpukeeper login`: log in to the web dashboard of this machine's daemon; list and revoke logins."""

from __future__ import annotations

from typing import Annotated

import typer

from gpukeeper.engine.requests import DataReply, Reply, Request
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.daemon import exchange, failed, read_reply
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import span
from gpukeeper.ledger.logins import Login
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, UsageError


def login(
    token: Annotated[
        str | None, typer.Option("--token", help="Create a token for programs, with this name.", metavar="NAME")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", help="Validity of the token (default: 90d).", metavar="DURATION")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List your sessions and tokens; admins: of all users.")
    ] = False,
    revoke: Annotated[
        str | None, typer.Option("--revoke", help="End a session or token by its ID; all: all of them.", metavar="ID")
    ] = None,
    json: o.Json = False,
) -> None:
    """Print a link that logs you in to the web dashboard. It works once, for ten minutes."""
    if sum((token is not None, listed, revoke is not None)) > 1 or (expires is not None and token is None):
        raise UsageError("--token, --list and --revoke exclude each other; --expires needs --token.")
    if listed:
        _list(json=json)
    elif revoke is not None:
        reply = _ask(Request(verb="revoke", workload="" if revoke == "all" else revoke))
        _print("revoke", reply, reply.words, json=json)
    elif token is not None:
        length = span(expires, "--expires")
        seconds = None if length is None else length.total_seconds()
        reply = _ask(Request(verb="token", workload=token, seconds=seconds))
        if not json:
            print_message(f"Token {reply.words}. It is shown only now. Use it as: Authorization: Bearer TOKEN")
        _print("token", reply, reply.token, json=json)
    else:
        reply = _ask(Request(verb="login"))
        if not json:
            print_message(f"Open this link in a browser ({reply.words}):")
        _print("login", reply, reply.token, json=json)


def _list(*, json: bool) -> None:
    found = reading.decode(bytes(_ask(Request(verb="logins")).body), type=tuple[Login, ...])
    if json:
        show.as_json("logins", {"logins": found})
        return
    for one in found:
        what = f"{one.kind} {one.name}".strip()
        used = "never used" if one.used is None else f"used {one.used:%Y-%m-%d %H:%M} UTC from {one.address or 'here'}"
        typer.echo(f"{one.id}  {one.person}  {what}  until {one.expires:%Y-%m-%d %H:%M} UTC  {used}")
    if not found:
        print_message("No logins.")


def _ask(request: Request) -> DataReply:
    answer = exchange(request)
    if answer is None:
        raise KeeperError("No daemon is running on this machine. Start one with: gpukeeper serve --web PORT")
    reply = read_reply(answer, DataReply)
    if not reply.done:
        raise failed(reply)
    return reply


def _print(verb: str, reply: Reply, words: str, *, json: bool) -> None:
    if json:
        show.as_json("login", {"verb": verb, "words": reply.words, "secret": reply.token})
    else:
        typer.echo(words)
