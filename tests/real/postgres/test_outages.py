"""Twenty machines write while the database is stopped, killed, filled up and replaced by a replica that lacks the last
lines. Afterwards every line of every ledger is there, once, and no ledger waited for the database."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpukeeper.ledger.copy import shipper as shipping
from gpukeeper.ledger.copy.shipper import Shipper
from tests.engines import require
from tests.real.postgres.conftest import copied
from tests.real.postgres.fleet import FleetDatabase, Machine, a_shipper, wait_for, wait_until_shipped
from tests.real.postgres.server import Server, a_folder

MACHINES = 20


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits between attempts are a minute at most; nothing here depends on that."""
    monkeypatch.setattr(shipping, "LONGEST_WAIT", 2.0)


class Writers:
    """A thread that writes a line to one machine after the other, each durable, as passes do."""

    def __init__(self, machines: list[Machine]) -> None:
        self.machines, self.count, self.slowest = machines, 0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            for machine in self.machines:
                begun = time.monotonic()
                machine.write(f"{machine.name} {self.count}")
                self.slowest = max(self.slowest, time.monotonic() - begun)
                self.count += 1
                self._stop.wait(0.002)

    def __enter__(self) -> Writers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def go_on(self, lines: int = 100) -> None:
        """Until so many more were written."""
        goal = self.count + lines
        wait_for(lambda: self.count >= goal, f"{lines} more lines")


@contextmanager
def a_fleet(database: FleetDatabase, folder: Path) -> Iterator[tuple[list[Machine], list[Shipper]]]:
    machines = [Machine.create(folder, f"node-{number}") for number in range(MACHINES)]
    shippers = [a_shipper(database.add(one.name), one) for one in machines]
    try:
        yield machines, shippers
    finally:
        for one in shippers:
            one.stop()
        for machine in machines:
            machine.close()


def all_are_there(database: FleetDatabase, machines: list[Machine]) -> None:
    """Nothing lost, nothing twice, in order, with the same words."""
    for machine in machines:
        wait_until_shipped(database, machine)


def unsent(shippers: list[Shipper]) -> int:
    return sum(one.state.unsent or 0 for one in shippers)


def test_the_database_is_stopped_restarted_and_killed(own_database: FleetDatabase, tmp_path: Path) -> None:
    server = own_database.server
    with a_fleet(own_database, tmp_path) as (machines, shippers):
        with Writers(machines) as writers:
            writers.go_on()
            server.stop("fast")
            writers.go_on()
            wait_for(lambda: all(not one.state.connected for one in shippers), "all notice it")
            assert all(one.state.last_error for one in shippers)
            server.start()
            writers.go_on()
            wait_for(lambda: all(one.state.connected for one in shippers), "all are back")
            server.kill()
            writers.go_on()
            wait_for(lambda: unsent(shippers) > 0, "lines wait")
            server.start()
            writers.go_on()
            server.stop("immediate")
            server.start()
            writers.go_on()
        all_are_there(own_database, machines)
        assert all(one.state.failures == 0 for one in shippers)
    assert writers.slowest < 5, "the ledger does not wait for the database"


def test_a_replica_that_lacks_the_last_lines_is_promoted(
    own_database: FleetDatabase, template: Server, tmp_path: Path
) -> None:
    """Those lines are sent again: the cursor is read from the database that is there now."""
    primary = own_database.server
    with a_folder() as folder:
        standby = Server(folder, folder / "standby")
        standby.create_standby(primary)
        standby.start()
        both = f"{primary.folder},{standby.folder}"
        machines = [Machine.create(tmp_path, f"node-{number}") for number in range(MACHINES)]
        shippers = []
        for machine in machines:
            settings = own_database.add(machine.name)
            address = f"{settings.address.replace(str(primary.folder), both)}&target_session_attrs=read-write"
            shippers.append(a_shipper(shipping.msgspec.structs.replace(settings, address=address), machine))
        try:
            with Writers(machines) as writers:
                writers.go_on()
                wait_for(lambda: all(one.state.connected for one in shippers), "all are connected")
                question = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn = pg_current_wal_lsn()"
                wait_for(lambda: own_database.sql(question) == [(1,)], "the replica has caught up once")
                standby.stop("fast")
                writers.go_on(400)
                wait_for(lambda: own_database.sql("SELECT count(*) FROM gpukeeper.lines")[0][0] > 200, "lines")
                known = own_database.sql("SELECT count(*) FROM gpukeeper.lines")[0][0]
                primary.kill()
                standby.start()
                standby.promote()
                after = FleetDatabase(standby, own_database.folder, "gpukeeper", own_database.secrets)
                assert after.sql("SELECT count(*) FROM gpukeeper.lines")[0][0] < known, "it lacks some"
                writers.go_on()
            all_are_there(after, machines)
        finally:
            for one in shippers:
                one.stop()
            for machine in machines:
                machine.close()
            standby.stop("immediate")


def test_the_disk_of_the_database_fills_up(template: Server, tmp_path: Path) -> None:
    require("tmpfs", os.geteuid() == 0)
    with a_folder() as folder, _small_disk(folder / "disk") as disk:
        server = copied(template, disk)
        server.start()
        try:
            server.sql("CREATE DATABASE gpukeeper", database="postgres")
            database = FleetDatabase(server, tmp_path, "gpukeeper")
            database.initialize()
            with a_fleet(database, tmp_path) as (machines, shippers):
                with Writers(machines) as writers:
                    writers.go_on()
                    _fill(disk / "ballast")
                    long = "x" * 4000
                    for machine in machines:
                        machine.write(*[f"{n} {long}" for n in range(100)])
                    wait_for(lambda: any(one.state.last_error for one in shippers), "somebody meets the full disk")
                    writers.go_on()
                    (disk / "ballast").unlink()
                    if not server.is_running():
                        server.start()  # without room for its log PostgreSQL ends; an administrator starts it again
                    writers.go_on()
                all_are_there(database, machines)
            assert writers.slowest < 5
        finally:
            if server.is_running():
                server.stop("immediate")


def test_a_database_that_hangs_is_left_and_found_again(
    own_database: FleetDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are stopped: connections stay open, and nothing answers."""
    monkeypatch.setattr(shipping, "STUCK", 1.0)
    machine = Machine.create(tmp_path, "node-1")
    shipper = a_shipper(own_database.add("node-1"), machine)
    machine.write("before")
    wait_for(lambda: own_database.lines("node-1") == machine.written(), "the first line")
    backends = [
        pid for (pid,) in own_database.sql("SELECT pid FROM pg_stat_activity WHERE application_name ~ 'node-1'")
    ]
    assert backends
    for pid in backends:
        os.kill(pid, 19)  # SIGSTOP
    try:
        machine.write("meanwhile")
        wait_for(lambda: shipper.check_stuck() or shipper.state.last_error, "it gives up waiting")
        wait_for(lambda: shipper.state.connected, "a new connection")
        wait_for(lambda: own_database.lines("node-1") == machine.written(), "the second line")
    finally:
        for pid in backends:
            os.kill(pid, 18)  # SIGCONT
    shipper.stop()
    machine.close()


@contextmanager
def _small_disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m,mode=755", "tmpfs", str(path)], check=True)
    shutil.chown(path, "nobody", "nogroup")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _fill(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, b"\0" * 2**16)
    except OSError:
        return
    finally:
        os.close(fd)
