"""What a hold, release or stop would do to one object, without doing it: for an admin who acts on many at once.

The preview has a revision. A request with it is executed only on the very object that was previewed.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec

from gpukeeper.engine.confirm import Asker, revision_of
from gpukeeper.engine.find import FoundSubject, find
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.requests import Request, described, hold_granted, may_be_done, not_prevented, until_in_words
from gpukeeper.lifecycle.holds import is_admin, release_of
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action
from gpukeeper.model.errors import UsageError
from gpukeeper.model.subject import State

PREVIEWED = ("hold", "release", "stop")


class RequestPreview(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    uid: str
    words: str  # what would be done
    revision: str


async def preview(keeper: Keeper, book: Rulebook, who: str, request: Request) -> RequestPreview:
    """Raises UsageError with the reason for which the request would be refused."""
    if not is_admin(book, who):
        raise UsageError("only an admin may preview requests for several workloads")
    if request.action not in PREVIEWED:
        raise UsageError(f'there is no preview of "{request.action}"; valid values: {", ".join(PREVIEWED)}')
    found = await find(keeper, book, request.workload)
    seen = found.view.subject.seen
    words = await _previewed(keeper, book, who, request, found)
    return RequestPreview(path=seen.ref.path, uid=seen.ref.uid, words=words, revision=revision_of(seen))


async def _previewed(keeper: Keeper, book: Rulebook, who: str, request: Request, found: FoundSubject) -> str:
    match request.action:
        case "hold":
            span = None if request.seconds is None else timedelta(seconds=request.seconds)
            granted = await hold_granted(keeper, book, found, who, span, reason=request.reason)
            return f"hold until {until_in_words(granted)}.{not_prevented(book, found, granted)}"
        case "release":
            return _release(keeper, book, who, found)
        case _:
            return await _stop(keeper, book, who, found)


def _release(keeper: Keeper, book: Rulebook, who: str, found: FoundSubject) -> str:
    ended, left = release_of(found.view, book, who, keeper.clock.now())
    ends = (*(("its own mark",) if found.view.subject.marks.unhold else ()), *ended.words)
    still = f" Still held afterwards: {'; '.join(left)}." if left else ""
    if not ends:
        raise UsageError(f"there is no hold that {who} may end.{still}")
    return f"release {', '.join(ends)}.{still}"


async def _stop(keeper: Keeper, book: Rulebook, who: str, found: FoundSubject) -> str:
    may_be_done(keeper, book, Asker(who), found, Action.STOP)
    paused = await keeper.ledger.paused()
    if paused is not None:
        raise UsageError(f"everything is paused ({paused})")
    if found.view.subject.state not in (State.RUNNING, State.PAUSED):
        raise UsageError(f"it is not running ({found.view.subject.state})")
    return described(found.view, Action.STOP)
