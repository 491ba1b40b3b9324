"""`gpukeeper backtest`: what a policy would have done to recorded work. Changes nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from gpukeeper.backtest.comparison import Evaluation, Where, course_of
from gpukeeper.backtest.replays import Compared, compare_together, scarce_times
from gpukeeper.config.load import Loaded, load_policy
from gpukeeper.config.sections import deciding_digest
from gpukeeper.config.units import read_percent, read_span
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.backtest import (
    SHOWN,
    Table,
    backtest_page,
    facts,
    stamp,
    stops,
    tables,
    timeline_page,
    worst_first,
)
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import span
from gpukeeper.ledger.files import ledger_path
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.meta import MOST_POINTS, record_backtest
from gpukeeper.lifecycle.replay import GIVEN, NEVER, Variant, grid
from gpukeeper.lifecycle.replay_outcome import NOTHING_LIMITED, Judging
from gpukeeper.model import reading
from gpukeeper.model.decision import Verdict
from gpukeeper.model.errors import UsageError
from gpukeeper.model.series import Trace, TraceTime
from gpukeeper.traces.open import SYNTHETIC, open_trace
from gpukeeper.views.backtest import BacktestReport, BreakerRow, LimitFacts, TraceFacts, record_of, report

WINDOWS = tuple(
    timedelta(minutes=one)
    for one in (5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 360, 480, 720, 1080, 1440, 2880, 4320)
)
THRESHOLDS = (0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0)

Source = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="Recorded work: ledger, prometheus:URL, a table with --mapping (.csv, .csv.gz, .txt), or synthetic:SEED.",
        show_default=False,
    ),
]
MappingFile = Annotated[
    Path | None, typer.Option("--mapping", metavar="FILE", help="What the columns of a table mean, as YAML.")
]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Where recorded work is replayed, and how a stop is judged."""

    horizon: Annotated[
        str, typer.Option("--horizon", metavar="DURATION", help="Use within this time after a stop counts as regret.")
    ] = "3d"
    restart: Annotated[
        str, typer.Option("--restart", metavar="DURATION", help="What a restart costs: this time of all its GPUs.")
    ] = "30m"
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, max=256, help="Processes. Default: one for each core."),
    ] = None
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="ADDRESS",
            help="Replay on the cores of this Ray cluster: auto, HOST:PORT or ray://HOST:PORT. The result is the same.",
        ),
    ] = None
    trust_cluster: Annotated[
        bool,
        typer.Option(
            "--trust-cluster",
            help="With --on as root: everyone who can run code on that cluster can run code as root here.",
        ),
    ] = False
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="FILE",
            help="Keep partial results in this file, and continue from it after an interruption.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BacktestOptions:
    """Which work, and what of it is shown."""

    source: Source
    mapping: MappingFile = None
    policy: o.PolicyFile = None
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="RANGES",
            help="Also other idle times and GPU thresholds: window=15m..6h,threshold=1%..10%, or window=30m/2h/5h.",
        ),
    ] = None
    workload: Annotated[
        str | None, typer.Option("--workload", metavar="NAME", help="Only this run: each decision about it, and why.")
    ] = None
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="With --workload: the answer of every rule at this time.")
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            min=1,
            help="How many GPUs there were, to replay high demand from how many were held.",
        ),
    ] = None


@o.with_options
def backtest(
    options: BacktestOptions,
    replay: ReplayOptions,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as one HTML file.")
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Record the result in this machine's ledger, for `policy check`, `doctor` and the dashboard.",
        ),
    ] = False,
    json: o.Json = False,
) -> None:
    """Show what a policy would have done to recorded work.

    What would have been stopped, when, and at which cost, by the rules that plan and apply use. Nothing is changed.
    """
    if options.at is not None and options.workload is None:
        raise UsageError("--at needs --workload: the run that is explained.")
    if record and options.source.startswith(SYNTHETIC):
        raise UsageError("--record needs recorded work: a synthetic trace says nothing about the work on this machine.")
    if html is not None and not html.parent.is_dir():
        raise UsageError(f"--html {html}: there is no directory {html.parent}. Nothing was replayed.")
    where = where_of(replay)
    variants = (GIVEN, *swept(options.sweep))
    if record and len(variants) > MOST_POINTS:
        raise UsageError(
            f"--record keeps {MOST_POINTS} combinations at most; --sweep has {len(variants) - 1}. Name fewer of them."
        )
    loaded, trace = load_policy(options.policy), open_trace(options.source, options.mapping)
    if options.workload is not None:
        _explain(trace, loaded, options, html, json=json)
        return
    found = _answer(trace, loaded, variants, judging_of(loaded, replay), where, options.gpus)
    if record:
        asyncio.run(_record(loaded, found))
    if html is not None:
        write(html, backtest_page(found))
    if json:
        show.as_json("backtest", found)
    elif html is None:
        _print(found)


