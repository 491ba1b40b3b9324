"""What went wrong on this machine, as a sentence. Values, since one unreadable folder must not end a look."""

from __future__ import annotations

from datetime import timedelta

from gpukeeper.model.decision import Refused, Unseen
from gpukeeper.model.durations import in_words

LOOKS_ONLY = Refused("this version only looks at the machine itself; deleting trees comes with a later version")


def unreadable(what: str, error: OSError) -> Unseen:
    return Unseen(what, f"could not be read: {error.strerror}")


def too_slow(what: str, deadline: timedelta) -> Unseen:
    return Unseen(what, f"did not answer within {in_words(deadline)}")
