"""`serve` itself: the loop, the socket and the daily rotation, until somebody says stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.daemon.server import listening, tell_systemd
from gpukeeper.ledger.archive import rotate
from gpukeeper.ledger.lease import DAEMON
from gpukeeper.ledger.paths import socket_path
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError, PolicyError
from gpukeeper.wiring import Session, reload_policy

DAY = timedelta(days=1)


async def serve_until_stopped(
    session: Session,
    policy: Path | None,
    on_report: Callable[[PassReport], None],
    say: Callable[[str], None],
    *,
    quiet: bool = False,
) -> None:
    """One daemon a machine: the lease says so. SIGTERM and SIGINT end it after the step under way."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with session.keeper.ledger.lease(DAEMON, "serve"), listening(socket_path(), session):
        if not quiet:
            places = ", ".join(f"{p.name}/{p.place}" for p in session.keeper.platforms)
            say(f"gpukeeper serves {places}, mode {session.book.policy.mode}, policy {session.loaded.source}")
            say(f"listening on {socket_path()}; Ctrl-C ends it")
        tell_systemd("READY=1")
        async with asyncio.TaskGroup() as group:
            book = _policy_now(session, policy, say)
            group.create_task(watch(Watch(session.keeper, book, stop, on_report, say)))
            group.create_task(_rotate_daily(session, stop, say))
        tell_systemd("STOPPING=1")


def _policy_now(session: Session, policy: Path | None, say: Callable[[str], None]) -> Callable[[], Rulebook]:
    """The policy file is read again before every pass. While it is broken, the last good one looks but does not act."""
    complained: list[str] = []

    def book() -> Rulebook:
        try:
            reload_policy(session, policy)
        except PolicyError as problem:
            if complained[-1:] != [str(problem)]:
                complained.append(str(problem))
                say(f"the policy cannot be used any more, so nothing is acted on:\n{problem}")
            return session.looking_only()
        if complained:
            complained.clear()
            say(f"the policy can be used again: mode {session.book.policy.mode}")
        return session.book

    return book


async def _rotate_daily(session: Session, stop: asyncio.Event, say: Callable[[str], None]) -> None:
    while not stop.is_set():
        policy, now = session.book.policy, session.keeper.clock.now()
        try:
            done = await rotate(session.ledger, policy.ledger, now)
            if done.believed is not None:
                await session.evidence.prune(policy.capture.keep, done.believed)
        except (OSError, KeeperError) as problem:
            say(f"the ledger could not be rotated: {problem}")
        waiting = asyncio.ensure_future(stop.wait())
        await asyncio.wait([waiting], timeout=DAY.total_seconds())
        waiting.cancel()
