"""Marks of nodes: where, how many may be out, the plan, and what was done; written to the ledger of this machine
before and after each change. Used by `node quarantine|return` and by `gpukeeper accept mark`: the results of a run
as label, condition and taint of the nodes. A plan unless --apply.
"""

from __future__ import annotations

import asyncio
import getpass
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpukeeper.acceptance.fleet.marks import (
    LABEL,
    TAINT,
    Change,
    MarkPlan,
    NodeMarks,
    NodeResult,
    plan_marks,
    result_of,
)
from gpukeeper.acceptance.launchers.marks import AGAIN, Applied, Cause, Marked, Replan, Work, lines_after, lines_before
from gpukeeper.acceptance.launchers.story import RunArchive, stored_runs
from gpukeeper.acceptance.reports.store import ReportFolder
from gpukeeper.blocking import SystemClock
from gpukeeper.config.load import load_policy
from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.acceptance import until_stopped
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import opened_for_reading
from gpukeeper.ledger.archive import read_archive
from gpukeeper.ledger.files import archive_folder, ledger_path, reports_folder
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.errors import KeeperError, LedgerError, PolicyError, UsageError
from gpukeeper.model.event import Event, NodeMarked, NodeTested
from gpukeeper.model.policy import Amount, MarkSettings
from gpukeeper.views.register import TYPES, Register, lines_of_run, register, warnings_about
from gpukeeper.wiring import kubernetes

NOT_BEGUN = "Nothing was changed on the cluster, because the change could not be recorded first."


def cause() -> Cause:
    """This user, now."""
    return Cause(by=getpass.getuser(), step=secrets.token_hex(8))


@dataclass
class MarkRecord:
    """One command that changes marks."""

    ledger: SqliteLedger
    cause: Cause
    place: str = ""
    _begun: list[NodeMarked] = field(default_factory=list)

    async def begin(self, plan: MarkPlan) -> None:
        """Durable when it returns."""
        lines = list(lines_before(plan.changes, self.place, self.cause, SystemClock().now()))
        try:
            await self.ledger.append(lines)
        except LedgerError as problem:
            raise LedgerError(f"{problem} {NOT_BEGUN}") from problem
        self._begun = lines

    def end(self, nodes: Iterable[Marked]) -> tuple[str, ...]:
        """What could not be recorded; what was changed stays changed."""
        lines = list(lines_after(self._begun, nodes, SystemClock().now()))
        try:
            asyncio.run(self.ledger.append(lines))
        except LedgerError as problem:
            names = ", ".join(one.ref.name for one in lines if one.ref is not None and one.result != "unchanged")
            return (f"The nodes were changed ({names}), but the result is not in the ledger: {problem}",)
        return ()


@contextmanager
def recording(why: Cause) -> Iterator[MarkRecord]:
    """A ledger that cannot be written is an error before anything is changed."""
    try:
        ledger = open_ledger(ledger_path(), write=True)
    except LedgerError as problem:
        raise LedgerError(f"{problem} {NOT_BEGUN}") from problem
    try:
        yield MarkRecord(ledger, why)
    finally:
        ledger.close()


def read_register(settings: MarkSettings, report_dir: Path | None = None) -> Register:
    """From the ledger, its archives, and the reports of runs that were collected."""
    unread: list[str] = []
    with opened_for_reading() as ledger:
        lines = [line for _, line in asyncio.run(ledger.lines(LineFilter(last=None, types=TYPES)))]
    lines += _archived(archive_folder(ledger.path), unread)
    found = register(
        lines,
        SystemClock().now(),
        repeats=settings.repeats,
        within=settings.repeats_within,
        collected=_collected(report_dir or reports_folder(ledger.path), unread),
    )
    return msgspec.structs.replace(found, unread=tuple(unread))


def _archived(folder: Path, unread: list[str]) -> Iterator[Event]:
    for path in sorted(folder.glob("journal-*.gz")):
        try:
            yield from (line for _, line in read_archive(path, TYPES))
        except LedgerError as problem:
            unread.append(str(problem))


def _collected(folder: Path, unread: list[str]) -> Iterator[NodeTested]:
    for _, found in stored_runs(folder):
        if isinstance(found, KeeperError):
            unread.append(str(found))
        elif found is not None:
            yield from lines_of_run(found)


