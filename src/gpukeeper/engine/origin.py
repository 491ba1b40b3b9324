"""A ledger that notes, on each line of one request, how that request came here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.ports import Ledger
from gpukeeper.model.event import Event


def with_origin(keeper: Keeper, who: str, via: str) -> Keeper:
    """The same keeper, for one request of `who`."""
    return replace(keeper, ledger=cast(Ledger, _WithOrigin(keeper.ledger, who, via)))


class _WithOrigin:
    """Everything but `append` is the ledger's own."""

    def __init__(self, ledger: Ledger, who: str, via: str) -> None:
        self._ledger, self._who, self._via = ledger, who, via

    async def append(self, lines: Sequence[Event]) -> None:
        await self._ledger.append(
            [msgspec.structs.replace(one, via=self._via) if one.by == self._who else one for one in lines]
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)
