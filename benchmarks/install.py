"""Size and start of gpukeeper with each extra, installed from its wheel, beside what kube-janitor and Ansible install.

Each environment is new and gets the versions of requirements.txt, without bytecode: its size and its cold times are
those of source that Python compiles in every run. Then all of it is compiled, as pip does unless told otherwise: its
size with bytecode and its warm times. Files are in the machine's cache in both cases. kube-janitor is not on PyPI: its
image has the packages that are measured, and 33 kB of its own code, which are not counted.

ACCEPT=1 also installs PyTorch, several gigabytes; without it the extra `accept` is not measured.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import msgspec

from benchmarks.needs import CannotMeasure
from benchmarks.report import Figure, fastest, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.model.unknown import Unknown

ROOT = Path(__file__).resolve().parents[1]
RUNS = sized(5, tiny=1)
MB = 1_000_000
PEER, OURS = "kube-janitor's packages", "kubernetes"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


class Contents(msgspec.Struct, frozen=True):
    imports: str  # what needs the packages of the extra
    packages: tuple[str, ...] = ()  # of a peer; empty: gpukeeper with the extra
    commands: tuple[str, str] = ("gpukeeper --version", "gpukeeper plan --help")


ENVIRONMENTS = {
    "base": Contents("gpukeeper.wiring.session"),
    "kubernetes": Contents("gpukeeper.platforms.kubernetes.adapter, lightkube, httpx2"),
    "accept": Contents("gpukeeper.acceptance.run, torch"),
    "metrics": Contents("gpukeeper.interfaces.telemetry.metrics"),
    "web": Contents("gpukeeper.interfaces.web.application, uvicorn, jinja2"),
    "postgres": Contents("gpukeeper.ledger.copy.connect, psycopg"),
    "notify": Contents("apprise"),
    "all": Contents("gpukeeper.wiring.session, lightkube, httpx2, prometheus_client, psycopg, starlette, apprise"),
    PEER: Contents("pykube, jmespath, yaml", ("pykube-ng==23.6.0", "jmespath==1.0.1"), ("", "")),
    "ansible-core": Contents("ansible.cli", ("ansible-core==2.19.14",), ("ansible --version", "ansible --help")),
}


class Times(msgspec.Struct, frozen=True):
    """Seconds, the fastest of several runs."""

    version: float | None  # None: there is no such command
    help: float | None
    imports: float


class Installed(msgspec.Struct, frozen=True):
    size: int  # bytes, without bytecode
    cold: Times
    size_compiled: int
    warm: Times


def run() -> None:
    with tempfile.TemporaryDirectory(prefix="install-") as name:
        folder = Path(name)
        wheel, pins = _wheel(folder), _pins(folder)
        chosen = sized(ENVIRONMENTS, tiny={name: ENVIRONMENTS[name] for name in (OURS, PEER)})
        results = {extra: _measured(folder, extra, contents, wheel, pins) for extra, contents in chosen.items()}
        python = fastest(lambda: _run([sys.executable, "-c", "pass"], {}), RUNS)
    _print(results, python)


def _wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next((folder / "dist").glob("*.whl"))


def _pins(folder: Path) -> Path:
    """Constraints cannot have extras, nor hashes where a file without one, our wheel, is installed."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [
        re.sub(r"\[.*?\]", "", line.removesuffix("\\")).rstrip()
        for line in lines
        if "==" in line and not line.startswith((" ", "#"))
    ]
    path = folder / "constraints.txt"
    path.write_text("\n".join(pins) + "\n")
    return path


def _measured(folder: Path, extra: str, contents: Contents, wheel: Path, pins: Path) -> Installed | Unknown:
    if extra == "accept" and not os.environ.get("ACCEPT"):
        return Unknown("PyTorch is several gigabytes; ACCEPT=1 installs it")
    what = contents.packages or (f"--constraint={pins}", str(wheel) if extra == "base" else f"{wheel}[{extra}]")
    place = folder / "environment"
    venv.create(place, clear=True)
    python = str(place / "bin" / "python")
    print(f"{extra} ...", file=sys.stderr, flush=True)
    install = [*PIP, "--python", python, "install", "--quiet", "--no-compile", "--only-binary=:all:", *what]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        return Unknown(f"it could not be installed: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")
    (packages,) = place.glob("lib/python*/site-packages")
    size, cold = _size(packages), _times(place, contents, {"PYTHONDONTWRITEBYTECODE": "1"})
    subprocess.run([python, "-m", "compileall", "-q", str(packages)], capture_output=True, check=False)
    return Installed(size, cold, _size(packages), _times(place, contents, {}))


def _size(packages: Path) -> int:
    return sum(path.lstat().st_size for path in packages.rglob("*") if not path.is_dir())


def _times(place: Path, contents: Contents, environ: dict[str, str]) -> Times:
    seconds = [
        fastest(lambda words=words: _run([str(place / "bin" / words[0]), *words[1:]], environ), RUNS) if words else None  # type: ignore[misc]
        for words in (command.split() for command in contents.commands)
    ]
    imports = [str(place / "bin" / "python"), "-c", f"import {contents.imports}"]
    return Times(seconds[0], seconds[1], fastest(lambda: _run(imports, environ), RUNS))


def _run(command: list[str], environ: dict[str, str]) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, env={**kept, **environ}, capture_output=True, text=True, cwd="/", check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")


def _print(results: dict[str, Installed | Unknown], python: float) -> None:
    rows = [(name, *_cells(one)) for name, one in results.items()]
    head = ("installed", "MB", "with bytecode", "--version", "plan --help, --help", "import", "what is imported")
    print_table(head, [(*row, ENVIRONMENTS[row[0]].imports) for row in rows])
    for name, one in results.items():
        if isinstance(one, Unknown):
            print(f"{name}: not measured: {one.why}")
    print(
        f"seconds: cold, then warm; minimum of {RUNS}; python -c pass: {python:.3f} s; load {os.getloadavg()[0]:.0f}\n"
    )
    ours, theirs = results[OURS], results[PEER]
    if isinstance(ours, Unknown) or isinstance(theirs, Unknown):
        raise CannotMeasure("gpukeeper[kubernetes] and its peer are needed for the figure; one was not installed.")
    ratio = round(ours.size / theirs.size, 2)
    print_figure(Figure("install", round(ours.size / MB, 1), "MB", ratio, f"{PEER}, both without bytecode"))


def _cells(one: Installed | Unknown) -> tuple[str, ...]:
    if isinstance(one, Unknown):
        return ("not measured",) * 5
    pairs = zip(msgspec.structs.astuple(one.cold), msgspec.structs.astuple(one.warm), strict=True)
    times = ("-" if cold is None or warm is None else f"{cold:.2f} {warm:.2f}" for cold, warm in pairs)
    return f"{one.size / MB:.1f}", f"{one.size_compiled / MB:.1f}", *times
