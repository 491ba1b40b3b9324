"""`gpukeeper accept`: test the GPUs of this machine or of many nodes, judge them, write a report; earlier runs.

A group that is also a command: without a subcommand it runs the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpukeeper.interfaces.cli.lazy import Entry, group_of
from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.model.errors import UsageError

if TYPE_CHECKING:
    from gpukeeper.interfaces.cli.accept_settings import Flags

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
        "gpukeeper.interfaces.cli.accept_mark:mark",
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
    together: Annotated[
        bool, typer.Option("--together", help="Also test several nodes as one run: with --on all of them.")
    ] = False
    report_to_log: Annotated[
        str | None,
        typer.Option(
            "--report-to-log",
            metavar="RUN",
            help="As one node of a run over many: print the report as lines of the log.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of a run over many nodes. Those of a test run are forwarded to each node."""

    on: Annotated[
        str | None,
        typer.Option("--on", metavar="ENGINE", help="Test many nodes: docker, kubernetes, ray, ssh or simulated."),
    ] = None
    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="NODES", help="With --on: all, NAME,NAME or a label selector.")
    ] = None
    as_: Annotated[
        str | None,
        typer.Option("--as", metavar="FORM", help="With --on kubernetes: job, daemonset, indexed-job, statefulset, …"),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node", min=1, metavar="N", help="With --on: GPUs to request on each node; also --expect."
        ),
    ] = None
    image: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="With --on: the image to run.")] = None
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="With --on: deadline of the run. Default: 1h.")
    ] = None
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NAME", help="With --on kubernetes: the namespace.")
    ] = None
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="With --on: an option of the engine.")
    ] = None
    owner: Annotated[
        str | None,
        typer.Option("--owner", metavar="NAME", help="With --on: owner of the run. Default: your user name."),
    ] = None
    render: Annotated[
        bool, typer.Option("--render", help="With --on: print what would be started, and start nothing.")
    ] = False
    keep_objects: Annotated[bool, typer.Option("--keep-objects", help="With --on: do not remove what was started.")] = (
        False
    )


@app.callback()
@o.with_options
def accept(context: typer.Context, options: RunOptions, launch: LaunchOptions) -> None:
    """Test all GPUs of this machine. Exit code 0: accepted, 4: failed, 5: inconclusive."""
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    raise typer.Exit(_launch(options, launch) if launch.on is not None else _run_here(options, launch))


def _run_here(options: RunOptions, launch: LaunchOptions) -> int:
    given = [name for name, value in vars(launch).items() if value]
    if given:
        flags = ", ".join(f"--{name.rstrip('_').replace('_', '-')}" for name in given)
        raise UsageError(f"{flags}: only with --on ENGINE, which tests many nodes. Nothing was run.")
    return _run(options)


def _launch(options: RunOptions, launch: LaunchOptions) -> int:
    from gpukeeper.interfaces.cli.accept_launch import Launch
    from gpukeeper.interfaces.cli.accept_launch import launch as launched

    local = {
        "--reference": options.reference,
        "--legacy": options.legacy,
        "--self-test": options.self_test,
        "--report-to-log": options.report_to_log,
    }
    if refused := [flag for flag, given in local.items() if given]:
        raise UsageError(f"{', '.join(refused)}: not with --on. Nothing was started.")
    assert launch.on is not None, "checked by the caller"
    return launched(
        Launch(
            engine=launch.on,
            form=launch.as_ or "",
            nodes=launch.nodes or "all",
            gpus_per_node=launch.gpus_per_node,
            image=launch.image or "",
            timeout=launch.timeout,
            together=options.together,
            options=tuple(launch.option or ()),
            namespace=launch.namespace,
            owner=launch.owner,
            keep_objects=launch.keep_objects,
            render=launch.render,
            flags=_flags(options),
            arguments=_forwarded(options),
            folder=options.report_dir,
            strict=options.strict,
            json=options.json,
        )
    )


def _forwarded(options: RunOptions) -> tuple[str, ...]:
    """The words of the same run on one node."""
    switches = {"--quick": options.quick, "--full": options.full, "--strict": options.strict}
    switches |= {"--verbose": options.verbose, "--together": options.together}
    words = [flag for flag, given in switches.items() if given]
    single = {"--within": options.within, "--expect": options.expect, "--ranks": options.ranks}
    single |= {"--python": options.python, "--device": options.device if options.device != "cuda" else None}
    for flag, value in single.items():
        words += [] if value is None else [flag, str(value)]
    several = {"--gpus": options.gpus, "--check": options.check, "--skip": options.skip, "--set": options.set_}
    for flag, values in several.items():
        for one in values or ():
            words += [flag, one]
    return tuple(words)


def _run(options: RunOptions) -> int:
    # The bench and its programs: the subcommands, which also load this module, do not need them.
    from gpukeeper.interfaces.cli.accept_node import run_on_node
    from gpukeeper.interfaces.cli.accept_run import AcceptOptions, run, self_test

    wanted = AcceptOptions(
        flags=_flags(options),
        reference=options.reference,
        python=options.python,
        folder=options.report_dir,
        summary=options.report_name,
        keep=options.keep,
        legacy=options.legacy,
        strict=options.strict,
        verbose=options.verbose,
        json=options.json,
        together=options.together,
    )
    if options.report_to_log is not None:
        return run_on_node(wanted, options.report_to_log)
    return self_test(wanted) if options.self_test else run(wanted)


def _flags(options: RunOptions) -> Flags:
    from gpukeeper.interfaces.cli.accept_settings import Flags

    return Flags(
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
    )


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
