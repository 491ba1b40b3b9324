"""Connections to the fleet database, and every way in which that fails, as a sentence. Secrets come from files only."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from gpukeeper.ledger.files import read_secret
from gpukeeper.model.errors import KeeperError, UsageError

if TYPE_CHECKING:
    import psycopg

    Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

# A statement that waits longer has met a lock or a dead disk; the next attempt begins with a new connection.
_LIMITS = {"statement_timeout": "60s", "lock_timeout": "10s", "idle_in_transaction_session_timeout": "60s"}
# A server that vanished without a word is noticed within about half a minute.
_KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
_MACHINE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,44}")  # with the prefix of its role 63 bytes, as PostgreSQL allows


def connect(address: str, password_file: str | None = None, *, name: str = "gpukeeper") -> Connection:
    """In autocommit mode. Raises psycopg.Error, or KeeperError where no attempt was made."""
    psycopg = load_driver()
    secret = {} if password_file is None else {"password": read_secret(Path(password_file))}
    connection: Connection = psycopg.connect(
        address,
        autocommit=True,
        connect_timeout=10,
        application_name=name,
        client_encoding="utf8",
        prepare_threshold=None,  # a pooler in between does not keep prepared statements
        **_KEEPALIVE,
        **secret,
    )
    try:
        for setting, value in _LIMITS.items():
            connection.execute("SELECT set_config(%s, %s, false)", (setting, value))
    except BaseException:
        connection.close()
        raise
    return connection


def disconnect(connection: Connection) -> None:
    """From another thread: ends a wait for a server that stopped answering."""
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


def load_driver() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise UsageError(
            f"The fleet database needs psycopg, which could not be imported ({error}). Nothing was done. "
            "In a clone of gpukeeper: pip install '.[postgres]'"
        ) from error
    return psycopg


@contextmanager
def translated(address: str) -> Iterator[None]:
    """For commands: errors of the database become one sentence."""
    psycopg = load_driver()
    try:
        yield
    except psycopg.Error as error:
        raise KeeperError(
            f"The fleet database {shown(address)} could not be used: {first_line(error)}. Nothing was changed."
        ) from error


def first_line(error: BaseException) -> str:
    """Without the query, which may be long, and without a full stop."""
    words = str(error).strip() or type(error).__name__
    return words.splitlines()[0].rstrip(".")


def shown(address: str) -> str:
    """Host and database: nothing that could be a secret."""
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    return f"{host or 'local socket'}{parts.path}"


def problem_of_address(address: str) -> str | None:
    """Why this is not the address of a database, or None."""
    try:
        parts = urlsplit(address)
        password = parts.password
    except ValueError as error:
        return str(error)
    if parts.scheme not in {"postgresql", "postgres"}:
        return "it does not start with postgresql://"
    if password is not None or "password=" in parts.query:
        return "it contains a password; write the password into a file and name that as password_file"
    return None


def problem_of_machine(name: str) -> str | None:
    if _MACHINE_NAME.fullmatch(name):
        return None
    return "a machine's name has 1 to 45 lower-case letters, digits, dots, hyphens or underscores"
