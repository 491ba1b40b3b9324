"""How a program of ours gets to the head of a cluster: in the metadata of its job.

The entrypoint of the job is constant but for the name of an interpreter; no text of a user reaches a shell.
"""

from __future__ import annotations

import base64
import re
import zlib
from typing import Final

from gpukeeper.model.errors import UsageError

PLAN: Final = "gpukeeper.io/plan"
PROGRAM: Final = "gpukeeper.io/program"
METADATA_MAX: Final = 100_000  # bytes; the kernel limits what Ray passes to the driver to 128 KiB
_ENTRY: Final = (
    "import sys; sys.path[:] = filter(None, sys.path); "  # not from its directory, also with a Python that has no -P
    'import base64, json, os, zlib; m = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]; '
    f'exec(zlib.decompress(base64.b64decode(m["{PROGRAM}"])))'
)
_PYTHON: Final = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_/.+-]*")


def entrypoint(python: str) -> str:
    return f"exec {python} -c '{_ENTRY}'"


def check_python(python: str) -> None:
    if not _PYTHON.fullmatch(python):
        raise UsageError(f'option python="{python}" is not the name or path of an interpreter')


def packed(what: bytes) -> str:
    return base64.b64encode(zlib.compress(what, 9)).decode()
