"""What people ask for: hold, release, stop, remove, restore, pause. The same rights by socket and by command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta

import msgspec

from gpukeeper.engine import clean
from gpukeeper.engine.act import take
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.observe import holds_elsewhere, views
from gpukeeper.engine.ports import Platform
from gpukeeper.engine.verify import evidence_of, settle
from gpukeeper.lifecycle.decide import REQUEST
from gpukeeper.lifecycle.holds import NotAllowed, is_admin, may_hold, may_touch, release_of
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Accepted, Action, Decision, Evidence, Refused, Result, Step, Verdict, View
from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import KeeperError, PlatformError, UsageError
from gpukeeper.model.event import Closed, Event, Held, Paused, Released, Restored, Resumed
from gpukeeper.model.identity import Ref
from gpukeeper.model.memory import KEEP_ALIVE, Hold
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import State, Subject
from gpukeeper.model.unknown import Unknown

SAID = 2  # of what could not be seen
GPU_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z][0-9A-Za-z/-]{0,99}")


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing somebody asks for. Who asks is never part of it: the socket or the process says that."""

    verb: str
    workload: str = ""
    seconds: float | None = None
    reason: str = ""
    suspends: tuple[str, ...] = ()
    attended: bool = False  # a person confirmed it on a terminal


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    done: bool
    words: str
    exit_code: int = 0


async def fulfil(keeper: Keeper, book: Rulebook, who: str, request: Request) -> Reply:
    """Do what was asked, with the rights of `who`. Every refusal is a sentence."""
    try:
        words = await _fulfil(keeper, book, who, request)
    except OverflowError:
        return Reply(done=False, words="that is longer than anybody can hold anything", exit_code=2)
    except KeeperError as problem:
        return Reply(done=False, words=str(problem), exit_code=problem.exit_code)
    return words if isinstance(words, Reply) else Reply(done=True, words=words)


async def _fulfil(keeper: Keeper, book: Rulebook, who: str, request: Request) -> str | Reply:
    match request.verb:
        case "hold":
            span = timedelta(seconds=request.seconds) if request.seconds is not None else None
            ref, granted = await hold(
                keeper, book, request.workload, who, span, reason=request.reason, suspends=request.suspends
            )
            until = f"{granted.until:%Y-%m-%d %H:%M} UTC ({in_words(granted.until - granted.at)})"
            what = f" It suspends {', '.join(granted.suspends)} only." if granted.suspends else ""
            return f"{ref.path} is held until {until}.{what}"
        case "release":
            return await release(keeper, book, request.workload, who)
        case "stop" | "remove":
            line = await act_now(keeper, book, request.workload, who, Action(request.verb), attended=request.attended)
            assert line.ref is not None
            words = f"{line.ref.path}: {line.result}: {line.reason}"
            done = line.result is Result.RECLAIMED
            return Reply(done=done, words=words, exit_code=0 if done else 3)
        case "pause":
            await pause(keeper, book, who, request.reason)
            return "Paused: nothing is acted on until: gpukeeper resume"
        case "resume":
            await resume(keeper, book, who)
            return "Resumed."
        case "quarantine" | "return":
            return await _change_gpu(keeper, book, who, request)
        case "restore":
            ref, undone = await restore(keeper, book, request.workload, who)
            hold_it = f"keep it: gpukeeper workload hold {ref.path}"
            if undone is Action.REMOVE:
                made = "is back from what was captured, without what was written inside it"
                start = "If it does not run yet, start it soon; once more `gpukeeper restore` does that on a cluster"
                return f"{ref.path} {made}. {start}. It may go again: {hold_it}"
            return f"{ref.path} was restored. It may be due again soon; {hold_it}"
        case _:
            raise UsageError(f'nobody knows how to "{request.verb}"')


class Found(msgspec.Struct, frozen=True):
    platform: Platform
    view: View


async def find(keeper: Keeper, book: Rulebook, words: str) -> Found:
    """The one thing whose path ends with these words, as it is now."""
    matches: list[Found] = []
    silent: list[str] = []
    for platform in keeper.platforms:
        try:
            matches += await _find_at(keeper, platform, book, words, silent)
        except PlatformError as problem:
            silent.append(str(problem))
    # Whoever gives a thing the uid of another as its name must not keep that one from being named.
    matches = [one for one in matches if one.view.subject.ref.uid == words] or matches
    if not matches:
        matches = [one for platform in keeper.platforms for one in await _find_parts(keeper, platform, book, words)]
    if not matches:
        more = f"; and {len(silent) - SAID} more" if len(silent) > SAID else ""
        unseen = f" Not everything could be seen: {'; '.join(silent[:SAID])}{more}." if silent else ""
        raise UsageError(f'nothing in the policy\'s scope is called "{words}".{unseen} See: gpukeeper workload list')
    if len(matches) > 1:
        paths = "\n  ".join(sorted(f"{m.view.subject.ref.path} ({m.view.subject.ref.uid})" for m in matches))
        raise UsageError(f'"{words}" fits {len(matches)} things; write more of the path, or the uid:\n  {paths}')
    return matches[0]


