"""`gpukeeper accept --report-to-log RUN`: one node of a run over many. Started by an engine, not by a person.

Whatever happens, the report is printed at the end as lines of the log (acceptance/fleet/frames.py), also if the run was
interrupted or could not begin. The machine may have no directory that can be written to.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer

from gpukeeper import __version__
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet import delivery, frames
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports.document import encodable, report_json
from gpukeeper.acceptance.reports.store import ReportFolder, folder_name
from gpukeeper.interfaces.cli import accept_run
from gpukeeper.interfaces.cli.accept_options import RunOptions
from gpukeeper.interfaces.cli.accept_run import INCONCLUSIVE, INTERRUPTED
from gpukeeper.interfaces.terminal import acceptance
from gpukeeper.interfaces.terminal.acceptance_progress import ProgressPrinter
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.paths import ledger_path
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.wiring.benches import node_name
from gpukeeper.wiring.clock import SystemClock

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # it is a label in Kubernetes
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
    _send(report, environ)
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
    return report, accept_run.exit_code(report, strict=options.strict)


def _tested(options: RunOptions, run: str, node: str, environ: Mapping[str, str]) -> tuple[Report, int]:
    """A report in any case, and the exit code."""
    started, wish, interrupted = SystemClock().now(), RunRequest(device=options.device), False
    try:
        prepared = accept_run.prepare(options, environ)
        options, wish = prepared.options, prepared.wish
        for one in prepared.notes:
            print_message(f"from the environment: {one}")
        printer = ProgressPrinter(wish, acceptance.to_stdout, verbose=options.verbose)
        with _ledger() as ledger:
            report, logs = asyncio.run(accept_run.leased_run(prepared, ledger, printer, node))
            folder, problems = "", list[str]()
            report = encodable(report)
            if options.report_dir is not None:
                folder, problems = accept_run.written(options, report, logs, folder_name(run, node))
            problems += accept_run.recorded(ledger, report, folder)
        with acceptance.reader_may_leave():
            accept_run.print_result(options, report, folder, printer)
        for problem in problems:
            print_message(problem)
        return report, accept_run.exit_code(report, strict=options.strict)
    except KeyboardInterrupt:
        why, code, interrupted = "it was interrupted.", INTERRUPTED, True
    except KeeperError as problem:
        why, code = str(problem), problem.exit_code
        print_message(why)
    except Exception as error:  # the report must leave this machine, whatever it says
        traceback.print_exc()
        why, code = f"this is a bug in gpukeeper ({type(error).__name__}: {error}).", 1
    report = delivery.without_result(
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


def _send(report: Report, environ: Mapping[str, str]) -> None:
    """The lines begin on a line of their own. The message comes last: it also says that all lines are printed."""
    text = report_json(report)
    with acceptance.reader_may_leave():
        typer.echo("")
        for line in frames.encode(text, report.run, report.node):
            typer.echo(line)
    if path := environ.get("GPUKEEPER_TERMINATION_LOG"):
        try:
            Path(path).write_bytes(delivery.message(report, text))
        except OSError as error:
            print_message(f"The termination message could not be written to {path}: {error.strerror}.")


def _stay() -> None:
    """Until the engine ends it: it would start a program that ended again, and drop its log. Uses no GPU."""
    print_message("Reported. Waiting until the run is removed; nothing more runs here.")
    signal.sigwait(STOPS)
