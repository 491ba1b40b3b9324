"""Runs probes in processes of their own: a worker for each GPU, or ranks over several of them by torchrun; and
which Python runs them: one that has PyTorch. It need not be ours. PyTorch is not imported to find out.

Whatever happens there is an answer: a probe that hangs is ended with everything it started, one that dies is quoted.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from gpukeeper.acceptance.bench.child_process import ChildProcess, ProcessEnded
from gpukeeper.acceptance.judging.replies import classify
from gpukeeper.acceptance.record import ProbeFailure, ProbeReply, ProbeRequest, ProbeResult
from gpukeeper.model import reading
from gpukeeper.model.unknown import Unknown
from gpukeeper.processes import last_line

PYTHON_VARIABLE = "GPUKEEPER_PYTHON"
PYTHONS_ON_PATH = ("python3", "python")
PYTHON_START_S = 30.0  # an interpreter on a slow network disk
_QUESTION = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('torch') else 9)"
_NO_TORCH = 9
GET_ONE = "in a clone of gpukeeper: pip install '.[accept]'; or name an interpreter with --python or GPUKEEPER_PYTHON"


def find_python(wanted: str | None = None, variables: Mapping[str, str] = os.environ) -> str | Unknown:
    """The configured one, and no other; else ours; else the first on PATH that has PyTorch. Or why there is none."""
    named = wanted or variables.get(PYTHON_VARIABLE)
    if named:
        return _configured_python(named, "--python" if wanted else PYTHON_VARIABLE, variables.get("PATH"))
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    there = [_path_of(name, variables.get("PATH")) for name in PYTHONS_ON_PATH]
    for python in dict.fromkeys(filter(None, there)):
        if why_not_python(python) is None:
            return python
    searched = ", ".join(dict.fromkeys((sys.executable, *filter(None, there))))
    return Unknown(f"No module named 'torch' in any of {searched}. To install it: {GET_ONE}.")


def _configured_python(named: str, how: str, path: str | None) -> str | Unknown:
    python = _path_of(named, path)
    if python is None:
        return Unknown(f"{how}={named!r}: program not found. Set it to a Python that has PyTorch.")
    why = why_not_python(python)
    return python if why is None else Unknown(f"{how}={named!r}: {why}. To install it: {GET_ONE}.")


def _path_of(name: str, path: str | None) -> str | None:
    """From wherever it is started. Links stay: an environment is known by the place of its link."""
    found = shutil.which(name, path=path)
    return None if found is None else str(Path(found).absolute())


def why_not_python(python: str) -> str | None:
    """None: it has PyTorch."""
    try:
        done = subprocess.run(
            (python, "-c", _QUESTION),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PYTHON_START_S,
            check=False,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return f"it did not start within {PYTHON_START_S:.0f} s"
    except OSError as error:
        return f"it could not be started: {error.strerror}"
    if done.returncode == _NO_TORCH:
        return "No module named 'torch'"
    return None if done.returncode == 0 else f"it is not a working Python: {last_line(done.stderr) or 'no output'}"


TO_START_S = 180.0  # PyTorch from a cold disk, eight at once; CUDA wakes the GPU
RANKS_TO_START_S = 90.0
# The directory we were started in is not trusted: before Python 3.11 nothing else keeps `-m` from importing from it.
FOLDER = "/"
LAST_LINES = 40
KEPT_OF_A_LOG = 256 * 1024
NCCL_LOG = "nccl-%h-%p.log"
_LEFT_OVER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_(?:ADDR|PORT)|PET_\w+|TORCHELASTIC_\w+"
)
# torchrun's own summary of which rank ended how.
_EXITED = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)")
_FIRST = re.compile(r"Root Cause.*?rank\s*: (\d+) ", re.DOTALL)
STOPPED_BY_TORCHRUN = (-15, 143)


def program() -> str:
    """The probes' main file, found without importing them: they are for another interpreter."""
    found = find_spec("gpukeeper.acceptance.probes")
    assert found is not None
    assert found.submodule_search_locations
    return str(Path(found.submodule_search_locations[0], "__main__.py"))