async def _find_at(keeper: Keeper, platform: Platform, book: Rulebook, words: str, silent: list[str]) -> list[Found]:
    """`silent` gets what could not be listed."""
    scope = book.policy.scope.get(platform.name)
    if scope is None:
        return []
    fitting: list[Subject] = []
    async for page in platform.observe(scope):
        fitting += [one for one in page.subjects if one.ref.ends_with(words)]
        silent += [f"{one.what}: {one.why}" for one in page.unseen]
    joined = await views(keeper, platform, fitting, book, [], keeper.clock.now())
    return [Found(platform, view) for view in joined]


async def _find_parts(keeper: Keeper, platform: Platform, book: Rulebook, words: str) -> list[Found]:
    """What is part of a workload: to be explained, never acted on by itself."""
    try:
        refs = await platform.parts(words)
    except PlatformError:
        return []
    looked = [await platform.look(ref) for ref in refs]
    parts = [one for one in looked if isinstance(one, Subject)]
    return [Found(platform, view) for view in await views(keeper, platform, parts, book, [], keeper.clock.now())]


async def hold(
    keeper: Keeper,
    book: Rulebook,
    words: str,
    who: str,
    span: timedelta | None,
    *,
    reason: str = "",
    suspends: tuple[str, ...] = (),
) -> tuple[Ref, Hold]:
    found = await find(keeper, book, words)
    now, subject = keeper.clock.now(), found.view.subject
    view = msgspec.structs.replace(found.view, elsewhere=await holds_elsewhere(keeper, book, subject, now))
    granted = may_hold(view, book, who, span, now, reason=reason, suspends=suspends)
    if isinstance(granted, NotAllowed):
        raise UsageError(granted.why)
    await keeper.ledger.append([Held(at=now, ref=subject.ref, owner=_owner(found.view), by=who, hold=granted)])
    return subject.ref, granted


async def release(keeper: Keeper, book: Rulebook, words: str, who: str) -> str:
    """Ends what `who` may end, and says what that was and what still holds."""
    found = await find(keeper, book, words)
    _allow(found.view, book, who)
    now, subject = keeper.clock.now(), found.view.subject
    ended, left = release_of(found.view, book, who, now)
    if not ended.words:
        still = f" Still held: {'; '.join(left)}." if left else ""
        raise UsageError(f"nothing was released: {subject.ref.path} has no hold that {who} may end.{still}")
    line = Released(at=now, ref=subject.ref, owner=_owner(found.view), by=who, mark=ended.mark)
    await keeper.ledger.append([line])
    if left:
        return f"{subject.ref.path}: released {', '.join(ended.words)}. Still held: {'; '.join(left)}."
    return f"{subject.ref.path} is no longer held."


async def act_now(
    keeper: Keeper, book: Rulebook, words: str, who: str, action: Action, *, attended: bool = False
) -> Closed:
    """Stop or remove one thing because its owner or an admin asks. Same evidence, condition and outcome as a pass."""
    if not attended and book.policy.mode is Mode.PLAN:
        raise UsageError(
            "mode is plan, and only mode: enforce acts unattended. Nothing was done; confirm on a terminal"
        )
    found = await find(keeper, book, words)
    _allow(found.view, book, who)
    if isinstance(found.view.subject.root, str):
        whole = found.view.subject.root
        raise UsageError(f"{found.view.subject.ref.path} is part of {whole}, and only that can be acted on as a whole")
    if action not in found.platform.guards:
        raise UsageError(f"{found.platform.name} offers no {action}; nothing was done")
    # What a file inside asks for, its owner may take back; and it is no obstacle to an admin in an emergency.
    own = {who, KEEP_ALIVE} if found.view.subject.owner == who or is_admin(book, who) else {who}
    held = next((h for h in found.view.memory.holds if h.by not in own and h.until > keeper.clock.now()), None)
    if held is not None:
        path = found.view.subject.ref.path
        raise UsageError(f"{path} is held by {held.by} ({held.reason or 'no reason given'}); release it first")
    async with keeper.ledger.lease(found.platform.name, found.platform.place):
        paused = await keeper.ledger.paused()
        if paused is not None:
            raise UsageError(f"everything is paused ({paused}); nothing was done. Go on with: gpukeeper resume")
        await settle(keeper, found.platform)
        ref = found.view.subject.ref
        if any(i.ref and i.ref.key == ref.key for i in await keeper.ledger.open_intents(ref.platform, ref.place)):
            raise UsageError(f"an earlier step on {ref.path} is not settled yet; nothing was done. Try again soon")
        pass_id = await keeper.ledger.next_pass()
        step = Step(f"{pass_id}.1", _asked(found.view, book, who, action))
        return await take(keeper, found.platform, step, book, pass_id)


async def pause(keeper: Keeper, book: Rulebook, who: str, reason: str) -> None:
    _allow_admin(book, who)
    await keeper.ledger.append([Paused(at=keeper.clock.now(), by=who, reason=reason)])


