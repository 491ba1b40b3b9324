"""Records how GPUs are used: remembers what passes see of GPUs, joins it with measurements, and hands it to the store.

Every five minutes, the last hour again: a later look or a late measurement completes what was open. The store counts no
minute twice. A restart forgets the claims; what was measured before it is still counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpukeeper.engine.ports import Ports
from gpukeeper.lifecycle.claims import claim_state, why_unsure
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.lifecycle.usage import (
    DeviceId,
    DeviceSeen,
    Holding,
    HoldingId,
    Sight,
    Tenure,
    Vacancy,
    VacantSpan,
    advance,
    advance_vacancy,
    fold,
    handovers,
    holdings_of,
)
from gpukeeper.model.decision import View
from gpukeeper.model.gpu import GpuMemory
from gpukeeper.model.series import DevicePresence, HourUse, UsageFold, minute_of, moment_of
from gpukeeper.model.subject import EMPTY, Gone, PlaceKey, Shape, Subject
from gpukeeper.model.unknown import Unknown

EVERY = timedelta(minutes=5)
WINDOW = timedelta(hours=1)  # how far back minutes are read again
BRIDGED = 3  # intervals of passes: two looks that are further apart do not speak for the time between them


@dataclass
class PlaceUsage:
    """What is remembered of one place."""

    looked: datetime | None = None  # the last whole look
    tenures: dict[HoldingId, Tenure] = field(default_factory=dict)
    devices: dict[DeviceId, DeviceSeen] = field(default_factory=dict)


@dataclass
class UsageTracker:
    """GPUs and their holders over the last hour. Nothing is remembered unless a store is there."""

    enabled: bool = False
    places: dict[PlaceKey, PlaceUsage] = field(default_factory=dict)
    spans: dict[DeviceId, VacantSpan] = field(default_factory=dict)
    first: dict[DeviceId, datetime] = field(default_factory=dict)  # when a device was first listed
    over: list[Tenure] = field(default_factory=list)
    vacated: list[tuple[DeviceId, VacantSpan]] = field(default_factory=list)
    absent: set[DeviceId] = field(default_factory=set)

    @property
    def listed(self) -> set[DeviceId]:
        return {id_ for one in self.places.values() for id_ in one.devices}

    def see(self, where: PlaceKey, sight: Sight, every: timedelta) -> None:
        """After one look at a place."""
        here, bridged = self.places.setdefault(where, PlaceUsage()), BRIDGED * every
        recent = here.looked if here.looked is not None and sight.at - here.looked <= bridged else None
        here.tenures, over = advance(here.tenures, sight, recent)
        self.over += over
        if not sight.whole:
            return
        here.looked = sight.at
        self._see_devices(here, sight, bridged)

    def _see_devices(self, here: PlaceUsage, sight: Sight, bridged: timedelta) -> None:
        seen = {(one.place, one.device): one for one in sight.devices}
        if sight.complete:
            gone = here.devices.keys() - seen.keys()
            self.absent |= gone
            for id_ in gone:
                self.first.pop(id_, None)
                if (span := self.spans.pop(id_, None)) is not None:
                    self.vacated.append((id_, span))
            here.devices = {}
        here.devices |= seen
        for id_ in seen:
            self.absent.discard(id_)
            self.first.setdefault(id_, sight.at)
        ended = [one for one in self.over if self._is_new(one)]
        between = handovers(self._lasting(), ended)
        self.spans, over = advance_vacancy(self.spans, sight.devices, sight.at, bridged, between)
        self.vacated += over

    def _is_new(self, tenure: Tenure) -> bool:
        """It ended after the last look at its device."""
        span = self.spans.get((tenure.holding.place, tenure.holding.device))
        return span is None or (tenure.ended or tenure.until) > span.until

    def _lasting(self) -> list[Tenure]:
        return [tenure for one in self.places.values() for tenure in one.tenures.values()]

    def tenures(self) -> list[Tenure]:
        return [*self.over, *self._lasting()]

    def vacancies(self) -> list[tuple[DeviceId, VacantSpan]]:
        return [*self.vacated, *self.spans.items()]

    def presences(self, hours: Sequence[HourUse]) -> tuple[DevicePresence, ...]:
        """Of every device that is listed, and of those that are only known by what has them."""
        counted = _extents(hours)
        listed = [
            DevicePresence(
                place=one.place,
                device=one.device,
                since=minute_of(self.first[id_]),
                until=max(minute_of(here.looked), counted.get(id_, (0, 0))[1]),
                model=one.model,
                share=one.share,
            )
            for here in self.places.values()
            if here.looked is not None
            for id_, one in here.devices.items()
        ]
        known = self.listed
        others = {(h.place, h.device): h for tenure in self.tenures() if not (h := tenure.holding).listed}
        unlisted = [_unlisted(one, *counted[id_]) for id_, one in others.items() if id_ in counted and id_ not in known]
        return (*listed, *unlisted)

    def reset(self) -> None:
        """The clock was set: times that were noted before are wrong."""
        self.__init__(enabled=self.enabled)  # type: ignore[misc]

    def forget(self, before: datetime) -> None:
        self.over = [one for one in self.over if max(one.until, one.ended or one.until) > before]
        self.vacated = [one for one in self.vacated if one[1].until > before]
        self.absent.clear()


def _extents(hours: Sequence[HourUse]) -> dict[DeviceId, tuple[int, int]]:
    """By device: the first minute that is counted, and the end of the last one."""
    found: dict[DeviceId, tuple[int, int]] = {}
    for one in hours:
        first = one.hour * 60 + (one.minutes & -one.minutes).bit_length() - 1
        end = one.hour * 60 + one.minutes.bit_length()
        known = found.get((one.place, one.device), (first, end))
        found[one.place, one.device] = (min(known[0], first), max(known[1], end))
    return found


def _unlisted(holding: Holding, since: int, until: int) -> DevicePresence:
    """A cluster shows which work has a GPU, not which GPU: it is counted while it is held."""
    share = None if holding.slice else 1.0
    return DevicePresence(
        place=holding.place, device=holding.device, since=since, until=until, share=share, listed=False
    )


@dataclass
class SightCollector:
    """Collects what one look finds of GPUs, page by page."""

    book: Rulebook
    views: list[View] = field(default_factory=list)  # of what has a GPU
    devices: list[Subject] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    ended: dict[str, datetime] = field(default_factory=dict)

    def add(self, view: View) -> None:
        subject = view.subject
        if subject.shape is Shape.DEVICE:
            self.devices.append(subject)
        elif subject.shape in (Shape.WORKLOAD, Shape.ORPHAN):
            self.read.add(subject.ref.key)
            if subject.devices != ():
                self.views.append(view)
            if isinstance(subject.ended, datetime):
                self.ended[subject.ref.key] = subject.ended

    async def sight(
        self, ports: Ports, tracker: UsageTracker, at: datetime, *, whole: bool, complete: bool, gone: Collection[Gone]
    ) -> Sight:
        devices = await self._devices(ports)
        listed = tracker.listed | {(one.place, one.device) for one in devices}
        found = [(view.subject, claim_state(view, self.book, at)) for view in self.views]
        holdings = [one for subject, how in found for one in holdings_of(subject, how, self.book, listed)]
        return Sight(
            at=at,
            whole=whole,
            complete=complete,
            holdings=tuple(holdings),
            devices=tuple(devices),
            read=frozenset(self.read | {one.ref.key for one in gone}),
            ended=self.ended,
        )

    async def _devices(self, ports: Ports) -> list[DeviceSeen]:
        if not self.devices:
            return []
        memories = await ports.ledger.memories([one.ref.key for one in self.devices])
        shares = await ports.gpus.shares() if ports.gpus is not None else {}
        known = {} if isinstance(shares, Unknown) else shares
        models = {one.ref.path: one.labels.get("model", "") for one in self.devices}
        cut = {one.root for one in self.devices if isinstance(one.root, str)}
        return [
            DeviceSeen(
                place=one.ref.place,
                device=one.ref.uid,
                model=models.get(one.root, "") if isinstance(one.root, str) else models[one.ref.path],
                share=known.get(one.ref.uid, None if isinstance(one.root, str) else 1.0),
                vacancy=_vacancy(one, memories.get(one.ref.key, EMPTY).gpu),
            )
            for one in self.devices
            if one.ref.path not in cut  # its slices are counted
        ]


def _vacancy(device: Subject, gpu: GpuMemory | None) -> Vacancy:
    if gpu is not None and gpu.quarantined is not None:
        return Vacancy.QUARANTINE
    if isinstance(device.busy, str):
        return Vacancy.TAKEN
    baseline = None if gpu is None else gpu.baseline_mib
    return Vacancy.VACANT if why_unsure(device, baseline) is None else Vacancy.UNSURE


async def record_usage(ports: Ports, tracker: UsageTracker, book: Rulebook, now: datetime) -> None:
    """The last hour, as far as its minutes are over."""
    if ports.usage is None:
        return
    end = minute_of(now)
    window = (end - WINDOW // timedelta(minutes=1), end)
    begin = moment_of(window[0])
    tenures, vacancies = tracker.tenures(), tracker.vacancies()
    keys = sorted({one.holding.holder.key for one in tenures})
    series = await ports.signals.series(keys, begin, moment_of(end - 1)) if keys else {}
    hours = fold(tenures, vacancies, series, book.policy.activity, window)
    found = UsageFold(devices=tracker.presences(hours), absent=tuple(sorted(tracker.absent)), hours=tuple(hours))
    await ports.usage.record(found)
    tracker.forget(begin)
