"""What the last pass at each place came to, as far as the next one needs it. Bounded: one entry for each place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpukeeper.model.identity import PlaceKey


@dataclass
class LastPasses:
    _counted: dict[PlaceKey, tuple[int, int]] = field(default_factory=dict)
    _breakers: dict[PlaceKey, str] = field(default_factory=dict)
    _failures: dict[PlaceKey, str] = field(default_factory=dict)

    def count(self, place: PlaceKey, seen: int, running: int) -> None:
        """How much a full pass found."""
        self._counted[place] = (seen, running)

    def counted(self, place: PlaceKey) -> tuple[int, int] | None:
        return self._counted.get(place)

    def set_breaker(self, place: PlaceKey, breaker: str | None) -> None:
        """Hints come one by one, and for one object at a time never too much is due: what a full pass found
        applies until the next one."""
        self._breakers.pop(place, None)
        if breaker is not None:
            self._breakers[place] = breaker

    def breaker(self, place: PlaceKey) -> str | None:
        return self._breakers.get(place)

    def set_failure(self, place: PlaceKey, why: str | None) -> bool:
        """Why the pass stopped midway. True: it is a new failure, or another one."""
        before = self._failures.pop(place, None)
        if why is not None:
            self._failures[place] = why
        return why is not None and why != before

    @property
    def failures(self) -> Mapping[PlaceKey, str]:
        return self._failures
