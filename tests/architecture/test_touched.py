"""The table that selects engine tests names every package, and only folders and paths that exist."""

from __future__ import annotations

import subprocess

from tests.touched import REAL, ROOT, engine_folders, select, table

SPECIAL = {"everything", "crashes"}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_every_package_and_test_folder_is_named() -> None:
    folders = {path.rsplit("/", 1)[0] for path in tracked() if path.startswith(("src/", "tests/", "deploy/"))}
    unnamed = [folder for folder in folders if "/" in folder and not named(f"{folder}/")]
    assert sorted(set(unnamed) - {"src/gpukeeper", "tests/real"}) == [], "add them to tests/touched.toml"


def named(path: str) -> bool:
    return any(path.startswith(prefix) for prefix in table().paths)


def test_every_row_matches_a_path_and_names_folders_that_exist() -> None:
    paths = tracked()
    assert [row for row in table().paths if not any(path.startswith(row) for path in paths)] == []
    wanted = {folder for folders in table().paths.values() for folder in folders}
    assert sorted(wanted - SPECIAL - set(engine_folders())) == []
    assert [row for row in table().core if not (ROOT / row).is_dir()] == []


def test_an_unknown_path_selects_everything() -> None:
    assert select(["src/gpukeeper/unheard_of.py"]).folders == engine_folders()
    assert select(["src/gpukeeper/unheard_of.py"]).core


def test_a_change_of_one_platform_selects_its_folders() -> None:
    docker = select(["src/gpukeeper/platforms/docker/translate.py"])
    assert docker.files() == ["tests/real/contract", "tests/real/docker", "tests/real/web"]
    assert not docker.core


def test_a_change_of_the_core_selects_the_crash_tests_of_every_engine() -> None:
    core = select(["src/gpukeeper/engine/reclaim.py", "docs/index.md"])
    assert core.core
    assert {"tests/real/kube/test_halts.py", "tests/real/disk/test_crashes.py"} <= set(core.files())
    assert all((REAL.parents[1] / file).is_file() for file in core.files())


def test_docs_alone_need_no_engine() -> None:
    assert select(["docs/index.md", "README.md", "tests/unit/test_blocking.py"]).files() == []