def where_of(replay: ReplayOptions) -> Where:
    """Raises UsageError. Ray makes objects of what a worker sends before we see it, and the worker chooses how: code of
    the cluster can run here, whatever we ask for."""
    if replay.trust_cluster and replay.on is None:
        raise UsageError("--trust-cluster needs --on: the cluster that is trusted.")
    if replay.on is not None and os.geteuid() == 0 and not replay.trust_cluster:
        raise UsageError(
            f"--on {replay.on} as root: Ray returns Python objects, so everyone who can run code on that cluster could "
            "run code as root here. Run it as an ordinary user. If only root can use the cluster, add --trust-cluster. "
            "Nothing was computed."
        )
    return Where(replay.workers, replay.on, replay.resume)


async def _record(loaded: Loaded, found: BacktestReport) -> None:
    line = record_of(found, datetime.now(UTC))
    ledger = open_ledger(ledger_path(), write=True)
    try:
        await record_backtest(ledger, deciding_digest(loaded.policy), line)
    finally:
        ledger.close()
    print_message("Recorded for `gpukeeper policy check`, `gpukeeper doctor` and the dashboard.")


def judging_of(loaded: Loaded, replay: ReplayOptions) -> Judging:
    activity = loaded.policy.activity
    return Judging(
        threshold=activity.gpu,
        slice_threshold=activity.gpu_slice,
        horizon=_span(replay.horizon, "--horizon"),
        restart=_span(replay.restart, "--restart"),
    )


def _span(words: str, flag: str) -> timedelta:
    found = span(words, flag)
    assert found is not None, "it was given"
    return found


def trace_facts(trace: Trace, loaded: Loaded, runs: int, gpus: int | None = None) -> TraceFacts:
    missing = [name for name in loaded.policy.activity.signals if name not in trace.signals]
    return TraceFacts(
        source=trace.source,
        begin=trace.begin,
        end=trace.end,
        runs=runs,
        rows=trace.rows,
        bad_rows=trace.bad_count,
        bad=tuple(one.words for one in trace.bad),
        not_recorded=tuple(missing),
        demand_known=bool(gpus or trace.made) or loaded.policy.demand.idle_factor == 1,
    )


def progress(done: int) -> None:
    if done % 8 == 1:  # they come in parts of eight
        show.progress_line(f"{done} runs replayed")


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Nothing else was changed.") from error
    print_message(f"Written: {path}")


def swept(words: str | None) -> tuple[Variant, ...]:
    """Raises UsageError."""
    windows: tuple[timedelta, ...] = ()
    thresholds: tuple[float, ...] = ()
    for part in words.split(",") if words else ():
        key, _, values = part.strip().partition("=")
        try:
            if key == "window":
                windows = _between(values, WINDOWS, read_span)
            elif key == "threshold":
                thresholds = _between(values, THRESHOLDS, read_percent)
            else:
                raise UsageError(f'--sweep "{part}": write window=15m..6h or threshold=1%..10%, separated by commas.')
        except ValueError as problem:
            raise UsageError(f"--sweep {key}: {problem}") from problem
    return tuple(grid(windows, thresholds)) if windows or thresholds else ()


V = TypeVar("V", timedelta, float)


def _between(words: str, known: tuple[V, ...], read: Callable[[object], V]) -> tuple[V, ...]:
    """15m..6h: the ends and the usual values between them. 30m/2h: these."""
    first, dots, last = words.partition("..")
    if not dots:
        return tuple(read(one.strip()) for one in words.split("/"))
    low, high = read(first.strip()), read(last.strip())
    if low > high:
        raise ValueError(f"{first} is more than {last}. Write the smaller one first.")
    usual: list[V] = [one for one in known if low < one < high]
    return tuple(sorted({low, high}.union(usual)))


def _answer(
    trace: Trace,
    loaded: Loaded,
    variants: tuple[Variant, ...],
    judging: Judging,
    where: Where,
    gpus: int | None,
) -> BacktestReport:
    compared = compare_together(trace, loaded.policy, variants, judging, where, progress, _scarce(trace, loaded, gpus))
    found = trace_facts(trace, loaded, len(compared.runs[GIVEN]), gpus)
    return report(loaded.source, loaded.policy.digest, found, judging, compared.runs, _limit_facts(compared))


def _scarce(trace: Trace, loaded: Loaded, gpus: int | None) -> tuple[datetime, ...] | None:
    return None if gpus is None else scarce_times(trace, gpus, loaded.policy)


