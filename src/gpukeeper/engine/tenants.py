"""Which workload got a GPU between the stop of another and its next start. A list gives a hint, a read by uid proof."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Tenant
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.identity import PlaceKey, Ref
from gpukeeper.model.subject import Shape, State, Subject
from gpukeeper.model.unknown import Unknown

_LIVE = (State.RUNNING, State.PAUSED)


class Tenancy(NamedTuple):
    """Running work that has a device, as a list showed it."""

    ref: Ref
    started: datetime


Tenancies = dict[str, dict[str, Tenancy]]  # by device, by key


@dataclass
class Tenants:
    """Bounded: what runs with GPUs in the last whole list of each place, and what was noted since."""

    _known: dict[PlaceKey, Tenancies] = field(default_factory=dict)

    def at(self, place: PlaceKey) -> Tenancies:
        return self._known.setdefault(place, {})

    def replace(self, place: PlaceKey, known: Tenancies) -> None:
        """From the result of a full pass."""
        self._known[place] = known


def note_tenants(subjects: Iterable[Subject], book: Rulebook, *into: Tenancies) -> None:
    """Work that runs, has GPUs and may block others; not monitors, which have all of them."""
    for one in subjects:
        if _has_gpus(one) and isinstance(one.started, datetime) and book.settings(one).untouchable is False:
            key, tenancy = one.ref.key, Tenancy(one.ref, one.started)
            for device in _devices(one):
                for known in into:
                    known.setdefault(device, {})[key] = tenancy


async def new_tenants(
    tenants: Tenants, platform: Platform, subjects: Sequence[Subject], book: Rulebook
) -> dict[str, Tenant]:
    """By key of the workload that was started again."""
    known = tenants.at(key_of(platform))
    found = {}
    for one in subjects:
        for device, hint in _hints(one, known, book):
            tenant = await _proven(platform, one, device, hint)
            if tenant is not None:
                found[one.ref.key] = tenant
                break
    return found


def _hints(one: Subject, known: Tenancies, book: Rulebook) -> Iterator[tuple[str, Tenancy]]:
    """Those that began after its stop-hold was over, and before it was started again."""
    if not isinstance(one.previous_end, datetime) or not isinstance(one.started, datetime) or not _has_gpus(one):
        return
    limits = book.settings(one).limits
    if isinstance(limits, Unknown):
        return
    free = one.previous_end + limits.hold_after_stop
    for device in _devices(one):
        for key, hint in known.get(device, {}).items():
            if key != one.ref.key and free <= hint.started < one.started:
                yield device, hint


async def _proven(platform: Platform, one: Subject, device: str, hint: Tenancy) -> Tenant | None:
    """It runs now, as then, and has that device; and it has another owner."""
    with suppress(PlatformError):
        found = await platform.read(hint.ref)
        if not isinstance(found, Subject) or not _has_gpus(found) or found.started != hint.started:
            return None
        owner = found.owner if isinstance(found.owner, str) else None
        if device in _devices(found) and (owner is None or owner != one.owner):
            return Tenant(found.ref.path, owner, device, hint.started)
    return None


def _has_gpus(one: Subject) -> bool:
    return one.shape is Shape.WORKLOAD and one.root is None and one.state in _LIVE and bool(_devices(one))


def _devices(one: Subject) -> tuple[str, ...]:
    return () if isinstance(one.devices, Unknown) else one.devices
