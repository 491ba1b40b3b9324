"""Looks at servers, changes them and verifies the result, over ssh; reads the bundle, and what a pass printed.

A server that fails or hangs stops no other. What happens on a server is server_program.py; what should happen is
plan.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import zipfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gpukeeper.clients.ssh import HostError, Program, Settings, SshClient
from gpukeeper.model import reading
from gpukeeper.model.decision import Unseen
from gpukeeper.model.errors import UsageError
from gpukeeper.model.subject import Disk, Ref
from gpukeeper.model.unknown import Unknown, direct
from gpukeeper.rollout import plan as planning
from gpukeeper.rollout import server_program
from gpukeeper.rollout.plan import Bundle, Done, Seen, ServerPlan, Wanted

ABOUT, INSTALLER = "about.json", "__main__.py"


class _About(msgspec.Struct, frozen=True):
    version: str
    pythons: tuple[str, ...]
    machine: str


def read_bundle(path: Path) -> Bundle:
    try:
        with zipfile.ZipFile(path) as archive:
            about = reading.decode(archive.read(ABOUT), type=_About)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"the bundle {path} cannot be read: {error.strerror}. Build one: make bundle") from error
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise UsageError(f"{path} is no bundle of gpukeeper ({error}). Build one: make bundle") from error
    return Bundle(
        path=str(path),
        version=about.version,
        sha256=digest,
        size=size,
        pythons=about.pythons,
        machine=about.machine,
    )


def installer(bundle: Bundle) -> str:
    with zipfile.ZipFile(bundle.path) as archive:
        return archive.read(INSTALLER).decode()


RECLAIMED: Final = "reclaimed"


class _Seen(msgspec.Struct, frozen=True):
    ref: Ref


class PlannedStep(msgspec.Struct, frozen=True):
    seen: _Seen
    action: str
    reason: str


class StepOutcome(msgspec.Struct, frozen=True):
    ref: Ref
    action: str
    result: str
    reason: str
    gpus_back: int | Unknown = 0


class Figures(msgspec.Struct, frozen=True):
    """Of a node: its temporary bytes; of a disk: its used ones. Without any: they could not be read again."""

    bytes: int | Unknown = Unknown("it was not read")
    disk: Disk | None = None
    disk_size: int | None = None
    disk_free: int | None = None


class NodeChange(msgspec.Struct, frozen=True):
    """A node or a disk before a pass and after it. `after` None: nothing was done, so it was not read again."""

    kind: str
    name: str
    before: Figures
    after: Figures | None = None


class PlacePass(msgspec.Struct, frozen=True, kw_only=True):
    """`leased`, `stopped`, `breaker`, `paused`: why nothing, or not everything, was done."""

    platform: str
    place: str
    steps: tuple[PlannedStep, ...] = ()
    outcomes: tuple[StepOutcome, ...] = ()
    deferred: tuple[PlannedStep, ...] = ()
    unseen: tuple[Unseen, ...] = ()
    nodes: tuple[NodeChange, ...] = ()
    bytes_back: int = 0
    leased: str | None = None
    stopped: str | None = None
    breaker: str | None = None
    paused: str | None = None


class Gpus(msgspec.Struct, frozen=True):
    number: int
    free: int


class ServerPass(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a server. `code`: of the command there, and what it `said` where that is not 0. `problem`: why it
    printed nothing that can be read. `gpus_before`, `gpus_after`: None: there are none, or they could not be read."""

    code: int
    mode: str = ""
    places: tuple[PlacePass, ...] = ()
    said: str = ""
    problem: str = ""
    seconds: float | None = None
    gpus_before: Gpus | None = None
    gpus_after: Gpus | None = None

    @property
    def bytes_back(self) -> int:
        return sum(place.bytes_back for place in self.places)

    @property
    def gpus_back(self) -> int:
        """Those that were not measured do not count."""
        found = [one.gpus_back for place in self.places for one in place.outcomes if one.result == RECLAIMED]
        return sum(one for one in found if not isinstance(one, Unknown))


class ServerLogs(msgspec.Struct, frozen=True, kw_only=True):
    """The newest lines of a server, the oldest first: errors in the ledger, all lines of it, those in the journal of
    systemd. `problems`: what could not be read."""

    errors: tuple[str, ...] = ()
    ledger: tuple[str, ...] = ()
    journal: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        return {"errors": self.errors, "ledger": self.ledger, "journal": self.journal}