def _limit_facts(compared: Compared) -> LimitFacts:
    given = compared.limits.get(GIVEN, NOTHING_LIMITED)
    never = sum(at == NEVER for at in given.stop_from.values())
    rows = [BreakerRow("/".join(one.place), one.first, one.last, one.passes, one.words) for one in given.opened]
    return LimitFacts(
        later=len(given.stop_from) - never,
        not_stopped=never,
        breaker=tuple(rows),
        approximate=GIVEN in compared.unsettled,
    )


def _print(found: BacktestReport) -> None:
    show.table([(f"{name}:", words) for name, words in facts(found).items()])
    for one in tables(found):
        _print_table(one)
    if found.stops:
        _print_table(stops(worst_first(found.stops)[:SHOWN]))
        if len(found.stops) > SHOWN:
            show.text(f"… and {len(found.stops) - SHOWN} more: --html FILE or --json has all.")
    show.text("\n" + "\n".join(found.notes))
    for words in found.trace.bad[:5]:
        print_message(f"not used: {words}")


def _print_table(one: Table) -> None:
    if one.rows:
        show.text(f"\n{one.title}")
        show.table(one.rows, one.head)


def _explain(trace: Trace, loaded: Loaded, options: BacktestOptions, html: Path | None, *, json: bool) -> None:
    run = next((one for one in trace.runs() if one.name == options.workload), None)
    if run is None:
        words = f'the trace has no run "{options.workload}".'
        raise UsageError(f"{words} The names: gpukeeper backtest … --json, under stops.")
    name, at = run.name, options.at
    moment = None if at is None else _moment(at)
    course = course_of(run, loaded.policy, trace, _scarce(trace, loaded, options.gpus), moment)
    if not course:
        raise UsageError(f'"{name}" ran between two passes only; no decision was made about it.')
    end = run.ended or trace.end
    if moment is not None and moment > end:
        what = "the trace ends" if run.ended is None else f'"{name}" ended'
        raise UsageError(f"{what} at {stamp(end)}, before {at}. Name a time before that.")
    if html is not None:
        time = TraceTime(trace.begin, trace.end)
        write(html, timeline_page(run, time, _changes(course), loaded.policy.activity.gpu))
    if moment is None:
        if json or html is None:
            _show_course(name, course, json=json)
        return
    before = [one for one in course if one.at <= moment]
    if not before:
        raise UsageError(f'"{name}" was first seen at {stamp(course[0].at)}, after {at}.')
    _show_evaluation(name, before[-1], json=json)


def _moment(words: str) -> datetime:
    try:
        return reading.moment(words, naive_is_utc=True)
    except ValueError as problem:
        raise UsageError(f'--at "{words}" is not a time. Write it like 2026-03-02T14:05, in UTC.') from problem


def _show_course(name: str, course: list[Evaluation], *, json: bool) -> None:
    changes = _changes(course)
    rows = [(one.decision.action.value, stamp(one.at), one.decision.rule, one.decision.reason) for one in changes]
    if json:
        show.as_json("backtest-course", {"workload": name, "decisions": [_plain(one) for one in changes]})
        return
    show.table(rows, ("decision", "at", "rule", "why"))
    show.text(f"{len(course)} evaluations; those that decided the same for the same rule are left out.")


def _show_evaluation(name: str, one: Evaluation, *, json: bool) -> None:
    given = [answer for answer in one.answers if answer.verdict is not Verdict.SILENT]
    if json:
        answers = [{"rule": a.rule, "verdict": a.verdict, "reason": a.reason, "due": a.due} for a in given]
        show.as_json("backtest-decision", {"workload": name, **_plain(one), "answers": answers})
        return
    show.text(f"{name} at {stamp(one.at)}: {one.decision.action}, by {one.decision.rule}: {one.decision.reason}")
    show.table([(a.verdict.value, a.rule, a.reason) for a in given], ("answer", "rule", "why"))


def _changes(course: list[Evaluation]) -> list[Evaluation]:
    """Where the decision changed."""
    return [one for number, one in enumerate(course) if number == 0 or _differs(course[number - 1], one)]


def _differs(before: Evaluation, one: Evaluation) -> bool:
    a, b = before.decision, one.decision
    return (a.action, a.rule, a.verdict, a.stage) != (b.action, b.rule, b.verdict, b.stage)


def _plain(one: Evaluation) -> dict[str, object]:
    d = one.decision
    return {"at": one.at, "action": d.action, "rule": d.rule, "verdict": d.verdict, "reason": d.reason, "due": d.due}
