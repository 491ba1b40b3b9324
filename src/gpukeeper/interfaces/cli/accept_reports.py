"""`gpukeeper accept list|show|compare|merge`: reports of earlier runs. They change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from gpukeeper.acceptance.fleet.collect import RunReport
from gpukeeper.acceptance.launchers.story import DESCRIPTION, FLEET, PAGE, load_run, stored_runs
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import formats
from gpukeeper.acceptance.reports import merge as merging
from gpukeeper.acceptance.reports.compare import compare as compared
from gpukeeper.acceptance.reports.compare import is_worse, text
from gpukeeper.acceptance.reports.html import page_of_fleet, page_of_report
from gpukeeper.acceptance.reports.merge import FleetReport
from gpukeeper.acceptance.reports.store import ReportFolder, StoredRun, load_file
from gpukeeper.acceptance.reports.wording import printable
from gpukeeper.interfaces.cli.accept_remote import Namespace, On, Options, engine_options, list_runs, show_run
from gpukeeper.interfaces.terminal import acceptance, completion
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.acceptance import print_run, reader_may_leave
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.ledger.files import ledger_path, reports_folder
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.gpu import Grade
from gpukeeper.views.acceptance import (
    ComparisonView,
    MergedView,
    RunsView,
    acceptance_document,
    finding_lines,
    fleet_notes,
    node_verdicts,
    run_document,
)

WORSE = 4
Run: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run from `accept list`, a unique prefix of it, or a path.",
        autocompletion=completion.runs,
    ),
]


def list_(
    report_dir: o.ReportDir = None,
    on: On = None,
    namespace: Namespace = None,
    option: Options = None,
    json: o.Json = False,
) -> None:
    """List the runs in the report directory, newest first. With --on: the runs that an engine has."""
    if on is not None:
        list_runs(on, engine_options(option, namespace), json=json)
        return
    folder = _folder(report_dir)
    many = [_of_many(path, one) for path, one in stored_runs(folder.path)]
    alone = folder.list()
    readable = sorted((one for one in (*alone, *many) if one.started), key=lambda one: str(one.started), reverse=True)
    found = [*(one for one in (*alone, *many) if not one.started), *readable]
    if json:
        shown.as_json("accept-list", RunsView(str(folder.path), tuple(found)))
        return
    shown.table([_row(one) for one in found], head=("verdict", "run", "node", "when", "profile", "kept", "reason"))
    if not found:
        print_message(f"No reports in {folder.path}. To create one: gpukeeper accept")
    else:
        print_message(f"in {folder.path}")


def show(
    run: Run,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page to this file instead.")
    ] = None,
    report_dir: o.ReportDir = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all findings.")] = False,
    on: On = None,
    namespace: Namespace = None,
    option: Options = None,
    json: o.Json = False,
) -> None:
    """Show the report of one run. With findings, GPUs, what was not tested, and the verdict."""
    if on is not None:
        show_run(run, on, engine_options(option, namespace), json=json)
        return
    folder = _folder(report_dir)
    if (many := _run_of_many(folder.path, run)) is not None:
        _show_many(many, html, json=json)
        return
    report = folder.load(run, samples=html is not None)
    if html is not None:
        _write(html, page_of_report(report))
        return
    if json:
        shown.as_json("acceptance", acceptance_document(report, str(folder.find(run))))
        return
    once = acceptance.AdviceFilter()
    for line in finding_lines(report.findings, report, verbose=verbose):
        acceptance.to_stdout(once(line))
    acceptance.ending(report, str(folder.find(run)), acceptance.to_stdout, verbose=verbose, once=once)


def _run_of_many(folder: Path, wanted: str) -> Path | None:
    """The directory of a run over many nodes: by its path, its name, or how its name begins."""
    names = {path.name: path for path, _ in stored_runs(folder)}
    if (Path(wanted) / DESCRIPTION).is_file():
        return Path(wanted)
    found = [name for name in names if wanted and name.startswith(wanted)]
    return names.get(wanted) or (names[found[0]] if len(found) == 1 else None)


def _show_many(path: Path, html: Path | None, *, json: bool) -> None:
    if not (path / FLEET).exists():
        raise UsageError(
            f"Run {path.name} has no report yet: it still runs, or its launcher was ended. "
            f"To collect it: gpukeeper accept fetch {path.name} --on ENGINE"
        )
    if html is not None:
        _write(html, (path / PAGE).read_text())
        return
    report = load_run(path)
    if json:
        shown.as_json("acceptance-run", run_document(report, str(path)))
        return
    print_run(report)
    typer.echo(f"Report: {path}")


def _of_many(path: Path, found: RunReport | KeeperError | None) -> StoredRun:
    if isinstance(found, KeeperError):
        return StoredRun(run=path.name, path=str(path), problem=str(found))
    if found is None:
        words = "no report yet: the run goes on, or its launcher was ended; gpukeeper accept fetch collects it"
        return StoredRun(run=path.name, path=str(path), problem=words)
    count = len(found.fleet.nodes) + len(found.fleet.missing)
    return StoredRun(
        run=path.name,
        path=str(path),
        node=f"{count} nodes",
        started=found.started,
        ended=found.ended,
        verdict=found.verdict,
        reason=found.fleet.reason,
        device="cuda",
        profile=f"on {found.engine}",
        kept=True,
    )


def compare(
    before: Annotated[
        str, typer.Argument(metavar="BEFORE", help="Run, or path of its report.", autocompletion=completion.runs)
    ],
    after: Annotated[
        str, typer.Argument(metavar="AFTER", help="Run to compare with it.", autocompletion=completion.runs)
    ],
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit with 4 if a value got worse by more than the noise, a verdict got worse, or a GPU is missing.",
        ),
    ] = False,
    report_dir: o.ReportDir = None,
    json: o.Json = False,
) -> None:
    """Show what changed between two runs. Tests whether each change is more than noise."""
    folder = _folder(report_dir)
    found = compared(folder.load(before, samples=False), folder.load(after, samples=False))
    with reader_may_leave():
        if json:
            shown.as_json("accept-compare", ComparisonView(found))
        else:
            typer.echo(text(found), nl=False)
    if exit_code and is_worse(found):
        raise typer.Exit(WORSE)


def merge(
    reports: Annotated[
        list[str], typer.Argument(metavar="REPORT…", help="report.json files, run directories, or directories of runs.")
    ],
    expect_nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--expect-nodes", metavar="NODE,…", help="Nodes that must have a report; a missing one is not a PASS."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page.")] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Also write a CSV file with one line per node.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Merge the reports of many nodes. The worst verdict counts, and outliers among all GPUs are listed."""
    wanted = [name.strip() for one in expect_nodes or () for name in one.split(",") if name.strip()]
    fleet = merging.merge(_all(reports), wanted)
    if html is not None:
        _write(html, page_of_fleet(fleet))
    if csv is not None:
        _write(csv, merging.fleet_csv(fleet))
    with reader_may_leave():
        if json:
            shown.as_json("accept-merge", MergedView(fleet))
        else:
            _print_fleet(fleet)
    raise typer.Exit(_code(fleet.verdict))


