"""Real removals on a scratch folder, against neighbours that race with each of them. The stage of `make simulate` that
needs no virtual world: `python -m tests.simulation.racer REMOVALS`.

Neighbours are ordinary users where we are root. What must hold after every removal: nothing outside the tree changed,
no tree that a neighbour had open was deleted, and nothing stays in the trash.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

from gpukeeper.disk import open_files
from gpukeeper.disk.measure import measure, open_directory
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import ExpectedTree, TreeRemoval, remove
from gpukeeper.disk.trash import leftovers
from tests.patience import PATIENCE
from tests.real.disk.filesystems import REPOSITORY, picture
from tests.real.disk.test_hostile import Ground

REMOVALS = 2_000
SWAPPERS = ("inside", "itself", "trash", "takeover")
HOLDERS = ("moving", "disguised", "relayed", "passed")
FREE = OpenFiles({}, {}, (), frozenset(), None)
TOLD_EVERY = 100


def race(removals: int = REMOVALS) -> list[str]:
    """What was broken, each as a sentence."""
    folder = Path(tempfile.mkdtemp(prefix="gpukeeper-racer-"))
    try:
        swaps, broken = _against_swappers(folder / "swapped", removals - removals // 10)
        holds, more = _against_holders(folder / "held", removals // 10)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{removals} removals against racing neighbours: {dict(swaps)}; in use: {dict(holds)}", file=sys.stderr)
    return broken + more


def _against_swappers(folder: Path, removals: int) -> tuple[Counter[str], list[str]]:
    """In turn, a quarter of the removals each."""
    endings, broken = Counter[str](), list[str]()
    for how in SWAPPERS:
        ground = Ground(_made(folder / how))
        ground.refill()
        with _neighbour("hostile", how, str(ground.root), str(10**12)):
            for number in range(removals // len(SWAPPERS)):
                ground.refill()
                endings[_attempt(ground.root, FREE)] += 1
                _progress(number)
        if picture(ground.canary) != ground.before:
            broken.append(f"something outside the tree was changed by a removal against {how!r}")
        broken += [f"{one} stayed after removals against {how!r}" for one in _left_in_trash(ground.root)]
    return endings, broken


def _against_holders(folder: Path, removals: int) -> tuple[Counter[str], list[str]]:
    endings, broken = Counter[str](), list[str]()
    for how in HOLDERS:
        root = _made(folder / how)
        for name in ("d0/f0", "d0/f1", "d1/f0"):
            (root / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "tree" / name).write_text("in use")
        with _neighbour("holder", how, str(root / "tree")):
            for number in range(removals // len(HOLDERS)):
                ending = _attempt(root, None)
                endings[ending] += 1
                _progress(number)
                if ending == TreeRemoval.__name__:
                    broken.append(f"a tree with an open file was deleted ({how}, removal {number})")
                    break
        broken += [f"{one} stayed after removals against {how!r}" for one in _left_in_trash(root)]
    return endings, broken


def _left_in_trash(root: Path) -> list[str]:
    """What is whole and not under a name that its owner can reach. A neighbour's folder of such a name is not ours."""
    with open_directory(str(root)) as parent:
        return [f"{one.trash}/{one.name}" for one in leftovers(parent) if not one.deleting]


def _attempt(root: Path, used: OpenFiles | None) -> str:
    with open_directory(str(root)) as parent:
        found = measure("tree", parent)
        if found is None or not isinstance(found.ctime_ns, int):
            return "not measured"
        wanted = ExpectedTree((found.device, found.inode), found.ctime_ns)
        scan = open_files.scan if used is None else lambda: used
        return type(remove(parent, "tree", wanted, scan=scan, until=time.monotonic() + PATIENCE)).__name__


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for one in (folder, folder.parent, folder.parent.parent):
        with suppress(PermissionError):
            one.chmod(0o755)
    return folder


def _neighbour(program: str, *words: str) -> ExitStack:
    command = [sys.executable, "-m", f"tests.real.disk.{program}", *words]
    pipe = subprocess.PIPE
    running = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=REPOSITORY, start_new_session=True)
    assert running.stdout is not None
    assert running.stdout.readline() == b"\n"
    ending = ExitStack()
    ending.callback(running.wait)
    ending.callback(os.killpg, running.pid, 9)
    return ending


def _progress(number: int) -> None:
    if number % TOLD_EVERY == 0:
        print(".", end="", flush=True, file=sys.stderr)


if __name__ == "__main__":
    found = race(int(sys.argv[1]) if len(sys.argv) > 1 else REMOVALS)
    print("\n".join(found) or "nothing outside was touched, nothing in use was deleted")
    sys.exit(bool(found))
