"""The acceptance image as the tests run it: its root filesystem (build.sh), its settings (those of the Containerfile),
and PyTorch, which is mounted: a copy of it in each engine would take five gigabytes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.real.docker.private_engine import PrivateEngine
from tests.real.torch import installation

REPOSITORY = Path(__file__).parents[3]
STEPS = REPOSITORY / "deploy/acceptance"
CONTAINERFILE = STEPS / "Containerfile"
OPERATOR = REPOSITORY / "deploy/operator/Containerfile"
BUILD = Path(__file__).with_name("build.sh")
NAME = "local/gpukeeper-accept:1"
SITE = "/usr/local/lib/python3.11/dist-packages"  # as rootfs.sh has it
PINS = ("install.sh", "rootfs.sh", "context.sh")
MADE = ("/opt", "/app", "/var/lib/accept", "/usr/local/bin")  # the steps leave things here, all else is the base's
SETTINGS = ("ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD")
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def folder() -> Path:
    """As build.sh has it."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("GPUKEEPER_IMAGE_CACHE") or caches / "gpukeeper/image")
    files = [f"deploy/acceptance/{name}" for name in PINS] + ["requirements.txt"]
    listed = "".join(f"{hashlib.sha256((REPOSITORY / name).read_bytes()).hexdigest()}  {name}\n" for name in files)
    return cache / hashlib.sha256(listed.encode()).hexdigest()[:12]


def is_built() -> bool:
    """Except for gpukeeper itself, which takes seconds."""
    return (folder() / "packages.tar").exists() and torch_fits()


def torch_fits() -> bool:
    """Compiled parts of PyTorch are for one minor version of Python: that of Debian."""
    return installation.is_installed() and (installation.folder() / "lib/python3.11").exists()


def root_filesystem() -> Path:
    """With gpukeeper as it is in this working tree."""
    environ = {key: value for key, value in os.environ.items() if key != "TORCH"} | {"PYTHON": sys.executable}
    done = subprocess.run([str(BUILD)], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


def operator_root_filesystem() -> Path:
    """That of the other image: made at the same time."""
    made = root_filesystem()
    return made.with_name(made.name.replace("image-", "operator-", 1))


def torch_packages() -> str:
    return str(installation.folder() / "lib/python3.11/site-packages")


@dataclass(frozen=True)
class Settings:
    """Of the last stage of the Containerfile."""

    lines: tuple[str, ...]
    environment: list[str] = field(default_factory=list)
    user: str = ""
    directory: str = ""
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        """As images have it."""
        return {
            "Env": [PATH, *self.environment],
            "User": self.user,
            "WorkingDir": self.directory,
            "Entrypoint": self.entrypoint,
            "Cmd": self.command,
        }


def settings(containerfile: Path = CONTAINERFILE) -> Settings:
    last = containerfile.read_text().rpartition("\nFROM ")[2].splitlines()
    lines = [line for line in last if line.partition(" ")[0] in SETTINGS]
    found: dict[str, list[str]] = {name: [] for name in SETTINGS}
    for line in lines:
        name, _, words = line.partition(" ")
        found[name].append(words)
    return Settings(
        tuple(lines),
        found["ENV"],
        found["USER"][-1],  # the steps before it run as root
        found["WORKDIR"][-1],
        json.loads(found["ENTRYPOINT"][-1]),
        json.loads(found["CMD"][-1]),
    )


def import_into(engine: PrivateEngine, archive: Path, name: str, changes: tuple[str, ...] = ()) -> None:
    """As `docker import` does."""
    repo, _, tag = name.partition(":")
    query = {"fromSrc": "-", "repo": repo, "tag": tag, "changes": [f"ENV {PATH}", *changes]}
    with archive.open("rb") as tar:
        engine.api.must("POST", "/images/create", iter(lambda: tar.read(2**20), b""), query=query, deadline=240)


def made_by_steps(archive: Path) -> set[str]:
    """What the steps left in a root filesystem, as `find -printf '%p %y %m %U:%G %l'` prints it."""
    found = set()
    with tarfile.open(archive) as tar:
        for one in tar:
            path = one.name.removeprefix(".")
            if any(path == top or path.startswith(f"{top}/") for top in MADE):
                kind = "l" if one.issym() else "d" if one.isdir() else "f"
                found.add(f"{path} {kind} {one.mode:o} {one.uid}:{one.gid} {one.linkname if one.issym() else ''}")
    return found


def build_in(engine: PrivateEngine, base: str, name: str, into: Path, file: str = "Containerfile") -> str:
    """As `docker build` does, with the builder of the engine. What it printed."""
    context = into / "context.tar"
    with tarfile.open(context, "w") as tar:
        tar.add(folder() / "context", ".")
    arguments = json.dumps({"BASE": base, "TORCH": "mounted"})
    query = {"dockerfile": file, "t": name, "buildargs": arguments, "networkmode": "none", "rm": 1}
    with context.open("rb") as tar:
        parts = iter(lambda: tar.read(2**20), b"")
        raw = engine.api.call("POST", "/build", parts, query=query, deadline=300).raw
    lines = [json.loads(line) for line in raw.splitlines() if line.strip()]
    return "".join(one.get("stream") or one.get("error") or "" for one in lines)
