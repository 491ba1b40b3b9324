"""Builds the offline bundle: gpukeeper, its pinned dependencies and pip in one file, for hosts without a package index.

    python deploy/bundle/build.py dist [--machine aarch64] [3.11 3.12 …]

dist/ has the wheel already (`make package`). The wheels of requirements.txt are downloaded for each Python version and
verified by their hashes. Nothing is compiled, so a bundle for another architecture can be built here. The same wheels
give the same file, byte by byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS, PIP = ROOT / "requirements.txt", Path(__file__).parent / "pip.txt"
SHEBANG = b"#!/usr/bin/env python3\n"
EPOCH = (1980, 1, 1, 0, 0, 0)


def build(dist: Path, pythons: list[str], machine: str) -> Path:
    own = sorted(dist.glob("gpukeeper-*.whl"))
    if len(own) != 1:
        sys.exit(f"{dist} has {len(own)} wheels of gpukeeper; one is needed. Run: make package")
    with tempfile.TemporaryDirectory() as directory:
        wheels = Path(directory)
        for python in pythons:
            _download(wheels, python, machine)
        files = {f"wheels/{path.name}": path.read_bytes() for path in sorted([*wheels.glob("*.whl"), *own])}
    files["requirements.txt"] = REQUIREMENTS.read_bytes()
    files["__main__.py"] = (Path(__file__).parent / "installer.py").read_bytes()
    version = own[0].name.split("-")[1]
    about = {
        "version": version,
        "wheel": own[0].name,
        "sha256": hashlib.sha256(own[0].read_bytes()).hexdigest(),
        "pythons": pythons,
        "machine": machine,
    }
    files["about.json"] = json.dumps(about, indent=1).encode()
    return _write(dist / f"gpukeeper-{version}-linux-{machine}.pyz", files)


def _download(wheels: Path, python: str, machine: str) -> None:
    tags = [f"--platform=manylinux{tag}_{machine}" for tag in ("2014", "_2_17", "_2_28")]
    what = [f"--requirement={REQUIREMENTS}", f"--requirement={PIP}", "--require-hashes"]
    command = [
        sys.executable,
        "-I",
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary=:all:",
    ]
    subprocess.run([*command, "--no-deps", f"--python-version={python}", *tags, f"--dest={wheels}", *what], check=True)


def _write(path: Path, files: dict[str, bytes]) -> Path:
    """A zip that Python runs. Wheels are compressed already."""
    made = path.with_name(f".{path.name}")
    with made.open("wb") as out:
        out.write(SHEBANG)
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in sorted(files.items()):
                entry = zipfile.ZipInfo(name, EPOCH)
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, content)
    made.chmod(0o755)
    return made.rename(path)


if __name__ == "__main__":
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser = argparse.ArgumentParser(description="Build the offline bundle of gpukeeper.")
    parser.add_argument("dist", type=Path)
    parser.add_argument("pythons", nargs="*", default=[own])
    parser.add_argument("--machine", default=platform.machine())
    asked = parser.parse_args()
    sys.stdout.write(f"{build(asked.dist, asked.pythons, asked.machine)}\n")
