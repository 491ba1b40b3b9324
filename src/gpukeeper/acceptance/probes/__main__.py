"""Where a probe process begins: `__main__.py worker cuda:0`, or by torchrun `__main__.py ranks FOLDER cuda JOB`.

Run by any interpreter that has PyTorch, which need not have gpukeeper: a bare module stands in for the package, so that
no other site-packages and nothing else of gpukeeper are imported.
"""

from __future__ import annotations

import os
import sys
import types


def main(arguments: list[str]) -> int:
    _be_alone()
    # Read when CUDA starts; without it cuBLAS may not promise the same bits twice.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    what, rest = (arguments[0] if arguments else ""), arguments[1:]
    if what == "worker":
        from gpukeeper.acceptance.probes import worker

        return worker.main(rest)
    if what == "ranks":
        from gpukeeper.acceptance.probes import ranks

        return int(ranks.main(rest) or 0)
    sys.stderr.write(f"{what!r} is not valid; expected worker or ranks. This program is started by gpukeeper accept.\n")
    return 2


def _be_alone() -> None:
    """Our files are found as gpukeeper.acceptance.probes, never by their bare names: `datasets` may be a package of
    somebody else."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - before anything else is imported
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]  # noqa: PTH100
    if "gpukeeper" not in sys.modules:
        package = types.ModuleType("gpukeeper")
        package.__path__ = [os.path.dirname(os.path.dirname(here))]  # noqa: PTH120
        sys.modules["gpukeeper"] = package


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
