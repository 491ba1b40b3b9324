"""Workers and ranks, started for real. The program they run speaks the probes' protocol and needs no PyTorch; torchrun
is one that starts ranks as the real one does. C17.2: whatever goes wrong has a kind, and a message by it."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.acceptance.bench import probing
from gpukeeper.acceptance.bench.probing import ProbeLauncher, ProbeWorkers, RanksOutput, answer_of, run_ranks
from gpukeeper.acceptance.record import ProbeFailure, ProbeReply, ProbeRequest, ProbeResult
from tests.patience import PATIENCE, growing

PROGRAM = str(Path(__file__).with_name("probe_program.py"))
BENCH = ProbeLauncher(sys.executable, "cuda", PROGRAM, to_start_s=60.0, ranks_to_start_s=60.0)
# Like torchrun: a session for each rank; when one fails, the others are ended; a summary names the first one.
TORCHRUN = """
import os, signal, subprocess, sys, time
arguments = sys.argv[1:]
option = lambda name: arguments[arguments.index(name) + 1]
count, logs = int(option("--nproc-per-node")), option("--log-dir")
command = [sys.executable, *arguments[arguments.index("--redirects") + 2:]]
ranks = []
for rank in range(count):
    folder = f"{logs}/none_x/attempt_0/{rank}"
    os.makedirs(folder)
    with open(f"{folder}/stderr.log", "w") as words, open(f"{folder}/stdout.log", "w") as printed:
        ranks.append(subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, start_new_session=True,
                                      stdout=printed, stderr=words))
first = None
while first is None and any(rank.poll() is None for rank in ranks):
    first = next((n for n, rank in enumerate(ranks) if rank.poll()), None)
    time.sleep(0.01)
if first is None:
    first = next((n for n, rank in enumerate(ranks) if rank.poll()), None)
if first is not None:
    for rank in ranks:
        rank.poll() is None and rank.terminate()
        rank.wait()
    for n, rank in enumerate(ranks):
        title = "Root Cause (first observed failure):" if n == first else "Failures:"
        sys.stderr.write(f"{title}\\n[0]:\\n  time : now\\n  rank      : {n} (local_rank: {n})\\n"
                         f"  exitcode  : {rank.returncode} (pid: {rank.pid})\\n")
    sys.exit(1)
