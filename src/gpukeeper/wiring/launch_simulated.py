"""The simulated engine behind `accept --on simulated`: its objects are files in the state directory, its nodes are
simulated machines. Nothing outside this machine is started."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from gpukeeper import __version__
from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet.group_jobs import Member, RankDevice
from gpukeeper.acceptance.fleet.launcher import RunSpec
from gpukeeper.acceptance.group.agent import AgentResult
from gpukeeper.acceptance.group.session import SimulatedGroup, merged, simulated_report
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.launchers.simulated import GPUS, Script, SimulatedLauncher
from gpukeeper.acceptance.record import GroupReport, Report
from gpukeeper.acceptance.run import RunConfig, accept
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.blocking import SystemClock
from gpukeeper.config.problems import did_you_mean
from gpukeeper.ledger.files import ledger_path, make_private
from gpukeeper.model.errors import UsageError
from gpukeeper.model.unknown import Unknown

OPTIONS = ("nodes", "scripts", "seconds")
DEFAULT = (*(Script.GOOD,) * 5, Script.FAIL, Script.LOST_LOG, Script.EVICTED)
MOST_NODES = 1024
WISH = RunRequest(device="simulated", only=("gemm", "exact"))  # whatever the command line selects
MODEL = "NVIDIA H200"
TAKE_PART = (Script.GOOD, Script.FAIL, Script.LOST_LOG, Script.CUT_LOG, Script.BAD_NETWORK)  # with --together
T = TypeVar("T")


def launcher(options: Mapping[str, str]) -> SimulatedLauncher:
    """`nodes`: how many; `scripts`: what becomes of them (pass,fail,hang,…), in turn; `seconds`: how long they take."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise UsageError(
            f"--option {unknown[0]}: the simulated engine has no such option. {did_you_mean(unknown[0], OPTIONS)}"
        )
    scripts = _scripts(options)
    engine = Path(ledger_path()).parent / "simulated-engine"
    return SimulatedLauncher(
        scripts, FolderOfObjects(engine), SystemClock(), SimulatedNodes(), seconds=_seconds(options)
    )


def _scripts(options: Mapping[str, str]) -> list[Script]:
    words = [word.strip() for word in options.get("scripts", "").split(",") if word.strip()]
    known = [one.value for one in Script]
    for word in words:
        if word not in known:
            raise UsageError(f'--option scripts: unknown script "{word}". Scripts: {", ".join(known)}.')
    scripts = [Script(word) for word in words] or list(DEFAULT)
    count = options.get("nodes", str(len(scripts)))
    if not (count.isascii() and count.isdigit() and 1 <= int(count[:6]) <= MOST_NODES):
        raise UsageError(f'--option nodes: "{count}" is not a number from 1 to {MOST_NODES}.')
    return [scripts[number % len(scripts)] for number in range(int(count))]


def _seconds(options: Mapping[str, str]) -> float:
    words = options.get("seconds", "2")
    if not (words.isascii() and words.isdigit() and int(words[:6]) <= 3600):
        raise UsageError(f'--option seconds: "{words}" is not a number from 0 to 3600.')
    return float(words)


class SimulatedNodes:
    """A node is tested once, and a group once: status and output are asked for often."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], Report] = {}
        self._groups: dict[str, GroupReport] = {}

    def __call__(self, spec: RunSpec, node: str, scripts: Mapping[str, Script]) -> Report:
        key = (spec.run, node)
        if key not in self._reports:
            self._reports[key] = self._tested(spec, node, scripts)
        return self._reports[key]

    def _tested(self, spec: RunSpec, node: str, scripts: Mapping[str, Script]) -> Report:
        alone = _in_a_loop(_test(spec, node, fault=scripts.get(node) is Script.FAIL))
        if not spec.together:
            return alone
        if spec.run not in self._groups:
            self._groups[spec.run] = _in_a_loop(_test_group(spec.run, scripts))
        index = list(scripts).index(node)
        return merged(alone, AgentResult(self._groups[spec.run], None, (), {}), WISH, index)


def _in_a_loop(work: Coroutine[Any, Any, T]) -> T:
    """One of its own: the caller's runs already."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, work).result()


def _bench(node: str, *, fault: bool) -> SimulatedWorkbench:
    seed = sum(node.encode())
    return SimulatedWorkbench(gpus=GPUS, seed=seed, ecc={seed % GPUS: 1} if fault else {})


async def _test(spec: RunSpec, node: str, *, fault: bool) -> Report:
    bench = _bench(node, fault=fault)
    order = RunConfig(
        run=spec.run,
        node=node,
        version=__version__,
        wish=WISH,
        checks=CHECKS,
        limits=reference.limits,
        history=lambda gpus: {},
    )
    return await accept(bench, order, bench.clock)


async def _test_group(run: str, scripts: Mapping[str, Script]) -> GroupReport:
    members = {}
    for index, (node, script) in enumerate(scripts.items()):
        if script not in TAKE_PART:
            continue
        machine = await _bench(node, fault=False).machine()
        gpus = () if isinstance(machine.gpus, Unknown) else machine.gpus
        devices = tuple(RankDevice(uuid=one.uuid, index=one.index, name=MODEL) for one in gpus)
        unfit = "its own checks failed" if script is Script.FAIL else ""
        members[index] = Member(index=index, node=node, devices=devices, unfit=unfit)
    bad = [index for index, script in enumerate(scripts.values()) if script is Script.BAD_NETWORK]
    return await simulated_report(run, SimulatedGroup(members, len(scripts), bad), len(scripts), WISH, reference.limits)


class FolderOfObjects(MutableMapping[str, bytes]):
    """One file, one object; written complete or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getitem__(self, key: str) -> bytes:
        try:
            return (self._path / quote(key, safe="")).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: bytes) -> None:
        make_private(self._path.parent)  # the state directory
        make_private(self._path)
        made = self._path / f".{secrets.token_hex(8)}"
        made.write_bytes(value)
        made.replace(self._path / quote(key, safe=""))

    def __delitem__(self, key: str) -> None:
        try:
            (self._path / quote(key, safe="")).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        names = sorted(path.name for path in self._path.iterdir()) if self._path.is_dir() else []
        return iter(unquote(name) for name in names if not name.startswith("."))

    def __len__(self) -> int:
        return sum(1 for _ in self)
