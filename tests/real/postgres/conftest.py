"""A PostgreSQL of the tests' own: one server for all that only need a database, one each for those that break it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from tests.cli.fleet import Fleet
from tests.engines import has_postgres, require
from tests.real.postgres.fleet import FleetDatabase
from tests.real.postgres.server import Server, a_folder

_numbers = count(1)


@pytest.fixture(scope="session")
def template() -> Iterator[Server]:
    """A data directory that was never started; making one takes longer than copying it."""
    require("postgres", has_postgres())
    with a_folder() as folder:
        server = Server(folder)
        server.create()
        yield server


@pytest.fixture(scope="session")
def shared(template: Server) -> Iterator[Server]:
    yield from _started(template)


@pytest.fixture
def server(template: Server) -> Iterator[Server]:
    """One that the test may stop, fill and kill."""
    yield from _started(template)


@pytest.fixture
def database(shared: Server, tmp_path: Path) -> FleetDatabase:
    """An initialized fleet database in the shared server."""
    name = f"fleet_{os.getpid()}_{next(_numbers)}"
    shared.sql(f'CREATE DATABASE "{name}"', database="postgres")
    made = FleetDatabase(shared, tmp_path, name)
    made.initialize()
    return made


@pytest.fixture
def own_database(server: Server, tmp_path: Path) -> FleetDatabase:
    """The same in a server of the test's own."""
    server.sql("CREATE DATABASE gpukeeper", database="postgres")
    made = FleetDatabase(server, tmp_path, "gpukeeper")
    made.initialize()
    return made


def _started(template: Server) -> Iterator[Server]:
    with ExitStack() as stack:
        server = copied(template, stack.enter_context(a_folder()))
        server.start()
        try:
            yield server
        finally:
            if server.is_running():
                server.stop("immediate")


def copied(template: Server, folder: Path) -> Server:
    server = Server(folder)
    subprocess.run(["cp", "-a", str(template.data), str(server.data)], check=True)
    settings = server.data / "postgresql.auto.conf"
    settings.write_text(settings.read_text().replace(str(template.folder), str(folder)))
    if os.geteuid() == 0:
        shutil.chown(settings, "nobody", "nogroup")
    return server


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)
