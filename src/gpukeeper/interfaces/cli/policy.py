"""`gpukeeper policy`: check the file, show its values and where each comes from; and what is on record about a
backtest of a policy on this machine. Changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpukeeper.interfaces.cli.main import Entry, group_of
from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.options import Json
from gpukeeper.interfaces.terminal.session import opened_for_reading
from gpukeeper.ledger.meta import backtest_record
from gpukeeper.model.errors import KeeperError, PolicyError
from gpukeeper.model.policy import Policy
from gpukeeper.views.own_state import backtest_warning

if TYPE_CHECKING:
    from gpukeeper.config.load import Loaded
    from gpukeeper.config.show import OwnerView, Row


def not_backtested(policy: Policy) -> list[str]:
    """One warning, or none. A ledger that cannot be read is reported by the commands that need it."""
    from gpukeeper.config.sections import deciding_digest

    try:
        with opened_for_reading() as ledger:
            record = asyncio.run(backtest_record(ledger, deciding_digest(policy)))
    except KeeperError:
        return []
    words = backtest_warning(policy, record)
    return [] if words is None else [words]


# The schema of a policy takes 100 ms to load: it is imported where a policy is read, not for help and completion.
COMMANDS = {
    "try": Entry(
        "gpukeeper.interfaces.cli.policy_try:try_",
        "Apply a policy to a hypothetical workload.",
    ),
    "schedule": Entry(
        "gpukeeper.interfaces.cli.policy_schedule:schedule",
        "Print the schedule for cron, systemd or a CronJob.",
    ),
    "import": Entry(
        "gpukeeper.interfaces.cli.policy_import:import_",
        "Translate the settings of another tool into a policy.",
    ),
}
app = typer.Typer(cls=group_of(COMMANDS), no_args_is_help=True, help="Check, show and try a policy. Changes nothing.")

PolicyOption = Annotated[Path | None, typer.Option("--policy", metavar="FILE", help="Policy file.", show_default=False)]

GROUPS_REPLACE = (
    " A group's value replaces the class's, shorter or longer; of several groups the most generous value applies."
)


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Policy file.", show_default=False)] = None,
    policy: PolicyOption = None,
    as_json: Json = False,
) -> None:
    """Report all problems of a policy file, each with its line."""
    try:
        loaded = _load(file or policy)
    except PolicyError as error:
        if as_json:
            _print_json("policy-check", {"valid": False, "problems": list(error.problems)})
        raise
    warnings = [*_warnings(loaded), *not_backtested(loaded.policy)]
    _warn(warnings)
    if as_json:
        _print_json("policy-check", {"valid": True, "problems": [], **_head(loaded), "warnings": warnings})
        return
    typer.echo(f"{loaded.source} is valid (digest {loaded.policy.digest}).")
    typer.echo(_in_words(loaded))


@app.command()
def show(
    section: Annotated[
        str | None,
        typer.Argument(
            metavar="SECTION",
            help="Only this section: retention, classes.managed, match[0], …",
            show_default=False,
            autocompletion=completion.sections,
        ),
    ] = None,
    owner: Annotated[
        str | None, typer.Option(metavar="USER", help="Show the values that apply to this user, including groups.")
    ] = None,
    policy: PolicyOption = None,
    as_json: Json = False,
) -> None:
    """Show all effective values, or one section. Prints the origin of each value."""
    from gpukeeper.config.show import for_owner, part_for_owner, part_of, rows

    loaded = _load(policy)
    _warn(_warnings(loaded))
    if owner is not None:
        view = for_owner(loaded, owner)
        _show_owner(loaded, view if section is None else part_for_owner(view, section), section, as_json)
        return
    found = rows(loaded) if section is None else part_of(rows(loaded), section)
    if as_json:
        _print_json("policy-show", {**_head(loaded), "section": section, "settings": _plain(found)})
        return
    if not found:
        typer.echo(f"{section} is not set.", err=True)
        return
    _print_rows(found)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a policy file, for editors."""
    from gpukeeper.config.sections import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command()
def sentence(policy: PolicyOption = None, as_json: Json = False) -> None:
    """Print the policy as one English sentence."""
    loaded = _load(policy)
    _warn(_warnings(loaded))
    if as_json:
        _print_json("policy-sentence", _head(loaded))
        return
    typer.echo(_in_words(loaded))


def _load(policy: Path | None) -> Loaded:
    from gpukeeper.config.load import load_policy

    return load_policy(policy)


def _show_owner(loaded: Loaded, view: OwnerView, section: str | None, as_json: bool) -> None:
    if as_json:
        classes = {name: _plain(found) for name, found in view.classes.items()}
        applies = {"exemptions": _plain(view.exemptions), "demand": _plain(view.demand), "holds": _plain(view.holds)}
        who = {"owner": view.owner, "groups": view.groups}
        _print_json("policy-show", {**_head(loaded), "section": section, **who, "classes": classes, **applies})
        return
    shown.text(f"{view.owner} is in {', '.join(view.groups) or 'no group'}.{GROUPS_REPLACE if view.groups else ''}\n")
    table = [(name, row.setting, row.text, row.origin) for name, found in view.classes.items() for row in found]
    if table:
        shown.table(table, head=("class", "limit", "value", "origin"))
    if table and section is None:
        typer.echo()
    if not view.exemptions and section in (None, "exemptions"):
        typer.echo(f"No exemption applies to {view.owner}." + ("\n" if section is None else ""))
    more = [*view.exemptions, *view.demand, *view.holds]
    if more:
        _print_rows(more)


def _print_rows(rows: Sequence[Row]) -> None:
    shown.table([(row.setting, row.text, row.origin) for row in rows], head=("setting", "value", "origin"))


def _in_words(loaded: Loaded) -> str:
    from gpukeeper.config.show import sentence

    return sentence(loaded.policy)


def _head(loaded: Loaded) -> dict[str, Any]:
    return {
        "source": loaded.source,
        "digest": loaded.policy.digest,
        "sentence": _in_words(loaded),
        "warnings": _warnings(loaded),
    }


def _plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{"setting": row.setting, "value": row.value, "origin": row.origin} for row in rows]


def _warnings(loaded: Loaded) -> list[str]:
    return [*loaded.warnings, *loaded.expired(datetime.now(UTC))]


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print_message(f"warning: {warning}")


def _print_json(kind: str, content: Mapping[str, Any]) -> None:
    typer.echo(json.dumps({"schema": f"gpukeeper/{kind}/v1", **content}, indent=2, ensure_ascii=False))
