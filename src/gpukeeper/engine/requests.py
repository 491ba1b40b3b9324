"""Requests of users: hold, release, stop, remove, restore, pause. The same rights by socket and by command line.

And what a hold, release or stop would do to one object, without doing it: for an admin who acts on many at once. That
preview has a revision; a request with it is executed only on the very object that was previewed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec

from gpukeeper.engine import clean
from gpukeeper.engine.act import take
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.memory import CONFIRMATION_LASTS, Asker, Pending, revision_of
from gpukeeper.engine.ports import key_of, place_name
from gpukeeper.engine.restore import restore, restored_in_words
from gpukeeper.engine.schedule import opening
from gpukeeper.engine.verify import settle
from gpukeeper.engine.view import FoundSubject, find, holds_elsewhere, read_subject
from gpukeeper.lifecycle.decide import NOT_HELD, REQUEST, why_not_yet
from gpukeeper.lifecycle.explain import in_spite_of
from gpukeeper.lifecycle.forecast import coming_in_words, next_steps
from gpukeeper.lifecycle.holds import NotAllowed, is_admin, may_act, may_hold, may_touch, release_of, whom_to_ask
from gpukeeper.lifecycle.rules import max_runtime
from gpukeeper.lifecycle.rules.hold import suspends
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, Refused, Result, Step, Verdict, View
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.event import Closed, Held, Paused, Released, Resumed
from gpukeeper.model.policy import Mode
from gpukeeper.model.reading import Moment
from gpukeeper.model.subject import KEEP_ALIVE, LIVE, RESTORE, Hold, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, size_in_words

PASS_WAITED_FOR = 60  # seconds
SECONDS_MAX = 100 * 365 * 86400.0  # of a request; more is no time that a clock has
LONGEST_REASON = 1000  # characters; each is written to the ledger and shown to everybody
__all__ = ["FoundSubject", "Reply", "Request", "find", "fulfil"]
GPU_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z][0-9A-Za-z/-]{0,99}")


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request. The user is never part of it: the socket or the process identifies them."""

    verb: str
    workload: str = ""
    seconds: Annotated[float, msgspec.Meta(ge=-SECONDS_MAX, le=SECONDS_MAX)] | None = None
    reason: str = ""
    suspends: tuple[str, ...] = ()
    confirm: bool = False  # ask before acting; mode plan always does
    token: str = ""  # of the reply that requested a confirmation: the user confirmed
    revision: str = ""  # of the object as the user was shown it: nothing is done to another one
    action: str = ""  # of a preview: the request that is previewed
    owner: str | None = None  # below here: of lines of the ledger that are requested
    last: int = 100
    types: tuple[str, ...] = ()
    errors: bool = False
    before: int | None = None  # only lines with a lower number
    search: str = ""  # text in any words of a line
    since: Moment | None = None  # below here: of a report, with `owner`
    until: Moment | None = None
    zone: str = ""
    described: Mapping[str, Any] = {}  # a hypothetical workload; see views.trial.WorkloadWords

    @property
    def span(self) -> timedelta | None:
        return None if self.seconds is None else timedelta(seconds=self.seconds)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """With a token nothing was done: `words` show what would be, and the same request with that token does it."""

    done: bool
    words: str
    exit_code: int = 0
    token: str = ""


class DataReply(Reply, frozen=True, kw_only=True):
    """The reply to a read-only request; `body` is JSON."""

    body: msgspec.Raw = msgspec.Raw(b"null")

    @classmethod
    def of(cls, body: object) -> DataReply:
        return cls(done=True, words="", body=msgspec.Raw(msgspec.json.encode(body)))


async def fulfil(keeper: Keeper, book: Rulebook, who: str, request: Request, *, uid: int | None = None) -> Reply:
    """Perform the request, with the rights of `who`, whose uid comes from the kernel. Every refusal is a sentence."""
    try:
        words = await _fulfil(keeper, book, Asker(who, uid), request)
    except OverflowError:
        return Reply(done=False, words="the requested hold is too long; nothing was done", exit_code=2)
    except KeeperError as problem:
        return Reply(done=False, words=str(problem), exit_code=problem.exit_code)
    return words if isinstance(words, Reply) else Reply(done=True, words=words)


