"""Real probes on this machine's CPU: where PyTorch is, and a worker to talk to."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VERSION = next(line for line in (HERE / "version.txt").read_text().split("\n") if line and line[0] != "#").strip()
MAIN = HERE.parents[2] / "src/gpukeeper/acceptance/probes/__main__.py"


def folder() -> Path:
    """As build.sh has it."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("GPUKEEPER_TORCH_CACHE") or caches / "gpukeeper/torch") / VERSION


def is_installed() -> bool:
    return (folder() / ".installed").exists()


def python() -> str:
    return str(folder() / "bin/python")


def environment(**more: str) -> dict[str, str]:
    """One thread: the machine has two cores, and other tests run beside."""
    return {"PATH": os.environ["PATH"], "HOME": str(Path.home()), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", **more}


def inside(program: str) -> subprocess.CompletedProcess[str]:
    """A program of the tests with PyTorch and the probes, as __main__ finds them."""
    begin = f"import runpy; runpy.run_path({str(MAIN)!r})['_be_alone']()\n"
    return subprocess.run(
        (python(), "-c", begin + program), capture_output=True, text=True, env=environment(), check=False
    )


class Worker:
    """A worker process, spoken to line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.hello = self.line()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        read = self.process.stdout.readline()
        assert read, "the worker ended without an answer"
        record: dict[str, Any] = json.loads(read, parse_constant=_not_json)
        return record

    def say(self, words: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return self.line()

    def ask(self, probe: str, **params: Any) -> dict[str, Any]:
        return self.say(json.dumps({"probe": probe, "params": params}))

    def run(self, probe: str, **params: Any) -> dict[str, Any]:
        """Of a probe that must come to an end."""
        answer = self.ask(probe, **params)
        assert "done" in answer, answer["broken"]["words"]
        done: dict[str, Any] = answer["done"]
        return done


@contextmanager
def worker(device: str = "cpu", **more: str) -> Iterator[Worker]:
    """Ends with its input, as it does when gpukeeper goes."""
    command = (python(), "-W", "error", str(MAIN), "worker", device)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment(**more)) as process:
        try:
            yield Worker(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            finally:
                process.kill()


def _not_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")
