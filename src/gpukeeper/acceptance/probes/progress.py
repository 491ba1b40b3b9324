"""How far a rank came, for the process that watches it: steps begun, a heartbeat, and on request where it is.

Steps are counted alike on all ranks, and written before the rank waits for the others: after a hang, the rank with the
fewest is the one that they waited for. Files, since a rank that hangs answers nothing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from itertools import count
from pathlib import Path
from typing import Any

from gpukeeper.acceptance.probes.group import RankGroup, write

BEAT_S = 0.5
DUMP = "dump"  # a file of this name in the directory of the ranks requests their position
_FRAMES = 4
_begun = count(1)


def begin(group: RankGroup, what: str) -> None:
    """Called before each step in which ranks wait for each other."""
    text = json.dumps({"step": next(_begun), "what": what, "pid": os.getpid()})
    write(group.folder / f"rank-{group.rank}.step", text)


def watched(directory: Path, rank: int) -> None:
    """From now on a thread of its own shows that this process runs. A process that is stopped has no heartbeat."""
    threading.Thread(target=_beat, args=(directory, rank, threading.main_thread().ident), daemon=True).start()


def _beat(directory: Path, rank: int, main: int | None) -> None:
    dumped = False
    while directory.exists():
        try:
            write(directory / f"rank-{rank}.alive", str(os.getpid()))
            if not dumped and (directory / DUMP).exists():
                dumped = True
                _dump(directory, rank, main)
        except OSError:
            return  # the directory is gone, or the disk is full: there is nothing to report to
        time.sleep(BEAT_S)


def _dump(directory: Path, rank: int, main: int | None) -> None:
    frame = sys._current_frames().get(main or 0)
    lines = traceback.format_stack(frame)[-_FRAMES:] if frame is not None else []
    write(directory / f"rank-{rank}.where", "".join(lines))
    trace = flight_recorder(sys.modules.get("torch"))
    if trace:
        write(directory / f"rank-{rank}.trace", trace)


def flight_recorder(torch: Any) -> str:
    """NCCL's record of its last collectives as JSON, where this PyTorch keeps one; else empty."""
    try:
        found = torch._C._distributed_c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False)
    except Exception:  # another release, a build without NCCL, no recorder
        return ""
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)
