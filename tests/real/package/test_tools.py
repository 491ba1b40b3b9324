"""The wheel installed by pipx and by `uv tool`, without a network: it runs, and uninstalled it leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.engines import require

PIPX, UV = "pipx==1.18.4", "uv==0.13.8"


@pytest.fixture(scope="module")
def tools() -> Path:
    """Where pipx and uv are: installed once, outside the repository."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpukeeper/tools"
    place = caches / f"{PIPX}-{UV}-{sys.version_info.major}.{sys.version_info.minor}"
    caches.mkdir(parents=True, exist_ok=True)
    with (caches / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at once would do the same work twice
        if not (place / ".installed").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
            pip = [place / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
            require("pypi", subprocess.run([*pip, PIPX, UV], check=False).returncode == 0)
            (place / ".installed").touch()
    return place / "bin"


@pytest.fixture(scope="module")
def wheels(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(bundle) as archive:
        archive.extractall(place)
    return place / "wheels"


class Home:
    """A user's empty home directory, in a network namespace without a network."""

    def __init__(self, place: Path) -> None:
        self.place, self.programs = place, place / ".local/bin"
        self._environment = {"PATH": f"{self.programs}:{os.environ['PATH']}", "HOME": str(place)}

    def run(self, *command: str | Path, codes: tuple[int, ...] = (0,), **more: str) -> str:
        offline = ["unshare", "--net", "--map-root-user", *command]
        done = subprocess.run(
            offline, capture_output=True, text=True, check=False, env=self._environment | more, cwd=self.place
        )
        assert done.returncode in codes, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def left(self) -> list[str]:
        return sorted(str(path.relative_to(self.place)) for path in self.place.rglob("*gpukeeper*"))

    def works(self, wheel: Path) -> None:
        assert wheel.name.split("-")[1] in self.run("gpukeeper", "--version")
        assert "--exit-code" in self.run("gpukeeper", "plan", "--help")
        found = json.loads(self.run("gpukeeper", "doctor", "--json", codes=(0, 1)))
        assert found["schema"] == "gpukeeper/doctor/v1"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_pipx(home: Home, tools: Path, wheels: Path) -> None:
    """With pip: pipx prefers a uv that is beside it."""
    (wheel,) = wheels.glob("gpukeeper-*.whl")
    find = f"--no-index --find-links={wheels}"
    backend = {
        "PIPX_DEFAULT_BACKEND": "pip",
        "PIP_NO_COMPILE": "1",
        "PIP_NO_CACHE_DIR": "1",
    }  # it prefers a uv beside it
    home.run(tools / "pipx", "install", f"--python={sys.executable}", f"--pip-args={find}", wheel, **backend)
    home.works(wheel)
    assert (home.place / ".local/share/man/man1/gpukeeper.1").exists()
    home.run(tools / "pipx", "uninstall", "gpukeeper")
    assert set(home.left()) <= {".local/share/pipx/venvs/.gpukeeper.lock"}, "a lock of pipx's own"


def test_uv_tool(home: Home, tools: Path, wheels: Path) -> None:
    (wheel,) = wheels.glob("gpukeeper-*.whl")
    find = ["--offline", "--no-index", f"--find-links={wheels}"]
    home.run(tools / "uv", "tool", "install", f"--python={sys.executable}", *find, wheel, UV_NO_CACHE="1")
    home.works(wheel)
    home.run(tools / "uv", "tool", "uninstall", "gpukeeper")
    assert home.left() == []
