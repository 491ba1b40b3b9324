"""`gpukeeper` with its own modules imported again, only those that the command imports. Run with tests/forked.py.

Libraries stay imported: they take as long as the rest, and what is tested is that a command of gpukeeper imports
everything it needs.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpukeeper"]:
        del sys.modules[name]
    runpy.run_module("gpukeeper", run_name="__main__", alter_sys=True)
