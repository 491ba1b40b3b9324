"""The program: the command line with the verbs of daemon and operator, put together here because none knows another."""

from __future__ import annotations

import sys

from gpukeeper.interfaces.cli.main import app, run_app
from gpukeeper.interfaces.daemon.command import serve
from gpukeeper.interfaces.operator.command import operator

app.command("serve")(serve)
app.command("operator")(operator)


def run() -> None:
    sys.exit(run_app())


if __name__ == "__main__":
    run()