def repeated(nodes: Collection[str], settings: MarkSettings) -> tuple[str, ...]:
    """In words: what was taken out again and again. A ledger that cannot be read prevents nothing."""
    try:
        found = read_register(settings)
    except KeeperError as problem:
        return (f"How often these nodes were taken out is unknown: {problem}",)
    more = (f"These nodes may have been taken out more often: {problem}" for problem in found.unread)
    return (*warnings_about(found, nodes), *more)


ENGINES = ("kubernetes",)
PARTLY, BREAKER, INTERRUPTED = 3, 12, 130
STOPPING = "Interrupted: the node in progress is completed, no other is begun. Press Ctrl-C again to exit at once."
On = Annotated[str, typer.Option("--on", metavar="ENGINE", help=f"The engine: {', '.join(ENGINES)}.")]
Context = Annotated[str, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")]


@dataclass(frozen=True, kw_only=True)
class MarkOptions:
    """Where, and how many nodes may be out."""

    on: On = ""
    apply: Annotated[bool, typer.Option("--apply", help="Write the marks. Default: print the plan.")] = False
    share: Annotated[
        float | None,
        typer.Option("--share", min=0.0, max=1.0, metavar="X", help="Share of GPU nodes that may be out; at least 1."),
    ] = None
    most: Annotated[
        int | None, typer.Option("--most", min=0, metavar="N", help="Number of GPU nodes that may be out.")
    ] = None
    context: Context = ""
    policy: o.PolicyFile = None
    json: o.Json = False

    @property
    def where(self) -> dict[str, str]:
        return {"context": self.context}

    def settings(self) -> MarkSettings:
        """Of the policy, unless an option says something else."""
        loaded = load_policy(self.policy)
        if self.apply and loaded.untrusted:
            raise PolicyError(
                [f"{one}. A policy that other users can change is not applied." for one in loaded.untrusted]
            )
        settings = loaded.policy.marks
        if self.share is None and self.most is None:
            return settings
        return msgspec.structs.replace(settings, max_out=Amount(count=self.most, share=self.share))


@dataclass(frozen=True)
class MarkResult:
    """`warnings`: what was taken out again and again. `problems`: what was done and could not be recorded."""

    found: Applied
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def refuse_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise UsageError(f'--on "{engine}" is not an engine. Name one: {", ".join(ENGINES)}')


def planned_or_applied(options: MarkOptions, replan: Replan, settings: MarkSettings, why: Cause) -> MarkResult:
    """After Ctrl-C: what was done until then."""
    if options.apply:
        found, problems = _applied_and_recorded(options, replan, settings, why)
        return MarkResult(found, _repeated(found.plan, settings), problems)
    plan = asyncio.run(kubernetes.plan_marks(options.where, replan, settings))
    return MarkResult(Applied(plan=plan), _repeated(plan, settings))


def _repeated(plan: MarkPlan, settings: MarkSettings) -> tuple[str, ...]:
    return repeated({*(one.node for one in plan.changes), *(one.node for one in plan.kept)}, settings)


def _applied_and_recorded(
    options: MarkOptions, replan: Replan, settings: MarkSettings, why: Cause
) -> tuple[Applied, tuple[str, ...]]:
    with recording(why) as record:
        work = kubernetes.work_on(options.where, replan, settings, SystemClock().now())
        record.place, work.announce = work.api.place, record.begin
        try:
            found = asyncio.run(_applied(work))
        except KeyboardInterrupt:
            names = ", ".join(sorted(work.written)) or "no node"
            print_message(f"Interrupted while marks were written. Changed: {names}. {AGAIN}.")
            raise typer.Exit(INTERRUPTED) from None
        return found, record.end(found.nodes)


async def _applied(work: Work) -> Applied:
    with until_stopped(work.stop, STOPPING):
        return await kubernetes.applied(work)


def document(result: MarkResult, options: MarkOptions) -> dict[str, object]:
    return {
        "plan": result.found.plan,
        "applied": options.apply,
        "nodes": result.found.nodes,
        "warnings": result.warnings,
        "problems": result.problems,
    }


def print_marks(
    result: MarkResult,
    options: MarkOptions,
    planned: Callable[[Change], tuple[str, ...]],
    written: Callable[[Marked], tuple[str, ...]],
    head: tuple[str, ...],
) -> None:
    """The plan, or what was done."""
    found, plan = result.found, result.found.plan
    rows = [written(one) for one in found.nodes] if options.apply else [planned(one) for one in plan.changes]
    blank = ("-",) * (len(head) - 3)
    shown.table([*rows, *(("kept", one.node, *blank, one.why) for one in plan.kept)], head=head)
    for words in result.warnings:
        print_message(f"{words.rstrip('.')}.")
    for words in result.problems:
        print_message(words)
    _print_limit(plan, applied=options.apply)


def _print_limit(plan: MarkPlan, *, applied: bool) -> None:
    print_message(f"{plan.out} of {plan.nodes} GPU nodes were out before; at most {plan.allowed} may be.")
    if plan.breaker:
        print_message(f"{plan.breaker}. Find the cause first.")
    if not applied:
        print_message("Nothing was changed. To write the marks: add --apply")


def exit_code(result: MarkResult) -> int:
    found = result.found
    if found.interrupted:
        return INTERRUPTED
    if found.plan.breaker:
        return BREAKER
    partly = any(one.deferred or one.problem for one in found.nodes) or any(one.deferred for one in found.plan.changes)
    return PARTLY if partly or found.plan.kept or result.problems else 0


@dataclass(frozen=True, kw_only=True)
class RunMarkOptions:
    taint: Annotated[
        bool | None,
        typer.Option("--taint/--no-taint", help="Taint failed nodes, or only label them. Default: the policy."),
    ] = None
    report_dir: Annotated[
        Path | None,
        typer.Option("--report-dir", metavar="DIR", help="Report directory. Default: reports/ in the state directory."),
    ] = None


@o.with_options
def mark(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run from `accept list`.", autocompletion=completion.runs)],
    options: MarkOptions,
    of_run: RunMarkOptions,
) -> None:
    """Mark nodes with the results of a run: label, condition, taint. Without --apply: only the plan.

    Exit code 3: some nodes were kept, deferred or not marked, 12: the breaker is open."""
    refuse_engine(options.on)
    results = _results(run, of_run)
    settings = options.settings()
    if of_run.taint is not None:
        settings = msgspec.structs.replace(settings, taint=of_run.taint)
    now = SystemClock().now()

    def replan(nodes: Sequence[NodeMarks]) -> MarkPlan:
        return plan_marks(results, nodes, settings, now)

    why = msgspec.structs.replace(cause(), run=run, gpus={one.node: one.gpus for one in results})
    found = planned_or_applied(options, replan, settings, why)
    if options.json:
        shown.as_json("accept-mark", {"run": run, **document(found, options)})
    else:
        print_marks(found, options, _planned, _written, ("acceptance", "node", "taint", "reason"))
    raise typer.Exit(exit_code(found))


def _planned(one: Change) -> tuple[str, ...]:
    word = "-" if TAINT not in one.taints else "add taint" if one.takes_out else "remove taint"
    reason = "; ".join(filter(None, (one.deferred or one.condition.message, one.note)))
    return (one.labels[LABEL] or "-", one.node, word, reason)


def _written(one: Marked) -> tuple[str, ...]:
    reason = "; ".join(filter(None, (one.problem or one.deferred, one.note)))
    return (one.acceptance or "-", one.node, "tainted" if one.tainted else "-", reason)


def _results(run: str, options: RunMarkOptions) -> list[NodeResult]:
    """Of all nodes with a report of this run."""
    folder = ReportFolder(options.report_dir or reports_folder(ledger_path()))
    # RUN/nodes/ is what was collected; RUN.NODE is what a node wrote itself, and another run can be named so too.
    written = [one for one in folder.list() if one.run == run or one.run.startswith(f"{run}.")]
    collected = RunArchive(folder.path, run).nodes
    found = [*((folder, one) for one in written), *((collected, one) for one in collected.list())]
    broken = [f"{one.path}: {one.problem}" for _, one in found if one.problem]
    if broken:
        raise UsageError("\n".join([*broken, "Nothing was marked."]))
    reports = [where.load(one.path, samples=False) for where, one in found]
    results = [result_of(one) for one in reports if one.run == run]
    if not results:
        raise UsageError(f"No report of run {run} in {folder.path}. To list the runs: gpukeeper accept list")
    twice = [node for node, times in Counter(one.node for one in results).items() if times > 1]
    if twice:
        raise UsageError(f"{folder.path} has two reports of run {run} for {twice[0]}. Keep one. Nothing was marked.")
    return results
