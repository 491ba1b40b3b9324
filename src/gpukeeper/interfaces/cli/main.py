"""The root command: the table of commands, and how errors are reported. Commands are imported when they are used:
their names and the first sentence of their help are a table, so that `gpukeeper --help` and the completion of
command names import none of them; each module has its imports at the top.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info, get_group_from_info
from typer.models import CommandInfo, TyperInfo

from gpukeeper import __version__
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.model.errors import KeeperError, UsageError

DESTRUCTIVE = frozenset({"apply", "remove", "stop", "stop-all"})


@dataclass(frozen=True)
class Entry:
    """One row of the table. The target is a function, or the Typer of a group."""

    target: str  # module:attribute
    help: str  # the first sentence of its own help; a test compares them
    settings: Mapping[str, Any] = field(default_factory=dict)  # context settings of Click


class LazyCommand(TyperCommand):
    """Listed by its entry. Replaced by the real command as soon as its arguments are parsed or completed."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.help, add_help_option=False, rich_markup_mode=None)
        self.entry = entry

    @cached_property
    def loaded(self) -> TyperCommand | TyperGroup:
        module, _, attribute = self.entry.target.partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            own = isinstance(found.info.cls, type)  # one of `group_of`
            group = TyperInfo(found, name=self.name, cls=found.info.cls if own else CarefulGroup)
            return get_group_from_info(
                group, pretty_exceptions_short=True, suggest_commands=True, rich_markup_mode=None
            )
        info = CommandInfo(name=self.name, callback=found, context_settings=dict(self.entry.settings))
        command = get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode=None)
        assert isinstance(command, TyperCommand)
        return command

    def make_context(self, *args: Any, **extra: Any) -> Any:
        return self.loaded.make_context(*args, **extra)