@dataclass(frozen=True)
class ProbeLauncher:
    """How probes are started. `kind`: cuda or cpu."""

    python: str
    kind: str
    main: str = field(default_factory=program)
    to_start_s: float = TO_START_S
    ranks_to_start_s: float = RANKS_TO_START_S

    def worker(self) -> tuple[str, ...]:
        return self.python, self.main, "worker", "cuda:0" if self.kind == "cuda" else "cpu"

    def ranks(self, count: int, directory: Path, job: ProbeRequest) -> tuple[str, ...]:
        """All of one machine, at an address that needs no name service."""
        here = "127.0.0.1"
        request = request_json(job)
        return (
            *(self.python, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(count)),
            *("--max-restarts", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{here}:0", "--local-addr", here),
            *("--log-dir", str(directory / "logs"), "--redirects", "3"),
            *(self.main, "ranks", str(directory), self.kind, request),
        )

    def environment(self, gpus: Sequence[str]) -> dict[str, str]:
        """Variables of a surrounding job must not define the ranks, and the current directory is not trusted."""
        kept = {name: value for name, value in os.environ.items() if not _LEFT_OVER.fullmatch(name)}
        shown = {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus) if self.kind == "cuda" else "",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        more = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
        return {**kept, **shown, **more}


def request_json(job: ProbeRequest) -> str:
    """Directories relative to the user's current directory: probes run in another one."""
    directories = {name: str(Path(at).absolute()) for name, at in job.params.items() if name.endswith("_dir") and at}
    return json.dumps({"probe": job.probe, "params": {**job.params, **directories}})


class ProbeWorker:
    """One GPU's. Started at the first need, and again after a failure."""

    def __init__(self, bench: ProbeLauncher, gpu: str) -> None:
        self._bench, self._gpu = bench, gpu
        self._process: ChildProcess | None = None
        self._hello: dict[str, Any] = {}
        self.words = ""  # the last output of earlier processes, and the output of this one

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def hello(self) -> dict[str, Any] | ProbeFailure:
        """Starts it; returns what it reports about PyTorch and its GPU."""
        if self._process is not None and self._process.exit_code is None:
            return self._hello
        await self.close()
        began = time.monotonic()
        try:
            self._process = await ChildProcess.start(
                self._bench.worker(), self._bench.environment((self._gpu,)), FOLDER
            )
            record = _record(await self._process.line(self._bench.to_start_s))
        except BaseException as error:
            return await self._broken(error, began, self._bench.to_start_s)
        hello = record.get("hello")
        if not isinstance(hello, dict):
            return await self._refused(record, began)
        self._hello = hello
        return hello

    async def run(self, job: ProbeRequest) -> ProbeReply:
        hello = await self.hello()
        if isinstance(hello, ProbeFailure):
            return hello
        assert self._process is not None
        began = time.monotonic()
        try:
            await self._process.send(request_json(job).encode())
            record = _record(await self._process.line(job.deadline_s))
        except BaseException as error:
            return await self._broken(error, began, job.deadline_s)
        done = record.get("done")
        if not isinstance(done, dict):
            return await self._refused(record, began)
        return ProbeResult(result=done, seconds=_number(record, "seconds"), busy_s=_number(record, "busy_s"))

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                await process.end()
            finally:
                self.words = (self.words + process.words)[-KEPT_OF_A_LOG:]

    async def _refused(self, record: Mapping[str, Any], began: float) -> ProbeFailure:
        """It reported the failure itself. After a CUDA error the process cannot use the GPU: the next one is new."""
        await self.close()
        words = _words(record) or f"invalid output: {str(record)[:500]}"
        return ProbeFailure(kind=classify(words), words=words, seconds=time.monotonic() - began)

    async def _broken(self, error: BaseException, began: float, deadline_s: float) -> ProbeFailure:
        process = self._process
        seconds = time.monotonic() - began
        if isinstance(error, ProcessEnded) and process is not None:
            code = await _exit_code(process)
            words = f"exited{_how(code)}\n{_last_lines(await process.last_words())}".strip()
            await self.close()
            return ProbeFailure(kind=classify(words, code), words=words, seconds=seconds)
        last = "" if process is None else process.words
        await self.close()  # with everything it started
        match error:
            case TimeoutError():
                words = f"{_last_lines(last)}\ntimeout: no result within {deadline_s:g} s, so it was stopped".strip()
                return ProbeFailure(kind="timeout", words=words, seconds=seconds)
            case OSError():
                return ProbeFailure(kind="failed", words=f"it could not be started: {error.strerror}", seconds=seconds)
            case ValueError():
                return ProbeFailure(kind="failed", words=f"{_last_lines(last)}\n{error}".strip(), seconds=seconds)
        raise error


class ProbeWorkers:
    """A worker for each GPU, by its uuid."""

    def __init__(self, bench: ProbeLauncher) -> None:
        self._bench = bench
        self._workers: dict[str, ProbeWorker] = {}

    async def hello(self, gpu: str) -> dict[str, Any] | ProbeFailure:
        return await self._worker(gpu).hello()

    async def each(self, jobs: Mapping[str, ProbeRequest]) -> dict[str, ProbeReply]:
        """All are up before the first begins: GPUs that wait for their neighbours' start would run alone."""
        await _all(*(self._worker(gpu).hello() for gpu in jobs))
        answers = await _all(*(self._worker(gpu).run(job) for gpu, job in jobs.items()))
        return dict(zip(jobs, answers, strict=True))

    async def close(self) -> None:
        await _all(*(worker.close() for worker in self._workers.values()))

    @property
    def words(self) -> dict[str, str]:
        return {gpu: worker.words for gpu, worker in self._workers.items() if worker.words}

    def _worker(self, gpu: str) -> ProbeWorker:
        return self._workers.setdefault(gpu, ProbeWorker(self._bench, gpu))


async def _all(*works: Any) -> list[Any]:
    """Waits for every one even when one is interrupted, so that each can end what it started."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


@dataclass(frozen=True)
class RanksOutput:
    """What ranks left behind: records by rank, the last words of each, how far each came, and torchrun's own words."""

    records: Mapping[int, Mapping[str, Any]]
    words: Mapping[int, str]
    stages: Mapping[int, str]
    torchrun: str
    exit_code: int | None  # None: the time was up
    deadline_s: float
    seconds: float


async def run_ranks(
    bench: ProbeLauncher, gpus: Sequence[str], job: ProbeRequest
) -> tuple[dict[str, ProbeReply], dict[str, str]]:
    """An answer for every rank, by its number; and the logs that are worth keeping, by their names."""
    directory = Path(tempfile.mkdtemp(prefix="gpukeeper-ranks-"))
    began, deadline = time.monotonic(), job.deadline_s + bench.ranks_to_start_s
    environment = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,TUNING,NET",
        **bench.environment(gpus),
        "NCCL_DEBUG_FILE": str(directory / NCCL_LOG),
    }
    try:
        code, words = await _torchrun(bench.ranks(len(gpus), directory, job), environment, deadline)
        left = gather(directory, len(gpus), words, code, deadline, time.monotonic() - began)
        answers = {str(rank): answer_of(rank, left) for rank in range(len(gpus))}
        return answers, {"torchrun": words, **logs_in(directory)}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _torchrun(
    command: Sequence[str], environment: Mapping[str, str], deadline_s: float
) -> tuple[int | None, str]:
    try:
        process = await ChildProcess.start(command, environment, FOLDER)
    except OSError as error:
        return 127, f"torchrun could not be started: {error.strerror}"
    try:
        code: int | None = await process.wait(deadline_s)
        await process.last_words()
    except TimeoutError:
        code = None
    finally:
        await process.end()
    return code, process.words


