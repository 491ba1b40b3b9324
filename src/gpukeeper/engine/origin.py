"""A ledger that notes, on each line of one request, how that request came here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.ports import Ledger
from gpukeeper.model.event import Closed, Event, Intended


def with_origin(keeper: Keeper, who: str, via: str) -> Keeper:
    """The same keeper, for one request of `who`."""
    return replace(keeper, ledger=cast(Ledger, _WithOrigin(keeper.ledger, who, via)))


class _WithOrigin:
    """Everything but `append` is the ledger's own."""

    def __init__(self, ledger: Ledger, who: str, via: str) -> None:
        self._ledger, self._who, self._via = ledger, who, via

    async def append(self, lines: Sequence[Event]) -> None:
        await self._ledger.append([self._noted(one) for one in lines])

    def _noted(self, line: Event) -> Event:
        """A step that a person requested is gpukeeper's: its lines name the person in `requested_by`."""
        requested_by = line.requested_by if isinstance(line, Intended | Closed) else line.by
        known = line.via is not msgspec.UNSET  # of an earlier request, which this one closes
        if known or self._who not in (line.by, requested_by):
            return line
        return msgspec.structs.replace(line, via=self._via)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)
