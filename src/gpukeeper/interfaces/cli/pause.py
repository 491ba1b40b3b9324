"""`gpukeeper pause` and `resume`: stop all acting at once, and go on."""

from __future__ import annotations

from typing import Annotated

import typer

from gpukeeper.interfaces.terminal import options as o


def pause(
    reason: Annotated[str, typer.Argument(help="Why; everybody who asks is told.")] = "",
    policy: o.PolicyFile = None,
    json: o.Json = False,
) -> None:
    """Stop all acting at once, on every place of this machine's ledger. Looking goes on."""
    from gpukeeper.interfaces.cli.ask import ask

    ask("pause", policy=policy, json=json, reason=reason)


def resume(policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Go on after a pause."""
    from gpukeeper.interfaces.cli.ask import ask

    ask("resume", policy=policy, json=json)