async def _fulfil(keeper: Keeper, book: Rulebook, asker: Asker, request: Request) -> str | Reply:
    who = asker.name
    if len(request.reason) > LONGEST_REASON:
        raise UsageError(f"the reason is longer than {LONGEST_REASON} characters; nothing was done")
    match request.verb:
        case "hold":
            return await _fulfil_hold(keeper, book, who, request)
        case "release":
            return await release(keeper, book, request.workload, who, revision=request.revision)
        case "stop" | "remove":
            return await _fulfil_act(keeper, book, asker, request)
        case "pause":
            return await pause(keeper, book, who, request.reason)
        case "resume":
            return await resume(keeper, book, who)
        case "quarantine" | "return":
            return await _change_gpu(keeper, book, who, request)
        case "restore":
            ref, undone = await restore(keeper, book, request.workload, who)
            return await restored_in_words(keeper, book, ref, undone)
        case _:
            raise UsageError(f'unknown request "{request.verb}"; nothing was done')


async def _fulfil_hold(keeper: Keeper, book: Rulebook, who: str, request: Request) -> str:
    found, granted = await hold(keeper, book, who, request)
    path = found.view.subject.ref.path
    return f"{path} is held until {until_in_words(granted)}.{not_prevented(book, found, granted)}"


async def hold(keeper: Keeper, book: Rulebook, who: str, request: Request) -> tuple[FoundSubject, Hold]:
    found = await find(keeper, book, request.workload)
    _is_still(found, request.revision)
    granted = await hold_granted(keeper, book, found, who, request)
    if not request.suspends:
        await _hold_on_it(found, granted.until)
    ref = found.view.subject.ref
    await keeper.ledger.append([Held(at=granted.at, ref=ref, owner=_owner(found.view), by=who, hold=granted)])
    return found, granted


def until_in_words(granted: Hold) -> str:
    until = f"{granted.until:%Y-%m-%d %H:%M} UTC ({in_words(granted.until - granted.at)})"
    return until + (f". It suspends {', '.join(granted.suspends)} only" if granted.suspends else "")


async def hold_granted(keeper: Keeper, book: Rulebook, found: FoundSubject, who: str, request: Request) -> Hold:
    """The hold that `who` may have on it, from now on. Raises UsageError: none. Writes nothing."""
    now, subject = keeper.clock.now(), found.view.subject
    view = msgspec.structs.replace(found.view, elsewhere=await holds_elsewhere(keeper, book, subject, now))
    granted = may_hold(view, book, who, request.span, now, reason=request.reason, suspends=request.suspends)
    if isinstance(granted, NotAllowed):
        raise UsageError(granted.why)
    return msgspec.structs.replace(granted, lasting=subject.lasting or "")


def not_prevented(book: Rulebook, found: FoundSubject, granted: Hold) -> str:
    """What ends it in spite of the hold, and when: so that no user relies on the hold alone."""
    act = in_spite_of(found.view, book, granted, granted.at, found.platform.guards, opening(book.policy.schedule))
    if act is None:
        return _but_max_runtime(book, found, granted)
    grant = " An admin can suspend that, too." if act.rule in NOT_HELD else ""
    coming = coming_in_words(next_steps((act,), granted.at), granted.at)
    return f" The hold does not prevent {act.rule}: {coming}.{grant}"


def _but_max_runtime(book: Rulebook, found: FoundSubject, granted: Hold) -> str:
    """Said also if it ends before that: who renews a hold relies on it."""
    subject = found.view.subject
    limits = book.settings(subject).limits
    if isinstance(limits, Unknown) or limits.longest is None or subject.state not in LIVE:
        return ""
    if suspends(granted, max_runtime.NAME, holdable=max_runtime.RULE.holdable):
        return ""
    return f" It does not suspend the maximum runtime of {in_words(limits.longest)}."


async def _hold_on_it(found: FoundSubject, until: datetime) -> None:
    """Where a hold is stored on the object itself: another instance there may have another ledger."""
    subject = found.view.subject
    answer = await found.platform.hold(subject, until)
    if isinstance(answer, Refused | Unknown):
        how = f"{subject.marks.hold_with}{until:%Y-%m-%dT%H:%M:%SZ}"
        raise UsageError(f"{subject.ref.path} is not held: {answer.why}. A user with that permission can run: {how}")


