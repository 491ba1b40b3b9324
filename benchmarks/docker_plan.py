"""A plan over 500 containers of a real engine, against the Docker SDK's list of the same ones.

With what earlier passes know (the engine's events were heard meanwhile) and without. The engine is a private one,
started for this. The peer is `containers.list(all=True)` of the package `docker`, in an interpreter of its own.

And where the time of the whole command goes: CPU seconds of `gpukeeper plan`, of its imports alone, and of
`docker ps -a --size`. Of wall time a busy host makes any multiple.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from benchmarks.needs import CannotMeasure, need
from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.blocking import SystemClock
from gpukeeper.clients.docker import Engine
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.reclaim import look_and_plan
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.policy import ClassSettings, PlaceScope, Policy
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.messages import Messages
from gpukeeper.platforms.docker.adapter import DockerPlatform
from tests.engines import has_docker
from tests.real.docker.private_engine import DockerEngine, docker_engine

CONTAINERS, RUNNING, RUNS = sized((500, 10, 5), tiny=(6, 2, 1))
KNOWING, COLD = 5.0, 3.0  # targets, times faster than the peer
SDK = "docker==7.2.0"
POLICY = Policy(scope={"docker": PlaceScope()}, classes={"unknown": ClassSettings(), "docker": ClassSettings()})
LISTS = """
import sys, time, docker
client = docker.DockerClient(base_url=sys.argv[1])
client.ping()
begun = time.perf_counter()
found = client.containers.list(all=True)
print(time.perf_counter() - begun, len(found))
"""


def run() -> None:
    need("docker", has_docker())
    sdk = sdk_interpreter()
    if isinstance(sdk, Unknown):
        raise CannotMeasure(f"The peer: {sdk.why}")
    with docker_engine() as engine:
        fill(engine)
        rounds = [(_sdk_lists(sdk, engine), *asyncio.run(_plans(engine))) for _ in range(RUNS)]
        commands = [_commands(engine) for _ in range(RUNS)]
    peer, cold, knowing = (min(times) for times in zip(*rounds, strict=True))
    rows = [
        (f"docker SDK {SDK.partition('==')[2]}, list(all=True)", f"{peer:.3f}", "1.0", ""),
        ("plan, cold: the first one", f"{cold:.3f}", f"{peer / cold:.1f}", _target(peer / cold, COLD)),
        ("plan, knowing the last one", f"{knowing:.3f}", f"{peer / knowing:.1f}", _target(peer / knowing, KNOWING)),
    ]
    print_table((f"{CONTAINERS} containers, {RUNNING} running", "seconds", "times faster", "target"), rows)
    print(f"minimum of {RUNS} rounds in turn\n")
    whole, uncached, start, ps = (min(times) for times in zip(*commands, strict=True))
    parts = [
        ("gpukeeper plan, the whole command", f"{whole:.2f}", "1.0"),
        ("its imports alone", f"{start:.2f}", f"{start / whole:.2f}"),
        ("the same plan without compiled modules", f"{uncached:.2f}", f"{uncached / whole:.2f}"),
        ("docker ps -a --size", f"{ps:.2f}", f"{ps / whole:.2f}"),
    ]
    print_table(("the command", "CPU seconds", "of the whole"), parts)
    print_figure(Figure("docker-plan", round(knowing, 4), "s", round(knowing / peer, 3), "the docker SDK's list"))


def _commands(engine: DockerEngine) -> tuple[float, float, float, float]:
    """CPU seconds of a plan with and without compiled modules, of its imports, and of docker's own list with sizes."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "policy.yaml")
        policy.write_text("preset: shared-host\nscope: {docker: {}}\n")
        environ = {**os.environ, "DOCKER_HOST": engine.host, "GPUKEEPER_STATE": f"{folder}/state"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        compiled = {**environ, "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
        plan = [sys.executable, "-m", "gpukeeper", "plan", "--policy", str(policy)]
        imports = [
            sys.executable,
            "-c",
            "import gpukeeper.wiring.session, gpukeeper.interfaces.cli.plan, gpukeeper.http_client",
        ]
        _cpu(plan, compiled)  # compiles
        not_compiled = {**environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": f"{folder}/nothing"}
        docker = ["docker", "-H", engine.host, "ps", "-a", "--size"]
        return _cpu(plan, compiled), _cpu(plan, not_compiled), _cpu(imports, compiled), _cpu(docker, environ)


def _cpu(command: list[str], environ: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environ, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fill(engine: DockerEngine) -> None:
    for number in range(CONTAINERS - RUNNING):
        engine.create(f"made-{number}", gpus=[number % 4] if number % 2 else [], user="1000")
    for number in range(RUNNING):
        engine.run(f"runs-{number}", gpus=[number % 4], user="1000")


def sdk_interpreter() -> str | Unknown:
    """Of an environment with the SDK, made once in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "gpukeeper" / f"benchmark-{SDK}"
    program = folder / "bin" / "python"
    if not _has_sdk(program):
        try:
            venv.create(folder, with_pip=True, clear=True)
            subprocess.run(
                [str(program), "-m", "pip", "install", "--quiet", SDK], check=True, capture_output=True, timeout=120
            )
        except (OSError, subprocess.SubprocessError) as error:
            return Unknown(f"{SDK} could not be installed into {folder}: {error}")
    return str(program)


def _has_sdk(program: Path) -> bool:
    if not program.exists():
        return False
    return subprocess.run([str(program), "-c", "import docker"], capture_output=True, check=False).returncode == 0


def _sdk_lists(sdk: str, engine: DockerEngine) -> float:
    printed = subprocess.run([sdk, "-c", LISTS, engine.host], capture_output=True, text=True, check=True).stdout
    seconds, found = printed.split()
    assert int(found) == CONTAINERS
    return float(seconds)


async def _plans(engine: DockerEngine) -> tuple[float, float]:
    """Cold, and once more after the first one while events are heard."""
    await _timed(_keeper(engine))  # imports, as the peer has imported and connected before
    cold = await _timed(_keeper(engine))
    keeper = _keeper(engine)
    hints = keeper.platforms[0].wake()
    await anext(hints)
    hearing = asyncio.ensure_future(anext(hints))
    await _timed(keeper)
    knowing = await _timed(keeper)
    hearing.cancel()
    await asyncio.wait([hearing])
    return cold, knowing


async def _timed(keeper: Keeper) -> float:
    begun = time.perf_counter()
    report = await look_and_plan(keeper, keeper.platforms[0], Rulebook(POLICY))
    seconds = time.perf_counter() - begun
    found = [one for one in report.survey.decisions if one.seen.ref.kind == "container"]
    assert (len(found), report.survey.unseen) == (CONTAINERS, [])
    return seconds


def _keeper(engine: DockerEngine) -> Keeper:
    inventory, clock = engine.inventory(), SystemClock()

    async def gpus() -> tuple[GpuFacts, ...] | Unknown:
        return inventory

    platform = DockerPlatform(Engine(engine.host, {}), "bench", clock, gpus)
    return Keeper((platform,), InMemoryLedger(), InMemorySignals(), InMemoryEvidence(), Messages(()), clock)


def _target(times: float, limit: float) -> str:
    return f"at least {limit:g}, {met(times, limit, least=True)}"
