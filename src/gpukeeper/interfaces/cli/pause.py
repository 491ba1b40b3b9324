"""`gpukeeper pause` and `resume`: pause all actions, and allow them again."""

from __future__ import annotations

from typing import Annotated

import typer

from gpukeeper.interfaces.cli.submit import submit
from gpukeeper.interfaces.terminal import options as o


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
