"""The copy in the fleet database, beside the loop of `serve`: starts the shipper as configured in the policy, and
answers the requests it finds. Copied are the ledger, the present view and the hours of GPUs. Passes do not wait for
any of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gpukeeper.engine.ports import bug_words
from gpukeeper.engine.requests import Reply, Request
from gpukeeper.interfaces.daemon.requests import Identity, carry_out
from gpukeeper.ledger.copy.admin import CopyState
from gpukeeper.ledger.copy.connect import load_driver, problem_of_machine, shown
from gpukeeper.ledger.copy.inbox import SHORTEST_KEY, Answer, Rejected, requester_of, verify
from gpukeeper.ledger.copy.ship import UsageRow, usage_rows
from gpukeeper.ledger.copy.shipper import CopySettings, Shipper, View
from gpukeeper.ledger.database import USAGE, open_for_reading, translated
from gpukeeper.ledger.files import read_secret, usage_path
from gpukeeper.ledger.lines import storable
from gpukeeper.ledger.meta import ensure_identity, remember_shipped, take_nonce
from gpukeeper.ledger.usage import UsageReader
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, LedgerError
from gpukeeper.model.policy import Fleet
from gpukeeper.model.words import plain
from gpukeeper.platforms.host.connect import hostname
from gpukeeper.views.live import MachineView
from gpukeeper.wiring.session import Session

SOONEST = 3.0  # seconds between two views
SHARE = 20  # building views takes at most one part in so many of the time
RENEWED = 30.0  # seconds: a view is built that often though no pass changed anything
CURRENT = 120.0  # seconds; an older view is not copied any more
LARGEST = 32 * 2**20  # bytes of a view; a larger one is copied without workloads that have no GPU, then without all
ROWS = 20_000  # of usage at once, roughly


class FleetSources:
    """Implements Sources. `build` runs in the event loop, everything else in the shipper's thread."""

    def __init__(self, session: Session, log: Callable[[str], None]) -> None:
        self._session, self._log = session, log
        self._view: View | None = None
        self._seq = int(time.time() * 1000)  # higher than all that this daemon used before it was started again
        self._built = float("-inf")  # steady time
        self._last: MachineView | None = None
        self._problem = self._usage_problem = ""  # logged last

    async def build(self) -> None:
        """For ever. What fails is logged, and tried again."""
        live = self._session.keeper.live
        live.enabled, live.gpus_only = True, False
        pause, version, due = SOONEST, -1, 0.0
        while True:
            begun = time.monotonic()
            if live.version != version or begun >= due:
                version, due = live.version, begun + RENEWED
                await self._try_build()
                pause = max(SOONEST, self._session.present.busy * SHARE)
            await asyncio.sleep(pause)

    async def _try_build(self) -> None:
        try:
            await self._build()
            self._problem = ""
        except Exception as problem:
            words = str(problem) if isinstance(problem, KeeperError) else bug_words(problem)
            if words != self._problem:
                self._log(f"the view of this machine is not copied: {words}")
            self._problem = words

    async def _build(self) -> None:
        if not self._session.keeper.live.places:
            return  # no pass was made yet
        view, last = await self._session.present.view(), self._last
        if last is None or msgspec.structs.replace(last, at=view.at) != view:
            body = await asyncio.to_thread(encoded, view)
            self._seq += 1
            self._view = View(self._seq, body)
        self._last, self._built = view, time.monotonic()

    def view(self) -> View | None:
        return self._view if time.monotonic() - self._built < CURRENT else None

    def usage(self, since: datetime | None) -> Sequence[UsageRow]:
        path = usage_path(self._session.ledger.path)
        try:
            with closing(open_for_reading(path, USAGE)) as connection, translated(path):
                return tuple(usage_rows(UsageReader(connection), since, datetime.now(UTC), ROWS))
        except LedgerError as problem:  # the ledger is copied in any case
            if str(problem) != self._usage_problem:
                self._log(f"how the GPUs are used is not copied: {problem}")
            self._usage_problem = str(problem)
            return ()


def encoded(view: MachineView, largest: int = LARGEST) -> bytes:
    """Never larger than that. Bytes of names that are no text are written as the journal writes them."""
    body = _json(view)
    if len(body) <= largest:
        return body
    for kept in (tuple(one for one in view.workloads if one.gpus != 0), ()):
        note = f"{len(view.workloads) - len(kept)} workloads are not in the copy of this machine: there are too many."
        smaller = msgspec.structs.replace(view, workloads=kept, notes=(note, *view.notes[:100]))
        body = _json(smaller)
        if len(body) <= largest:
            return body
    note = f"{len(view.gpus)} GPUs are not in the copy of this machine: there are too many."
    return _json(msgspec.structs.replace(view, workloads=(), gpus=(), notes=(note,)))


def _json(view: MachineView) -> bytes:
    try:
        return msgspec.json.encode(view)
    except UnicodeEncodeError:
        return msgspec.json.encode(storable(msgspec.to_builtins(view)))


