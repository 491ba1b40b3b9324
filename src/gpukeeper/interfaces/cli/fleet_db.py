"""`gpukeeper fleet-db`: the database that many machines copy their records to: init, migrate, add-machine, status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpukeeper.config.load import load_policy
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.session import span
from gpukeeper.ledger.copy.admin import (
    WEB,
    FleetStatus,
    MachineStatus,
    Migration,
    initialize,
    migrations,
    set_retention,
)
from gpukeeper.ledger.copy.admin import add_machine as add
from gpukeeper.ledger.copy.admin import fleet_status as status_of
from gpukeeper.ledger.copy.admin import migrate as migrate_database
from gpukeeper.ledger.copy.connect import connect, problem_of_address, translated
from gpukeeper.model.errors import UsageError
from gpukeeper.model.words import in_words, size_in_words

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection

app = typer.Typer(no_args_is_help=True, help="Set up the PostgreSQL database that many machines copy their records to.")

Address = Annotated[
    str,
    typer.Argument(metavar="DATABASE", help="postgresql://USER@HOST/DATABASE, without a password."),
]
OwnPassword = Annotated[
    Path | None,
    typer.Option(
        "--password-file", help="File with the password of USER. Default: as configured for libpq.", metavar="FILE"
    ),
]
Retention = Annotated[
    str | None,
    typer.Option("--retention", help="How long copied lines and measurements are kept: 90d, 400d, … (default: 400d)."),
]


@app.command()
def init(
    database: Address,
    web_password: Annotated[
        Path,
        typer.Option(
            "--web-password-file",
            help="Password of the web server's role; a random one is written to it if the file does not exist.",
            metavar="FILE",
        ),
    ],
    password: OwnPassword = None,
    retention: Retention = None,
    json: o.Json = False,
) -> None:
    """Create tables, roles and partitions in an empty database. Run it as a role that may create roles."""

    with _opened(database, password) as connection:
        applied = initialize(connection, web_password, _span(retention))
    if json:
        _print_applied(applied)
        return
    typer.echo(f"{_applied(applied)} The web server connects as {WEB}, with the password in {web_password}.")
    typer.echo("Next: gpukeeper fleet-db add-machine")


@app.command()
def migrate(database: Address, password: OwnPassword = None, retention: Retention = None, json: o.Json = False) -> None:
    """Update the schema to that of this version, and set the retention. Older daemons keep working."""

    span = _span(retention)
    with _opened(database, password) as connection:
        applied = migrate_database(connection)
        if span is not None:
            set_retention(connection, span)
    if json:
        _print_applied(applied)
    else:
        typer.echo(_applied(applied))


@app.command("add-machine")
def add_machine(
    database: Address,
    name: Annotated[str, typer.Argument(help="Name of the machine, as in its policy (fleet.machine).")],
    machine_password: Annotated[
        Path,
        typer.Option(
            "--machine-password-file",
            help="Password of the machine's role; a random one is written to it if the file does not exist.",
            metavar="FILE",
        ),
    ],
    password: OwnPassword = None,
    json: o.Json = False,
) -> None:
    """Add a machine, or give it a new password. Its role can read and write the rows of this machine only."""

    with _opened(database, password) as connection:
        role = add(connection, name, machine_password)
    if json:
        show.as_json("fleet-db-machine", {"machine": name, "role": role, "password_file": str(machine_password)})
        return
    typer.echo(f"{name} connects as {role}, with the password in {machine_password}. Copy that file to the machine and")
    typer.echo("write into its policy:")
    typer.echo(f"fleet: {{copy_to: {_with_user(database, role)}, password_file: FILE, machine: {name}}}")


@app.command()
def status(
    database: Annotated[
        str | None, typer.Argument(metavar="DATABASE", help="Default: the database in the policy, as this machine.")
    ] = None,
    password: OwnPassword = None,
    policy: o.PolicyFile = None,
    json: o.Json = False,
) -> None:
    """Show schema, retention, size and, for each machine, when it last connected and how far its copy is."""

    address, secret = (database, password) if database is not None else _configured(policy)
    with _opened(address, secret) as connection:
        found = status_of(connection)
    if json:
        show.as_json("fleet-db-status", {"database": found})
        return
    show.table(_status_rows(found))
    show.table(
        [_machine_row(one) for one in found.machines],
        head=("machine", "seen", "version", "lines until", "newest line", "view", "open requests"),
    )


@contextmanager
def _opened(address: str, password: Path | None) -> Iterator[Connection]:

    problem = problem_of_address(address)
    if problem is not None:
        raise UsageError(f"this is not an address of a database: {problem}. Nothing was done.")
    with translated(address):
        secret = None if password is None else str(password)
        with closing(connect(address, secret, name="gpukeeper fleet-db")) as connection:
            yield connection


def _configured(policy: Path | None) -> tuple[str, Path | None]:

    fleet = load_policy(policy).policy.fleet
    if fleet.copy_to is None:
        raise UsageError("no database given, and the policy has none (fleet.copy_to). Nothing was done.")
    return fleet.copy_to, None if fleet.password_file is None else Path(fleet.password_file)


def _span(words: str | None) -> timedelta | None:

    return span(words, "--retention")


def _with_user(address: str, role: str) -> str:
    scheme, _, rest = address.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{role}@{authority.rpartition('@')[2]}{slash}{path}"


def _applied(applied: tuple[Migration, ...]) -> str:
    if not applied:
        return "The schema is up to date; nothing was changed."
    return f"Schema {applied[-1].number}: applied {', '.join(one.name for one in applied)}."


def _print_applied(applied: tuple[Migration, ...]) -> None:

    names = [{"number": one.number, "name": one.name} for one in applied]
    show.as_json("fleet-db-migrate", {"applied": names, "version": len(migrations())})


def _status_rows(found: FleetStatus) -> list[tuple[str, str]]:

    newer = "" if found.schema >= found.known_schema else f"; this version has {found.known_schema}: fleet-db migrate"
    oldest = found.oldest_partition
    since = "" if oldest is None else f", oldest {oldest[:4]}-{oldest[4:]}"
    return [
        ("schema", f"{found.schema}{newer}"),
        ("retention", in_words(found.retention)),
        ("size", size_in_words(found.size)),
        ("partitions", f"{found.partitions}{since}"),
    ]


def _machine_row(one: MachineStatus) -> tuple[str, ...]:
    times = [
        f"{at:%Y-%m-%d %H:%M:%S} UTC" if at is not None else "never" for at in (one.seen, one.newest_line, one.view_at)
    ]
    return (one.name, times[0], one.version or "-", str(one.shipped or 0), times[1], times[2], str(one.open_requests))
