"""The root command: the list of verbs, and what an error looks like."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import Annotated

import typer

from gpukeeper import __version__
from gpukeeper.interfaces.cli import (
    accept,
    apply,
    check,
    demo,
    doctor,
    explain,
    ledger,
    login,
    node,
    observe,
    pause,
    plan,
    policy,
    restore,
    stop_all,
    tidy,
    top,
    workload,
)

app = typer.Typer(
    name="gpukeeper",
    help="Test GPU nodes before use, and reclaim GPUs and disk space from finished, idle and stuck work.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("observe")(observe.observe)
app.command("top")(top.top)
app.command("plan")(plan.plan)
app.command("explain")(explain.explain)
app.command("apply")(apply.apply)
app.command("demo")(demo.demo)
app.add_typer(accept.app, name="accept")
app.add_typer(check.app, name="check")
app.add_typer(workload.app, name="workload")
app.add_typer(node.app, name="node")
app.add_typer(policy.app, name="policy")
app.add_typer(ledger.app, name="ledger")
app.command("login")(login.login)
app.command("restore")(restore.restore)
app.command("doctor")(doctor.doctor)
app.command("pause")(pause.pause)
app.command("resume")(pause.resume)
app.command("stop-all")(stop_all.stop_all)
app.command("tidy", context_settings={"allow_interspersed_args": False})(tidy.tidy)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpukeeper {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Test GPU nodes before use, and reclaim GPUs and disk space from finished, idle and stuck work."""


def run_app() -> int:
    """Returns the exit code. Expected errors are printed as one sentence, bugs are reported as bugs."""
    from gpukeeper.interfaces.terminal.session import print_message
    from gpukeeper.model.errors import KeeperError

    try:
        app(standalone_mode=True)
    except KeeperError as problem:
        print_message(str(problem))
        return problem.exit_code
    except BaseExceptionGroup as several:
        # The tasks of the daemon end together; what one of them ended with is what people must know.
        first = _first(several)
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
            raise
        _discard_output()
        with suppress(OSError):
            print_message(
                f"The output could not be written: {problem.strerror}. To see what was done: gpukeeper ledger list"
            )
        return 1
    return 0


def _interrupted() -> int:
    from gpukeeper.interfaces.terminal.session import print_message

    print_message("Interrupted. The next pass inspects any open step first.")
    return 130


def _came_from(end: SystemExit, kind: type[BaseException]) -> bool:
    """Typer makes an exit of Ctrl-C, and says nothing."""
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
