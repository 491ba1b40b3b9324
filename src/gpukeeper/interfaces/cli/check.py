"""`gpukeeper check`: which checks there are, what each proves and what it cannot. Runs nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from gpukeeper.acceptance import suite
from gpukeeper.acceptance.check import Check, CheckSize
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.config.problems import did_you_mean
from gpukeeper.interfaces.cli.accept_settings import defaults_of
from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.model.errors import UsageError
from gpukeeper.model.words import in_words
from gpukeeper.views.acceptance import ChecksView, CheckView, check_facts

DEPTHS = ("quick", "minutes", "half an hour", "hours")
PAGE = "docs/reference/checks.md"
app = typer.Typer(no_args_is_help=True, help="List and show the checks of `gpukeeper accept`.")


@app.command("list")
def list_(json: o.Json = False) -> None:
    """List the checks in execution order. With the duration of each size."""
    if json:
        shown.as_json("check-list", ChecksView(tuple(check_facts(one) for one in CHECKS)))
        return
    rows = [(one.name, _how(one), *(_seconds(one, depth) for depth in range(len(DEPTHS))), one.title) for one in CHECKS]
    shown.table(rows, head=("check", "runs on", *DEPTHS, "description"))


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="CHECK", help="Name of a check; see `check list`.", autocompletion=completion.checks),
    ],
    json: o.Json = False,
) -> None:
    """Show what a check proves and what it cannot detect. With its sizes, and the parameters that --set overrides."""
    check = suite.find_check(name)
    if check is None:
        names = [one.name for one in suite.CHECKS]
        raise UsageError(f'unknown check "{name}". {did_you_mean(name, names)} To list all: gpukeeper check list')
    if json:
        shown.as_json("check-show", CheckView(check_facts(check)))
        return
    typer.echo(f"{check.name}: {check.title}\n")
    shown.table([("proves", check.proves), ("cannot detect", check.cannot), ("runs on", _how(check))])
    typer.echo("")
    shown.table(
        [
            (DEPTHS[one.depth], _length(one.seconds), _deadline(check, one), f"{one.worth:g}", one.what)
            for one in check.servings
        ],
        head=("size", "duration", "deadline", "weight", "description"),
    )
    settings = _defaults(check)
    if settings:
        typer.echo("")
        shown.table([(f"{check.name}.{key}", *map(str, values)) for key, values in settings.items()], head=_SETTINGS)
    shown.text(f"\nTo run only this check: gpukeeper accept --check {check.name}    Details: {PAGE}#{check.name}")


_SETTINGS = ("--set", *DEPTHS)


def _how(check: Check) -> str:
    words = {
        "look": "no GPU: reads driver and kernel",
        "each": "each GPU, in parallel",
        "together": "all GPUs together",
    }[check.how]
    return words + (f", {check.least_gpus} or more" if check.least_gpus > 1 else "")


def _seconds(check: Check, depth: int) -> str:
    return next((_length(one.seconds) for one in check.servings if one.depth == depth), "-")


def _deadline(check: Check, size: CheckSize) -> str:
    found = suite.deadline_s(check, size)
    return "-" if found is None else _length(found)


def _length(seconds: float) -> str:
    return in_words(timedelta(seconds=seconds))


def _defaults(check: Check) -> dict[str, tuple[object, ...]]:
    """Every parameter with its value at each depth; values for CPU mode are marked."""
    by_depth = {
        one.depth: {**{key: f"{_shown(value)} (CPU)" for key, value in one.small.items()}, **one.params}
        for one in check.servings
    }
    return {
        key: tuple(_shown(by_depth.get(depth, {}).get(key, "-")) for depth in range(len(DEPTHS)))
        for key in defaults_of(check)
    }


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else "none" if value is None else str(value)
