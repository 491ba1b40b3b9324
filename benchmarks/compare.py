"""`python -m benchmarks.compare BASE [NAME...]`: the working tree against the commit BASE, in turns; marks losses.

BASE is checked out in a temporary git worktree. Each tree runs its own benchmarks with its own `src` on the path, in
the environment of this interpreter, first BASE, then the working tree, and so on: both meet the same neighbours. The
last line is one JSON object. Exit codes: 0 compared, 1 a benchmark failed in the working tree, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.__main__ import NAMES
from benchmarks.needs import EXIT_CODE
from benchmarks.report import Figure, print_table

ROOT = Path(__file__).resolve().parents[1]
IMPORTANT = (
    "decisions",
    "plan",
    "kubernetes-scan",
    "kubernetes-reclaim",
    "docker-plan",
    "disk-size",
    "startup",
    "simulation",
    "web-page",
    "backtest",
)
ROUNDS = 3
LOSS = 0.1  # a larger change for the worse is marked
_MORE_IS_BETTER = ("/s", "/CPU second")  # how such a unit ends; of all others less is better
Verdict = str  # "loss", "gain" or ""


class NoFigure(msgspec.Struct, frozen=True):
    why: str
    failed: bool = False  # otherwise something that it needs is not here


class Side(msgspec.Struct):
    """The figures of one tree. After one failure it is not run again."""

    figures: list[Figure] = []
    failure: NoFigure | None = None

    def add(self, result: Figure | NoFigure) -> None:
        if isinstance(result, Figure):
            self.figures.append(result)
        else:
            self.failure = result

    @property
    def values(self) -> list[float]:
        return [] if self.failure is not None else [one.value for one in self.figures]


class Row(msgspec.Struct, frozen=True):
    name: str
    unit: str
    old: list[float]
    new: list[float]
    ratio: float | None = None  # median of new over median of old
    verdict: Verdict = ""
    note: str = ""  # why there are no values
    failed: bool = False  # in the working tree


def more_is_better(unit: str) -> bool:
    return unit.endswith(_MORE_IS_BETTER) or unit == "flips"


def judged(old: Sequence[float], new: Sequence[float], unit: str) -> tuple[float | None, Verdict]:
    if not old or not new or not median(old):
        return None, ""
    ratio = median(new) / median(old)
    gain = ratio - 1 if more_is_better(unit) else 1 - ratio
    return ratio, "loss" if gain < -LOSS else "gain" if gain > LOSS else ""


def row_of(name: str, old: Side, new: Side) -> Row:
    unit = next((one.unit for one in (*new.figures, *old.figures)), "")
    notes = [f"{tree}: {side.failure.why}" for tree, side in (("old", old), ("new", new)) if side.failure]
    ratio, verdict = judged(old.values, new.values, unit)
    failed = new.failure is not None and new.failure.failed
    return Row(name, unit, old.values, new.values, ratio, verdict, "; ".join(notes), failed)


def spread(values: Sequence[float]) -> str:
    return f"{median(values):,.6g} ({min(values):,.6g} to {max(values):,.6g})" if values else "not measured"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="Working tree against a commit.")
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(IMPORTANT)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="times that each tree runs a benchmark")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in NAMES]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}")
    with _checked_out(given.base) as base:
        rows = [_compared(name, base, given.rounds) for name in given.names or IMPORTANT]
    _print(given.base, rows)
    return 1 if any(row.failed for row in rows) else 0


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="gpukeeper-compare-") as folder:
        place = Path(folder, "base")
        done = subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=False)
        if done.returncode:
            sys.exit(2)  # git has said why
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def _compared(name: str, base: Path, rounds: int) -> Row:
    old, new = Side(), Side()
    for number in range(rounds):
        for tree, side in ((base, old), (ROOT, new)):
            if side.failure is None:
                print(f"{name}, round {number + 1} of {rounds}, {'old' if side is old else 'new'} ...", file=sys.stderr)
                side.add(_measured(tree, name))
    return row_of(name, old, new)


def _measured(tree: Path, name: str) -> Figure | NoFigure:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    return result_of(done.returncode, done.stdout, done.stderr)


def result_of(code: int, out: str, err: str) -> Figure | NoFigure:
    """Before exit code 3 a benchmark without its engine ended with 0, and its last line was a sentence."""
    said = out.strip().splitlines()
    try:
        if code == 0:
            return msgspec.json.decode(said[-1] if said else "", type=Figure)
    except msgspec.DecodeError:
        return NoFigure(said[-1] if said else "it printed nothing")
    last = (err.strip().splitlines() or said or ["it printed nothing"])[-1]
    return NoFigure(last) if code == EXIT_CODE else NoFigure(f"failed: {last}", failed=True)


def _print(base: str, rows: Sequence[Row]) -> None:
    cells = [
        (
            row.name,
            row.unit,
            spread(row.old),
            spread(row.new),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            " ".join(filter(None, (row.verdict.upper(), row.note))),
        )
        for row in rows
    ]
    head = ("benchmark", "unit", f"old: {base}", "new: working tree", "new/old", f"change above {LOSS:.0%}")
    print_table(head, cells)
    found = {"base": base, "losses": [row.name for row in rows if row.verdict == "loss"], "rows": rows}
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
