"""A test run from the command line: what was asked for, the lease, the run, its report, its line in the ledger."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper import __version__
from gpukeeper.acceptance.catalog import CHECKS
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet import group_plan
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.judging.reference import ReferenceRow
from gpukeeper.acceptance.record import Report, Thresholds
from gpukeeper.acceptance.recording import history_of, line_of, ref_of
from gpukeeper.acceptance.reports import legacy
from gpukeeper.acceptance.reports.document import encodable
from gpukeeper.acceptance.reports.store import ReportFolder, read, refuse_summary
from gpukeeper.acceptance.run import RunConfig, accept
from gpukeeper.config.load import load_policy
from gpukeeper.config.own_reference import read_rows
from gpukeeper.interfaces.cli.accept_group import GroupRun, read_group, with_group, without_group
from gpukeeper.interfaces.cli.accept_options import RunOptions, read_variables
from gpukeeper.interfaces.cli.accept_settings import run_request
from gpukeeper.interfaces.terminal import acceptance, show
from gpukeeper.interfaces.terminal.acceptance_progress import (
    ATTEMPT_HEAD,
    ProgressPrinter,
    attempt_printer,
    attempt_row,
)
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.stopping import until_stopped
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.paths import ledger_path, reports_folder
from gpukeeper.model.durations import size_in_words
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.event import NodeTested
from gpukeeper.model.gpu import Gpu
from gpukeeper.model.grade import Grade, Past
from gpukeeper.views.acceptance import acceptance_document
from gpukeeper.wiring.benches import node_name, open_bench, try_detectors
from gpukeeper.wiring.messages import send_to_admins

FAILED, INCONCLUSIVE, PARTLY, INTERRUPTED = 4, 5, 3, 130
OLDEST, LEAST_KEPT = timedelta(days=90), 20  # reports
MOST_BYTES = 2 * 1024**3  # of all reports together; the newest one stays, however large
LEASE = "acceptance"
STOPPING = "Interrupted: stopping the checks, then writing the report. Press Ctrl-C again to exit at once."


@dataclass(frozen=True)
class PreparedRun:
    options: RunOptions  # with what the variables of the environment add
    wish: RunRequest
    rows: tuple[ReferenceRow, ...]
    notes: Sequence[str]  # what was understood of the variables
    group: GroupRun | None = None  # with other nodes as one run


def run(options: RunOptions) -> int:
    """The exit code. Everything that can be refused is refused before anything runs."""
    prepared = prepare(options, os.environ)
    options = prepared.options
    for one in prepared.notes:
        print_message(f"from the environment: {one}")
    echo = acceptance.to_stderr if options.json else acceptance.to_stdout
    printer = ProgressPrinter(prepared.wish, echo, verbose=options.verbose)
    ledger = open_ledger(ledger_path(), write=True)
    try:
        must_be_writable(folder_of(options))
        report, logs = asyncio.run(leased_run(prepared, ledger, printer))
        report = encodable(report)
        folder, problems = written(options, report, logs)
        problems += recorded(ledger, report, folder)
    finally:
        ledger.close()
    with acceptance.reader_may_leave():
        print_result(options, report, folder, printer)
    problems += _pruned(options, report) if folder else []
    for problem in problems:
        print_message(problem)
    return exit_code(report, strict=options.strict) or (PARTLY if problems else 0)


def prepare(options: RunOptions, environ: Mapping[str, str]) -> PreparedRun:
    refuse_summary(options.report_name)
    run = options.report_to_log or ""
    environment = read_variables(environ, of_many=bool(run) or options.together)
    options = environment.below(options)
    rows = read_rows(options.reference) if options.reference is not None else ()
    if not options.together:
        return PreparedRun(options, run_request(options, CHECKS), rows, environment.notes)
    wish = run_request(options, (*CHECKS, group_plan.CHECK))
    group = read_group(wish, run, options.python, environ)
    return PreparedRun(options, without_group(wish), rows, environment.notes, group)


def exit_code(report: Report, *, strict: bool) -> int:
    if report.interrupted:
        return INTERRUPTED
    codes = {Grade.PASS: 0, Grade.WARN: FAILED if strict else 0, Grade.FAIL: FAILED}
    return codes.get(report.verdict, INCONCLUSIVE)


async def leased_run(
    prepared: PreparedRun, ledger: SqliteLedger, printer: ProgressPrinter, node: str = ""
) -> tuple[Report, Mapping[str, str]]:
    """The report, and the output of the programs. One run at a time: two would slow each other. `node`: what this
    machine is called in a run over many."""
    options, name = prepared.options, node or node_name()
    async with ledger.lease(LEASE, name):
        history = await _history(ledger, name)
        bench = open_bench(prepared.wish, python=options.python, count=options.ranks)
        stop = asyncio.Event()
        drawing = asyncio.create_task(printer.moving())
        with until_stopped(stop, STOPPING):
            try:
                order = _order(prepared, bench.clock.now(), history, printer, node)
                report = await accept(bench.workbench, order, bench.clock, stop)
                if prepared.group is None:
                    return report, bench.logs()
                await bench.workbench.close()  # its workers keep memory of the GPUs
                report, logs = await with_group(report, prepared.group, order.limits, stop)
                report = msgspec.structs.replace(report, ended=bench.clock.now())
                return report, {**bench.logs(), **logs}
            finally:
                await bench.workbench.close()
                printer.flush()
                drawing.cancel()
                with suppress(asyncio.CancelledError):
                    await drawing


async def _history(ledger: SqliteLedger, node: str) -> Mapping[str, tuple[Past, ...]]:
    key = ref_of(node).key
    memory = (await ledger.memories([key])).get(key)
    return history_of(memory.tested if memory is not None else ())


def _order(
    prepared: PreparedRun,
    now: datetime,
    history: Mapping[str, tuple[Past, ...]],
    printer: ProgressPrinter,
    node: str,
) -> RunConfig:
    def limits(gpu: Gpu, check: str, metric: str, method: str) -> Thresholds:
        return reference.limits(gpu, check, metric, method, own=prepared.rows)

    return RunConfig(
        run=prepared.options.report_to_log or run_name(now),
        node=node,
        version=__version__,
        wish=prepared.wish,
        checks=CHECKS,
        limits=limits,
        history=lambda gpus: history,
        progress=printer,
    )


def run_name(at: datetime) -> str:
    """By time, so that names sort; and two runs of one second differ."""
    return f"{at:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def folder_of(options: RunOptions) -> Path:
    """Absolute: the ledger stores it, and is read from other directories."""
    return (options.report_dir or reports_folder(ledger_path())).expanduser().absolute()


def must_be_writable(folder: Path) -> None:
    """Before an hour of testing, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"Reports cannot be written to {folder}: {error.strerror}. Nothing was run. "
            "Use another directory: --report-dir DIR"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"Reports cannot be written to {folder}: permission denied. Nothing was run. "
            "Use another directory: --report-dir DIR"
        )


