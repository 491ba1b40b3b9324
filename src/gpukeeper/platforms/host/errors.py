"""Errors on this machine, as sentences. Values, since one unreadable directory must not end a pass."""

from __future__ import annotations

from datetime import timedelta

from gpukeeper.disk.remove import TreeRemoval
from gpukeeper.model.decision import Refused, Unseen
from gpukeeper.model.durations import in_words, size_in_words
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host.resolve import ForeignLink

READ_ONLY = Refused("gpukeeper only reports GPUs, processes and disks of the machine itself; nothing was done")
NOT_MEASURED = Refused("it could not be measured completely, so it was not removed")
NO_COPY = Refused("nothing was saved of it, so it cannot be restored")
NEVER_FROM_HERE = "so it is never removed from here, however old it is; no policy setting changes that"
SHOWN_ENTRIES = 3  # of entries that could not be removed


def unreadable(what: str, error: OSError) -> Unseen:
    if isinstance(error, ForeignLink):
        return Unseen(what, str(error.strerror))
    return Unseen(what, f"could not be read: {error.strerror}")


def too_slow(what: str, deadline: timedelta) -> Unseen:
    return Unseen(what, f"did not answer within {in_words(deadline)}")


def not_all(removal: TreeRemoval, trash: str) -> Refused:
    """A part of it is left. An immediate retry would leave the same."""
    more = f"; and {len(removal.left) - SHOWN_ENTRIES} more" if len(removal.left) > SHOWN_ENTRIES else ""
    back = removal.bytes_back
    gone = f"{removal.entries:,} entries" + ("" if isinstance(back, Unknown) else f" ({size_in_words(back)})")
    why = f"{'; '.join(removal.left[:SHOWN_ENTRIES])}{more}"
    return Refused(f"{gone} of it were removed, but not all: {why}. The rest is in {trash}; a later pass retries")
