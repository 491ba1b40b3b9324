"""The processes of this test alone, for a scan of open files that does not depend on what else runs on the machine.

A scan of the real /proc reads every process, with every thread: how long that takes, and whether all could be read,
depends on the neighbours of the test. These scans read a directory of links to the real directories of this process
and its descendants, so what they find of those is real.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from gpukeeper.disk import open_files
from gpukeeper.disk.kernel import STATUS_MAX, read_proc, stat_fields
from gpukeeper.disk.open_files import OpenFiles

# The first process of a machine, as a kernel thread (PF_KTHREAD), which has no files: without it a scan reports that
# the machine hides processes.
FIRST = "1 (init) S 0 1 1 0 -1 2097152 " + "0 " * 20


def own_pids() -> list[int]:
    """This process and its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for home in Path("/proc").iterdir():
        if home.name.isdecimal():
            with suppress(OSError):  # it ended, or may not be read: then it is none of ours
                parent = int(stat_fields(read_proc(f"{home}/stat", STATUS_MAX))[1])
                children[parent].append(int(home.name))
    found = [os.getpid()]
    for pid in found:
        found += children[pid]
    return found


@contextmanager
def own_proc() -> Iterator[str]:
    """A /proc with these processes only; all users may read it."""
    with tempfile.TemporaryDirectory(prefix="proc-") as proc:
        Path(proc).chmod(0o755)
        for pid in own_pids():
            Path(proc, str(pid)).symlink_to(f"/proc/{pid}")
        if not Path(proc, "1").is_symlink():
            Path(proc, "1").mkdir()
            Path(proc, "1/stat").write_text(FIRST)
        for name in ("self", "swaps"):
            Path(proc, name).symlink_to(f"/proc/{name}")
        yield proc


def scan_own() -> OpenFiles:
    """What `open_files.scan()` finds of them, and of the kernel itself."""
    with own_proc() as proc:
        return open_files.scan(proc)


def everything_seen() -> OpenFiles:
    """As root on a whole machine sees it: a test machine may be a container, where a scan is never complete."""
    return msgspec.structs.replace(scan_own(), hidden=None)
