"""The links that the installer of the bundle keeps: what was made with pip, and what older installers left."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.package.test_build import ROOT


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("installer", ROOT / "deploy" / "bundle" / "installer.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def environment(path: Path) -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "pyvenv.cfg").touch()
    (path / "bin" / "gpukeeper").write_text(path.name)
    return path


def about() -> dict[str, object]:
    return {"pythons": [f"{sys.version_info.major}.{sys.version_info.minor}"], "machine": os.uname().machine}


def switch(installer: ModuleType, target: Path, version: str) -> None:
    """As an install does it, after the environment was made."""
    installer._check(about(), target)
    place = target.with_name(f"{target.name}-{version}")
    if not place.exists():
        environment(place)
    installer._put_aside(target)
    installer._link(target, place)


def links(folder: Path) -> dict[str, str]:
    return {one.name: one.readlink().name for one in folder.iterdir() if one.is_symlink()}


def test_an_environment_made_with_pip_is_the_version_before(installer: ModuleType, tmp_path: Path) -> None:
    target = environment(tmp_path / "g")
    switch(installer, target, "1")
    assert links(tmp_path) == {"g": "g-1", "g.previous": "g.by-pip"}
    installer._roll_back(target)
    assert links(tmp_path) == {"g": "g.by-pip", "g.previous": "g-1"}
    installer._roll_back(target)
    switch(installer, target, "2")
    assert links(tmp_path) == {"g": "g-2", "g.previous": "g-1"}
    assert (tmp_path / "g.by-pip/bin/gpukeeper").read_text() == "g"


@pytest.mark.parametrize("roll_back", [True, False])
def test_what_an_older_installer_left_is_repaired(installer: ModuleType, tmp_path: Path, roll_back: bool) -> None:
    """It moved the environment to .previous itself, and refused everything afterwards."""
    target = tmp_path / "g"
    environment(tmp_path / "g-1")
    target.symlink_to("g-1")
    environment(tmp_path / "g.previous")
    if roll_back:
        installer._roll_back(target)
        assert links(tmp_path) == {"g": "g.by-pip", "g.previous": "g-1"}
    else:
        switch(installer, target, "2")
        assert links(tmp_path) == {"g": "g-2", "g.previous": "g-1"}
    assert (tmp_path / "g.by-pip/bin/gpukeeper").read_text() == "g.previous"


def test_nothing_is_overwritten(installer: ModuleType, tmp_path: Path) -> None:
    target = environment(tmp_path / "g")
    environment(tmp_path / "g.by-pip")
    with pytest.raises(SystemExit, match=r"g\.by-pip exists: .* Nothing was changed"):
        installer._check(about(), target)
    (tmp_path / "g.by-pip").rename(tmp_path / "g.previous")
    with pytest.raises(SystemExit, match=r"g\.previous exists: .* Nothing was changed"):
        installer._check(about(), target)
    (tmp_path / "g.previous" / "pyvenv.cfg").unlink()
    with pytest.raises(SystemExit, match=r"g\.previous exists and is not a virtual environment"):
        installer._check(about(), target)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["g", "g.previous"]


def test_a_second_bundle_after_pip_finds_its_own_environment_aside(installer: ModuleType, tmp_path: Path) -> None:
    """The link is a directory of gpukeeper's own; .by-pip is there from the first one."""
    switch(installer, environment(tmp_path / "g"), "1")
    switch(installer, tmp_path / "g", "2")
    switch(installer, tmp_path / "g", "3")
    assert links(tmp_path) == {"g": "g-3", "g.previous": "g-2"}
