"""The offline bundle: one file, installed where there is no network, upgraded and rolled back."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.package.fixtures import OWN_PYTHON


def install(bundle: Path, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """In a network namespace with no interface but an idle loopback; pip's caches and settings are not there either."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(target.parent), "PIP_NO_CACHE_DIR": "1"}
    environment["PIP_NO_COMPILE"] = "1"  # what is never imported here need not be compiled
    offline = ["unshare", "--net", "--map-root-user"]
    command = [*offline, sys.executable, bundle, target, *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def renamed(bundle: Path, made: Path, **about: object) -> Path:
    """The same bundle, which says something else about itself."""
    with zipfile.ZipFile(bundle) as source, zipfile.ZipFile(made, "w") as copy:
        for name in source.namelist():
            content = source.read(name)
            if name == "about.json":
                content = json.dumps(json.loads(content) | about).encode()
            copy.writestr(name, content)
    return made


@pytest.mark.smoke
def test_it_installs_without_a_network_upgrades_and_rolls_back(bundle: Path, tmp_path: Path) -> None:
    target = tmp_path / "gpukeeper"
    first = install(bundle, target)
    assert first.returncode == 0, first.stderr
    program = target / "bin" / "gpukeeper"
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert shown.strip() in first.stdout
    assert (target / "share/man/man1/gpukeeper.1").is_file()
    assert "installed already" in install(bundle, target).stdout

    old = target.resolve()
    newer = renamed(bundle, tmp_path / "newer.pyz", version="99.0")
    shutil.copytree(old, tmp_path / "gpukeeper-99.0", symlinks=True)  # as an install that was not switched to yet
    assert install(newer, target).returncode == 0
    assert target.resolve().name == "gpukeeper-99.0"
    assert subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout == shown
    # A daemon of the version before still has all of its files.
    assert (tmp_path / "gpukeeper.previous").resolve() == old
    assert f"{old}/bin/python" in (old / "bin" / "gpukeeper").read_text()

    assert install(newer, target, "--rollback").returncode == 0
    assert target.resolve() == old
    assert install(newer, target, "--rollback").returncode == 0
    assert target.resolve().name == "gpukeeper-99.0"


def test_after_pip_it_installs_upgrades_and_rolls_back(bundle: Path, tmp_path: Path) -> None:
    target = tmp_path / "gpukeeper"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)
    program = target / "bin" / "gpukeeper"
    program.write_text(f"#!{target}/bin/python\nimport sys\nprint('with pip', sys.prefix)\n")  # as pip writes it
    program.chmod(0o755)
    first = install(bundle, target)
    assert first.returncode == 0, first.stderr
    made = target.resolve()
    assert install(bundle, target, "--rollback").returncode == 0
    ran = subprocess.run([program], capture_output=True, text=True, check=True)
    assert ran.stdout == f"with pip {target}\n"
    assert install(bundle, target).returncode == 0
    assert target.resolve() == made
    newer = renamed(bundle, tmp_path / "newer.pyz", version="99.0")
    shutil.copytree(made, tmp_path / "gpukeeper-99.0", symlinks=True)
    assert install(newer, target).returncode == 0
    assert (tmp_path / "gpukeeper.previous").resolve() == made
    assert install(newer, target, "--rollback").returncode == 0
    assert target.resolve() == made
    assert (tmp_path / "gpukeeper.by-pip" / "bin" / "gpukeeper").is_file(), "what pip made is kept"


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"sha256": "0" * 64}, "is damaged. Nothing was installed"),
        ({"pythons": ["3.2"]}, "has wheels for Python 3.2"),
        ({"machine": "s390x"}, "is for s390x; this machine is"),
    ],
)
def test_what_does_not_fit_is_refused(bundle: Path, tmp_path: Path, about: dict[str, object], words: str) -> None:
    refused = install(renamed(bundle, tmp_path / "odd.pyz", **about), tmp_path / "target")
    assert refused.returncode == 1
    assert words in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd.pyz"]


def test_a_bundle_for_another_architecture_is_built_here_and_refused_here(
    bundle_for: Callable[..., Path], tmp_path: Path
) -> None:
    """Every program in it is for that architecture, by its ELF header. It is not run: there is no such machine here."""
    other, number = {"x86_64": ("aarch64", 183)}.get(os.uname().machine, ("x86_64", 62))
    made = bundle_for(OWN_PYTHON, other)
    assert made.name.endswith(f"-linux-{other}.pyz")
    found = set()
    with zipfile.ZipFile(made) as archive, zipfile.ZipFile(bundle_for(OWN_PYTHON)) as own:
        assert projects(archive.namelist()) == projects(own.namelist())
        wheels = [name for name in archive.namelist() if name.endswith(".whl")]
        for name in wheels:
            with zipfile.ZipFile(io.BytesIO(archive.read(name))) as wheel:
                heads = [wheel.read(one)[:20] for one in wheel.namelist() if not one.endswith("/")]
            found |= {int.from_bytes(head[18:20], "little") for head in heads if head[:4] == b"\x7fELF"}
    assert found == {number}
    refused = install(made, tmp_path / "target")
    assert (refused.returncode, list(tmp_path.iterdir())) == (1, [])
    assert f"is for {other}; this machine is {os.uname().machine}. Nothing was changed." in refused.stderr
    assert f"make bundle MACHINE={os.uname().machine}" in refused.stderr


def projects(names: list[str]) -> set[str]:
    return {Path(name).name.split("-")[0] for name in names if name.endswith(".whl")}


def test_a_directory_that_is_not_its_own_is_never_replaced(bundle: Path, tmp_path: Path) -> None:
    target = tmp_path / "data"
    target.mkdir()
    (target / "precious").write_text("kept")
    refused = install(bundle, target)
    assert "is not a virtual environment. Nothing was changed" in refused.stderr
    assert refused.returncode == 1
    (target / "precious").unlink()
    target.rmdir()
    with zipfile.ZipFile(bundle) as archive:
        version = json.loads(archive.read("about.json"))["version"]
    other = tmp_path / f"data-{version}"
    other.mkdir()
    (other / "pyvenv.cfg").touch()  # an environment that a person made
    (other / "precious").write_text("kept")
    assert "Move it away" in install(bundle, target).stderr
    assert (other / "precious").read_text() == "kept"


@pytest.mark.parametrize("more", [(), ("--rollback",)])
def test_two_installers_at_once_are_one_too_many(bundle: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = install(bundle, tmp_path / "gpukeeper", *more)
        assert "Another installation is in progress" in done.stderr
        assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    finally:
        os.close(other)


def test_nothing_to_roll_back_to_is_an_error(bundle: Path, tmp_path: Path) -> None:
    refused = install(bundle, tmp_path / "target", "--rollback")
    assert refused.returncode == 1
    assert "There is no version to go back to" in refused.stderr


@pytest.mark.smoke
def test_nothing_in_it_depends_on_when_or_where_it_was_built(bundle: Path) -> None:
    with zipfile.ZipFile(bundle) as archive:
        entries = archive.infolist()
    assert [one.filename for one in entries] == sorted(one.filename for one in entries)
    assert {(one.date_time, one.external_attr) for one in entries} == {((1980, 1, 1, 0, 0, 0), 0o644 << 16)}
