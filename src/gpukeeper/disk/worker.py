"""`python -m gpukeeper.disk.worker WORK TOP SETTINGS`: one of the worker processes that share a large tree; see
`worker_pool`.

TOP and SETTINGS are descriptors. Every line of standard input is a list of directories below the top; for each line it
prints one: what it counted, and which directories it leaves to others since it has done its share.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from gpukeeper.disk import kernel
from gpukeeper.disk.erase import TreeDeleter
from gpukeeper.disk.walk import Pending, TreeWalk, WalkStopped, WalkTotals

WorkerResult = dict[str, Any]


def main(work: str, top: str, settings: str) -> None:
    with os.fdopen(int(settings), "rb") as file:
        given = json.load(file)
    gc.disable()  # walking creates no cycles, and searching for them takes a tenth of the time
    share = {"measure": measure_share, "erase": erase_share}[work]
    if work == "erase":
        kernel.lower_priority()
    sys.stdout.write("{}\n")  # ready: the parent works alone until now
    sys.stdout.flush()
    for line in sys.stdin:
        jobs = [(path.encode("latin-1"), depth) for path, depth in json.loads(line)]
        sys.stdout.write(json.dumps(share(int(top), jobs, given)) + "\n")
        sys.stdout.flush()


def measure_share(top: int, jobs: list[Pending], given: dict[str, Any]) -> WorkerResult:
    tally = WalkTotals({(device, inode): pid for device, inode, pid in given["open"]})
    walk = TreeWalk(tally, depth_max=given["depth_max"], locking=given["locking"])
    try:
        left = _in_turn(jobs, lambda job: walk.one(top, job, given["quantum"]), tally, given["quantum"])
    except WalkStopped as enough:
        tally.problem(str(enough))
        left = []
    return {**tally.record(), "left_to_do": _encoded(left)}


def erase_share(top: int, jobs: list[Pending], given: dict[str, Any]) -> WorkerResult:
    eraser, later = TreeDeleter(given["until"]), list[bytes]()

    def one(job: Pending) -> list[Pending]:
        path, _ = job
        left, unfinished = (eraser.remove if path else eraser.empty)(top, path, given["quantum"])
        later.extend(unfinished)
        return left

    left = _in_turn(jobs, one, eraser, given["quantum"])
    return {**eraser.record(), "left_to_do": _encoded(left), "later": [path.decode("latin-1") for path in later]}


def _in_turn(
    jobs: list[Pending], work: Callable[[Pending], list[Pending]], count: WalkTotals | TreeDeleter, quantum: int
) -> list[Pending]:
    left: list[Pending] = []
    for number, job in enumerate(jobs):
        left += work(job)
        if count.entries >= quantum:
            return left + jobs[number + 1 :]
    return left


def _encoded(left: list[Pending]) -> list[tuple[str, int]]:
    """Names are bytes, and JSON is text: each byte becomes the character of its number."""
    return [(path.decode("latin-1"), depth) for path, depth in left]


if __name__ == "__main__":
    main(*sys.argv[1:])
