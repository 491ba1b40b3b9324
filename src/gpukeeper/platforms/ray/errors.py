"""Errors of a Ray node, as sentences. Values, since one unreadable directory must not end a pass."""

from __future__ import annotations

from datetime import timedelta

from gpukeeper.model.decision import Refused, Unseen
from gpukeeper.model.durations import in_words

NODES_ARE_SHOWN = Refused("a node is only reported; its leftovers are removed, not the node itself")
UNDER_WAY = Refused("an earlier removal of it hangs, perhaps because the disk does not answer; nothing more was done")
NOT_BROUGHT_BACK = Refused("temporary files cannot be restored; the last lines of a session's logs are in its evidence")


def unreadable(what: str, error: OSError) -> Unseen:
    return Unseen(what, f"could not be read: {error.strerror}")


def too_slow(what: str, deadline: timedelta) -> Unseen:
    return Unseen(what, f"did not answer within {in_words(deadline)}")