LOOK = 10.0  # seconds between two checks of the policy and of the shipper
LONGEST_VIA = 200  # characters
REMEMBER_EVERY = 6  # such checks between two notes in the ledger of how far the copy is


class FleetCopy:
    """One per daemon."""

    def __init__(self, session: Session, log: Callable[[str], None]) -> None:
        self._session, self._log = session, log
        self._sources = FleetSources(session, log)
        self._building: asyncio.Task[None] | None = None
        self._shipper: Shipper | None = None
        self._settings = Fleet()
        self._remembered: int | None = None

    @property
    def state(self) -> CopyState | None:
        """For metrics and health. None: no copy is configured, or it could not be started."""
        return None if self._shipper is None else self._shipper.state

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. A changed policy counts within seconds. What fails here is logged; the daemon goes on."""
        turns = 0
        self._session.copy_state = lambda: self.state
        try:
            while not stop.is_set():
                try:
                    await self._follow(self._session.book.policy.fleet)
                    if turns % REMEMBER_EVERY == 0:
                        await self._remember()
                except KeeperError as problem:
                    self._log(f"the fleet database: {problem}")
                except Exception as bug:
                    self._log(f"the fleet database: {bug_words(bug)}")
                turns += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), LOOK)
        finally:
            await self._end()

    async def _follow(self, wanted: Fleet) -> None:
        if self._shipper is not None:
            self._shipper.check_stuck()
        if wanted == self._settings:
            return
        await self._end()
        self._settings = wanted
        if wanted.copy_to is not None:
            await self._begin(wanted, wanted.copy_to)

    async def _begin(self, wanted: Fleet, address: str) -> None:
        load_driver()
        machine = wanted.machine or hostname().lower()
        problem = problem_of_machine(machine)
        if problem is not None:
            raise KeeperError(f'the host name "{machine}" cannot be used: {problem}. Set fleet.machine in the policy.')
        key = None if wanted.request_key_file is None else read_secret(Path(wanted.request_key_file))
        if key is not None and len(key) < SHORTEST_KEY:
            raise KeeperError(
                f"the key in {wanted.request_key_file} is shorter than {SHORTEST_KEY} characters, so that nothing is "
                "copied. Make one: openssl rand -hex 32"
            )
        await ensure_identity(self._session.ledger)
        settings = CopySettings(
            address=address, machine=machine, password_file=wanted.password_file, signals=wanted.signals
        )
        loop = asyncio.get_running_loop()

        def on_request(document: str, signature: str) -> Future[Answer]:
            """In the shipper's thread."""
            work = answer(self._session, wanted, machine, key, document, signature)
            return asyncio.run_coroutine_threadsafe(work, loop)

        self._shipper = Shipper(
            settings, self._session.ledger.path, sources=self._sources, on_request=on_request, log=self._log
        )
        self._shipper.start()
        self._building = asyncio.create_task(self._sources.build())
        self._log(f"copying to the fleet database {shown(address)} as {machine}")

    async def _remember(self) -> None:
        state = self.state
        if state is not None and state.shipped is not None and state.shipped != self._remembered:
            await remember_shipped(self._session.ledger, state.shipped)
            self._remembered = state.shipped

    async def _end(self) -> None:
        shipper, self._shipper = self._shipper, None
        if self._building is not None:
            self._building.cancel()
            await asyncio.gather(self._building, return_exceptions=True)
        if shipper is not None:
            await asyncio.to_thread(shipper.stop)


async def answer(
    session: Session, settings: Fleet, machine: str, key: str | None, document: str, signature: str
) -> Answer:
    """One request from the database. The database is not believed: only what is signed, meant for this machine, new and
    in time is done, with the rights of the person it names."""

    if key is None:
        return Answer("refused", _refusal(f"{machine} accepts no requests from the fleet database; nothing was done"))
    now = session.keeper.clock.now()
    verified = verify(document, signature, key, machine, now)
    if isinstance(verified, Rejected):
        return Answer("expired" if verified.expired else "refused", _refusal(verified.why))
    try:
        if not await take_nonce(session.ledger, verified.nonce, verified.expires, now):
            return Answer("refused", _refusal("this request was received before; it is not carried out a second time"))
        request = reading.decode(bytes(verified.request), type=Request)
        name = requester_of(verified, machine, same_users=settings.same_users)
        reply = await carry_out(session, Identity(name=name, via=plain(verified.via)[:LONGEST_VIA]), request)
    except (msgspec.MsgspecError, ValueError) as problem:
        return Answer("refused", _refusal(f"invalid request: {problem}"))
    except KeeperError as problem:
        return Answer("refused", _refusal(str(problem)))
    except Exception as bug:
        return Answer(
            "refused", _refusal(f"this is a bug in gpukeeper: {bug!r}; the history shows whether something was done")
        )
    return Answer("answered", msgspec.json.encode(reply))


def _refusal(words: str) -> bytes:
    return msgspec.json.encode(Reply(done=False, words=words, exit_code=2))
