"""A filesystem of its own for the disk benchmarks: its cache can be emptied without disturbing the machine."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FILES_IN_A_FOLDER, FOLDERS_IN_A_FOLDER = 500, 20


class DiskTrees:
    """`cool` is None where no filesystem can be mounted: then only what is in the cache can be measured."""

    def __init__(self, folder: Path, cool: Callable[[], None] | None) -> None:
        self.folder, self.cool = folder, cool

    def tree(self, name: str, files: int) -> Path:
        for folder in range(files // FILES_IN_A_FOLDER):
            path = self.folder / name / str(folder // FOLDERS_IN_A_FOLDER) / str(folder)
            path.mkdir(parents=True)
            fd = os.open(path, os.O_RDONLY)
            for file in range(FILES_IN_A_FOLDER):
                os.close(os.open(f"file-{file}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
            os.close(fd)
        os.sync()
        return self.folder / name


@contextmanager
def disk_trees(files: int) -> Iterator[DiskTrees]:
    """Large enough for so many empty files."""
    with tempfile.TemporaryDirectory(prefix="gpukeeper-benchmark-") as made:
        folder = Path(made)
        if os.geteuid() != 0:
            yield DiskTrees(folder, None)
            return
        image, point = folder / "image", folder / "disk"
        point.mkdir()
        subprocess.run(["truncate", "-s", f"{1 + files // 500_000}G", image], check=True)
        inodes, lazily = str(int(files * 1.1)), "lazy_itable_init=1"
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-N", inodes, "-E", lazily, image], check=True)
        loop = subprocess.run(
            ["losetup", "--find", "--show", "--direct-io=on", str(image)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if loop.returncode:  # a container without loop devices
            image.unlink()
            yield DiskTrees(folder, None)
            return
        device = loop.stdout.strip()
        try:
            _mount(device, point)
            try:
                yield DiskTrees(point, lambda: _remount(device, point))
            finally:
                subprocess.run(["umount", point], check=True)
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)


def _mount(device: str, point: Path) -> None:
    # Without the kernel's thread that writes empty inode tables: it would be measured, too.
    subprocess.run(["mount", "-o", "noinit_itable", device, point], check=True)


def _remount(device: str, point: Path) -> None:
    subprocess.run(["umount", point], check=True)
    _mount(device, point)
