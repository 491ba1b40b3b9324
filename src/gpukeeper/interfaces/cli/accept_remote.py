"""`gpukeeper accept --on ENGINE`: test many nodes at once, collect their reports, remove what was started; and
`accept list|show|logs|fetch|remove … --on ENGINE`: runs that an engine has, found by their run id.

From any machine: the engine knows the run, its description and its nodes. The module of an engine is imported when
it is used.
"""

from __future__ import annotations

import asyncio
import getpass
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar, cast

import typer

from gpukeeper.acceptance.fleet import group_jobs
from gpukeeper.acceptance.fleet.collect import FRAME_MARK, NCCL_MARK, exit_code
from gpukeeper.acceptance.fleet.launcher import DEADLINE_S, Launcher, RunSpec, RunSummary, flags
from gpukeeper.acceptance.launchers import story
from gpukeeper.acceptance.launchers.story import LOG, RunArchive
from gpukeeper.acceptance.reports.store import read, refuse_summary
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.blocking import SystemClock
from gpukeeper.config.problems import did_you_mean
from gpukeeper.config.units import read_span
from gpukeeper.interfaces.cli.accept_run import PARTLY, run_name
from gpukeeper.interfaces.cli.accept_settings import LaunchOptions, RunOptions, run_request
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.acceptance import RunPrinter, print_ended, reader_may_leave
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.ledger.files import ledger_path, make_private, reports_folder, state_folder
from gpukeeper.model.errors import KeeperError, PlatformError, UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import plain
from gpukeeper.views.acceptance import RunsOnEngine, RunStatusView, run_document, run_on_engine

LAUNCHERS = {
    "docker": "gpukeeper.wiring.launch_hosts:docker",
    "kubernetes": "gpukeeper.wiring.kubernetes:kubernetes_launcher",
    "ray": "gpukeeper.wiring.ray:ray_launcher",
    "simulated": "gpukeeper.wiring.launch_simulated:launcher",
    "ssh": "gpukeeper.wiring.launch_hosts:ssh",
}


def open_launcher(engine: str, options: Mapping[str, str]) -> Launcher:
    """`options`: of the engine (namespace, hosts, …). UsageError: the engine or one of them is not known."""
    if engine not in LAUNCHERS:
        raise UsageError(f'--on "{engine}": unknown engine. {did_you_mean(engine, sorted(LAUNCHERS))}')
    module, _, name = LAUNCHERS[engine].partition(":")
    made = cast("Callable[[Mapping[str, str]], Launcher]", getattr(import_module(module), name))
    return made(options)


NOTHING = "Nothing was started."


def launch(options: RunOptions, wanted: LaunchOptions) -> int:
    """The exit code. Everything that can be refused is refused before anything is started."""
    local = {
        "--reference": options.reference,
        "--self-test": options.self_test,
        "--report-to-log": options.report_to_log,
    }
    if refused := [flag for flag, given in local.items() if given]:
        raise UsageError(f"{', '.join(refused)}: not with --on. {NOTHING}")
    refuse_summary(options.report_name)
    spec = _spec(options, wanted)
    launcher = open_launcher(spec.engine, spec.options)
    return asyncio.run(_launched(options, wanted, spec, launcher))


def _spec(options: RunOptions, wanted: LaunchOptions) -> RunSpec:
    assert wanted.on is not None, "without --on this machine is tested"
    known = (*CHECKS, group_jobs.CHECK) if options.together else CHECKS
    request = run_request(options, known)
    names, selector = _nodes(wanted.nodes or "all")
    now = SystemClock().now()
    arguments = _forwarded(options)
    if wanted.gpus_per_node is not None and options.expect is None:
        arguments = ("--expect", str(wanted.gpus_per_node), *arguments)
    return RunSpec(
        run=run_name(now),
        owner=wanted.owner or getpass.getuser(),
        created=now,
        engine=wanted.on,
        form=wanted.as_ or "",
        nodes=names,
        selector=selector,
        gpus_per_node=wanted.gpus_per_node,
        image=wanted.image or "",
        arguments=arguments,
        together=options.together,
        deadline_s=_deadline(wanted.timeout, request.within_s),
        options=engine_options(wanted.option, wanted.namespace),
    )


