"""What a daemon with a socket keeps for requests, so that they cost its passes nothing: the lists and decisions of its
last passes, pending confirmations, whose pass waits. Nothing is kept where no socket listens.

Bounded: one list and one outlook for each place, the latter of at most outlook.MOST decisions; confirmations expire.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gpukeeper.engine.confirm import Confirmations
from gpukeeper.model.decision import Decision, PlaceHead
from gpukeeper.model.identity import PlaceKey, Ref


@dataclass(frozen=True)
class Listing:
    """What one full list of a place contained."""

    begun: float  # steady time
    refs: tuple[Ref, ...] = ()
    unseen: tuple[str, ...] = ()


@dataclass
class Outlook:
    """What the passes at a place decided about each object there."""

    head: PlaceHead
    decisions: dict[str, Decision] = field(default_factory=dict)  # by key
    left_out: int = 0  # beyond what is kept


@dataclass
class RequestState:
    enabled: bool = False
    listings: dict[PlaceKey, Listing] = field(default_factory=dict)  # the last whole list
    outlooks: dict[PlaceKey, Outlook] = field(default_factory=dict)
    listing: asyncio.Lock = field(default_factory=asyncio.Lock)  # one list at a time for all requests
    next_list: float = 0.0  # steady time before which no list is made for a request
    turned_away: set[PlaceKey] = field(default_factory=set)  # places whose pass waits for a request to end
    confirmations: Confirmations = field(default_factory=Confirmations)

    def keep_list(self, place: PlaceKey, listing: Listing) -> None:
        if self.enabled:
            self.listings[place] = listing