"""


def with_workers(use: Callable[[ProbeWorkers], Awaitable[Any]], bench: ProbeLauncher = BENCH) -> Any:
    async def run() -> Any:
        workers = ProbeWorkers(bench)
        try:
            return await use(workers)
        finally:
            await workers.close()

    return asyncio.run(run())


def one(probe: str, bench: ProbeLauncher = BENCH, deadline_s: float = PATIENCE, **params: Any) -> ProbeReply:
    job = ProbeRequest(probe=probe, params=params, deadline_s=deadline_s)
    answer: ProbeReply = with_workers(lambda workers: workers.each({"GPU-a": job}), bench)["GPU-a"]
    return answer


@pytest.mark.slow
def test_every_gpu_has_a_worker_that_sees_only_it_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")  # of a job around us: none of its business

    async def twice(workers: ProbeWorkers) -> Any:
        jobs = {uuid: ProbeRequest(probe="echo", params={"n": 8}) for uuid in ("GPU-a", "GPU-b")}
        return await workers.each(jobs), await workers.each(jobs)

    first, again = with_workers(twice)
    for uuid in ("GPU-a", "GPU-b"):
        assert isinstance(first[uuid], ProbeResult)
        assert first[uuid].result["params"] == {"n": 8}
        assert first[uuid].result["env"] == {
            "CUDA_VISIBLE_DEVICES": uuid,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONSAFEPATH": "1",
            "RANK": None,
        }
        assert (first[uuid].seconds, first[uuid].busy_s) == (1.5, 1.25)
        assert again[uuid].result["pid"] == first[uuid].result["pid"]
    assert first["GPU-a"].result["pid"] != first["GPU-b"].result["pid"]


def test_on_the_cpu_no_gpu_is_shown() -> None:
    answer = one("echo", replace(BENCH, kind="cpu"))
    assert isinstance(answer, ProbeResult)
    assert answer.result["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_a_probe_that_hangs_is_ended_with_its_family_and_the_next_gets_a_new_process(tmp_path: Path) -> None:
    async def use(workers: ProbeWorkers) -> Any:
        file = tmp_path / "pids"
        os.mkfifo(file)
        job = ProbeRequest(probe="family", params={"file": str(file)}, deadline_s=600.0)
        hanging = asyncio.ensure_future(workers.each({"GPU-a": job}))
        said = await asyncio.to_thread(file.read_text)  # waits until it is written
        fds = [os.pidfd_open(int(pid)) for pid in said.split()]
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        ended = [bool(select.select([fd], [], [], PATIENCE)[0]) for fd in fds]
        for fd in fds:
            os.close(fd)
        for seconds in growing(0.5):
            late = (await workers.each({"GPU-a": ProbeRequest(probe="sleep", deadline_s=seconds)}))["GPU-a"]
            if isinstance(late, ProbeFailure) and "about to sleep" in late.words:
                break
        after = await workers.each({"GPU-a": ProbeRequest(probe="echo")})
        return ended, late, seconds, after["GPU-a"], workers.words

    ended, late, seconds, after, words = with_workers(use)
    assert ended == [True, True]
    assert isinstance(late, ProbeFailure)
    assert late.kind == "timeout"
    assert "about to sleep" in late.words
    assert f"no result within {seconds:g} s" in late.words
    assert isinstance(after, ProbeResult)
    assert "about to sleep" in words["GPU-a"]


def test_a_probe_that_hangs_does_not_keep_the_others() -> None:
    async def use(workers: ProbeWorkers) -> Any:
        return await workers.each(
            {"GPU-a": ProbeRequest(probe="sleep", deadline_s=0.5), "GPU-b": ProbeRequest(probe="echo")}
        )

    answers = with_workers(use)
    assert isinstance(answers["GPU-a"], ProbeFailure)
    assert isinstance(answers["GPU-b"], ProbeResult)


def test_a_probe_that_dies_is_quoted() -> None:
    answer = one("die")
    assert isinstance(answer, ProbeFailure)
    assert answer.kind == "crashed"
    assert "by signal 6" in answer.words
    assert "terminate called" in answer.words


def test_what_a_probe_says_itself_names_the_kind_and_the_next_process_is_new() -> None:
    async def use(workers: ProbeWorkers) -> Any:
        words = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB"
        failed = await workers.each({"GPU-a": ProbeRequest(probe="fail", params={"words": words})})
        return failed["GPU-a"], (await workers.each({"GPU-a": ProbeRequest(probe="echo")}))["GPU-a"]

    failed, after = with_workers(use)
    assert (failed.kind, failed.words[:16]) == ("out_of_memory", "OutOfMemoryError")
    assert isinstance(after, ProbeResult)


def test_what_is_no_record_is_no_measurement() -> None:
    answer = one("mumble")
    assert isinstance(answer, ProbeFailure)
    assert answer.kind == "failed"
    assert "invalid output" in answer.words


@pytest.mark.parametrize(
    ("hello", "kind", "said"),
    [
        ("broken", "no_torch", "No module named 'torch'"),
        ("dies", "ecc", "uncorrectable ECC"),
        ("silent", "timeout", "no result within 0.5 s"),
    ],
)
def test_a_worker_that_cannot_begin_gives_the_reason(
    hello: str, kind: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELLO", hello)
    answer = one("echo", replace(BENCH, to_start_s=0.5 if hello == "silent" else PATIENCE))
    assert isinstance(answer, ProbeFailure)
    assert answer.kind == kind
    assert said in answer.words


def test_an_interpreter_that_is_not_there_is_an_answer_too() -> None:
    answer = one("echo", replace(BENCH, python="/nowhere/python"))
    assert isinstance(answer, ProbeFailure)
    assert "/nowhere/python could not be started" in answer.words


# Ranks


@pytest.fixture
def torchrun(tmp_path: Path) -> ProbeLauncher:
    """An interpreter whose torch.distributed.run is the program above."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text(TORCHRUN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return replace(BENCH, python=str(python))


def ranks(
    bench: ProbeLauncher, count: int = 2, deadline_s: float = PATIENCE, **params: Any
) -> tuple[dict[str, ProbeReply], dict[str, str]]:
    uuids = [f"GPU-{number}" for number in range(count)]
    return asyncio.run(run_ranks(bench, uuids, ProbeRequest(probe="ddp", params=params, deadline_s=deadline_s)))