def _forwarded(options: RunOptions) -> tuple[str, ...]:
    """The words of the same run on one node."""
    switches = {"--quick": options.quick, "--full": options.full, "--strict": options.strict}
    switches |= {"--verbose": options.verbose, "--together": options.together, "--legacy": options.legacy}
    words = [flag for flag, given in switches.items() if given]
    single = {
        "--within": options.within,
        "--check-timeout": options.check_timeout,
        "--expect": options.expect,
        "--ranks": options.ranks,
    }
    single |= {"--python": options.python, "--device": options.device if options.device != "cuda" else None}
    for flag, value in single.items():
        words += [] if value is None else [flag, str(value)]
    several = {"--gpus": options.gpus, "--check": options.check, "--skip": options.skip, "--set": options.set_}
    for flag, values in several.items():
        for one in values or ():
            words += [flag, one]
    return tuple(words)


def _nodes(words: str) -> tuple[tuple[str, ...], str]:
    """all, names with commas, or a selector: what has an operator in it."""
    if words.strip() in ("", "all"):
        return (), ""
    if "=" in words or " in " in words or words.startswith("!"):
        return (), words.strip()
    return tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip())), ""


def _deadline(words: str | None, within_s: float) -> float:
    """Long enough for what was asked for, and for pulling an image."""
    if words is None:
        return max(DEADLINE_S, 1.5 * within_s + 600)
    try:
        seconds = read_span(words).total_seconds()
    except ValueError as problem:
        raise UsageError(f"--timeout: {problem} {NOTHING}") from None
    if seconds <= 0:
        raise UsageError(f"--timeout {words} is too short. {NOTHING} Use for example --timeout 1h.")
    return seconds


def engine_options(words: Sequence[str] | None, namespace: str | None) -> dict[str, str]:
    found = {}
    for one in words or ():
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise UsageError(f'--option "{one}": write it like KEY=VALUE. {NOTHING}')
        found[key] = value
    return {**found, "namespace": namespace} if namespace else found


async def _launched(options: RunOptions, wanted: LaunchOptions, spec: RunSpec, launcher: Launcher) -> int:
    printer = RunPrinter(to_stderr=options.json)
    try:
        targets = await launcher.targets(spec)
        if not targets:
            raise UsageError(f"--nodes {wanted.nodes or 'all'}: no node was selected. {NOTHING}")
        if wanted.render:
            typer.echo(launcher.render(spec, [one for one in targets if not one.excluded]), nl=False)
            return 0
        folder = made_reports(options.report_dir)
        await _clear_leftovers(launcher, folder, spec.owner, printer)
        summary = options.report_name if options.legacy else ""
        setting = setting_of(launcher, RunArchive(folder, spec.run, summary=summary), printer)
        printer.begin(spec, targets)
        _hear_signals(setting.stop)
        ended = await story.launch(setting, spec, targets, keep_objects=wanted.keep_objects)
    finally:
        printer.close()
        await launcher.close()
    return conclude(ended, setting.archive.path, json=options.json, strict=options.strict)


def conclude(ended: story.Ended, folder: Path, *, json: bool, strict: bool) -> int:
    if json:
        show.as_json("acceptance-run", run_document(ended.report, str(folder), ended.removal, ended.problems))
    else:
        print_ended(ended, folder)
    for problem in ended.problems:
        print_message(problem)
    return exit_code(ended.report, strict=strict) or (PARTLY if ended.problems else 0)


def reports(folder: Path | None) -> Path:
    return (folder or reports_folder(ledger_path())).expanduser().absolute()


def made_reports(folder: Path | None) -> Path:
    """To write to: the state directory is private, whichever command creates it. Raises LedgerError."""
    if folder is None:
        make_private(state_folder())
    return reports(folder)


def setting_of(launcher: Launcher, archive: RunArchive, progress: story.Progress) -> story.Setting:
    return story.Setting(launcher, archive, SystemClock(), progress=progress)


