"""Workload-minutes a second on two cores in a backtest: a month of 1,000 containers under the rules that run.

The peer is only the window of the idle rule (no use for 30 minutes), as a rolling maximum in polars, on a part of the
same trace, on one thread like the replay beside it. Polars is installed into an environment of its own. Then what a
second core wins here and on Ray, memory with the length of the trace, and what advice and the rules that people copy
win of what an oracle would win.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from math import isnan
from pathlib import Path

import msgspec

from benchmarks.backtest_parallel import HeldTrace, parallel
from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.backtest.comparison import Where, compare
from gpukeeper.backtest.replays import Asked, Replays, advice_on
from gpukeeper.config.load import load_policy
from gpukeeper.lifecycle.replay import GIVEN, Variant, grid
from gpukeeper.lifecycle.replay_outcome import JudgedStop, Judging
from gpukeeper.model.policy import OnLimit, Policy
from gpukeeper.model.series import RecordedRun, Signal
from gpukeeper.model.words import in_words
from gpukeeper.traces.synthetic import SyntheticTrace, Truth
from gpukeeper.views.advice import Advice, Rule, under
from gpukeeper.views.backtest import TraceFacts, tally

SECONDS_MAX = 60.0
TINY = sized(False, tiny=True)  # without what is installed or started for it: polars and Ray
MONTH, CONTAINERS, PART = sized((30, 1000, 100), tiny=(3, 10, 2))
RULES = {"30m": 30, "2h": 120, "5h": 300}
WINDOWS = (15, 30, 60, 120, 300, 720, 1440)  # minutes
SEED, WORK, ALLOWED = 11, sized(300, tiny=20), 0.02
PEER = """
import json, sys, time
import polars as pl
frame = pl.read_csv(sys.argv[1], schema_overrides={"gpu": pl.Float32})
begin = time.perf_counter()
busy = (pl.col("gpu") >= 5.0) | pl.col("gpu").is_null()
quiet = ~busy.cast(pl.Int8).rolling_max(30, min_samples=30).over("run").cast(pl.Boolean)
found = frame.with_columns(quiet.alias("quiet")).filter("quiet").group_by("run").agg(pl.col("minute").min())
print(json.dumps([time.perf_counter() - begin, frame.height, found.height]))
"""


def run() -> None:
    policy = _without_runtime(load_policy(None).policy)
    month = HeldTrace(1, CONTAINERS, MONTH)
    two = _timed(month, policy, 2)
    minutes = sum(max(len(one.minutes) for one in run.series) for run in month.runs())
    part = HeldTrace(1, PART, MONTH)
    part_minutes = sum(max(len(one.minutes) for one in run.series) for run in part.runs())
    one_core = _timed(part, policy, 1)
    peer = "not at tiny size" if TINY else _peer(part)
    rows = [
        ("1,000 containers in a month, two cores", f"{two:.1f} s", f"{minutes / two:,.0f}"),
        ("a part of it, one core", f"{one_core:.1f} s", f"{part_minutes / one_core:,.0f}"),
    ]
    if isinstance(peer, str):
        rows.append(("polars, only the window, one thread", peer, "not measured"))
    else:
        rows.append(("polars, only the window, one thread", f"{peer[0]:.2f} s", f"{peer[1] / peer[0]:,.0f}"))
    print_table(("what", "time", "workload-minutes/s"), rows)
    whole = CONTAINERS * MONTH * 24 * 60
    full = two * whole / minutes
    print(f"They ran for {minutes / whole:.0%} of the month. If each ran all the time, at this pace: {full:.0f} s.")
    print(f"target at most {SECONDS_MAX:g} s, {met(full, SECONDS_MAX, least=False)}")
    parallel(ray=not TINY)
    print_table(
        ("days", "peak memory, MB"), [(str(days), f"{_memory(days):.0f}") for days in sized((3, 30, 300), tiny=(1,))]
    )
    _quality(policy)
    ratio = 0.0 if isinstance(peer, str) else round(minutes / two / (peer[1] / peer[0]), 4)
    print_figure(Figure("backtest", round(minutes / two), "workload-minutes/s", ratio, "polars, only the window"))


def _without_runtime(policy: Policy) -> Policy:
    """Only the idle rule stops: the same work as the peer's."""
    limits = {"idle": timedelta(minutes=30), "max_runtime": None}
    classes = {
        # Unknown work, too, which the built-in policy only reports.
        name: msgspec.structs.replace(one, **limits, on_idle=OnLimit.STOP if name == "unknown" else one.on_idle)
        for name, one in policy.classes.items()
    }
    return msgspec.structs.replace(policy, classes=classes)


def _timed(trace: SyntheticTrace, policy: Policy, workers: int) -> float:
    begin = time.perf_counter()
    compare(trace, policy, (GIVEN,), Judging(), Where(workers))
    return time.perf_counter() - begin