def written(options: RunOptions, report: Report, logs: Mapping[str, str], named: str = "") -> tuple[str, list[str]]:
    """Where it is; and what did not go well, which takes nothing from the verdict. `named`: the folder of a run that
    has a name already; empty: one is made."""
    store = ReportFolder(folder_of(options))
    extra = {f"log-{name.replace('/', '-')}": words.encode("utf-8", "replace") for name, words in logs.items()}
    try:
        folder = store.write(
            report,
            keep=options.keep,
            with_legacy=options.legacy,
            summary=options.report_name,
            extra=extra,
            name=named,
        )
    except KeeperError as problem:
        return "", [str(problem)]
    return str(folder), _written_beside(options, folder)


def _written_beside(options: RunOptions, folder: Path) -> list[str]:
    """The older kits wrote into the directory itself, each time: readers of those files expect them there."""
    into = options.report_dir
    if not options.legacy or into is None:
        return []
    names = {options.report_name, *legacy.LEGACY_FIELDS, *legacy.SKIPPED.values()}
    strange = []
    try:
        for path in sorted(folder.iterdir()):
            if path.name in names or path.name.startswith("gpu_accept_"):
                if _cleared(into / path.name):
                    made = into / f".{path.name}.{secrets.token_hex(4)}"
                    made.write_bytes(path.read_bytes())
                    made.replace(into / path.name)
                else:
                    strange.append(path.name)
        for result, skipped in legacy.SKIPPED.items():
            # An earlier run's: a result beside the word that nothing ran would be taken for this run's.
            old = result if (folder / skipped).exists() else skipped
            if not _cleared(into / old):
                strange.append(old)
    except OSError as error:
        return [f"The files of the older test kits could not be written to {into}: {error.strerror}."]
    problem = f"Not written, because existing files in {into} are not from an acceptance run: {', '.join(strange)}."
    return [problem] if strange else []


