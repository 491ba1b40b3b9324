"""`--on ray`: the options with which plan and apply run on the nodes of a Ray cluster, by short tasks there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpukeeper.interfaces.terminal.session import confirmed
from gpukeeper.interfaces.terminal.short_times import ShortTimes
from gpukeeper.lifecycle.narrow import Narrow
from gpukeeper.model.errors import UsageError

if TYPE_CHECKING:
    from gpukeeper.rollout.execute import ServerResult

NOTHING = "Nothing was done."


@dataclass(frozen=True, kw_only=True)
class OnRay:
    """On nodes that only Ray can reach."""

    on: Annotated[
        str | None,
        typer.Option("--on", metavar="ray", help="Run it on the idle nodes of a Ray cluster, by a short task on each."),
    ] = None
    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="NODE,…", help="With --on: only these nodes, by Ray's names.")
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="With --on: address, ca, python, program, deadline, again."),
    ] = None

    @property
    def asked(self) -> bool:
        if self.on is None and (self.nodes or self.option):
            raise UsageError(f"--nodes and --option need --on ray. {NOTHING}")
        if self.on not in (None, "ray"):
            raise UsageError(f'--on "{self.on}": only ray. Over ssh: gpukeeper fleet plan and fleet apply. {NOTHING}')
        return self.on is not None

    def check_narrow(self, narrow: Narrow, short: ShortTimes, *others: object) -> None:
        if narrow != Narrow() or short.asked or any(one is not None for one in others):
            raise UsageError(f"with --on ray the whole policy applies on each node: only --nodes selects. {NOTHING}")

    def plan(self, policy: Path | None, *, json: bool) -> None:
        # Only with --on: every other plan and apply would load the client of Ray's jobs for nothing.
        from gpukeeper.interfaces.terminal.server_passes import finish_passes

        finish_passes(self._passed(policy, self._only(), act=False), json=json)

    def apply(self, policy: Path | None, *, yes: bool, json: bool) -> None:
        from gpukeeper.interfaces.terminal.server_passes import finish_passes, in_words, print_passes

        only = self._only()
        if not yes:
            if json or not sys.stdin.isatty():
                raise UsageError(
                    f"apply needs a confirmation, and stdin is not a terminal. {NOTHING} For scripts: --yes"
                )
            found = self._passed(policy, only, act=False)
            print_passes(found)
            only = [one.host for one in found if one.passed and any(place.steps for place in one.passed.places)]
            if not only:
                return
            if not confirmed(f"Run a pass on {in_words(len(only))}?"):
                raise typer.Exit(1)
        finish_passes(self._passed(policy, only, act=True), json=json)

    def _only(self) -> list[str]:
        return [one.strip() for one in (self.nodes or "").split(",") if one.strip()]

    def _passed(self, policy: Path | None, only: Sequence[str], *, act: bool) -> list[ServerResult]:
        from gpukeeper.wiring.ray_passes import policy_text, ray_passes

        text = policy_text(policy, act=act)
        return asyncio.run(ray_passes(self._options()).run(text, only, act=act))

    def _options(self) -> dict[str, str]:
        found = {}
        for one in self.option or ():
            key, equals, value = one.partition("=")
            if not equals or not key:
                raise UsageError(f'--option "{one}": write it like KEY=VALUE. {NOTHING}')
            found[key] = value
        return found
