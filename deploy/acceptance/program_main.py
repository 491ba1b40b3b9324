"""gpukeeper from one file: python3 gpukeeper.pyz COMMAND. Nothing is installed; what it unpacks is deleted at its end.

For a container or a machine that has Python and, for `accept`, PyTorch. `make program` writes the file.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKED = "payload.tar.xz"


def main() -> None:
    own = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    with zipfile.ZipFile(Path(__file__).parent) as program:
        machine, known = program.read("machine").decode(), program.read("pythons").decode().split()
        if own not in known or platform.machine() != machine:
            sys.exit(
                f"{sys.argv[0]} is for {', '.join(known)} on {machine}; this Python is {own} on {platform.machine()}."
                " Nothing was run."
            )
        folder = Path(_made())
        try:
            with program.open(PACKED) as packed, tarfile.open(fileobj=packed, mode="r|xz") as files:
                files.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian's 3.11.2 has none
                files.extractall(folder)  # noqa: S202 - written by ourselves, beside this file
            _run([str(folder / "lib"), str(folder / own)])
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _made() -> str:
    try:
        return tempfile.mkdtemp(prefix="gpukeeper-")
    except FileNotFoundError:  # a read-only root
        return tempfile.mkdtemp(prefix="gpukeeper-", dir="/dev/shm")


def _run(paths: list[str]) -> None:
    sys.path[:0] = paths
    # For our own modules in processes of their own.
    os.environ["PYTHONPATH"] = ":".join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.argv[0] = "gpukeeper"
    from gpukeeper.__main__ import run

    run()


main()