def _print_fleet(fleet: FleetReport) -> None:
    rows = [
        (one.verdict.value, one.node, "?" if one.gpus is None else str(one.gpus), one.run or "-", one.reason)
        for one in node_verdicts(fleet)
    ]
    shown.table(rows, head=("verdict", "node", "gpus", "run", "reason"))
    for words in fleet_notes(fleet):
        _echo(words)
    typer.echo("")
    _echo(f"{fleet.verdict}  {fleet.reason}")


def _echo(words: str) -> None:
    typer.echo(printable(words))


def _all(given: Sequence[str]) -> list[Report]:
    """Every problem at once: a report that cannot be read must not make a fleet look better."""
    found, problems = [], []
    for words in given:
        try:
            found += list(_reports_at(words))
        except KeeperError as problem:
            problems.append(str(problem))
    if problems:
        raise UsageError("\n".join([*problems, "Nothing was merged."]))
    return found


def _reports_at(words: str) -> Iterator[Report]:
    path = Path(words)
    if path.is_file():
        yield load_file(path)
    elif (path / formats.REPORT).is_file():
        yield ReportFolder(path.parent).load(str(path), samples=False)
    elif path.is_dir():
        entries = ReportFolder(path).list()
        broken = [f"{one.path}: {one.problem}" for one in entries if one.problem]
        if broken or not entries:
            raise UsageError("\n".join(broken) or f"No reports in {path}.")
        for one in entries:
            yield ReportFolder(path).load(one.path, samples=False)
    else:
        raise UsageError(f"{path} is neither a report.json file nor a directory of reports.")


def _folder(report_dir: Path | None) -> ReportFolder:
    return ReportFolder(report_dir or reports_folder(ledger_path()))


def _row(entry: StoredRun) -> tuple[str, ...]:
    if entry.problem or entry.verdict is None or entry.started is None:
        return ("unreadable", entry.run, "?", "?", "?", "-", entry.problem)
    mode = "" if entry.device == "cuda" else f" {entry.device}"
    when = f"{entry.started:%Y-%m-%d %H:%M}Z"
    kept = "kept" if entry.kept else "-"
    return (entry.verdict.value, entry.run, entry.node, when, entry.profile + mode, kept, entry.reason)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{path} could not be written: {error.strerror}.") from error
    print_message(f"wrote {path}")


def _code(verdict: Grade) -> int:
    return {Grade.PASS: 0, Grade.WARN: 0, Grade.FAIL: 4}.get(verdict, 5)
