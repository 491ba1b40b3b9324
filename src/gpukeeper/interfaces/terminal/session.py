"""From flags to an open session: policy, platforms, filters; messages about what could not be reached; and the
ledger of this machine, opened for commands that only read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from gpukeeper.config.units import read_span
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.ledger.files import ledger_path, may_exist, socket_path, state_folder
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.errors import UsageError
from gpukeeper.model.subject import OUTCOMES

if TYPE_CHECKING:
    from gpukeeper.ledger.journal import SqliteLedger
    from gpukeeper.wiring.session import Session


NOBODY = "nobody"  # --owner: what has no known owner


@contextmanager
def opened(
    policy: Path | None,
    *,
    write: bool,
    only: str | None = None,
    quiet: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Session]:
    """`tell`: how warnings are printed; default: `print_message`."""
    # All platforms and the schema of the policy take 200 ms to load, which help and completion do not need.
    from gpukeeper.interfaces.terminal.daemon import load_daemon_state
    from gpukeeper.wiring.session import open_session

    session = open_session(policy, write=write, only=only)
    tell = tell or print_message
    try:
        for warning in (*session.loaded.warnings, *session.loaded.expired(session.keeper.clock.now())):
            tell(f"policy: {warning}")
        if not write and not _is_another_daemon():
            load_daemon_state(session.keeper)
        elif _is_another_daemon():
            tell("A daemon with its own ledger is running here: its holds and warnings are not shown.")
        if not quiet:
            print_unreachable(session, only, tell)
        try:
            yield session
        except UsageError:
            if quiet and only is None:  # what was requested may be there
                print_unreachable(session)
            raise
    finally:
        session.close()


def _is_another_daemon() -> bool:
    return os.geteuid() != 0 and may_exist(socket_path()) and socket_path().parent != state_folder()


def print_unreachable(session: Session, only: str | None = None, tell: Callable[[str], None] | None = None) -> None:
    """Platforms in the policy's scope that are not reachable from here."""
    requested = None if only is None else only.partition("/")[0]
    for reach in session.reaches:
        if not reach.reachable and reach.platform in session.book.policy.scope and requested in (None, reach.platform):
            (tell or print_message)(f"{reach.platform}: {reach.why}")


def some_unreachable(session: Session) -> bool:
    """Whether a platform in the policy's scope that exists here cannot be read, or none of them can."""
    covered = [reach for reach in session.reaches if reach.platform in session.book.policy.scope]
    broken = any(not reach.reachable and reach.place for reach in covered)
    return broken or not any(reach.reachable for reach in covered)


def confirmed(question: str) -> bool:
    """Asks for confirmation on the terminal; Ctrl-C interrupts."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None


def narrowed(given: Narrow, older_than: str | None = None) -> Narrow:
    """As the flags mean it."""
    if given.outcome is not None and given.outcome not in OUTCOMES:
        raise UsageError(f'--outcome "{given.outcome}" is not one of: {", ".join(OUTCOMES)}')
    return msgspec.structs.replace(
        given,
        kind=given.kind.lower() if given.kind else None,
        nobodys=given.owner == NOBODY,
        older_than=span(older_than, "--older-than"),
    )


def own_only(session: Session, narrow: Narrow) -> Narrow:
    """A user may really be named nobody; what has no owner is an admin's all the same."""
    return narrow if is_admin(session.book, session.user) else msgspec.structs.replace(narrow, nobodys=False)


def span(words: str | None, flag: str) -> timedelta | None:
    if words is None:
        return None
    try:
        return read_span(words)
    except ValueError as problem:
        raise UsageError(f"{flag}: {problem}") from problem


@contextmanager
def opened_for_reading() -> Iterator[SqliteLedger]:
    from gpukeeper.ledger.journal import open_ledger

    ledger = open_ledger(ledger_path(), write=False)
    try:
        yield ledger
    finally:
        ledger.close()
