"""The mounts of every mount namespace, also of those without processes, and the directories that overlays consist of.

A part of the scan of open files: what a mount uses counts as in use.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpukeeper.disk import kernel, procfs
from gpukeeper.disk.kernel import KERNEL
from gpukeeper.disk.mounts import MountEntry, parse_mounts, unparsed
from gpukeeper.disk.namespaces import mountinfo_of
from gpukeeper.disk.unresponsive import leads_through_silent
from gpukeeper.disk.walk import Identity

MOUNT_NAMESPACE = "mnt:["
ROUNDS = 50


class MountScan:
    """Adds to the files, paths and problems of the scan that it is part of."""

    def __init__(self, proc: str, files: dict[Identity, int], paths: dict[str, int], problems: list[str]) -> None:
        self._proc, self._files, self._paths, self._problems = proc, files, paths, problems
        self.mounted: set[tuple[str, str]] = set()
        self.points: set[str] = set()
        self.namespaces: dict[str, tuple[MountEntry, ...]] = {}
        # Those that a descriptor or a mount keeps, each with a path to it (empty: it may hang).
        self.kept_namespaces: dict[str, str] = {}
        self.unentered: str | None = None
        self.by_number: dict[int, MountEntry] = {}
        self._overlays: set[tuple[str, tuple[str, ...]]] = set()

    def add(self, home: Path) -> tuple[MountEntry, ...]:
        namespace = os.readlink(f"{home}/ns/mnt")  # noqa: PTH115
        if namespace not in self.namespaces:
            text = procfs.read(f"{home}/mountinfo", procfs.TABLE)
            if unparsed(text):
                self._problems.append(f"{unparsed(text)} lines of {home}/mountinfo could not be understood")
            self._add_table(namespace, parse_mounts(text), home)
        return self.namespaces[namespace]

    def add_kept(self) -> None:
        """Those without processes: a process that enters one of them later finds its mounts."""
        for _ in range(ROUNDS):
            left = [one for one in self.kept_namespaces if one not in self.namespaces]
            if not left:
                return
            way = self.kept_namespaces[left[0]]
            found = mountinfo_of(way, self._proc) if way else None
            if found is None:
                self.unentered = left[0]
                return
            self._add_table(left[0], parse_mounts(found), Path(self._proc, "self"))
        self.unentered = "more than can be read"

    def _add_table(self, namespace: str, mounts: tuple[MountEntry, ...], home: Path) -> None:
        self.namespaces[namespace] = mounts
        self.by_number.update((mount.number, mount) for mount in mounts if mount.number is not None)
        self.mounted.update((mount.device, mount.source) for mount in mounts if mount.source != "/")
        self.points.update(mount.point for mount in mounts)
        for mount in mounts:
            self._add_layers(mount, home, mounts)
            if mount.kind == "nsfs" and mount.source.startswith(MOUNT_NAMESPACE):
                hangs = leads_through_silent(mount.point, mounts)
                self.kept_namespaces.setdefault(mount.source, "" if hangs else f"{home}/root{mount.point}")

    def _add_layers(self, mount: MountEntry, home: Path, mounts: tuple[MountEntry, ...]) -> None:
        """No process has a descriptor of the directories an overlay consists of, and they are mounted nowhere. Their
        paths are those of the process that mounted it, so they are looked up in each namespace until one has them
        all.
        """
        if not mount.layers or (mount.device, mount.layers) in self._overlays:
            return
        for layer in mount.layers:
            self._paths.setdefault(layer, KERNEL)
        found = [self._add_layer(layer, mount, home, mounts) for layer in mount.layers]
        if all(found):
            self._overlays.add((mount.device, mount.layers))

    def _add_layer(self, layer: str, mount: MountEntry, home: Path, mounts: tuple[MountEntry, ...]) -> bool:
        """A relative one was relative to a directory that engines keep above another layer or above the mount point."""
        near = [mount.point, *(other for other in mount.layers if other.startswith("/"))]
        bases = dict.fromkeys(str(above) for one in near for above in Path(one).parents)
        known = False
        for base in ["/"] if layer.startswith("/") else bases:
            path = os.path.normpath(Path(base, layer))
            if leads_through_silent(path, mounts):
                continue
            try:
                found = kernel.status_of(f"{home}/root{path}")
            except OSError:
                continue
            self._paths.setdefault(path, KERNEL)
            self._files.setdefault((found.dev, found.ino), KERNEL)
            known = True
        return known
