"""How GPUs were used, hour by hour: values that the ledger stores and the views sum up.

One bit stands for one minute (bit 0: the first of the hour). So the same minutes can be recorded again without being
counted twice, and what two holders share is still visible.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

WHOLE_HOUR = (1 << 60) - 1
OUTSIDE = "outside"  # the class of a device that is held by processes which are no workload
QUARANTINE = "quarantine"  # the class of a device that must not be used


class Holder(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What had a device. Empty: unknown, or none. Without a key no workload had it."""

    key: str = ""
    path: str = ""
    owner: str = ""
    class_: str = ""
    group: str = ""


FREE = Holder()


class HourUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One hour of one device and one holder. `hour`: hours since 1970, UTC. `unknown`: held, and its use was not
    measured. `free`: only without a holder."""

    hour: int
    place: str
    device: str
    holder: Holder = FREE
    active: int = 0
    idle: int = 0
    unknown: int = 0
    free: int = 0

    @property
    def minutes(self) -> int:
        """Every minute it has something about."""
        return self.active | self.idle | self.unknown | self.free


class DevicePresence(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A device from `since` to `until` (minutes since 1970). `listed`: in the inventory of its place, so that a minute
    about which nothing is recorded is a minute that was not measured. `share`: of a whole GPU; None: a slice of unknown
    size."""

    place: str
    device: str
    since: int
    until: int
    model: str = ""
    share: float | None = 1.0
    listed: bool = True

    def in_hour(self, hour: int) -> int:
        """The minutes of that hour in which it was there."""
        first, last = max(self.since - hour * 60, 0), min(self.until - hour * 60, 60)
        return (1 << last) - (1 << first) if first < last else 0


class UsageFold(msgspec.Struct, frozen=True, kw_only=True):
    """What one reading of signals and claims adds. `absent`: place and uuid of devices that are provably not there."""

    devices: tuple[DevicePresence, ...] = ()
    absent: tuple[tuple[str, str], ...] = ()
    hours: tuple[HourUse, ...] = ()


class RecordedHour(msgspec.Struct, frozen=True, gc=False):
    """All that is known about one device in one hour."""

    hour: int
    device: DevicePresence
    uses: tuple[HourUse, ...]


def merged(before: HourUse, added: HourUse) -> HourUse:
    """Of the same hour, device and holder. The newest measurement of a minute counts; what was not measured replaces
    no measurement."""
    measured = added.active | added.idle | added.free
    kept = before.active | before.idle | before.free
    return msgspec.structs.replace(
        before,
        active=before.active & ~measured | added.active,
        idle=before.idle & ~measured | added.idle,
        free=before.free & ~measured | added.free,
        unknown=(before.unknown | added.unknown) & ~(measured | kept),
    )


def minute_of(at: datetime) -> int:
    return int(at.timestamp()) // 60


def moment_of(minute: int) -> datetime:
    return datetime.fromtimestamp(minute * 60, UTC)
