"""The server of these tests ends with the process that started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.engines import has_postgres, require
from tests.real.postgres.fleet import wait_for

_PROGRAM = """
import os
from tests.real.postgres.server import a_server
with a_server() as server:
    print(server.folder, server._pid(), flush=True)
    os.read(0, 1)
"""


def test_a_killed_test_run_leaves_no_server() -> None:
    require("postgres", has_postgres())
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        folder, pid = program.stdout.readline().split()
        assert is_running(int(pid))
        program.send_signal(signal.SIGKILL)
        program.wait()
        wait_for(lambda: not is_running(int(pid)), "the end of the server")
    subprocess.run(["rm", "-rf", folder], check=True)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