def test_every_rank_answers_and_nccls_words_are_kept(torchrun: ProbeLauncher) -> None:
    """C1.2, C1.9"""
    answers, logs = ranks(torchrun)
    assert list(answers) == ["0", "1"]
    for number, answer in answers.items():
        assert isinstance(answer, ProbeResult), answer
        assert answer.result == {"rank": int(number), "shown": "GPU-0,GPU-1"}
    assert logs["nccl-host-0.log"] == "NCCL INFO ring"


def test_what_lies_in_the_directory_we_are_in_does_not_run(
    torchrun: ProbeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter before 3.11 knows no safe path, so that `-m` looks there first."""
    python = Path(torchrun.python)
    python.write_text(python.read_text().replace("PYTHONPATH=", "unset PYTHONSAFEPATH\nPYTHONPATH="))
    evil = tmp_path / "evil"
    (evil / "torch").mkdir(parents=True)
    (evil / "torch/__init__.py").write_text("raise SystemExit('this is not PyTorch')")
    monkeypatch.chdir(evil)
    answers, _ = ranks(torchrun)
    assert {type(answer) for answer in answers.values()} == {ProbeResult}, answers


def test_a_directory_is_meant_as_seen_from_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = one("echo", data_dir="images", data=None, no_dir=None)
    assert isinstance(answer, ProbeResult)
    assert answer.result["params"] == {"data_dir": str(tmp_path / "images"), "data": None, "no_dir": None}


def test_the_directory_of_ranks_is_gone_afterwards(
    torchrun: ProbeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    ranks(torchrun)
    assert list((tmp_path / "t").iterdir()) == []


def test_the_rank_that_failed_is_blamed_and_the_others_were_stopped(torchrun: ProbeLauncher) -> None:
    answers, _ = ranks(torchrun, refuse=[1], wait=True)
    stopped, failed = answers["0"], answers["1"]
    assert isinstance(failed, ProbeFailure)
    assert failed.kind == "out_of_memory"
    assert isinstance(stopped, ProbeFailure)
    assert stopped.kind == "failed"  # nothing is known of its GPU
    assert "stopped because rank 1 failed" in stopped.words


def test_a_rank_that_is_killed_is_a_crash(torchrun: ProbeLauncher) -> None:
    answers, _ = ranks(torchrun, die=[0], wait=True)
    failed = answers["0"]
    assert isinstance(failed, ProbeFailure)
    assert (failed.kind, "by signal 9" in failed.words) == ("crashed", True)


def test_who_hangs_and_who_waits_for_it_are_distinguished(torchrun: ProbeLauncher) -> None:
    for seconds in growing(2.0):
        answers, _ = ranks(replace(torchrun, ranks_to_start_s=seconds), deadline_s=0.0, hang=[1], wait=True)
        assert isinstance(answers["0"], ProbeFailure)
        assert isinstance(answers["1"], ProbeFailure)
        if "last stage" in answers["0"].words and "last stage" in answers["1"].words:  # both had begun
            break
    assert (answers["0"].kind, answers["1"].kind) == ("rendezvous", "timeout")
    assert "last stage: 'ddp'" in answers["1"].words


def test_without_torch_no_rank_starts() -> None:
    answers, _ = ranks(BENCH)
    assert {type(answer) for answer in answers.values()} == {ProbeFailure}
    assert {answer.kind for answer in answers.values() if isinstance(answer, ProbeFailure)} == {"no_torch"}


def test_a_rank_without_a_record_is_never_done() -> None:
    """Pure: torchrun says that all went well, and one record is not there."""
    left = RanksOutput({0: {"done": {"rank": 0}}}, {}, {0: "end", 1: ""}, "", 0, 60.0, 5.0)
    assert isinstance(answer_of(0, left), ProbeResult)
    broken = answer_of(1, left)
    assert isinstance(broken, ProbeFailure)
    assert "exited without a record" in broken.words


def test_a_record_that_was_cut_off_is_no_measurement(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text('{"done": {"rank"')
    left = probing.gather(tmp_path, 1, "", 0, 60.0, 5.0)
    assert isinstance(answer_of(0, left), ProbeFailure)


def test_the_probes_are_found_without_importing_them() -> None:
    assert Path(probing.program()).name == "__main__.py"
    told = "import sys; from gpukeeper.acceptance.bench import probing, workbench\n"
    told += "probing.program(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.split()
    assert "gpukeeper.acceptance.bench.workbench" in loaded
    assert not [name for name in loaded if name.startswith("gpukeeper.acceptance.probes.")]
