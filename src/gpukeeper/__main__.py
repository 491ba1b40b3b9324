"""The program: the command line with the daemon's verb, put together here because neither knows the other."""

from __future__ import annotations

import sys

from gpukeeper.interfaces.cli.main import app, run_app
from gpukeeper.interfaces.daemon.command import serve

app.command("serve")(serve)


def run() -> None:
    sys.exit(run_app())


if __name__ == "__main__":
    run()
