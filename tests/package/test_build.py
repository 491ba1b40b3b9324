"""The wheel and the sdist: the same bytes from the same commit, and complete."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import pytest

from tests.pins import read_pins

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {"kubernetes", "accept", "metrics", "operator", "parquet", "postgres", "web", "notify", "all"}


def build(source: Path, out: Path, *what: str, umask: int = 0o022, epoch: str = "1700000000") -> dict[str, Path]:
    """Sdist, then the wheel from it, or only `what`, without a download."""
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", out, source],
        check=True,
        capture_output=True,
        umask=umask,
        env=os.environ | {"SOURCE_DATE_EPOCH": epoch},
    )
    return {path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as one commit with a tag: its files that git does not ignore."""
    place = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    files = [name for name in os.fsdecode(listed).split("\0") if name and (ROOT / name).is_file()]
    assert "pyproject.toml" in files
    subprocess.run(["tar", "-cf", place / "t.tar", "-C", ROOT, "-T", "-"], input="\n".join(files).encode(), check=True)
    tree = place / "gpukeeper"
    tree.mkdir()
    subprocess.run(["tar", "-xf", place / "t.tar", "-C", tree], check=True)
    who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in _WHO.items()}
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"], ["tag", "v7.8.9"]):
        subprocess.run(["git", *command], cwd=tree, check=True, env=os.environ | who)
    return tree


_WHO = {"NAME": "test", "EMAIL": "test@example.com", "DATE": "2026-01-01T00:00:00Z"}


@pytest.fixture(scope="module")
def built(committed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(committed, tmp_path_factory.mktemp("dist"))


def test_two_builds_of_one_commit_are_the_same_bytes(committed: Path, built: dict[str, Path], tmp_path: Path) -> None:
    """From another directory, at another time, with another umask."""
    other = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "-q", committed, other], check=True)
    again = build(other, tmp_path / "dist", umask=0o077)
    assert built.keys() == again.keys() == {".whl", ".gz"}
    for suffix, path in built.items():
        assert path.name == again[suffix].name
        assert _digest(path) == _digest(again[suffix]), f"{path.name} differs"


def test_the_version_is_the_tag(built: dict[str, Path]) -> None:
    assert built[".whl"].name == "gpukeeper-7.8.9-py3-none-any.whl"


def test_the_chart_has_the_version_of_the_wheel(committed: Path, built: dict[str, Path], tmp_path: Path) -> None:
    charts = []
    for place in (tmp_path / "one", tmp_path / "two"):
        place.mkdir()
        (place / built[".whl"].name).touch()
        subprocess.run([sys.executable, committed / "deploy/helm/package.py", place], check=True, capture_output=True)
        charts.append(place / "gpukeeper-7.8.9.tgz")
    with tarfile.open(charts[0]) as chart:
        files = {entry.name for entry in chart.getmembers() if entry.isfile()}
        described = chart.extractfile("gpukeeper/Chart.yaml")
        assert described is not None
        lines = described.read().decode().splitlines()
    assert {'version: "7.8.9"', 'appVersion: "7.8.9"'} <= set(lines)
    assert {"gpukeeper/values.yaml", "gpukeeper/rbac/observe.yaml", "gpukeeper/prometheusrule.yaml"} <= files
    assert _digest(charts[0]) == _digest(charts[1])


def test_the_wheel_has_types_man_page_completion_and_extras(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        names = set(wheel.namelist())
        metadata = BytesParser().parsebytes(wheel.read("gpukeeper-7.8.9.dist-info/METADATA"))
    share = "gpukeeper-7.8.9.data/data/share/"
    assert {
        "gpukeeper/py.typed",
        f"{share}man/man1/gpukeeper.1",
        f"{share}bash-completion/completions/gpukeeper",
        f"{share}zsh/site-functions/_gpukeeper",
        f"{share}fish/vendor_completions.d/gpukeeper.fish",
        "gpukeeper-7.8.9.dist-info/licenses/LICENSE",
    } <= names
    assert set(metadata.get_all("Provides-Extra") or ()) == EXTRAS
    assert not [name for name in names if name.startswith("tests") or "__pycache__" in name]


def test_the_wheel_has_an_sbom_with_every_pin_and_its_hashes(committed: Path, built: dict[str, Path]) -> None:
    """Written by `make sbom`; after a change of the pins it has to be run again."""
    with zipfile.ZipFile(built[".whl"]) as wheel:
        (name,) = [name for name in wheel.namelist() if "/sboms/" in name]
        text = wheel.read(name)
    assert name == "gpukeeper-7.8.9.dist-info/sboms/gpukeeper.cdx.json"
    assert text == (committed / "deploy/sbom/gpukeeper.cdx.json").read_bytes()
    sbom = json.loads(text)
    assert (sbom["bomFormat"], sbom["metadata"]["component"]["name"]) == ("CycloneDX", "gpukeeper")
    listed = {(one["name"], one["version"]): _hashes(one) for one in sbom["components"]}
    pins = read_pins(committed / "requirements.txt")
    assert listed == {(pin.requirement.name, pin.version): pin.hashes for pin in pins}


def _hashes(component: dict[str, Any]) -> set[str]:
    return {digest["content"] for source in component["externalReferences"] for digest in source["hashes"]}


def test_every_file_of_the_package_is_in_the_wheel(committed: Path, built: dict[str, Path]) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "src"], cwd=committed, check=True, capture_output=True, text=True
    ).stdout
    wanted = {name.removeprefix("src/") for name in tracked.split()}
    with zipfile.ZipFile(built[".whl"]) as wheel:
        assert wanted <= set(wheel.namelist())


def test_the_sdist_builds_the_same_wheel_without_git(built: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built[".gz"]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    again = build(tmp_path / "gpukeeper-7.8.9", tmp_path / "dist", "--wheel")
    assert _digest(again[".whl"]) == _digest(built[".whl"])


def test_the_readme_lists_every_extra() -> None:
    listed = set(
        re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text().partition("## Install")[2], re.MULTILINE)
    )
    assert listed >= EXTRAS


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