async def _clear_leftovers(launcher: Launcher, folder: Path, owner: str, printer: RunPrinter) -> None:
    """Runs past their deadline: their launcher was killed. Their reports are collected before they are removed."""
    try:
        known = await launcher.runs()
    except PlatformError as problem:
        known = Unknown(str(problem))
    if isinstance(known, Unknown):
        print_message(f"Whether there are leftovers of earlier runs is unknown: {known.why}")
        return
    for one in known:
        if not story.is_over(one, SystemClock().now()):
            continue
        again = f"gpukeeper accept remove {one.spec.run} {flags(one.spec)}"
        if one.spec.owner != owner:
            print_message(f"Run {one.spec.run} of {one.spec.owner} is past its deadline. To remove it: {again}")
            continue
        try:
            ended = await story.remove_run(setting_of(launcher, RunArchive(folder, one.spec.run), printer), one)
        except KeeperError as problem:
            print_message(f"Run {one.spec.run} is past its deadline and was not removed: {problem}")
            continue
        count = f"{len(ended.report.fleet.nodes)} reports are in {folder / one.spec.run}"
        words = "; ".join(ended.problems) or f"removed {_objects(one)}; {count}"
        print_message(f"Run {one.spec.run} was left behind, past its deadline: {words}")


def _objects(summary: RunSummary) -> str:
    count = len(summary.objects)
    return f"{count} object{'' if count == 1 else 's'}"


def _hear_signals(stop: asyncio.Event) -> None:
    """The first Ctrl-C (or SIGTERM) collects what is there and removes the run; a second one ends at once."""
    loop = asyncio.get_running_loop()

    def ask() -> None:
        stop.set()
        print_message(
            "Interrupted: collecting the reports that are there, then removing the run. Press Ctrl-C again to exit at"
            " once; then the run stays on its nodes."
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)


T = TypeVar("T")
On: TypeAlias = Annotated[
    str | None,
    typer.Option("--on", metavar="ENGINE", help="Runs that this engine has: docker, kubernetes, ray, ssh, simulated."),
]
Needed: TypeAlias = Annotated[
    str, typer.Option("--on", metavar="ENGINE", help="Engine: docker, kubernetes, ray, ssh, …")
]
RunId: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="Run id, as in `accept list --on ENGINE`.")]
Namespace: TypeAlias = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="With --on kubernetes: its namespace.")
]
Options: TypeAlias = Annotated[
    list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="With --on: an option of the engine.")
]


def logs(
    run: RunId,
    on: Needed,
    node: Annotated[
        str | None, typer.Option("--node", metavar="NODE", help="Only this node, completely. Default: all nodes.")
    ] = None,
    tail: Annotated[int, typer.Option("--tail", min=1, metavar="N", help="Last lines of each node.")] = 20,
    report_dir: o.ReportDir = None,
    namespace: Namespace = None,
    option: Options = None,
) -> None:
    """Print what the nodes of a run have written. From the engine; of nodes that are gone, what was collected."""

    async def printed(launcher: Launcher) -> None:
        summary = await _the_run(launcher, run)
        names = [one.node for one in summary.nodes]
        if node is not None and node not in names:
            raise UsageError(f"--node {node}: not a node of run {run}. Nodes: {', '.join(names)}")
        for name in [node] if node is not None else names:
            output = await launcher.output(summary.spec, name)
            text = _collected(reports(report_dir) / run, name) if isinstance(output, Unknown) else output
            if text is None:
                assert isinstance(output, Unknown), "only what is unknown is searched for elsewhere"
                typer.echo(f"{name}: the log could not be read: {plain(output.why)}")
                continue
            lines = [line for line in text.decode("utf-8", "replace").splitlines() if FRAME_MARK not in line]
            if node is None:
                lines = [line for line in lines if not line.startswith(NCCL_MARK)][-tail:]
            for line in lines:
                typer.echo(plain(line) if node is not None else f"{name}: {plain(line)}")

    with reader_may_leave():
        _with(on, engine_options(option, namespace), printed)


def _collected(folder: Path, node: str) -> bytes | None:
    path = folder / "nodes" / node / LOG
    return read(path) if path.is_file() else None


@dataclass(frozen=True, kw_only=True)
class CollectOptions:
    """Which run, of which engine, and where its reports go."""

    run: RunId
    on: Needed
    report_dir: o.ReportDir = None
    namespace: Namespace = None
    option: Options = None
    json: o.Json = False


