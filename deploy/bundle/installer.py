"""Installs gpukeeper from this file, without a network: python3 gpukeeper-….pyz [DIRECTORY]

The wheels in this file go into a virtual environment DIRECTORY-VERSION, verified by their hashes. When it works, the
link DIRECTORY (default /opt/gpukeeper) is switched to it, and DIRECTORY.previous is the version before. A daemon that
runs keeps the files of its version until it is restarted. Needs Python's venv module; ensurepip and pip are not needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

# In the environment: written first, and written last. Only an attempt of ours that was interrupted is removed.
BEGUN, COMPLETE = "gpukeeper-installing", "gpukeeper-installed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default="/opt/gpukeeper", type=Path)
    parser.add_argument("--rollback", action="store_true", help="switch back to the version before")
    parser.add_argument("--list", action="store_true", help="print the wheels in this file")
    asked = parser.parse_args()
    target = Path(os.path.abspath(asked.directory))  # noqa: PTH100 - links are kept
    if asked.rollback:
        _roll_back(target)
        return
    with zipfile.ZipFile(sys.argv[0]) as bundle:
        about = json.loads(bundle.read("about.json"))
        if asked.list:
            _say("\n".join(sorted(Path(name).name for name in bundle.namelist() if name.startswith("wheels/"))))
            return
        _check(about, target)
        with tempfile.TemporaryDirectory() as directory:
            bundle.extractall(directory)
            _install(Path(directory), target, about)


def _check(about: dict[str, Any], target: Path) -> None:
    python, machine = f"{sys.version_info.major}.{sys.version_info.minor}", os.uname().machine
    if python not in about["pythons"]:
        known = ", ".join(about["pythons"])
        sys.exit(f"This file has wheels for Python {known}; this is Python {python}. Run it with one of those.")
    if machine != about["machine"]:
        sys.exit(f"This file is for {about['machine']}; this machine is {machine}. Build one there: make bundle")
    if target.exists() and not (target / "pyvenv.cfg").is_file():
        sys.exit(f"{target} exists and is not a virtual environment. Nothing was changed. Name another directory.")
    previous = target.with_name(f"{target.name}.previous")
    if previous.exists() and not previous.is_symlink():
        sys.exit(f"{previous} exists and is not a link. Nothing was changed. Move it away.")


def _install(unpacked: Path, target: Path, about: dict[str, Any]) -> None:
    wheel = unpacked / "wheels" / about["wheel"]
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != about["sha256"]:
        sys.exit(f"{about['wheel']} in this file is damaged. Nothing was installed. Copy the file again.")
    place = target.with_name(f"{target.name}-{about['version']}")
    if target.is_symlink() and target.resolve() == place.resolve():
        _say(f"gpukeeper {about['version']} is installed already: {target}/bin/gpukeeper")
        return
    if not (place / COMPLETE).exists():
        _make(place, wheel, unpacked / "requirements.txt")
    before = _put_aside(target)
    _link(target, place)
    _say(
        f"gpukeeper {about['version']} is installed: {target}/bin/gpukeeper" + (f". Before: {before}" if before else "")
    )


def _make(place: Path, wheel: Path, requirements: Path) -> None:
    if (place / BEGUN).is_file():
        shutil.rmtree(place)
    elif place.exists():
        sys.exit(f"{place} exists and was not made by this program. Nothing was changed. Move it away.")
    try:
        place.mkdir(parents=True)
        (place / BEGUN).touch()
        _fill(place, wheel, requirements)
    except (OSError, subprocess.CalledProcessError) as problem:
        shutil.rmtree(place, ignore_errors=True)
        sys.exit(f"gpukeeper could not be installed in {place}: {problem}. Nothing else was changed.")


def _fill(place: Path, wheel: Path, requirements: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    pip = next(wheel.parent.glob("pip-*.whl")) / "pip"  # runs from its wheel
    install = [
        place / "bin/python",
        pip,
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    find = f"--find-links={wheel.parent}"
    subprocess.run([*install, find, "--require-hashes", f"--requirement={requirements}"], check=True)
    subprocess.run([*install, wheel], check=True)
    subprocess.run([place / "bin/gpukeeper", "--version"], check=True, stdout=subprocess.DEVNULL)
    (place / COMPLETE).touch()


def _put_aside(target: Path) -> Path | None:
    """DIRECTORY.previous is what DIRECTORY was. An environment that was made at DIRECTORY itself is moved there."""
    previous = target.with_name(f"{target.name}.previous")
    if target.is_symlink():
        _link(previous, target.resolve())
    elif target.exists():
        if previous.is_symlink():
            previous.unlink()
        target.rename(previous)
    else:
        return None
    return previous


def _roll_back(target: Path) -> None:
    previous = target.with_name(f"{target.name}.previous")
    if not (target.is_symlink() and previous.is_symlink() and (previous / "bin/gpukeeper").exists()):
        sys.exit(f"There is no version to go back to: {previous} is not a link to one. Nothing was changed.")
    now, before = target.resolve(), previous.resolve()
    _link(target, before)
    _link(previous, now)
    _say(f"{target} is {before.name} again. Restart the daemon, if one runs: systemctl restart gpukeeper")


def _link(link: Path, place: Path) -> None:
    """At once: there is no moment without it."""
    made = link.with_name(f".{link.name}.{os.getpid()}")
    made.symlink_to(place.name)
    made.replace(link)


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")


if __name__ == "__main__":
    main()