async def resume(keeper: Keeper, book: Rulebook, who: str) -> None:
    _allow_admin(book, who)
    await keeper.ledger.append([Resumed(at=keeper.clock.now(), by=who)])


async def _change_gpu(keeper: Keeper, book: Rulebook, who: str, request: Request) -> str:
    """`workload` is the uuid of a GPU or slice of the machine that is asked."""
    _allow_admin(book, who)
    uuid = request.workload
    if not GPU_UUID.fullmatch(uuid):
        raise UsageError(f'"{uuid}" is not the uuid of a GPU. See: gpukeeper node list')
    if request.verb == "quarantine":
        if not await clean.quarantine(keeper, uuid, who, request.reason or f"asked for by {who}"):
            raise UsageError(f"{uuid} is quarantined already. Why: gpukeeper node show {uuid}")
        return f"{uuid} is quarantined until: gpukeeper node return {uuid}"
    if not await clean.give_back(keeper, uuid, who, request.reason):
        raise UsageError(f"{uuid} is not quarantined; nothing was changed")
    return f"{uuid} was returned."


async def restore(keeper: Keeper, book: Rulebook, words: str, who: str) -> tuple[Ref, Action]:
    """Bring back what gpukeeper last stopped or removed under this name; and which of the two it was."""
    lines = await keeper.ledger.about(words)
    done = [
        one
        for one in lines
        if isinstance(one, Closed) and one.result is Result.RECLAIMED and one.action is not Action.TRIM
    ]
    things = {(one.ref.path, one.owner): one for one in done if one.ref is not None}  # the newest of each
    if len(things) > 1:
        told = "\n  ".join(_newest_of(one) for one in things.values())
        raise UsageError(f'"{words}" fits {len(things)} things; write more of the path, or the uid:\n  {told}')
    if not done or done[-1].ref is None:
        raise UsageError(f'gpukeeper reclaimed nothing called "{words}". See: gpukeeper ledger list --type outcome')
    last = done[-1]
    ref = done[-1].ref
    if not is_admin(book, who) and last.owner != who:
        raise UsageError(f"{ref.path} belongs to {last.owner or 'nobody known'}; {who} may not restore it")
    platform = next((p for p in keeper.platforms if (p.name, p.place) == (ref.platform, ref.place)), None)
    if platform is None:
        raise UsageError(f"{ref.platform}/{ref.place} is not reachable from here; nothing was restored")
    name = evidence_of(lines, last.step)
    evidence = await keeper.evidence.load(name) if name else None
    if isinstance(evidence, Unknown):
        raise UsageError(f"the evidence {name} cannot be read ({evidence.why}); nothing was restored")
    if evidence is not None and last.action is Action.REMOVE:
        evidence = Evidence({**await _before_the_stop(keeper, lines, ref), **evidence.files})
    answer = await platform.restore(ref, evidence)
    words = "restored" if isinstance(answer, Accepted) else answer.why
    await keeper.ledger.append(
        [Restored(at=keeper.clock.now(), ref=ref, owner=last.owner, by=who, evidence=name, result=words)]
    )
    if isinstance(answer, Refused | Unknown):
        raise UsageError(f"{ref.path} was not restored: {words}")
    return ref, last.action


def _asked(view: View, book: Rulebook, who: str, action: Action) -> Decision:
    subject, limits = view.subject, book.settings(view.subject).limits
    return Decision(
        seen=subject.seen,
        action=action,
        rule=REQUEST,
        reason=f"asked for by {who}",
        verdict=Verdict.DUE,
        grace=timedelta() if isinstance(limits, Unknown) else limits.stop_grace,
        running=subject.state in (State.RUNNING, State.PAUSED),
        owner=_owner(view),
        gpus=subject.devices if isinstance(subject.devices, Unknown) else len(subject.devices),
    )


async def _before_the_stop(keeper: Keeper, lines: Sequence[Event], ref: Ref) -> dict[str, bytes]:
    """What gpukeeper stopped before it removed it was still as its owner had made it when that stop was prepared."""
    stops = [one for one in lines if isinstance(one, Closed) and one.action is Action.STOP and one.ref == ref]
    name = evidence_of(lines, stops[-1].step) if stops else ""
    found = await keeper.evidence.load(name) if name else None
    return {} if found is None or isinstance(found, Unknown) else {f"stop/{k}": v for k, v in found.files.items()}


def _newest_of(one: Closed) -> str:
    assert one.ref is not None
    return f"{one.ref.path} ({one.ref.uid}, {one.owner or 'nobody known'}, {one.at:%Y-%m-%d %H:%M})"


def _owner(view: View) -> str | None:
    return view.subject.owner if isinstance(view.subject.owner, str) else None


def _allow(view: View, book: Rulebook, who: str) -> None:
    refused = may_touch(view, book, who)
    if refused is not None:
        raise UsageError(refused.why)


def _allow_admin(book: Rulebook, who: str) -> None:
    if not is_admin(book, who):
        raise UsageError(f"only an admin may do that; {who} is not one of: {', '.join(book.policy.admins)}")