@o.with_options
def fetch(wanted: CollectOptions) -> None:
    """Collect the reports of a run and write its report. Removes nothing. Exit code 0, 4 or 5."""
    _ended(wanted, story.rescue)


@o.with_options
def remove(wanted: CollectOptions) -> None:
    """Remove every object of a run, running or not. Reports that are there are collected first. Exit code 0, 4 or 5."""
    _ended(wanted, story.remove_run)


def _ended(wanted: CollectOptions, act: Callable[[story.Setting, RunSummary], Awaitable[story.Ended]]) -> None:
    options = engine_options(wanted.option, wanted.namespace)
    archive = RunArchive(reports(wanted.report_dir), wanted.run)

    async def acted(launcher: Launcher) -> story.Ended:
        summary = await _the_run(launcher, wanted.run)
        made_reports(wanted.report_dir)
        printer = RunPrinter(to_stderr=True)
        return await act(setting_of(launcher, archive, printer), summary)

    raise typer.Exit(conclude(_with(wanted.on, options, acted), archive.path, json=wanted.json, strict=False))


def list_runs(engine: str, options: Mapping[str, str], *, json: bool) -> None:
    async def listed(launcher: Launcher) -> tuple[RunSummary, ...]:
        found = await launcher.runs()
        if isinstance(found, Unknown):
            raise PlatformError(f"The runs on {engine} could not be read: {found.why}")
        return found

    now = SystemClock().now()
    found = _with(engine, options, listed)
    runs = tuple(
        run_on_engine(one, over=story.is_over(one, now)) for one in sorted(found, key=lambda one: one.spec.run)
    )
    if json:
        shown.as_json("accept-runs", RunsOnEngine(engine, runs))
        return
    rows = [
        (
            one.run,
            one.owner,
            f"{one.created:%Y-%m-%d %H:%M}Z",
            ", ".join(f"{count} {phase}" for phase, count in one.nodes.items()),
            str(one.objects),
            "past its deadline" if one.over else "-",
        )
        for one in runs
    ]
    shown.table(rows, head=("run", "owner", "created", "nodes", "objects", "note"))
    if not runs:
        where = "the namespace (others: --namespace NAME)" if engine == "kubernetes" else engine
        print_message(f"{where} has no runs. Reports of earlier runs: gpukeeper accept list")


def show_run(run: str, engine: str, options: Mapping[str, str], *, json: bool) -> None:
    summary = _with(engine, options, lambda launcher: _the_run(launcher, run))
    if json:
        shown.as_json("accept-run-status", RunStatusView(summary))
        return
    rows = [
        (one.phase.value, one.node, "-" if one.exit_code is None else str(one.exit_code), one.reason or "-")
        for one in summary.nodes
    ]
    shown.table(rows, head=("phase", "node", "exit", "reason"))
    for name in summary.objects[:20]:
        typer.echo(plain(f"object {name}"))
    if len(summary.objects) > 20:
        typer.echo(f"… and {len(summary.objects) - 20} more objects")
    print_message(f"Collect its reports: gpukeeper accept fetch {run} {flags(summary.spec)}")


async def _the_run(launcher: Launcher, run: str) -> RunSummary:
    found = await launcher.run(run)
    if found is not None:
        return found
    known = await launcher.runs()
    names = [] if isinstance(known, Unknown) else [one.spec.run for one in known]
    where = "the namespace" if launcher.engine == "kubernetes" else launcher.engine
    other = "Another namespace: --namespace NAME. " if launcher.engine == "kubernetes" else ""
    raise UsageError(
        f"{where} has nothing of run {run}. Runs there: {', '.join(sorted(names)[-5:]) or 'none'}. {other}"
        f"A report that was collected: gpukeeper accept show {run}"
    )


def _with(engine: str, options: Mapping[str, str], act: Callable[[Launcher], Awaitable[T]]) -> T:
    async def acted() -> T:
        launcher = open_launcher(engine, options)
        try:
            return await act(launcher)
        finally:
            await launcher.close()

    return asyncio.run(acted())
