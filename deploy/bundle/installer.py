"""Installs gpukeeper from this file, without a network: python3 gpukeeper-….pyz [DIRECTORY]

The wheels in this file go into a virtual environment DIRECTORY-VERSION, verified by their hashes. When it works, the
link DIRECTORY (default /opt/gpukeeper) is switched to it, and the link DIRECTORY.previous to the version before. An
environment that was made at DIRECTORY itself, such as with pip, is moved to DIRECTORY.by-pip. A daemon that runs keeps
the files of its version until it is restarted. Needs Python's venv module; ensurepip and pip are not needed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
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
        with _alone(target.parent):
            _roll_back(target)
        return
    with zipfile.ZipFile(sys.argv[0]) as bundle:
        about = json.loads(bundle.read("about.json"))
        if asked.list:
            _say("\n".join(sorted(Path(name).name for name in bundle.namelist() if name.startswith("wheels/"))))
            return
        with tempfile.TemporaryDirectory() as directory, _alone(target.parent):
            _check(about, target)
            bundle.extractall(directory)
            _install(Path(directory), target, about)


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Two installers at once would delete what the other has made so far. The lock ends with this process."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        sys.exit(f"{parent} cannot be used: {problem.strerror}. Nothing was changed.")
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"Another installation is in progress in {parent}. Nothing was changed. Try again when it has ended.")
    try:
        yield
    finally:
        os.close(directory)


def _check(about: dict[str, Any], target: Path) -> None:
    python, machine = f"{sys.version_info.major}.{sys.version_info.minor}", os.uname().machine
    if python not in about["pythons"]:
        known = ", ".join(about["pythons"])
        sys.exit(f"This file has wheels for Python {known}; this is Python {python}. Run it with one of those.")
    if machine != about["machine"]:
        advice = f"Build one for it: make bundle MACHINE={machine}"
        sys.exit(f"This file is for {about['machine']}; this machine is {machine}. Nothing was changed. {advice}")
    if target.exists() and not (target / "pyvenv.cfg").is_file():
        sys.exit(f"{target} exists and is not a virtual environment. Nothing was changed. Name another directory.")
    previous, by_pip = _beside(target, "previous"), _beside(target, "by-pip")
    moves = [one for one in (target, previous) if one.is_dir() and not one.is_symlink()]
    if previous in moves and not (previous / "pyvenv.cfg").is_file():
        sys.exit(f"{previous} exists and is not a virtual environment. Nothing was changed. Move it away.")
    if len(moves) + os.path.lexists(by_pip) > 1:
        here = by_pip if os.path.lexists(by_pip) else previous
        sys.exit(f"{here} exists: an environment that was made with pip. Nothing was changed. Move it away.")


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
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", place], check=True)
    pip = next(wheel.parent.glob("pip-*.whl")) / "pip"  # runs from its wheel
    install = [
        place / "bin/python",
        "-I",
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
    """DIRECTORY.previous links to what DIRECTORY was."""
    previous = _beside(target, "previous")
    _move_previous(target)
    if target.is_symlink():
        _link(previous, target.resolve())
    elif target.exists():
        by_pip = _beside(target, "by-pip")
        _link(previous, by_pip)  # first: killed between the two, it is still found
        target.rename(by_pip)
    else:
        return None
    return previous


def _move_previous(target: Path) -> None:
    """Earlier versions of this program moved an environment that was made with pip to DIRECTORY.previous itself."""
    previous = _beside(target, "previous")
    if previous.is_dir() and not previous.is_symlink():
        previous.rename(_beside(target, "by-pip"))
        _link(previous, _beside(target, "by-pip"))


def _roll_back(target: Path) -> None:
    previous = _beside(target, "previous")
    if not (target.is_symlink() and (previous / "bin/gpukeeper").exists()):
        sys.exit(f"There is no version to go back to: {previous} is not one. Nothing was changed.")
    if not previous.is_symlink() and os.path.lexists(_beside(target, "by-pip")):
        sys.exit(f"{_beside(target, 'by-pip')} exists. Nothing was changed. Move it away.")
    _move_previous(target)
    now, before = target.resolve(), previous.resolve()
    _link(target, before)
    _link(previous, now)
    _say(f"{target} is {before.name} again. Restart the daemon, if one runs: systemctl restart gpukeeper")


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(f"{target.name}.{ending}")


def _link(link: Path, place: Path) -> None:
    """At once: there is no moment without it."""
    made = link.with_name(f".{link.name}.{os.getpid()}")
    made.symlink_to(place.name)
    made.replace(link)


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")


if __name__ == "__main__":
    main()
