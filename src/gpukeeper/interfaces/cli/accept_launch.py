"""`gpukeeper accept --on ENGINE`: test many nodes at once, collect their reports, remove what was started."""

from __future__ import annotations

import asyncio
import getpass
import signal
from collections.abc import Sequence
from pathlib import Path

import typer

from gpukeeper.acceptance.catalog import CHECKS
from gpukeeper.acceptance.fleet import group_plan
from gpukeeper.acceptance.fleet.collect import exit_code
from gpukeeper.acceptance.fleet.ports import Launcher
from gpukeeper.acceptance.fleet.spec import DEADLINE_S, RunSpec, flags
from gpukeeper.acceptance.fleet.status import RunSummary
from gpukeeper.acceptance.launchers import story
from gpukeeper.acceptance.launchers.archive import RunArchive
from gpukeeper.config.units import read_span
from gpukeeper.interfaces.cli.accept_options import LaunchOptions, RunOptions
from gpukeeper.interfaces.cli.accept_run import PARTLY, run_name
from gpukeeper.interfaces.cli.accept_settings import run_request
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.acceptance_run import RunPrinter, print_ended
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.ledger.paths import ledger_path, reports_folder, state_folder
from gpukeeper.ledger.trust import make_private
from gpukeeper.model.errors import KeeperError, PlatformError, UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.acceptance import run_document
from gpukeeper.wiring.clock import SystemClock
from gpukeeper.wiring.launchers import open_launcher

NOTHING = "Nothing was started."


def launch(options: RunOptions, wanted: LaunchOptions) -> int:
    """The exit code. Everything that can be refused is refused before anything is started."""
    local = {
        "--reference": options.reference,
        "--legacy": options.legacy,
        "--self-test": options.self_test,
        "--report-to-log": options.report_to_log,
    }
    if refused := [flag for flag, given in local.items() if given]:
        raise UsageError(f"{', '.join(refused)}: not with --on. {NOTHING}")
    spec = _spec(options, wanted)
    launcher = open_launcher(spec.engine, spec.options)
    return asyncio.run(_launched(options, wanted, spec, launcher))


def _spec(options: RunOptions, wanted: LaunchOptions) -> RunSpec:
    assert wanted.on is not None, "without --on this machine is tested"
    known = (*CHECKS, group_plan.CHECK) if options.together else CHECKS
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
        setting = setting_of(launcher, RunArchive(folder, spec.run), printer)
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