def _peer(trace: SyntheticTrace) -> tuple[float, int] | str:
    with tempfile.TemporaryDirectory() as folder:
        place, table, program = Path(folder, "venv"), Path(folder, "minutes.csv"), Path(folder, "peer.py")
        venv.create(place, with_pip=True)
        python = place / "bin" / "python"
        made = subprocess.run([python, "-m", "pip", "install", "-q", "polars"], capture_output=True, check=False)
        if made.returncode:
            return "polars could not be installed"
        with table.open("w") as file:
            file.write("run,minute,gpu\n")
            for number, run in enumerate(trace.runs()):
                gpu = next(one for one in run.series if one.signal is Signal.GPU)
                lines = (f"{number},{n},{'' if isnan(v) else round(v, 1)}\n" for n, v in enumerate(gpu.minutes))
                file.writelines(lines)
        program.write_text(PEER)
        done = subprocess.run(
            [python, program, table], capture_output=True, text=True, check=True, env={"POLARS_MAX_THREADS": "1"}
        )
        seconds, rows, _ = json.loads(done.stdout)
        return seconds, rows


def _memory(days: int) -> float:
    """Of a process of its own that replays sixteen workloads of so many days."""
    program = (
        "import resource\n"
        "from benchmarks.backtest import _timed, _without_runtime\n"
        "from gpukeeper.config.load import load_policy\n"
        "from gpukeeper.traces.synthetic import SyntheticTrace\n"
        f"_timed(SyntheticTrace(1, 16, {days}), _without_runtime(load_policy(None).policy), 1)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _quality(policy: Policy) -> None:
    """On the last third of the recorded time; the first two thirds are for `advise`. The oracle knows the truth, and
    stops each run at its last use. Of a stop after which a run was used again, nothing counts as won."""
    trace = SyntheticTrace(SEED, WORK, MONTH)
    windows = [timedelta(minutes=minutes) for minutes in WINDOWS]
    facts = TraceFacts(
        source=trace.source,
        begin=trace.begin,
        end=trace.end,
        runs=WORK,
        rows=0,
        bad_rows=0,
        bad=(),
        not_recorded=(),
    )
    asked = Asked(
        policy=policy, source="30m for all classes", grid=tuple(grid(windows, ())), judging=Judging(), allowed=ALLOWED
    )
    replays = Replays(trace, asked, Where(2), lambda done: None)
    advice = advice_on(trace, asked, lambda runs: facts, Where(2))
    plain = replays.plain(replays.of(replays.first, (GIVEN, *replays.grid)))
    rules = {f"every class {name}": _every_class(timedelta(minutes=RULES[name]), replays.classes) for name in RULES}
    rules[f"idle times alone, regret at most {ALLOWED:.0%}"] = plain
    rules[f"advise, regret at most {ALLOWED:.0%}: {advice.kind}"] = _advised(advice)
    later = replays.of(replays.last, frozenset(chain.from_iterable(one.variants for one in rules.values())))
    truths = trace.truths()
    oracle = sum(_tail(run, truths[run.name], trace) for run in replays.last.runs())
    rows = []
    for name, rule in rules.items():
        # A class without advice is not stopped: its idle time would have more regret than allowed.
        runs = [
            one if one.class_ in rule.choices else msgspec.structs.replace(one, stop=None) for one in under(rule, later)
        ]
        total = tally(runs, "idle")
        final = [run.stop for run in runs if run.stop is not None and _is_final(run.stop, truths[run.name])]
        known = "not known" if total.regret is None else f"{total.regret:.1%} of {total.known}"
        rows.append((name, str(total.stops), known, f"{sum(one.won for one in final) / oracle:.0%}"))
    print_table(("idle time", "stops", "regretted", "of the oracle's GPU-hours"), rows)
    tried = [
        (one.kind.value, one.words, str(one.unseen.stops), _share(one.unseen.regret), f"{one.unseen.won:,.0f}", one.why)
        for one in advice.choice.tried
    ]
    print_table(("tried", "", "stops", "regretted", "GPU-hours won", "not chosen because"), tried)
    advised = {one.class_: one.window for one in advice.classes}
    print("advised: " + ", ".join(f"{name} {in_words(w) if w else 'none'}" for name, w in sorted(advised.items())))


def _share(regret: float | None) -> str:
    return "not known" if regret is None else f"{regret:.1%}"


def _every_class(window: timedelta, classes: Sequence[str]) -> Rule:
    return Rule(choices=dict.fromkeys(classes, Variant(window)))


def _advised(advice: Advice) -> Rule:
    rest = Variant(None, None, advice.signals, advice.at)
    choices = {
        one.class_: msgspec.structs.replace(rest, window=one.window) for one in advice.classes if one.window is not None
    }
    if advice.owners is None:
        return Rule(kind=advice.kind, choices=choices, rest=rest)
    own = Variant(advice.owners.idle)
    return Rule(kind=advice.kind, choices=choices, rest=rest, for_members=own, returns=advice.owners.returns)


def _is_final(stop: JudgedStop, truth: Truth) -> bool:
    return truth.last_use is None or truth.last_use <= stop.at


def _tail(run: RecordedRun, truth: Truth, trace: SyntheticTrace) -> float:
    begin = max(run.started, run.series[0].start, truth.last_use or trace.begin)
    return max(timedelta(), (run.ended or trace.end) - begin) / timedelta(hours=1) * len(run.devices)