async def _release_from_it(keeper: Keeper, book: Rulebook, found: FoundSubject) -> FoundSubject | None:
    """Without the hold on the object itself, read again: marks of other tools may still hold it. None: it has none,
    or only a new object would be without it."""
    subject = found.view.subject
    answer = await found.platform.hold(subject, None) if subject.marks.unhold else None
    if isinstance(answer, Refused | Unknown):
        how = subject.marks.unhold
        raise UsageError(f"{subject.ref.path} is still held: {answer.why}. A user with that permission can run: {how}")
    return None if answer is None else await read_subject(keeper, book, subject.ref)


async def release(keeper: Keeper, book: Rulebook, words: str, who: str, *, revision: str = "") -> str:
    """Ends what `who` may end, and reports what that was and what still holds. A claimed owner ends their own alone."""
    found = await find(keeper, book, words)
    _is_still(found, revision)
    _allow(may_touch(found.view, book, who))
    own = may_act(found.view, book, who) is not None  # only claimed: what holds for others stays
    released = None if own else await _release_from_it(keeper, book, found)
    found = released or found
    now, subject = keeper.clock.now(), found.view.subject
    ended, left = release_of(found.view, book, who, now, own=own)
    if released is not None:
        ended = msgspec.structs.replace(ended, words=("its own mark", *ended.words))
    if not ended.words:
        still = f" Still held: {'; '.join(left)}." if left else ""
        raise UsageError(f"nothing was released: {subject.ref.path} has no hold that {who} may end.{still}")
    line = Released(at=now, ref=subject.ref, owner=_owner(found.view), by=who, own=own, mark=ended.mark)
    await keeper.ledger.append([msgspec.structs.replace(line, lasting=subject.lasting or "")])
    if left:
        return f"{subject.ref.path}: released {', '.join(ended.words)}. Still held: {'; '.join(left)}."
    return f"{subject.ref.path} is no longer held."


async def _fulfil_act(keeper: Keeper, book: Rulebook, asker: Asker, request: Request) -> Reply:
    line = await _act(keeper, book, asker, request)
    if isinstance(line, Reply):
        return line
    assert line.ref is not None
    done = line.result is Result.RECLAIMED
    words = f"{line.ref.path}: {line.result}: {line.reason}"
    return Reply(done=done, words=words, exit_code=0 if done else 3)


async def _act(keeper: Keeper, book: Rulebook, asker: Asker, request: Request) -> Closed | Reply:
    """Stop or remove. Without a confirmation only in mode enforce, and only if the request does not ask for one."""
    action, now = Action(request.verb), keeper.clock.now()
    if request.token:
        pending = keeper.request_state.confirmations.take(request.token, asker, action, now)
        if pending is None:
            raise UsageError(
                f"this confirmation is unknown, was already used, or is older than {in_words(CONFIRMATION_LASTS)}; "
                "nothing was done. Try again"
            )
        return await _act_on(keeper, book, asker, await _confirmed(keeper, book, pending), action)
    found = await find(keeper, book, request.workload, acting=True)
    _is_still(found, request.revision)
    if not request.confirm and book.policy.mode is Mode.ENFORCE:
        return await _act_on(keeper, book, asker, found, action)
    may_be_done(keeper, book, asker, found, action)
    token = keeper.request_state.confirmations.ask(asker, found.view.subject.seen, action, now)
    return Reply(done=False, words=described(found.view, action), exit_code=UsageError.exit_code, token=token)


def _is_still(found: FoundSubject, revision: str) -> None:
    seen = found.view.subject.seen
    if revision and revision != revision_of(seen):
        raise UsageError(f"{seen.ref.path} has changed since the preview; nothing was done. Preview it again")


async def _confirmed(keeper: Keeper, book: Rulebook, pending: Pending) -> FoundSubject:
    """What the user was shown, if a fresh read still gives that."""
    ref = pending.seen.ref
    found = await read_subject(keeper, book, ref)
    if found is None or found.view.subject.seen.incarnation != pending.seen.incarnation:
        raise UsageError(f"{ref.path} has changed since the confirmation was requested; nothing was done. Try again")
    return found