class CarefulGroup(TyperGroup):
    """For an unknown word similar commands are suggested, but none that ends work or deletes: people repeat what a
    message says."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.commands:
            return super().resolve_command(ctx, args)
        destructive = {name: self.commands.pop(name) for name in DESTRUCTIVE & self.commands.keys()}
        try:
            return super().resolve_command(ctx, args)
        finally:
            self.commands.update(destructive)


def group_of(entries: Mapping[str, Entry]) -> type[TyperGroup]:
    """The class of a group with these commands: `typer.Typer(cls=group_of(…))`."""

    class LazyGroup(CarefulGroup):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.commands.update({name: LazyCommand(name, entry) for name, entry in entries.items()})

    return LazyGroup


_HELP = "Test GPU nodes before use, and reclaim GPUs and disk space from finished, idle and stuck work."
_CLI = "gpukeeper.interfaces.cli"
COMMANDS = {
    "observe": Entry(f"{_CLI}.observe:observe", "Show workloads, leftovers, GPUs and contradictions."),
    "top": Entry(f"{_CLI}.top:top", "Show all GPUs live, with their owners and next actions."),
    "plan": Entry(f"{_CLI}.plan:plan", "Show what would be done now, and why."),
    "explain": Entry(
        f"{_CLI}.explain:explain",
        "Show each rule's verdict on a workload.",
    ),
    "apply": Entry(f"{_CLI}.apply:apply", "Reclaim what is due now."),
    "demo": Entry("gpukeeper.interfaces.demo:demo", "Simulate a week on a fleet and show what was reclaimed and why."),
    "report": Entry(f"{_CLI}.report:report", "Report how GPUs were used, and what was given back."),
    "backtest": Entry(f"{_CLI}.backtest:backtest", "Show what a policy would have done to recorded work."),
    "advise": Entry(f"{_CLI}.advise:advise", "Find the idle times that win most at an allowed regret."),
    "login": Entry(f"{_CLI}.login:login", "Print a link that logs you in to the web dashboard."),
    "restore": Entry(f"{_CLI}.submit:restore", "Restore what gpukeeper stopped, or removed after capturing it."),
    "doctor": Entry(f"{_CLI}.doctor:doctor", "Check this machine: what works, what does not, and how to fix it."),
    "pause": Entry(f"{_CLI}.submit:pause", "Pause all actions at every place of this machine's ledger."),
    "resume": Entry(f"{_CLI}.submit:resume", "Allow actions again after a pause."),
    "stop-all": Entry(f"{_CLI}.stop_all:stop_all", "Stop all running GPU workloads, or one owner's."),
    "tidy": Entry(
        f"{_CLI}.tidy:tidy",
        "Run a command with a private TMPDIR, deleted when it ends.",
        {"allow_interspersed_args": False},
    ),
}
GROUPS = {
    "accept": Entry(f"{_CLI}.accept:app", "Test the GPUs of this machine."),
    "check": Entry(f"{_CLI}.check:app", "List and show the checks of `gpukeeper accept`."),
    "workload": Entry(f"{_CLI}.workload:app", "List, hold, release, stop, remove or restore your workloads."),
    "node": Entry(f"{_CLI}.node:app", "List, show, quarantine and return GPUs of this machine and nodes of a cluster."),
    "setup": Entry(f"{_CLI}.setup:app", "Put gpukeeper into service on this machine, and take it out again."),
    "policy": Entry(f"{_CLI}.policy:app", "Check, show and try a policy."),
    "ledger": Entry(f"{_CLI}.ledger:app", "Read the record of everything gpukeeper observed, decided and did."),
    "notify": Entry(f"{_CLI}.notify:app", "Test the channels for messages to owners and admins."),
    "fleet": Entry(f"{_CLI}.fleet:app", "Deploy gpukeeper to many servers over ssh."),
    "fleet-db": Entry(
        f"{_CLI}.fleet_db:app", "Set up the PostgreSQL database that many machines copy their records to."
    ),
}


def root_app(commands: Mapping[str, Entry]) -> typer.Typer:
    app = typer.Typer(
        name="gpukeeper",
        cls=group_of(commands),
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=_HELP)(_root)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpukeeper {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


def run_app(app: typer.Typer) -> int:
    """Returns the exit code. Expected errors are printed as one sentence, bugs are reported as bugs."""
    try:
        app(standalone_mode=True)
    except KeeperError as problem:
        print_message(str(problem))
        return problem.exit_code
    except BaseExceptionGroup as several:
        # The tasks of the daemon end together; what one of them ended with is what people must know.
        first = _first(several)
        if isinstance(first, PermissionError):
            return _not_permitted(first)
        if not isinstance(first, KeeperError):
            raise
        print_message(str(first))
        return first.exit_code
    except AssertionError as bug:
        print_message(f"This is a bug in gpukeeper, not in your setup: {bug}\nNothing was changed after it.")
        return 1
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as end:
        if _came_from(end, KeyboardInterrupt):
            return _interrupted()
        # The reader of our output went away (| head); nothing is wrong, though Click ends with 1 then.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _discard_output()
        return 0
    except OSError as problem:
        if not _in_output(problem):
            if isinstance(problem, PermissionError):
                return _not_permitted(problem)
            raise
        _discard_output()
        with suppress(OSError):
            print_message(
                f"The output could not be written: {problem.strerror}. To see what was done: gpukeeper ledger list"
            )
        return 1
    return 0


def _not_permitted(problem: PermissionError) -> int:
    """Commands report what they expect with the object it is about; this is for all the rest."""
    what = os.fsdecode(problem.filename) if isinstance(problem.filename, str | bytes) else "A part of this machine"
    print_message(
        f"{what} cannot be used by you ({problem.strerror or problem}). The command ended there. "
        "Run it as a user who may, such as root with sudo, or ask an admin for the permission. "
        "To see what was done: gpukeeper ledger list"
    )
    return UsageError.exit_code


def _interrupted() -> int:
    print_message("Interrupted. The next pass inspects any open step first.")
    return 130


def _came_from(end: SystemExit, kind: type[BaseException]) -> bool:
    """Typer turns Ctrl-C into an exit without a message."""
    return end.__context__ is not None and isinstance(end.__context__.__cause__, kind)


def _in_output(problem: OSError) -> bool:
    """It came from printing: a full disk behind `>`, a terminal that is gone."""
    return any(frame.f_code.co_name == "echo" for frame, _ in traceback.walk_tb(problem.__traceback__))


def _discard_output() -> None:
    """So that Python does not try once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = several.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
