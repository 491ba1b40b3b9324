"""Which Python runs the probes: one that has PyTorch. It need not be ours. PyTorch is not imported to find out."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gpukeeper.model.unknown import Unknown

VARIABLE = "GPUKEEPER_PYTHON"
ON_PATH = ("python3", "python")
START_S = 30.0  # an interpreter on a slow network disk
_QUESTION = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('torch') else 9)"
_NO_TORCH = 9
GET_ONE = "in a clone of gpukeeper: pip install '.[accept]'; or name an interpreter with --python or GPUKEEPER_PYTHON"


def find_python(wanted: str | None = None, variables: Mapping[str, str] = os.environ) -> str | Unknown:
    """The configured one, and no other; else ours; else the first on PATH that has PyTorch. Or why there is none."""
    named = wanted or variables.get(VARIABLE)
    if named:
        return _configured(named, "--python" if wanted else VARIABLE, variables.get("PATH"))
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    there = [_path_of(name, variables.get("PATH")) for name in ON_PATH]
    for python in dict.fromkeys(filter(None, there)):
        if why_not(python) is None:
            return python
    searched = ", ".join(dict.fromkeys((sys.executable, *filter(None, there))))
    return Unknown(f"No module named 'torch' in any of {searched}. To install it: {GET_ONE}.")


def _configured(named: str, how: str, path: str | None) -> str | Unknown:
    python = _path_of(named, path)
    if python is None:
        return Unknown(f"{how}={named!r}: program not found. Set it to a Python that has PyTorch.")
    why = why_not(python)
    return python if why is None else Unknown(f"{how}={named!r}: {why}. To install it: {GET_ONE}.")


def _path_of(name: str, path: str | None) -> str | None:
    """From wherever it is started. Links stay: an environment is known by the place of its link."""
    found = shutil.which(name, path=path)
    return None if found is None else str(Path(found).absolute())


def why_not(python: str) -> str | None:
    """None: it has PyTorch."""
    try:
        done = subprocess.run(
            (python, "-c", _QUESTION),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_S,
            check=False,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return f"it did not start within {START_S:.0f} s"
    except OSError as error:
        return f"it could not be started: {error.strerror}"
    if done.returncode == _NO_TORCH:
        return "No module named 'torch'"
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    return None if done.returncode == 0 else f"it is not a working Python: {''.join(last) or 'no output'}"