async def _act_on(keeper: Keeper, book: Rulebook, asker: Asker, found: FoundSubject, action: Action) -> Closed:
    """Same evidence, condition and outcome as a pass."""
    may_be_done(keeper, book, asker, found, action)
    if not is_admin(book, asker.name):
        await _let_pass(keeper, found)
    async with keeper.ledger.lease(found.platform.name, found.platform.place):
        paused = await keeper.ledger.paused()
        if paused is not None:
            raise UsageError(f"everything is paused ({paused}); nothing was done. Resume with: gpukeeper resume")
        await keeper.clock_watch.recall(keeper)
        await settle(keeper, found.platform)
        ref = found.view.subject.ref
        if any(i.ref and i.ref.key == ref.key for i in await keeper.ledger.open_intents(ref.platform, ref.place)):
            raise UsageError(f"an earlier step on {ref.path} is still open; nothing was done. Try again soon")
        pass_id = await keeper.ledger.next_pass()
        bound = None if is_admin(book, asker.name) else asker.uid
        step = Step(f"{pass_id}.1", _asked(found.view, book, asker.name, action), bound, asker.name)
        return await take(keeper, found.platform, step, book, pass_id)


async def _let_pass(keeper: Keeper, found: FoundSubject) -> None:
    """A pass that another request kept waiting comes first: many requests must not keep passes away."""
    platform = found.platform
    for _ in range(PASS_WAITED_FOR):
        if key_of(platform) not in keeper.request_state.turned_away:
            return
        await asyncio.sleep(1)
    raise UsageError(f"a pass on {place_name(platform)} is waiting and comes first; nothing was done. Try again soon")


def may_be_done(keeper: Keeper, book: Rulebook, asker: Asker, found: FoundSubject, action: Action) -> None:
    """Raises UsageError: not by this user, not on this object, or not now."""
    view, who = found.view, asker.name
    subject, path = view.subject, view.subject.ref.path
    _allow(may_act(view, book, who))
    if isinstance(subject.root, str):
        raise UsageError(f"{path} is part of {subject.root}, and only the root can be acted on, as a whole")
    if subject.shape is Shape.REMNANT:
        raise UsageError("; ".join((f"{path} is only reported, nothing was done", *subject.findings)))
    if action not in found.platform.guards:
        raise UsageError(f"{found.platform.name} offers no {action}; nothing was done")
    # What a file inside requests, or a restore grants, its owner may revoke; and it is no obstacle to an admin in an
    # emergency.
    own = {who, KEEP_ALIVE, RESTORE}
    held = next((h for h in view.memory.holds if h.by not in own and h.until > keeper.clock.now()), None)
    if held is not None:
        raise UsageError(f"{path} is held by {held.by} ({held.reason or 'no reason given'}); release it first")
    if subject.shape is Shape.TREE and not is_admin(book, who):
        _may_lose_tree(keeper, book, asker, view)


def _may_lose_tree(keeper: Keeper, book: Rulebook, asker: Asker, view: View) -> None:
    """An ordinary user may have removed what they could remove themselves: a tree in which everything is theirs. Files
    belong to a uid, whatever name it has. The act checks again after the tree was moved out of reach."""
    path, uids = view.subject.ref.path, view.subject.uids
    if asker.uid is None or uids is None:
        raise UsageError(
            f"the owner of the files in {path} could not be determined; nothing was done. {whom_to_ask(book)}"
        )
    if uids != {asker.uid}:
        named = ", ".join(str(uid) for uid in sorted(uids - {asker.uid})[:3])
        raise UsageError(
            f"not everything in {path} belongs to {asker.name} (uid {asker.uid}): entries of uid {named}; "
            f"nothing was done. {whom_to_ask(book)}"
        )
    why = why_not_yet(view, book.settings(view.subject), keeper.clock.now())
    if why is not None:
        raise UsageError(f"{path}: {why}. Nothing was done. {whom_to_ask(book)}")


def described(view: View, action: Action) -> str:
    """What would be done, to exactly what."""
    subject = view.subject
    facts = [f"owner {subject.owner if isinstance(subject.owner, str) else 'unknown'}"]
    if subject.shape is not Shape.TREE:
        facts.append("state unknown" if isinstance(subject.state, Unknown) else str(subject.state))
    if isinstance(subject.devices, Unknown):
        facts.append("GPUs unknown")
    elif subject.devices:
        facts.append(f"{len(subject.devices)} GPU{'s' if len(subject.devices) > 1 else ''}")
    if not isinstance(subject.size, Unknown) and subject.size:
        facts.append(size_in_words(subject.size))
    lost = f". Lost with it: {', '.join(subject.loses)}" if isinstance(subject.loses, tuple) and subject.loses else ""
    return f"{action} {subject.ref.path} ({subject.ref.uid}; {', '.join(facts)}){lost}"


