"""A million damaged inputs for the parsers of tests/property/parsers.py, before the seeds of a long run.

python -m tests.simulation.inputs 10000          another number
python -m tests.simulation.inputs 10000 7        from another first seed; a failure names its parser and seed
python -m tests.simulation.inputs 10000 7 2000   without the first 2,000: continues a run that was interrupted

An input fails if it raises what its parser does not declare, or takes more than a second of processor time. It is
written to a file before it is parsed: if it ends its process, or is given up after a minute of processor time, the file
is still there, with the place in the program.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from tests.property.mutate import damaged
from tests.property.parsers import PARSERS, Parser
from tests.property.test_parsers import problem_of

MILLION = 1_000_000
CHUNK = 500
LONGEST_S, GIVEN_UP_S = 1.0, 60.0  # of processor time, which does not depend on what else runs
Chunk = tuple[int, range]


_given: list[tuple[Path, tuple[Parser, ...]]] = []  # in a process of the pool: a parser cannot be sent to it


def check(work: Chunk) -> str | None:
    """The first that failed, in words."""
    (folder, parsers), (place, seeds) = _given[0], work
    parser = parsers[place]
    for sample in parser.samples:  # what it imports is not its time
        with suppress(*parser.declared):
            parser.read(sample)
    with (
        (folder / f"{os.getpid()}.input").open("wb", 0) as noted,
        (folder / f"{os.getpid()}.where").open("wb") as where,
    ):
        faulthandler.enable(where)
        faulthandler.register(signal.SIGPROF, where, chain=True)  # and then the signal ends the process
        try:
            return next(filter(None, (_problem(parser, seed, noted.fileno()) for seed in seeds)), None)
        finally:
            noted.truncate(0)
            faulthandler.unregister(signal.SIGPROF)
            faulthandler.enable()


def _problem(parser: Parser, seed: int, noted: int) -> str | None:
    data = damaged(parser.name, parser.samples, seed)
    written = f"{parser.name}, seed {seed}\n".encode() + data
    os.pwrite(noted, written, 0)
    os.ftruncate(noted, len(written))
    signal.setitimer(signal.ITIMER_PROF, GIVEN_UP_S)
    begun = time.process_time()
    problem = problem_of(parser, seed, data)
    took = time.process_time() - begun
    signal.setitimer(signal.ITIMER_PROF, 0)
    if problem is None and took > LONGEST_S:
        return f"{parser.name}, seed {seed}: {took:.1f} s of processor time\ninput: {data[:3000]!r}"
    return problem


def read_all(
    inputs: int = MILLION, first: int = 0, skipped: int = 0, parsers: tuple[Parser, ...] = PARSERS
) -> list[str]:
    """One failure of each parser that has any. As many processes as this one may use processors."""
    folder, done, failed = Path(tempfile.mkdtemp(prefix="gpukeeper-inputs-")), 0, dict[str, str]()
    size = len(os.sched_getaffinity(0))
    waiting = deque[tuple[Chunk, Future[str | None]]]()
    with ProcessPoolExecutor(size, get_context("fork"), _given.append, ((folder, parsers),)) as pool:
        try:
            for chunk in _chunks(inputs, first, parsers):
                if done < skipped:
                    done += len(chunk[1])
                    continue
                waiting.append((chunk, pool.submit(check, chunk)))
                if len(waiting) > 2 * size:
                    done += _read(waiting, failed, done)
            while waiting:
                done += _read(waiting, failed, done)
        except BrokenProcessPool:
            failed["process"] = _ended(folder)
            return list(failed.values())
        finally:
            pool.shutdown(cancel_futures=True)
            print(f"\nto continue: python -m tests.simulation.inputs {inputs} {first} {done}", file=sys.stderr)
    shutil.rmtree(folder)
    return list(failed.values())


def _read(waiting: deque[tuple[Chunk, Future[str | None]]], failed: dict[str, str], done: int) -> int:
    (_, seeds), reading = waiting.popleft()
    problem = reading.result()
    if problem is not None and failed.setdefault(problem.partition(",")[0], problem) is problem:
        print(f"\n{problem}", file=sys.stderr)
    print(f"\r{done + len(seeds)} inputs, {len(failed)} parsers fail", end="", file=sys.stderr)
    return len(seeds)


def _ended(folder: Path) -> str:
    """What the processes worked on when one of them ended; where it was, if it could still say so."""
    words = [f"a process ended; what was parsed is in {folder}:"]
    for file in folder.glob("*.input"):
        if noted := file.read_bytes():
            name, _, data = noted.partition(b"\n")
            words.append(f"{name.decode()}\ninput: {data[:3000]!r}\n{file.with_suffix('.where').read_text()}")
    return "\n".join(words)


def _chunks(inputs: int, first: int, parsers: tuple[Parser, ...]) -> Iterator[Chunk]:
    """Every parser has its part at every moment, so that a run that is interrupted has tried all of them."""
    whole = sum(parser.weight for parser in parsers)
    chunks = []
    for place, parser in enumerate(parsers):
        end = first + -(-inputs * parser.weight // whole)
        step = max(1, CHUNK * parser.weight // 10)
        chunks += [(place, range(start, min(start + step, end))) for start in range(first, end, step)]
    return iter(sorted(chunks, key=lambda chunk: ((chunk[1].start - first) / parsers[chunk[0]].weight, chunk[0])))


def main() -> int:
    words = [int(word) for word in sys.argv[1:]]
    failed = read_all(*words)
    print(*failed, sep="\n\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
