"""Options of plan and apply alone: `--on ray`, passes on the nodes of a Ray cluster by short tasks there, and
`--compress`, which tries a policy on named workloads.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import confirmed
from gpukeeper.lifecycle.settings import CompressedBook, Narrow, Rulebook
from gpukeeper.model.errors import UsageError

if TYPE_CHECKING:
    from gpukeeper.rollout.execute import ServerResult


FULL_PATH = 2  # slashes: platform/place/name
PATTERN = frozenset("*?[")


@dataclass(frozen=True, kw_only=True)
class ShortTimes:
    """A policy with short times, on named workloads alone."""

    compress: Annotated[
        int | None,
        typer.Option(
            "--compress",
            min=2,
            max=3600,
            metavar="N",
            help="Try the policy with times divided by N, on the workloads named with --workload alone.",
        ),
    ] = None
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload", metavar="PATH", help="With --compress: a full path as `plan` prints it. Repeatable."
        ),
    ] = None

    @property
    def asked(self) -> bool:
        return self.compress is not None

    def check(self) -> None:
        """Before anything is read."""
        if self.compress is not None and not self.workload:
            raise UsageError(
                "--compress needs the workloads that it may act on: --workload PATH, as `gpukeeper plan --verbose` "
                "prints it. Nothing was done."
            )
        if self.compress is None and self.workload:
            raise UsageError("--workload needs --compress. To select by name: --name. Nothing was done.")
        for path in self.workload or ():
            if path.count("/") < FULL_PATH or set(path) & PATTERN:
                raise UsageError(
                    f'--workload "{path}" is not a full path such as docker/node-3/eval; patterns are not allowed. '
                    "Nothing was done."
                )

    def book(self, book: Rulebook) -> Rulebook:
        return book if self.compress is None else CompressedBook(book.policy, self.compress, self.workload or ())

    def narrow(self, narrow: Narrow) -> Narrow:
        return (
            narrow if self.compress is None else msgspec.structs.replace(narrow, paths=frozenset(self.workload or ()))
        )

    def name_missing(self, found: Iterable[str]) -> None:
        for path in sorted({*(self.workload or ())} - set(found)):
            print_message(f"{path} was not found.")


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
        from gpukeeper.wiring.ray import policy_text, ray_passes

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