def gather(
    directory: Path, count: int, torchrun: str, exit_code: int | None, deadline_s: float, seconds: float
) -> RanksOutput:
    stderr = {int(path.parent.name): path for path in directory.glob("logs/*/attempt_*/*/stderr.log")}
    records = {rank: record_in(directory / f"rank-{rank}.json") for rank in range(count)}
    return RanksOutput(
        records={rank: record for rank, record in records.items() if record is not None},
        words={rank: _tail(path) for rank, path in stderr.items()},
        stages={rank: _tail(directory / f"rank-{rank}.stage").strip() for rank in range(count)},
        torchrun=torchrun,
        exit_code=exit_code,
        deadline_s=deadline_s,
        seconds=seconds,
    )


def answer_of(rank: int, left: RanksOutput) -> ProbeReply:
    """Pure. torchrun reports that a rank failed; the reason is in the output of that rank."""
    record = left.records.get(rank)
    if record is not None and isinstance(record.get("done"), dict):
        done = dict(record["done"])
        return ProbeResult(result=done, seconds=_number(record, "seconds"), busy_s=_number(record, "busy_s"))
    words = _words(record or {}) or _last_lines(left.words.get(rank, ""))
    if record is not None:
        return ProbeFailure(kind=classify(words), words=words or "its record is empty", seconds=left.seconds)
    if left.exit_code is None:
        return _late(rank, words, left)
    codes = {int(found[1]): int(found[2]) for found in _EXITED.finditer(left.torchrun)}
    first = _FIRST.search(left.torchrun)
    culprit = int(first[1]) if first else None
    if culprit not in (None, rank) and codes.get(rank, STOPPED_BY_TORCHRUN[0]) in STOPPED_BY_TORCHRUN:
        why = _words(left.records.get(culprit or 0, {})) or left.words.get(culprit or 0, "")
        message = f"rank {rank} was stopped because rank {culprit} failed{_how(codes.get(culprit or 0))}"
        return ProbeFailure(kind="failed", words=f"{_last_lines(why)}\n{message}".strip(), seconds=left.seconds)
    code = codes.get(rank, left.exit_code)
    words = words or ("" if rank in codes else _last_lines(left.torchrun))  # its summary only repeats the exit code
    words = f"{words}\nrank {rank} exited without a record{_how(code)}".strip()
    return ProbeFailure(kind=classify(words, code), words=words, seconds=left.seconds)


