"""What was there and is not listed any more. Missing from a list is a hint; the platform confirms it by uid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpukeeper.engine.ports import Platform, Ports, key_of
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.event import Vanished
from gpukeeper.model.identity import PlaceKey, Ref
from gpukeeper.model.subject import Gone


async def confirmed(platform: Platform, missing: Sequence[Ref]) -> Sequence[Gone]:
    if not missing:
        return ()
    try:
        return await platform.gone(missing)
    except PlatformError:
        return ()  # nothing is proven; the next pass checks again


@dataclass
class Absences:
    """What is not listed any more and not yet accepted as gone. Bounded: by what the last lists did not show."""

    patience: timedelta = timedelta()  # how long something must be missing to count as gone while the breaker is open
    _since: dict[PlaceKey, dict[str, datetime]] = field(default_factory=dict)  # by place, then by key

    async def record(
        self, ports: Ports, platform: Platform, missing: Sequence[Ref], gone: Sequence[Gone], *, believe: bool
    ) -> None:
        """While the breaker is open, absence is accepted only after a while: an engine that lost its data reports
        everything as gone. A removal that the platform announced is accepted at once."""
        now, before = ports.clock.now(), self._since.get(key_of(platform), {})
        since = self._since[key_of(platform)] = {ref.key: before.get(ref.key, now) for ref in missing}
        lost = [
            one.ref for one in gone if believe or one.announced or now - since.get(one.ref.key, now) >= self.patience
        ]
        if lost:
            await ports.ledger.append([Vanished(at=now, ref=ref) for ref in lost])
            for ref in lost:
                since.pop(ref.key, None)

    def keys(self) -> Iterable[str]:
        return [key for since in self._since.values() for key in since]