async def pause(keeper: Keeper, book: Rulebook, who: str, reason: str) -> str:
    """The first pause applies, with its reason; a second one is recorded and its author gets the first reason."""
    _allow_admin(book, who)
    before = await keeper.ledger.paused()
    await keeper.ledger.append([Paused(at=keeper.clock.now(), by=who, reason=reason)])
    if before is None:
        return "Paused: no actions until: gpukeeper resume"
    return (
        f"Already paused: {before}. That reason stays; yours was written to the ledger. "
        "One `gpukeeper resume` ends both, so coordinate first"
    )


async def resume(keeper: Keeper, book: Rulebook, who: str) -> str:
    _allow_admin(book, who)
    before = await keeper.ledger.paused()
    if before is None:
        raise UsageError("not paused; nothing was changed")
    await keeper.ledger.append([Resumed(at=keeper.clock.now(), by=who)])
    return f"Resumed. It was paused: {before}"


async def _change_gpu(keeper: Keeper, book: Rulebook, who: str, request: Request) -> str:
    """`workload` is the uuid of a GPU or slice of the machine that gets the request."""
    _allow_admin(book, who)
    uuid = request.workload
    if not GPU_UUID.fullmatch(uuid):
        raise UsageError(f'"{uuid}" is not the uuid of a GPU. See: gpukeeper node list')
    if request.verb == "quarantine":
        if not await clean.quarantine(keeper, uuid, who, request.reason or f"requested by {who}"):
            raise UsageError(f"{uuid} is quarantined already. Why: gpukeeper node show {uuid}")
        return f"{uuid} is quarantined until: gpukeeper node return {uuid}"
    if not await clean.give_back(keeper, uuid, who, request.reason):
        raise UsageError(f"{uuid} is not quarantined; nothing was changed")
    return f"{uuid} was returned."


def _asked(view: View, book: Rulebook, who: str, action: Action) -> Decision:
    subject, limits = view.subject, book.settings(view.subject).limits
    return Decision(
        seen=subject.seen,
        action=action,
        rule=REQUEST,
        reason=f"requested by {who}",
        verdict=Verdict.DUE,
        grace=timedelta() if isinstance(limits, Unknown) else limits.stop_grace,
        running=subject.state in (State.RUNNING, State.PAUSED),
        owner=_owner(view),
        owner_verified=subject.owner_verified,
        gpus=subject.devices if isinstance(subject.devices, Unknown) else len(subject.devices),
    )


def _owner(view: View) -> str | None:
    return view.subject.owner if isinstance(view.subject.owner, str) else None


def _allow(refused: NotAllowed | None) -> None:
    if refused is not None:
        raise UsageError(refused.why)


def _allow_admin(book: Rulebook, who: str) -> None:
    if not is_admin(book, who):
        raise UsageError(f"only an admin may do that; {who} is not one of: {', '.join(book.policy.admins)}")


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
            granted = await hold_granted(keeper, book, found, who, request)
            return f"hold until {until_in_words(granted)}.{not_prevented(book, found, granted)}"
        case "release":
            return _preview_release(keeper, book, who, found)
        case _:
            return await _preview_stop(keeper, book, who, found)


def _preview_release(keeper: Keeper, book: Rulebook, who: str, found: FoundSubject) -> str:
    ended, left = release_of(found.view, book, who, keeper.clock.now())
    ends = (*(("its own mark",) if found.view.subject.marks.unhold else ()), *ended.words)
    still = f" Still held afterwards: {'; '.join(left)}." if left else ""
    if not ends:
        raise UsageError(f"there is no hold that {who} may end.{still}")
    return f"release {', '.join(ends)}.{still}"


async def _preview_stop(keeper: Keeper, book: Rulebook, who: str, found: FoundSubject) -> str:
    may_be_done(keeper, book, Asker(who), found, Action.STOP)
    paused = await keeper.ledger.paused()
    if paused is not None:
        raise UsageError(f"everything is paused ({paused})")
    if found.view.subject.state not in (State.RUNNING, State.PAUSED):
        raise UsageError(f"it is not running ({found.view.subject.state})")
    return described(found.view, Action.STOP)
