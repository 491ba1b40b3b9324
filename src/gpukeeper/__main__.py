"""The program: the command line with the commands of daemon and operator, which do not import each other."""

from __future__ import annotations

import sys

from gpukeeper.interfaces.cli.main import COMMANDS, GROUPS, Entry, root_app, run_app

SERVICES = {
    "serve": Entry(
        "gpukeeper.interfaces.daemon.serve:serve", "Run the daemon: watch, measure and, in mode enforce, reclaim."
    ),
    "operator": Entry(
        "gpukeeper.interfaces.operator:operator",
        "Run the daemon inside a Kubernetes cluster.",
    ),
}
app = root_app({**COMMANDS, **SERVICES, **GROUPS})


def run() -> None:
    sys.exit(run_app(app))


if __name__ == "__main__":
    run()
