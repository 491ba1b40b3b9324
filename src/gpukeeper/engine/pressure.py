"""What is scarce: the GPUs of a place, the bytes and inodes of a disk, the bytes for unused images. Kept between
passes, because GPUs and disks are scarce from a high mark on, until they are below a low one, and because an image is
read again without the others.

Bounded: one entry for each place, and one for each disk and image that the last complete list of its place showed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate

from msgspec.structs import replace

from gpukeeper.lifecycle.rules import unused_image
from gpukeeper.model.decision import View
from gpukeeper.model.identity import PlaceKey
from gpukeeper.model.policy import Demand, DiskMarks, Images
from gpukeeper.model.subject import Shape, Subject


@dataclass
class _Demanded:
    since: float | None = None  # when it went over the mark, as a timestamp
    high: bool = False


@dataclass
class Pressure:
    _demand: dict[PlaceKey, _Demanded] = field(default_factory=dict)
    _held: dict[PlaceKey, frozenset[str]] = field(default_factory=dict)  # GPUs that are open in no workload
    _full: dict[PlaceKey, set[str]] = field(default_factory=dict)  # disks
    # Unused images: since when, when built (of two that came together the newer is kept longer), bytes.
    _images: dict[PlaceKey, dict[str, tuple[datetime, float, int]]] = field(default_factory=dict)

    def is_too_full(self, subject: Subject, marks: DiskMarks) -> bool:
        """The disk it lies on: from the high mark on, until it is below the low one."""
        if subject.disk is None:
            return False
        full = self._full.setdefault((subject.ref.platform, subject.ref.place), set())
        high = subject.disk.full >= marks.high or (subject.disk_name in full and subject.disk.full >= marks.low)
        if high:
            full.add(subject.disk_name)
        else:
            full.discard(subject.disk_name)
        return high

    def is_full(self, place: PlaceKey, disk: str) -> bool:
        """When something on it was last read."""
        return disk in self._full.get(place, ())

    def keep_disks(self, place: PlaceKey, disks: Collection[str]) -> None:
        """Forgets the others: a complete list of the place did not show them."""
        self._full[place] = self._full.get(place, set()).intersection(disks)

    def with_images(self, views: Sequence[View], images: Images) -> list[View]:
        """Unused images, each with the bytes of all that were used as lately, itself included."""
        if images.above is None or not any(one.subject.shape is Shape.IMAGE for one in views):
            return list(views)
        here = self._images.setdefault((views[0].subject.ref.platform, views[0].subject.ref.place), {})
        for one in views:
            since, created, size = unused_image.free_since(one, images), one.subject.created, one.subject.size
            here.pop(one.subject.ref.key, None)
            if isinstance(since, datetime) and isinstance(size, int):
                built = created.timestamp() if isinstance(created, datetime) else 0.0
                here[one.subject.ref.key] = (since, built, size)
        newest_first = sorted(here, key=lambda key: (here[key], key), reverse=True)
        sums = dict(zip(newest_first, accumulate(here[key][2] for key in newest_first), strict=True))
        return [
            replace(one, subject=replace(one.subject, together=sums[one.subject.ref.key]))
            if one.subject.ref.key in sums
            else one
            for one in views
        ]

    def keep_images(self, place: PlaceKey, keys: Collection[str]) -> None:
        """Forgets the others, like disks."""
        self._images[place] = {key: one for key, one in self._images.get(place, {}).items() if key in keys}

    def set_held(self, place: PlaceKey, held: Iterable[str], *, among: Collection[str] | None = None) -> None:
        """GPUs that something outside of workloads has open. `among`: only these were checked."""
        before = frozenset[str]() if among is None else self._held.get(place, frozenset()).difference(among)
        self._held[place] = before.union(held)

    def claimed_share(
        self, claimed: Collection[str], devices: Collection[str], shares: Mapping[str, float] | None
    ) -> float | None:
        """How much of the GPUs is taken. By weight where this machine's GPUs are meant (`shares`), so that a slice is
        not a GPU; by number if a place lists GPUs of its own. None: unknown."""
        held, listed = frozenset[str]().union(*self._held.values()), frozenset(devices)
        taken = held.union(claimed)
        if shares and (not listed or listed & shares.keys()):
            return sum(weight for device, weight in shares.items() if device in taken) / sum(shares.values())
        return len((held & listed).union(claimed)) / len(listed) if listed else None

    def update_demand(self, place: PlaceKey, share: float, marks: Demand, now: datetime) -> None:
        state = self._demand.setdefault(place, _Demanded())
        if share < marks.below:
            state.since, state.high = None, False
        elif share >= marks.above:
            state.since = state.since if state.since is not None else now.timestamp()
            state.high = state.high or now.timestamp() - state.since >= marks.settle.total_seconds()
        elif not state.high:
            state.since = None

    def set_scarce(self, place: PlaceKey) -> None:
        """As the daemon whose ledger this is reports it."""
        self._demand[place] = _Demanded(high=True)

    def gpus_are_scarce(self, place: PlaceKey) -> bool:
        return self._demand.get(place, _Demanded()).high

    def scarce_places(self) -> tuple[PlaceKey, ...]:
        return tuple(place for place, one in self._demand.items() if one.high)
