"""Nodes and disks as series. A value that could not be read has no series; it is counted as not measured."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily

from gpukeeper.engine.counts import TreeCount
from gpukeeper.interfaces.telemetry.series import gauge
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.nodes import DISK, bytes_of

OF_A_NODE, OF_A_DISK = ("platform", "place", "node"), ("platform", "place", "node", "disk")
FACTS = ("temporary bytes", "busy", "disk", "held open", "tree size")
Numbers = dict[tuple[str, ...], float]
Piles = Mapping[tuple[str, bool], TreeCount]  # by category, and whether they are due


def of_nodes(subjects: Iterable[Subject], trees: Iterable[Piles]) -> Iterator[GaugeMetricFamily]:
    found = _Found()
    for subject in subjects:
        found.add(subject)
    number, size = Tally[tuple[str, ...]](), Tally[tuple[str, ...]]()
    for piles in trees:
        for (category, _), pile in piles.items():
            number[(category,)] += pile.number
            if pile.sized:
                size[(category,)] += pile.bytes
            found.missing["tree size"] += pile.unsized
    yield gauge("gpukeeper_trees", number, "category")
    yield gauge("gpukeeper_tree_bytes", size, "category")
    yield gauge("gpukeeper_node_temporary_bytes", found.temporary, *OF_A_NODE)
    yield gauge("gpukeeper_node_busy", found.busy, *OF_A_NODE)
    for name, values in found.disks.items():
        yield gauge(name, values, *OF_A_DISK)
    yield gauge("gpukeeper_not_measured", {(fact,): found.missing[fact] for fact in FACTS}, "what")


class _Found:
    def __init__(self) -> None:
        self.temporary: Numbers = {}
        self.busy: Numbers = {}
        self.missing: Tally[str] = Tally()
        self.disks: dict[str, Numbers] = {
            "gpukeeper_disk_size_bytes": {},
            "gpukeeper_disk_free_bytes": {},
            "gpukeeper_disk_used_ratio": {},
            "gpukeeper_disk_inodes_used_ratio": {},
            "gpukeeper_held_open_bytes": {},
        }

    def add(self, subject: Subject) -> None:
        ref = subject.ref
        node = ref.namespace if ref.kind == DISK else ref.name  # a disk of the machine itself belongs to no node
        if ref.kind != DISK:
            self._add_node((ref.platform, ref.place, node), subject)
        self._add_disk((ref.platform, ref.place, node), subject)

    def _add_node(self, key: tuple[str, ...], subject: Subject) -> None:
        if isinstance(subject.size, Unknown):
            self.missing["temporary bytes"] += 1
        else:
            self.temporary[key] = subject.size
        if isinstance(subject.busy, Unknown):
            self.missing["busy"] += 1
        else:
            self.busy[key] = subject.busy is not None

    def _add_disk(self, node: tuple[str, ...], subject: Subject) -> None:
        disk = subject.disk
        if disk is None:
            self.missing["disk"] += 1
            return
        facts = bytes_of(subject)
        self.missing["held open"] += facts.held_open is None and subject.ref.kind == DISK
        values = {
            "gpukeeper_disk_size_bytes": facts.size,
            "gpukeeper_disk_free_bytes": facts.free,
            "gpukeeper_disk_used_ratio": disk.used,
            "gpukeeper_disk_inodes_used_ratio": disk.inodes,
            "gpukeeper_held_open_bytes": facts.held_open,
        }
        for name, value in values.items():
            if value is not None:
                self.disks[name][*node, disk.name] = value
