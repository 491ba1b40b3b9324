"""How long `gpukeeper --help` takes, against a Python that does nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.report import Figure, fastest, met, print_figure, print_table
from benchmarks.size import sized

RUNS = sized(10, tiny=1)
SECONDS = 0.25  # target


def run() -> None:
    program = Path(sys.executable).with_name("gpukeeper")
    commands = {"gpukeeper --help": [str(program), "--help"], "python -c pass": [sys.executable, "-c", "pass"]}
    seconds = {name: fastest(lambda command=command: _run(command), RUNS) for name, command in commands.items()}  # type: ignore[misc]
    ours, peer = seconds.values()
    print_table(("command", "seconds", ""), [(name, f"{took:.3f}", "") for name, took in seconds.items()])
    print(f"minimum of {RUNS}; target below {SECONDS:g} s, {met(ours, SECONDS, least=False)}\n")
    print_figure(Figure("startup", round(ours, 3), "s", round(ours / peer, 1), "python -c pass"))


def _run(command: list[str]) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
