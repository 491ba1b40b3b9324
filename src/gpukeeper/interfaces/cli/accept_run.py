"""A test run from the command line: what was asked for, the lease, the run, its report, its line in the ledger.

Also as one node of a run over many (`--together`, `--report-to-log RUN`), which an engine starts and not a person.
Then, whatever happens, the report is printed at the end as lines of the log (acceptance/fleet/collect.py), also if
the run was interrupted or could not begin. The machine may have no directory that can be written to.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import typer

from gpukeeper import __version__
from gpukeeper.acceptance.bench.probing import ProbeLauncher
from gpukeeper.acceptance.check import ALWAYS, RunRequest
from gpukeeper.acceptance.fleet import group_jobs
from gpukeeper.acceptance.fleet.collect import encode_frames, nccl_lines, termination_message, without_result
from gpukeeper.acceptance.fleet.group_jobs import Member, RankDevice
from gpukeeper.acceptance.fleet.group_judge import Limits
from gpukeeper.acceptance.fleet.launcher import RUN_ID
from gpukeeper.acceptance.group.members import Membership, read_fabric, read_membership
from gpukeeper.acceptance.group.session import merged, take_part
from gpukeeper.acceptance.judging import reference, verdicts
from gpukeeper.acceptance.judging.reference import ReferenceRow
from gpukeeper.acceptance.record import Report, Thresholds, history_of, line_of, ref_of
from gpukeeper.acceptance.reports import legacy
from gpukeeper.acceptance.reports.formats import encodable, report_json
from gpukeeper.acceptance.reports.store import ReportFolder, folder_name, read, refuse_summary
from gpukeeper.acceptance.run import RunConfig, accept
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.blocking import SystemClock
from gpukeeper.config.load import load_policy
from gpukeeper.config.own_reference import read_rows
from gpukeeper.interfaces.cli.accept_settings import RunOptions, read_variables, run_request
from gpukeeper.interfaces.terminal import acceptance, show
from gpukeeper.interfaces.terminal.acceptance import (
    ATTEMPT_HEAD,
    ProgressPrinter,
    attempt_printer,
    attempt_row,
    until_stopped,
)
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.ledger.files import ledger_path, reports_folder
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.event import NodeTested
from gpukeeper.model.gpu import Gpu, Grade, Past
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import size_in_words
from gpukeeper.views.acceptance import acceptance_document
from gpukeeper.wiring.benches import interpreter, node_name, open_bench, try_detectors
from gpukeeper.wiring.messages import send_to_admins


@dataclass(frozen=True)
class GroupRun:
    run: str  # what all nodes must know
    who: Membership
    wish: RunRequest
    python: str | None


def read_group(wish: RunRequest, run: str, python: str | None, environ: Mapping[str, str]) -> GroupRun:
    """Refuses what cannot work before anything runs. `run`: empty if it was not started by a launcher."""
    if wish.device == "simulated":
        raise UsageError("--together needs --device cuda or cpu: simulated nodes have no network. Nothing was run.")
    group_jobs.settings_of(wish)
    found = read_membership(environ, socket.gethostname())
    print_message(f"one of {found.size} nodes: {', '.join(found.notes)}")
    run = run or environ.get("GPUKEEPER_RUN") or f"{found.address}:{found.port}/{found.size}"
    return GroupRun(run, found, wish, python)


def without_group(wish: RunRequest) -> RunRequest:
    """For the checks of this node alone: `--check group` selects none of them."""
    only = tuple(name for name in wish.only if name != group_jobs.GROUP)
    return msgspec.structs.replace(wish, only=only or (ALWAYS[:1] if wish.only else ()))


async def with_group(
    report: Report, group: GroupRun, limits: Limits, stop: asyncio.Event
) -> tuple[Report, dict[str, str]]:
    """The report with the findings of the group, and the logs of its ranks."""
    who, wish = group.who, group.wish
    gpus = report.machine.gpus
    shown = () if isinstance(gpus, Unknown) else verdicts.wanted(gpus, wish.gpus)
    found = interpreter(group.python)
    unfit = found.why if isinstance(found, Unknown) else "" if shown else "it has no GPU"
    if report.verdict is Grade.FAIL and report.device == "cuda":
        unfit = f"its own checks failed: {report.reason}"
    member = Member(
        index=who.index,
        node=report.node,
        devices=tuple(
            RankDevice(uuid=gpu.uuid, index=gpu.index, name=gpu.name if isinstance(gpu.name, str) else "")
            for gpu in shown
        ),
        fabric=read_fabric(),
        unfit=unfit,
    )
    bench = ProbeLauncher(found if isinstance(found, str) else "", wish.device)
    result = await take_part(group.run, who, member, bench, wish, limits, stop, tell=print_message)
    return merged(report, result, wish, who.index), result.logs


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
    environment = read_variables(environ, together=options.together)
    options = environment.below(options)
    rows = read_rows(options.reference) if options.reference is not None else ()
    if not options.together:
        return PreparedRun(options, run_request(options, CHECKS), rows, environment.notes)
    wish = run_request(options, (*CHECKS, group_jobs.CHECK))
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


SHARED_MEMORY = "/dev/shm"  # noqa: S108
STOPS = (signal.SIGTERM, signal.SIGINT)


def run_on_node(options: RunOptions, run: str) -> int:
    _refuse(options, run)
    environ = os.environ
    node = environ.get("GPUKEEPER_NODE") or node_name()
    _use_memory_for_files()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also before and after the checks it ends with a report
    report, code = _earlier(options, run, node, environ) or _tested(options, run, node, environ)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    _send(report, environ, with_records=options.legacy)
    if environ.get("GPUKEEPER_STAY") == "1" and not report.interrupted:
        _stay()
    return code


def _refuse(options: RunOptions, run: str) -> None:
    if not RUN_ID.fullmatch(run):
        raise UsageError(
            f"--report-to-log {run!r}: not a valid run id. "
            "Use at most 63 letters, digits, dots, dashes and underscores."
        )
    if options.json:
        raise UsageError("--json and --report-to-log cannot be combined: the report is printed as lines of the log.")


def _earlier(options: RunOptions, run: str, node: str, environ: Mapping[str, str]) -> tuple[Report, int] | None:
    """The engine started this program again after it had reported: with a report directory, its report is there."""
    directory = options.report_dir or (Path(environ["REPORT_DIR"]) if environ.get("REPORT_DIR") else None)
    if directory is None:
        return None
    try:
        report = ReportFolder(directory).load(str(directory / folder_name(run, node)), samples=False)
    except KeeperError:
        return None
    if (report.run, report.node) != (run, node) or report.interrupted:
        return None
    print_message(f"This node has already reported to run {run}; the report is printed again.")
    return report, exit_code(report, strict=options.strict)


def _tested(options: RunOptions, run: str, node: str, environ: Mapping[str, str]) -> tuple[Report, int]:
    """A report in any case, and the exit code."""
    started, wish, interrupted = SystemClock().now(), RunRequest(device=options.device), False
    try:
        prepared = prepare(options, environ)
        options, wish = prepared.options, prepared.wish
        for one in prepared.notes:
            print_message(f"from the environment: {one}")
        printer = ProgressPrinter(wish, acceptance.to_stdout, verbose=options.verbose)
        with _ledger() as ledger:
            report, logs = asyncio.run(leased_run(prepared, ledger, printer, node))
            folder, problems = "", list[str]()
            report = encodable(report)
            if options.report_dir is not None:
                folder, problems = written(options, report, logs, folder_name(run, node))
            problems += recorded(ledger, report, folder)
        with acceptance.reader_may_leave():
            for line in nccl_lines(logs):
                typer.echo(line)
            print_result(options, report, folder, printer)
        for problem in problems:
            print_message(problem)
        return report, exit_code(report, strict=options.strict)
    except KeyboardInterrupt:
        why, code, interrupted = "it was interrupted.", INTERRUPTED, True
    except KeeperError as problem:
        why, code = str(problem), problem.exit_code
        print_message(why)
    except Exception as error:  # the report must leave this machine, whatever it says
        traceback.print_exc()
        why, code = f"this is a bug in gpukeeper ({type(error).__name__}: {error}).", 1
    report = without_result(
        run=run,
        node=node,
        version=__version__,
        wish=wish,
        started=started,
        ended=SystemClock().now(),
        why=why,
        interrupted=interrupted,
    )
    return encodable(report), code or INCONCLUSIVE


def _use_memory_for_files() -> None:
    """Where no directory for temporary files can be written (a read-only root): for this program and its probes."""
    try:
        tempfile.gettempdir()
    except OSError:
        os.environ["TMPDIR"] = SHARED_MEMORY


@contextmanager
def _ledger() -> Iterator[SqliteLedger]:
    """This machine's; where it cannot be written (a read-only image), one that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpukeeper-accept-") as directory:
        try:
            ledger = open_ledger(ledger_path(), write=True)
        except KeeperError as problem:
            print_message(f"{problem} This run is not compared with earlier ones, and not recorded here.")
            ledger = open_ledger(Path(directory) / "ledger.db", write=True)
        try:
            yield ledger
        finally:
            ledger.close()


def _send(report: Report, environ: Mapping[str, str], *, with_records: bool) -> None:
    """The lines begin on a line of their own. The message comes last: it also says that all lines are printed."""
    text = report_json(report, with_records=with_records)
    with acceptance.reader_may_leave():
        typer.echo("")
        for line in encode_frames(text, report.run, report.node):
            typer.echo(line)
    if path := environ.get("GPUKEEPER_TERMINATION_LOG"):
        try:
            Path(path).write_bytes(termination_message(report, text))
        except OSError as error:
            print_message(f"The termination message could not be written to {path}: {error.strerror}.")


def _stay() -> None:
    """Until the engine ends it: it would start a program that ended again, and drop its log. Uses no GPU."""
    print_message("Reported. Waiting until the run is removed; nothing more runs here.")
    signal.sigwait(STOPS)
