"""A million damaged inputs for the parsers of tests/property/parsers.py, before the seeds of a long run.

python -m tests.simulation.inputs 10000      another number
python -m tests.simulation.inputs 10000 7    from another first seed; a failure names its parser and seed
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.pool import Pool

from tests.property.parsers import PARSERS
from tests.property.test_parsers import fails

MILLION = 1_000_000
CHUNK = 500


def check(work: tuple[int, range]) -> tuple[int, str | None]:
    """How many inputs were read, and the first that failed, in words."""
    place, seeds = work
    for count, seed in enumerate(seeds, start=1):
        problem = fails(PARSERS[place], seed)
        if problem is not None:
            return count, problem
    return len(seeds), None


def read_all(pool: Pool, inputs: int = MILLION, first: int = 0) -> list[str]:
    """One failure of each parser that has any."""
    done, failed = 0, {}
    for count, problem in pool.imap_unordered(check, _chunks(inputs, first)):
        done += count
        if problem is not None:
            failed.setdefault(problem.partition(",")[0], problem)
        if done % 10_000 < CHUNK:
            print(f"\r{done} inputs of {len(PARSERS)} parsers, {len(failed)} fail", end="", file=sys.stderr)
    print(f"\r{done} inputs of {len(PARSERS)} parsers, {len(failed)} fail", file=sys.stderr)
    return list(failed.values())


def _chunks(inputs: int, first: int) -> Iterator[tuple[int, range]]:
    whole = sum(parser.weight for parser in PARSERS)
    for place, parser in enumerate(PARSERS):
        end = first + -(-inputs * parser.weight // whole)
        for start in range(first, end, CHUNK):
            yield place, range(start, min(start + CHUNK, end))


def main() -> int:
    inputs, first = (int(word) for word in (*sys.argv[1:], *(str(MILLION), "0")[len(sys.argv) - 1 :]))
    with multiprocessing.Pool(os.cpu_count()) as pool:
        failed = read_all(pool, inputs, first)
    print(*failed, sep="\n\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
