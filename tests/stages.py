"""What CI runs, stage by stage: `python -m tests.stages`. Each stage is a target of the Makefile.

check, test, test-slow, the smoke set of every engine, the engine tests that the change needs (tests/touched.toml), and
more seeds if the core changed. `--all` runs every engine test instead. The run ends with the first stage that fails. No
stage starts that cannot finish in time. Logs, junit files and the slowest tests are in the results directory, outside
the repository; a test on an engine that passed on the same source tree is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.resources import CACHE, missing
from tests.results import VARIABLE, outcomes
from tests.touched import ROOT, Selection, base_commit, changed_since, engine_folders, select

LIMIT = 90 * 60
SLOWEST = 40
AGAIN = 5  # failed engine tests that are run once more, alone
# Tests of crashes, races and deletions: a failure once in a hundred runs is a bug, so they run once.
# Parts of the names of their files.
NEVER_AGAIN = (
    *("attack", "crash", "disk", "fault", "halt", "hostile", "kill"),
    *("orphan", "race", "remove", "stop", "sweep", "zombie"),
)


@dataclass(frozen=True)
class Stage:
    """`minutes`: how long it takes on two cores, with engines that were built before."""

    name: str
    command: Sequence[str]
    minutes: float
    required: bool = True
    on_engines: bool = False


def stages(selection: Selection) -> Iterator[Stage]:
    yield Stage("check", ["make", "check"], 2)
    yield Stage("test", ["make", "test"], 6)
    yield Stage("slow", ["make", "test-slow"], 10)
    yield Stage("smoke", ["make", "test-smoke"], 7, on_engines=True)
    if files := selection.files():
        minutes = 38 if selection.folders == engine_folders() else 8 + len(files)
        yield Stage("engines", ["make", "test-engines", f"ENGINES={' '.join(files)}"], minutes, on_engines=True)
    if selection.core:
        yield Stage("seeds", ["make", "simulate", "SEEDS=2000"], 10, required=False)


class Run:
    def __init__(self, results: Path, started: float) -> None:
        self._results = results
        self._end = started + LIMIT
        self._summary: list[str] = []

    def all(self, wanted: Sequence[Stage]) -> int:
        code = 0
        for number, stage in enumerate(wanted):
            if not self._fits(stage):
                code = code or int(stage.required)
            elif not self._passes(stage):
                code = 1
                self._note("".join(f"{one.name}: not run\n" for one in wanted[number + 1 :]).rstrip())
                break
        print("\n".join(["", *self._summary, f"results: {self._results}"]), flush=True)
        return code

    def _fits(self, stage: Stage) -> bool:
        left = self._end - time.time()
        if left >= stage.minutes * 60:
            return True
        need = "required" if stage.required else "not required"
        self._note(f"{stage.name}: NOT RUN ({need}): needs about {stage.minutes:g} min, {left / 60:.0f} are left")
        return False

    def _passes(self, stage: Stage) -> bool:
        directory = self._results / ("engines" if stage.on_engines else stage.name)
        directory.mkdir(parents=True, exist_ok=True)
        if not stage.on_engines:
            (directory / "outcomes.jsonl").unlink(missing_ok=True)
        before = time.time()
        code = self._start(stage.command, directory, stage.name)
        if code and stage.on_engines and (again := to_run_again(directory)):
            self._note(f"{stage.name}: run again, alone (a defect, even if they pass now): {', '.join(again)}")
            command = [sys.executable, "-m", "pytest", "-n", "1", *again]
            code = self._start(command, directory, f"{stage.name}-again")
        self._report(stage, directory, code, time.time() - before)
        if code == -signal.SIGKILL and not stage.required:
            self._note(f"{stage.name}: NOT FINISHED (not required): the limit was reached")
            return True
        return code == 0

    def _start(self, command: Sequence[str], directory: Path, name: str) -> int:
        """Run it with its output here and in a file. It is stopped when the time is over."""
        environment = {**os.environ, VARIABLE: str(directory)}
        print(f"\n== {' '.join(command)}", flush=True)
        with (
            (directory / f"{name}.log").open("wb") as log,
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
            ) as started,
        ):
            signal.signal(signal.SIGALRM, lambda *_: _stop(started))
            signal.alarm(max(1, int(self._end - time.time())))
            assert started.stdout is not None
            for line in started.stdout:
                log.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
        signal.alarm(0)
        return started.returncode

    def _report(self, stage: Stage, directory: Path, code: int, seconds: float) -> None:
        ran = outcomes(directory)
        slowest = sorted(ran, key=lambda one: -one["seconds"])[:SLOWEST]
        (directory / "slowest.txt").write_text("".join(f"{one['seconds']:8.1f} s  {one['test']}\n" for one in slowest))
        self._note(f"{stage.name}: {'failed' if code else 'passed'} in {seconds / 60:.1f} min, {len(ran)} tests")
        for one in ran:
            if code and one["outcome"] == "failed":
                self._note(f"  FAILED {one['test']}")

    def _note(self, line: str) -> None:
        self._summary.append(line)
        print(line, flush=True)


def to_run_again(directory: Path) -> list[str]:
    """The failed tests, if they are few and none of them must pass at once."""
    failed = [one["test"] for one in outcomes(directory) if one["outcome"] == "failed"]
    strict = [test for test in failed if any(word in test.split("::")[0] for word in NEVER_AGAIN)]
    return failed if len(failed) <= AGAIN and not strict else []


def _stop(started: subprocess.Popen[bytes]) -> None:
    print(f"stopped: the limit of {LIMIT // 60} minutes is reached", flush=True)
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)


def results_directory() -> Path:
    """One for each source tree and list of required engines, because only then a passed test stays passed."""
    tree = "uncommitted" if _git("status", "--porcelain") else _git("rev-parse", "HEAD^{tree}")
    engines = hashlib.sha256(os.environ.get("GPUKEEPER_REQUIRE", "").encode()).hexdigest()
    made = CACHE / "tests" / f"{tree[:16]}-{engines[:8]}"
    if tree == "uncommitted":
        shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True, exist_ok=True)
    return made


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stages", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every engine test, whatever changed")
    parser.add_argument("--list", action="store_true", help="print the stages, run nothing")
    parser.add_argument("--started", type=float, default=time.time(), help="when the run began, for its time limit")
    wanted = parser.parse_args()
    base = None if wanted.all else base_commit()
    changed = changed_since(base) if base else []
    selection = select(changed) if base else Selection(engine_folders(), crashes=False, core=True)
    print(f"{len(changed)} files changed since {base}" if base else "every engine test", flush=True)
    planned = list(stages(selection))
    for stage in planned:
        print(f"  {stage.name:8} about {stage.minutes:3g} min  {' '.join(stage.command)}")
    if wanted.list:
        return 0
    if lacking := missing():
        print("\n".join(lacking), file=sys.stderr)
        return 1
    return Run(results_directory(), wanted.started).all(planned)


if __name__ == "__main__":
    sys.exit(main())
