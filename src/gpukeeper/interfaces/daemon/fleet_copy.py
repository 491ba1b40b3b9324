"""The copy in the fleet database, beside the loop of `serve`: starts the shipper as configured in the policy, and
answers the requests it finds. Passes do not wait for any of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec

from gpukeeper.engine.failures import bug_words
from gpukeeper.engine.origin import with_origin
from gpukeeper.engine.refresh import refresh
from gpukeeper.engine.requests import Reply, Request, fulfil
from gpukeeper.interfaces.daemon.fleet_sources import FleetSources
from gpukeeper.ledger.copy.connect import load_driver, problem_of_machine, shown
from gpukeeper.ledger.copy.identity import ensure_identity, remember_shipped, take_nonce
from gpukeeper.ledger.copy.inbox import Answer
from gpukeeper.ledger.copy.shipper import CopySettings, Shipper
from gpukeeper.ledger.copy.signing import SHORTEST_KEY, Rejected, name_of, verify
from gpukeeper.ledger.copy.state import CopyState
from gpukeeper.ledger.secret_file import read_secret
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.policy import Fleet
from gpukeeper.model.printable import plain
from gpukeeper.platforms.host.connect import hostname
from gpukeeper.wiring.session import Session

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
        who = name_of(verified, machine, same_users=settings.same_users)
        keeper = with_origin(session.keeper, who, plain(verified.via)[:LONGEST_VIA])
        reply = await fulfil(keeper, session.book, who, request)
        await refresh(session.keeper, session.book, request.workload)
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