def _late(rank: int, words: str, left: RanksOutput) -> ProbeFailure:
    """A rank that waits in the rendezvous for another one is not the one that hangs."""
    waiting = [one for one, stage in left.stages.items() if stage == "rendezvous"]
    stage = left.stages.get(rank, "")
    came = f"last stage: {stage!r}" if stage else "it had not started"
    words = (
        f"{words}\ntimeout: no record of rank {rank} within {left.deadline_s:g} s, so it was stopped; {came}"
    ).strip()
    kind = "rendezvous" if rank in waiting else "timeout"
    return ProbeFailure(kind=kind, words=words, seconds=left.seconds)


def _record(line: bytes) -> dict[str, Any]:
    """ValueError when it is none."""
    try:
        record = reading.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"invalid output: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"invalid output: {str(record)[:500]}")
    return record


def record_in(path: Path) -> dict[str, Any] | None:
    try:
        return _record(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return {"broken": {"words": str(error)}}


def _words(record: Mapping[str, Any]) -> str:
    broken = record.get("broken")
    return str(broken.get("words", "")) if isinstance(broken, Mapping) else ""


def _number(record: Mapping[str, Any], key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


async def _exit_code(process: ChildProcess) -> int | None:
    try:
        return await process.wait(2.0)
    except TimeoutError:
        return None


def _how(code: int | None) -> str:
    """Signal n is reported as 128 + n by the supervisor, as -n by torchrun."""
    number = None if code is None else -code if code < 0 else code - 128 if code > 128 else None
    if number is not None:
        return f" by signal {number}"
    return "" if code is None else f" with exit code {code}"


def _last_lines(words: str) -> str:
    return "\n".join(words.strip().splitlines()[-LAST_LINES:])


def _tail(path: Path, most: int = 65536) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - most, 0))
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def logs_in(directory: Path) -> dict[str, str]:
    """NCCL's own words begin with what matters, the rings and the algorithms; ranks' end with it."""
    found = {path.name: _tail(path, KEPT_OF_A_LOG) for path in sorted(directory.glob("nccl-*.log"))}
    ranks = {f"rank-{path.parent.name}.{path.name}": path for path in directory.glob("logs/*/attempt_*/*/std*.log")}
    return {**found, **{name: words for name, path in sorted(ranks.items()) if (words := _tail(path))}}
