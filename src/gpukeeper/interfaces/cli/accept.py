"""`gpukeeper accept`: test the GPUs of this machine or of many nodes, judge them, write a report; earlier runs.

A group that is also a command: without a subcommand it runs the tests.
"""

from __future__ import annotations

import typer

from gpukeeper.interfaces.cli.accept_settings import LaunchOptions, RunOptions
from gpukeeper.interfaces.cli.main import Entry, group_of
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.model.errors import UsageError

COMMANDS = {
    "list": Entry(
        "gpukeeper.interfaces.cli.accept_reports:list_", "List the runs in the report directory, newest first."
    ),
    "show": Entry(
        "gpukeeper.interfaces.cli.accept_reports:show",
        "Show the report of one run.",
    ),
    "compare": Entry(
        "gpukeeper.interfaces.cli.accept_reports:compare",
        "Show what changed between two runs.",
    ),
    "logs": Entry(
        "gpukeeper.interfaces.cli.accept_remote:logs",
        "Print what the nodes of a run have written.",
    ),
    "fetch": Entry(
        "gpukeeper.interfaces.cli.accept_remote:fetch",
        "Collect the reports of a run and write its report.",
    ),
    "remove": Entry(
        "gpukeeper.interfaces.cli.accept_remote:remove",
        "Remove every object of a run, running or not.",
    ),
    "merge": Entry(
        "gpukeeper.interfaces.cli.accept_reports:merge",
        "Merge the reports of many nodes.",
    ),
    "mark": Entry(
        "gpukeeper.interfaces.cli.marking:mark",
        "Mark nodes with the results of a run: label, condition, taint.",
    ),
    "preflight": Entry(
        "gpukeeper.interfaces.cli.accept_preflight:preflight",
        "Check what would prevent a run on the nodes of an engine.",
    ),
}
app = typer.Typer(
    cls=group_of(COMMANDS),
    invoke_without_command=True,
    help="Test the GPUs of this machine. Also list, show, compare and merge reports.",
    subcommand_metavar="[list|show|logs|fetch|remove|compare|merge|preflight|mark]",
)


@app.callback()
@o.with_options
def accept(context: typer.Context, options: RunOptions, launch: LaunchOptions) -> None:
    """Test all GPUs of this machine. Exit code 0: accepted, 4: failed, 5: inconclusive."""
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    raise typer.Exit(_launch(options, launch) if launch.on is not None else _run_here(options, launch))


def _launch(options: RunOptions, wanted: LaunchOptions) -> int:
    from gpukeeper.interfaces.cli.accept_remote import launch

    return launch(options, wanted)


def _run_here(options: RunOptions, launch: LaunchOptions) -> int:
    given = [name for name, value in vars(launch).items() if value]
    if given:
        flags = ", ".join(f"--{name.rstrip('_').replace('_', '-')}" for name in given)
        raise UsageError(f"{flags}: only with --on ENGINE, which tests many nodes. Nothing was run.")
    # The bench and its programs: the subcommands, which also load this module, do not need them.
    from gpukeeper.interfaces.cli.accept_run import run, run_on_node, self_test

    if options.report_to_log is not None:
        return run_on_node(options, options.report_to_log)
    return self_test(options) if options.self_test else run(options)


def _refuse_options(context: typer.Context) -> None:
    """`accept --keep list` would silently keep nothing."""
    given = [
        one.opts[0]
        for one in context.command.params
        if one.name is not None and str(getattr(context.get_parameter_source(one.name), "name", "")) == "COMMANDLINE"
    ]
    if given:
        verb = context.invoked_subcommand
        raise UsageError(
            f"{', '.join(given)}: not an option of {verb}, only of a test run. Options of {verb} follow its name: "
            f"gpukeeper accept {verb} --help"
        )
