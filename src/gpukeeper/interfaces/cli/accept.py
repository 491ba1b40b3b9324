"""`gpukeeper accept`: test the GPUs of this machine, judge them, write a report; reports of earlier runs.

A group that is also a command: without a subcommand it runs the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpukeeper.interfaces.cli.lazy import Entry, group_of
from gpukeeper.interfaces.terminal import completion
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
    "merge": Entry(
        "gpukeeper.interfaces.cli.accept_reports:merge",
        "Merge the reports of many nodes.",
    ),
}
app = typer.Typer(
    cls=group_of(COMMANDS),
    invoke_without_command=True,
    help="Test the GPUs of this machine. Also list, show, compare and merge reports.",
    subcommand_metavar="[list|show|compare|merge]",
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a test run."""

    quick: Annotated[bool, typer.Option("--quick", help="Run for about a minute (default).")] = False
    full: Annotated[bool, typer.Option("--full", help="Same as --within 30m.")] = False
    within: Annotated[
        str | None,
        typer.Option(
            "--within", metavar="DURATION", help="Time limit: run as many checks as fit into 5m, 30m, 4h, 24h, …"
        ),
    ] = None
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpus", metavar="GPU,…", help="Only these GPUs: index, UUID or serial number. Default: all."),
    ] = None
    expect: Annotated[
        int | None, typer.Option("--expect", min=1, metavar="N", help="Expected number of GPUs; fewer is a FAIL.")
    ] = None
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="DEVICE", help="cuda; or cpu or simulated, for a trial run that accepts no GPU."
        ),
    ] = "cuda"
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="With cpu or simulated: number of devices to use instead of GPUs."),
    ] = None
    check: Annotated[
        list[str] | None,
        typer.Option(
            "--check",
            metavar="CHECK,…",
            help="Only these checks; see `gpukeeper check list`.",
            autocompletion=completion.checks,
        ),
    ] = None
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="CHECK,…", help="Skip these checks.", autocompletion=completion.checks),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="CHECK.PARAM=VALUE", help="Override a check parameter; see `gpukeeper check show`."
        ),
    ] = None
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="FILE", help="File with your own floors and ceilings, YAML or JSON."),
    ] = None
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="EXE", help="Python interpreter with PyTorch. Default: found automatically."),
    ] = None
    report_dir: Annotated[
        Path | None,
        typer.Option("--report-dir", metavar="DIR", help="Report directory. Default: reports/ in the state directory."),
    ] = None
    report_name: Annotated[
        str, typer.Option("--report-name", metavar="NAME", help="With --legacy: file name of the summary.")
    ] = "summary.json"
    keep: Annotated[bool, typer.Option("--keep", help="Exclude this report from automatic deletion.")] = False
    legacy: Annotated[
        bool, typer.Option("--legacy", help="Also write the files of the older test kits, directly in --report-dir.")
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 on WARN, too.")] = False
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Inject faults and verify that each is detected. Tests no GPU.")
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all findings and skipped checks.")] = False
    json: o.Json = False


@app.callback()
@o.with_options
def accept(context: typer.Context, options: RunOptions) -> None:
    """Test all GPUs of this machine. Exit code 0: accepted, 4: failed, 5: inconclusive."""
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    raise typer.Exit(_run(options))


def _run(options: RunOptions) -> int:
    # The bench and its programs: the subcommands, which also load this module, do not need them.
    from gpukeeper.interfaces.cli.accept_run import AcceptOptions, run, self_test
    from gpukeeper.interfaces.cli.accept_settings import Flags

    wanted = AcceptOptions(
        flags=Flags(
            options.quick,
            options.full,
            options.within,
            options.gpus or (),
            options.expect,
            options.device,
            options.ranks,
            options.check or (),
            options.skip or (),
            options.set_ or (),
        ),
        reference=options.reference,
        python=options.python,
        folder=options.report_dir,
        summary=options.report_name,
        keep=options.keep,
        legacy=options.legacy,
        strict=options.strict,
        verbose=options.verbose,
        json=options.json,
    )
    return self_test(wanted) if options.self_test else run(wanted)


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
