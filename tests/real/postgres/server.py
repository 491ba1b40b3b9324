"""A private PostgreSQL: its own directory, a socket in it and no network; run as an unprivileged user.

The superuser `postgres` needs no password; everybody else does, as on a real server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

_VERSIONS = Path("/usr/lib/postgresql")
_PROGRAMS = ("initdb", "pg_ctl", "postgres", "pg_basebackup")
_USER = "nobody"
_ACCESS = """\
local all postgres trust
local replication postgres trust
local all all scram-sha-256
"""
_SETTINGS = """\
listen_addresses = ''
fsync = off
shared_buffers = 16MB
max_connections = 60
min_wal_size = 32MB
max_wal_size = 64MB
wal_keep_size = 64MB
max_wal_senders = 4
password_encryption = scram-sha-256
log_min_messages = warning
"""


def programs() -> Path | None:
    """The directory of the newest complete release on this machine."""
    found = [*sorted(_VERSIONS.glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)]
    on_path = shutil.which("initdb")
    found += [Path(on_path).parent] if on_path else []
    return next((path for path in found if all((path / name).exists() for name in _PROGRAMS)), None)


class Server:
    """One data directory. `folder` also has the socket, so its path is short."""

    def __init__(self, folder: Path, data: Path | None = None) -> None:
        self.folder, self.data = folder, data or folder / "data"
        self.log = folder / f"{self.data.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        self._run("initdb", "-D", str(self.data), "-A", "trust", "-U", "postgres", "-N", "-E", "UTF8", "--locale=C")
        self._write("pg_hba.conf", _ACCESS)
        self._write("postgresql.auto.conf", _SETTINGS + f"unix_socket_directories = '{self.folder}'\n")

    def create_standby(self, of: Server) -> None:
        """A streaming replica that has caught up to now."""
        source = f"host={of.folder} user=postgres application_name=standby"
        self._run("pg_basebackup", "-D", str(self.data), "-R", "-X", "stream", "-c", "fast", "-d", source)
        with (self.data / "postgresql.auto.conf").open("a") as file:
            file.write(f"unix_socket_directories = '{self.folder}'\n")

    def start(self) -> None:
        """Not by pg_ctl, which detaches it: a test run that is killed takes its server with it."""
        found = programs()
        assert found is not None
        command = [*_as_user("--pdeathsig", "KILL"), str(found / "postgres"), "-D", str(self.data)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        deadline = time.monotonic() + 120
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"postgres did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "-D", str(self.data), "-m", mode, "-W", "stop")
        self._wait()

    def promote(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-w", "-t", "60", "promote")

    def kill(self) -> None:
        """The postmaster and with it everything, as by a crash of the machine."""
        os.kill(self._pid(), signal.SIGKILL)
        for path in self.folder.glob(".s.PGSQL.*"):
            path.unlink(missing_ok=True)
        self._wait()
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def is_running(self) -> bool:
        return bool(self._run("pg_ctl", "-D", str(self.data), "status", check=False))

    def address(self, user: str = "postgres", database: str = "gpukeeper") -> str:
        return f"postgresql://{user}@/{database}?host={self.folder}"

    def connect(
        self, user: str = "postgres", database: str = "gpukeeper", **more: str
    ) -> psycopg.Connection[tuple[Any, ...]]:
        import psycopg  # an extra: other tests ask only whether the programs are here

        return psycopg.connect(self.address(user, database), autocommit=True, **more)  # type: ignore[arg-type]

    def sql(self, statement: str, *values: object, database: str = "gpukeeper") -> list[tuple[Any, ...]]:
        with self.connect(database=database) as connection:
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def _is_ready(self) -> bool:
        """As pg_ctl finds it: in the last line of the file that the server writes."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        own = self._process is not None and lines[:1] == [str(self._process.pid)]
        return own and len(lines) > 7 and lines[7].strip() in ("ready", "standby")

    def _wait(self) -> None:
        if self._process is not None:
            self._process.wait(60)
            self._process = None

    def _pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def _write(self, name: str, text: str) -> None:
        (self.data / name).write_text(text)

    def _run(self, program: str, *words: str, check: bool = True) -> bool:
        found = programs()
        assert found is not None
        command = [*_as_user(), str(found / program), *words]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd="/", timeout=120
        )
        if check and done.returncode:
            tail = self.log.read_text()[-2000:] if self.log.exists() else ""
            raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr}\n{tail}")
        return done.returncode == 0


@contextmanager
def a_folder() -> Iterator[Path]:
    """Its path is short and every directory on the way can be entered."""
    folder = Path(tempfile.mkdtemp(prefix="gkpg-", dir="/tmp"))
    folder.chmod(0o755)
    if os.geteuid() == 0:
        shutil.chown(folder, _USER, "nogroup")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def a_server() -> Iterator[Server]:
    with a_folder() as folder:
        server = Server(folder)
        server.create()
        server.start()
        try:
            server.sql("CREATE DATABASE gpukeeper", database="postgres")
            yield server
        finally:
            if server.is_running():
                server.stop("immediate")


def _as_user(*more: str) -> list[str]:
    """PostgreSQL refuses to run as root. `more`: options of setpriv."""
    user = [f"--reuid={_USER}", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *user, *more] if user or more else []