class Step(msgspec.Struct, frozen=True):
    """A line for people: what would be done, or what was."""

    word: str
    path: str
    action: str
    reason: str


def steps(place: PlacePass) -> Iterator[Step]:
    for one in place.steps:
        yield Step("due", one.seen.ref.path, one.action, one.reason)
    for done in place.outcomes:
        yield Step(done.result, done.ref.path, done.action, done.reason)


def why_not_all(found: ServerPass) -> tuple[str, ...]:
    """Why a pass is not complete, in words; empty: it is."""
    words = [found.problem] if found.problem else []
    for place in found.places:
        name = f"{place.platform}/{place.place}"
        words += [f"{name}: {why}" for why in (place.leased, place.stopped, place.breaker, place.paused) if why]
        words += [f"{name}: {one.what} could not be read: {one.why}" for one in place.unseen]
        failed = sum(one.result != RECLAIMED for one in place.outcomes)
        words += [f"{name}: {failed} of {len(place.outcomes)} steps did not reclaim"] if failed else []
        words += [f"{name}: {len(place.deferred)} deferred by the budget"] if place.deferred else []
    return tuple(words) or ((found.said or f"exit code {found.code}",) if found.code else ())


T = TypeVar("T")
AT_ONCE = 10


@direct
class Outcome(StrEnum):
    UNCHANGED = "unchanged"
    PLANNED = "planned"
    DEPLOYED = "deployed"
    REMOVED = "removed"
    NOT_STARTED = "not started"
    BLOCKED = "blocked"
    DIFFERS = "differs"
    FAILED = "failed"
    ROLLED_BACK = "rolled back"
    UNREACHABLE = "unreachable"
    APPLIED = "applied"
    READ = "read"
    INCOMPLETE = "incomplete"
    SKIPPED = "skipped"


GOOD = frozenset(
    {
        Outcome.UNCHANGED,
        Outcome.PLANNED,
        Outcome.DEPLOYED,
        Outcome.REMOVED,
        Outcome.APPLIED,
        Outcome.READ,
        Outcome.SKIPPED,
    }
)


class ServerResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `words`: why, and what to do. `seen` None: it did not answer. `passed`: of a pass."""

    host: str
    outcome: Outcome
    words: tuple[str, ...] = ()
    plan: ServerPlan = ServerPlan()
    seen: Seen | None = None
    passed: ServerPass | None = None
    logs: ServerLogs | None = None

    @property
    def good(self) -> bool:
        return self.outcome in GOOD and not self.plan.drift


Act = Callable[[Wanted], Awaitable[ServerResult]]


class Servers:
    """`settings`: of the client; interpreter, time and rights are those of each server."""

    def __init__(self, settings: Settings, at_once: int = AT_ONCE) -> None:
        self._settings = settings
        self._limit = asyncio.Semaphore(at_once)
        self._program = Program.of(server_program.__file__, server_program.MARK)

    async def each(self, wanted: Sequence[Wanted], act: Act) -> list[ServerResult]:
        """In their order."""

        async def one(server: Wanted) -> ServerResult:
            async with self._limit:
                try:
                    return await act(server)
                except HostError as error:
                    outcome = Outcome.UNREACHABLE if error.code == "unreachable" else Outcome.FAILED
                    return ServerResult(host=server.name, outcome=outcome, words=(str(error),))

        return list(await asyncio.gather(*map(one, wanted)))

    async def look(self, wanted: Wanted) -> Seen:
        """As root, where that is possible."""
        found = await self._request(wanted, Seen, "look", sudo=False)
        if found.root or found.sudo:
            return found
        return msgspec.structs.replace(await self._request(wanted, Seen, "look", sudo=True), by_sudo=True)

    async def plan(self, wanted: Wanted) -> ServerResult:
        seen = await self.look(wanted)
        return planned(wanted.name, planning.plan(wanted, seen), seen)

    async def plan_upgrade(self, wanted: Wanted) -> ServerResult:
        seen = await self.look(wanted)
        return planned(wanted.name, planning.upgrade(wanted, seen)[1], seen)

    async def status(self, wanted: Wanted) -> ServerResult:
        seen = await self.look(wanted)
        if seen.directory == "absent":
            words: tuple[str, ...] = ("gpukeeper is not installed there. Install it: gpukeeper fleet deploy",)
        else:
            words = (*planning.unverified(wanted, seen), *planning.overdue(seen))
        found = ServerPlan(drift=planning.plan(wanted, seen).drift)
        outcome = Outcome.DIFFERS if words or found.drift else Outcome.UNCHANGED
        return ServerResult(host=wanted.name, outcome=outcome, words=(*words, *found.drift), plan=found, seen=seen)

    # Passes, by the policy that is in force on a server.

    async def plan_pass(self, wanted: Wanted) -> ServerResult:
        return await self._pass(wanted, act=False)

    async def apply_pass(self, wanted: Wanted) -> ServerResult:
        return await self._pass(wanted, act=True)

    async def logs(self, wanted: Wanted, last: int) -> ServerResult:
        seen, why = await self._ready(wanted, "the ledger can only root read")
        if why:
            return ServerResult(host=wanted.name, outcome=Outcome.BLOCKED, words=(why,), seen=seen)
        found = await self._request(wanted, ServerLogs, "logs", sudo=not seen.root, last=last)
        outcome = Outcome.INCOMPLETE if found.problems else Outcome.READ
        return ServerResult(host=wanted.name, outcome=outcome, words=found.problems, seen=seen, logs=found)

    async def _ready(self, wanted: Wanted, needs_root: str) -> tuple[Seen, str]:
        """And why the gpukeeper there cannot be asked; empty: it can."""
        seen = await self._request(wanted, Seen, "look", sudo=False, brief=True)
        if seen.directory == "absent":
            return seen, "gpukeeper is not installed there. Install it: gpukeeper fleet deploy"
        return seen, "" if seen.can_become_root else f"{needs_root}: {seen.sudo}"

    async def _pass(self, wanted: Wanted, *, act: bool) -> ServerResult:
        seen, why = await self._ready(wanted, "a pass over the work of all users needs root")
        if why:
            return ServerResult(host=wanted.name, outcome=Outcome.BLOCKED, words=(why,), seen=seen)
        found = await self._request(wanted, ServerPass, "one_pass", sudo=not seen.root, act=act)
        words = why_not_all(found)
        complete = Outcome.APPLIED if act else Outcome.PLANNED
        outcome = Outcome.FAILED if found.problem else Outcome.INCOMPLETE if words else complete
        return ServerResult(host=wanted.name, outcome=outcome, words=words, seen=seen, passed=found)

    def _client(self, wanted: Wanted, *, sudo: bool) -> SshClient:
        settings = msgspec.structs.replace(
            self._settings, python=wanted.python, request=wanted.timeout, sudo=sudo, user=self._settings.user
        )
        return SshClient(settings, self._program)

    async def _request(self, wanted: Wanted, reply: type[T], do: str, *, sudo: bool, **more: object) -> T:
        return await self._client(wanted, sudo=sudo).request(wanted.host, reply, do, **(_request(wanted) | more))

    # Changes.

    async def deploy(self, wanted: Wanted) -> ServerResult:
        before = await self.look(wanted)
        return await self._deploy(wanted, before, planning.plan(wanted, before))

    async def upgrade(self, wanted: Wanted) -> ServerResult:
        before = await self.look(wanted)
        kept, found = planning.upgrade(wanted, before)
        return await self._deploy(kept, before, found)

    async def _deploy(self, wanted: Wanted, before: Seen, found: ServerPlan) -> ServerResult:
        if found.blocked or not found.steps:
            return planned(wanted.name, found, before)
        try:
            done = await self._change(wanted, before, found)
            after = await self.look(wanted)
        except HostError as error:
            words = f"{error}. What was begun is continued by the next `gpukeeper fleet deploy`."
            return ServerResult(host=wanted.name, outcome=Outcome.FAILED, words=(words,), plan=found, seen=before)
        problems = ((done.problem,) if done.problem else ()) + planning.unverified(wanted, after)
        drift = planning.plan(wanted, after).drift
        if not problems:
            found = msgspec.structs.replace(found, drift=drift)
            return ServerResult(host=wanted.name, outcome=Outcome.DEPLOYED, words=drift, plan=found, seen=after)
        if done.installed and before.version:
            return await self._roll_back(wanted, before, found, problems)
        return ServerResult(host=wanted.name, outcome=Outcome.FAILED, words=problems, plan=found, seen=after)

    async def _change(self, wanted: Wanted, before: Seen, found: ServerPlan) -> Done:
        if not found.installs:
            return await self._request(wanted, Done, "deploy", sudo=before.by_sudo, size=0)
        assert wanted.bundle is not None, "only a bundle is installed"
        client, about = self._client(wanted, sudo=before.by_sudo), _request(wanted)
        about |= {"size": wanted.bundle.size, "sha256": wanted.bundle.sha256}
        return await client.send(wanted.host, Done, "deploy", Path(wanted.bundle.path), **about)

    async def _roll_back(
        self, wanted: Wanted, before: Seen, found: ServerPlan, problems: tuple[str, ...]
    ) -> ServerResult:
        """To the version and the policy before."""
        assert wanted.bundle is not None, "it was installed from a bundle"
        given = {"installer": installer(wanted.bundle), "policy": before.policy}
        try:
            done = await self._request(wanted, Done, "roll_back", sudo=before.by_sudo, **given)
            after = await self.look(wanted)
        except HostError as error:
            words = (*problems, f"it could not be rolled back: {error}")
            return ServerResult(host=wanted.name, outcome=Outcome.FAILED, words=words, plan=found)
        wrong = ((done.problem,) if done.problem else ()) + planning.not_working(after)
        words = (*problems, *(f"after rolling back: {one}" for one in wrong))
        outcome = Outcome.FAILED if wrong or after.version != before.version else Outcome.ROLLED_BACK
        return ServerResult(host=wanted.name, outcome=outcome, words=words, plan=found, seen=after)

    async def remove(self, wanted: Wanted) -> ServerResult:
        before = await self.look(wanted)
        if before.directory == "absent" and before.active:
            why = f"{before.active} is in service there, and gpukeeper is not in {wanted.directory}. Name its directory"
            return ServerResult(host=wanted.name, outcome=Outcome.BLOCKED, words=(why,), seen=before)
        if before.directory == "absent":
            return ServerResult(host=wanted.name, outcome=Outcome.UNCHANGED, words=("it is not there",), seen=before)
        if not before.can_become_root:
            why = f"this needs root: {before.sudo}"
            return ServerResult(host=wanted.name, outcome=Outcome.BLOCKED, words=(why,), seen=before)
        done = await self._request(wanted, Done, "remove", sudo=before.by_sudo)
        words = tuple(word for word in (done.problem, *(f"{one} is kept" for one in done.left)) if word)
        after = await self.look(wanted)
        gone = not done.problem and not done.left and after.directory == "absent" and not after.active
        outcome = Outcome.REMOVED if gone else Outcome.FAILED
        return ServerResult(host=wanted.name, outcome=outcome, words=words, seen=after)

    async def in_order(self, wanted: Sequence[Wanted], act: Act, first: int) -> list[ServerResult]:
        """The first ones, and the others only if all of those are good. 0: all at the same time."""
        begun = await self.each(wanted[:first], act)
        if all(one.good for one in begun):
            return begun + await self.each(wanted[first:], act)
        words = "a server before it failed, so nothing was done here"
        rest = [ServerResult(host=one.name, outcome=Outcome.NOT_STARTED, words=(words,)) for one in wanted[first:]]
        return begun + rest


def planned(host: str, found: ServerPlan, seen: Seen) -> ServerResult:
    if found.blocked:
        outcome, words = Outcome.BLOCKED, found.blocked
    else:
        outcome = Outcome.PLANNED if found.steps else Outcome.UNCHANGED
        words = tuple(step.words for step in found.steps)
    return ServerResult(host=host, outcome=outcome, words=(*words, *found.drift), plan=found, seen=seen)


def _request(wanted: Wanted) -> dict[str, object]:
    policy = wanted.policy.text if wanted.policy is not None else None
    return {"directory": wanted.directory, "answers": wanted.answers(), "policy": policy, "size": 0}
