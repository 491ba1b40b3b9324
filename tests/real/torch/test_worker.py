"""The long-lived process that runs probes: its greeting, its records, and what it says when something breaks."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.real.torch import installation


@pytest.mark.smoke
def test_it_greets_with_what_pytorch_says_of_itself(worker: installation.Worker) -> None:
    hello = worker.hello["hello"]
    assert hello["torch"].startswith(installation.VERSION)
    assert hello["device_name"] == "CPU"
    assert hello["device_count"] == 0
    assert hello["memory_total"] > hello["memory_free"] > 0
    assert {"cuda", "nccl", "cudnn", "python"} <= hello.keys()


def test_a_machine_without_a_gpu_is_broken_at_once_and_gives_the_reason() -> None:
    """C1.9, C17.2: unusable CUDA stops before the first probe, in PyTorch's own words, which messages.py sorts."""
    command = (installation.python(), str(installation.MAIN), "worker", "cuda:0")
    environment = installation.environment(CUDA_VISIBLE_DEVICES="")
    ended = subprocess.run(command, input="", capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 3
    words = json.loads(ended.stdout)["broken"]["words"]
    assert "RuntimeError" in words.splitlines()[-1]
    assert "NVIDIA" in words or "CUDA" in words


def test_a_probe_that_does_not_exist_is_broken_and_the_worker_goes_on(worker: installation.Worker) -> None:
    answer = worker.ask("divination")
    assert "unknown probe 'divination'" in answer["broken"]["words"]
    assert worker.run("memory_bandwidth", bytes=1 << 20, seconds=0.01, repeats=1)["wrong"] == 0


def test_a_line_that_is_no_job_is_answered(worker: installation.Worker) -> None:
    assert "JSONDecodeError" in worker.say("{")["broken"]["words"].splitlines()[-1]
    assert "KeyError" in worker.say("{}")["broken"]["words"].splitlines()[-1]


def test_every_answer_shows_how_long_it_took_and_how_long_the_device_was_at_work(worker: installation.Worker) -> None:
    answer = worker.ask("stress", n=64, seconds=0.2, window_s=0.05)
    assert 0.2 <= answer["busy_s"] <= answer["seconds"]


def test_what_libraries_print_does_not_get_between_the_records() -> None:
    """NCCL prints to the output when it is told to speak. Here a site hook does."""
    code = "import sys, runpy; sys.argv = [sys.argv[1], 'worker', 'cpu']\n"
    code += "import atexit, os; atexit.register(lambda: os.write(1, b'last words\\n'))\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = (installation.python(), "-c", code, str(installation.MAIN))
    ended = subprocess.run(
        command, input="", capture_output=True, text=True, env=installation.environment(), check=True
    )
    assert [list(json.loads(line)) for line in ended.stdout.splitlines()] == [["hello"]]
    assert "last words" in ended.stderr


def test_figures_that_json_does_not_know_are_words(worker: installation.Worker) -> None:
    """A loss that is not a number must reach the judge, and must not break the record, which is read strictly."""
    result = worker.run("training", samples=64, rate=1e30, steps=0, batch=32)
    assert result["runs"][0]["fall"] in {"nan", "-inf", "inf"}


def test_probes_are_found_without_gpukeeper_and_without_its_directory_on_the_path() -> None:
    """Torchrun puts the script's folder on the path; `training` there must not be somebody's `import training`."""
    code = "import sys, runpy; sys.path.insert(0, sys.argv[1]); sys.argv = [sys.argv[2], 'neither']\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit as end: print(end.code)\n"
    code += "import importlib.util as u; ours = 'gpukeeper.acceptance.probes.training'\n"
    code += "print(u.find_spec('training'), u.find_spec(ours) is None)"
    command = (installation.python(), "-I", "-c", code, str(installation.MAIN.parent), str(installation.MAIN))
    ended = subprocess.run(command, capture_output=True, text=True, env=installation.environment(), check=True)
    assert ended.stdout.split() == ["2", "None", "False"]
    assert "expected worker or ranks" in ended.stderr


def test_it_ends_with_its_input() -> None:
    with installation.worker() as started:
        pid = started.process.pid
    assert started.process.returncode == 0
    assert not os.path.exists(f"/proc/{pid}")  # noqa: PTH110