def _cleared(path: Path) -> bool:
    """Whether the name is free now. A file of an earlier run is deleted; anything else stays. It is moved aside before
    it is read, so that what is deleted is what was read."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    name = legacy.HOST if path.name.startswith("gpu_accept_") else path.name
    try:
        ours = not aside.is_symlink() and legacy.is_ours(name, read(aside))
    except KeeperError:
        ours = False
    if ours:
        aside.unlink()
    else:
        aside.rename(path)
    return ours


def _pruned(options: RunOptions, report: Report) -> list[str]:
    """Last of all: whatever is wrong with old reports, this one is written, recorded and told. Only in our own folder:
    in one that somebody named nothing is deleted."""
    if options.report_dir is not None:
        return []
    try:
        folder = ReportFolder(folder_of(options))
        old = folder.prune(report.ended, older_than=OLDEST, keep_last=LEAST_KEPT)
        large = folder.prune(report.ended, older_than=timedelta.max, quota=MOST_BYTES)
    except (KeeperError, OSError) as problem:
        return [f"Old reports could not be deleted: {problem}"]
    if old.removed:
        print_message(f"Deleted {len(old.removed)} reports older than 90 days; use --keep to keep a report.")
    if large.removed:
        many = f"Deleted the {len(large.removed)} oldest reports"
        print_message(
            f"{many}: together they were larger than {size_in_words(MOST_BYTES)}; use --keep to keep a report."
        )
    return []


def recorded(ledger: SqliteLedger, report: Report, folder: str) -> list[str]:
    """A simulation is not about a machine, so it is not recorded in a ledger."""
    if report.device == "simulated":
        return []
    line = line_of(report, folder)
    try:
        asyncio.run(ledger.append([line]))
    except KeeperError as problem:
        return [f"The run could not be recorded in the ledger, so later runs cannot be compared with it: {problem}"]
    return _admins_notified(line)


def _admins_notified(line: NodeTested) -> list[str]:
    """Of a failed run, if the policy has channels for admins. Other commands report a policy that cannot be read."""
    try:
        settings = load_policy(None).policy.notify
    except KeeperError:
        return []
    return asyncio.run(send_to_admins(settings, line))


def print_result(options: RunOptions, report: Report, folder: str, printer: ProgressPrinter) -> None:
    if options.json:
        show.as_json("acceptance", acceptance_document(report, folder))
    else:
        acceptance.ending(report, folder, acceptance.to_stdout, verbose=options.verbose, once=printer.once)


def self_test(options: RunOptions) -> int:
    """0 every planted fault was found and nothing else; 4 not so; 5 nothing could be planted on this machine itself."""
    options = prepare(options, os.environ).options
    printed = attempt_printer(options.json)
    found = asyncio.run(try_detectors(python=options.python, device=options.device, tell=printed))
    with acceptance.reader_may_leave():
        if options.json:
            show.as_json("self-test", {"verdict": found.verdict, "reason": found.reason, "attempts": found.attempts})
        else:
            show.table([attempt_row(one) for one in found.attempts], head=ATTEMPT_HEAD)
            acceptance.to_stdout(f"\n{found.verdict}  {found.reason}")
    return {Grade.PASS: 0, Grade.FAIL: FAILED}.get(found.verdict, INCONCLUSIVE)
