"""A backtest on a real Ray cluster of two nodes gives, bit by bit, what one process gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import cronsim
import msgspec
import pytest

import gpukeeper
from tests.engines import has_ray, require
from tests.real.ray.clusters import NEWEST, Cluster, ray_cluster, until

PROJECT = Path(__file__).parents[3]
# Read by every Python of the cluster. The command of a test has all packages of the tests, behind those of Ray's own
# environment; a node has gpukeeper and the two that a replay needs: Ray's agent would use others that it finds.
SITE = """
import os, sys
if "FOR_THE_COMMAND" in os.environ:
    sys.path += os.environ["FOR_THE_COMMAND"].split(":")
"""
ON_NODES = "else:\n    sys.path += [{!r}]\n"
OPTIONS = ("backtest", "synthetic:7", "--sweep", "window=30m/5h", "--json")


def environment(cluster: Cluster) -> dict[str, str]:
    paths = [str(PROJECT / "src"), *(path for path in sys.path if "site-packages" in path)]
    return cluster.env | {"GPUKEEPER_STATE": str(cluster.root / "state"), "FOR_THE_COMMAND": ":".join(paths)}


def backtest(cluster: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(cluster.python), "-m", "gpukeeper", *OPTIONS, *options]
    return subprocess.run(
        command, env=environment(cluster), cwd=cluster.root, capture_output=True, text=True, check=False, timeout=300
    )


def cluster_with(folder: Path, packages: Sequence[ModuleType]) -> Iterator[Cluster]:
    """`packages`: what its nodes have."""
    require("ray", has_ray(NEWEST))
    (folder / "sitecustomize.py").write_text(SITE + ON_NODES.format(str(folder / "packages")))
    (folder / "packages").mkdir()
    for package in packages:
        (folder / "packages" / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    if gpukeeper in packages:
        (metadata,) = Path(str(distribution("gpukeeper").locate_file(""))).glob("gpukeeper-*.dist-info")  # its version
        (folder / "packages" / metadata.name).symlink_to(metadata)
    with ray_cluster(NEWEST, nodes=2, env={"PYTHONPATH": str(folder)}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from cluster_with(tmp_path_factory.mktemp("site"), [gpukeeper, msgspec, cronsim])


@pytest.fixture(scope="module")
def bare_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from cluster_with(tmp_path_factory.mktemp("site"), [])


def test_a_cluster_gives_the_very_same_as_one_process(cluster: Cluster) -> None:
    here = backtest(cluster, "--workers", "1")
    assert here.returncode == 0, here.stderr
    there = backtest(cluster, "--on", cluster.address)
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout


def test_a_node_that_dies_in_the_middle_changes_nothing(cluster: Cluster) -> None:
    here = backtest(cluster, "--workers", "1")
    lost = cluster.add_node()
    command = [str(cluster.python), "-m", "gpukeeper", *OPTIONS, "--on", cluster.address]
    child = subprocess.Popen(
        command, env=environment(cluster), cwd=cluster.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: child.poll() is not None or any("_run" in title for title in lost.titles()), "it has a task")
        assert child.poll() is None, "it was done before its node could die: make the trace longer"
        lost.kill_raylet()
        out, err = child.communicate(timeout=300)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 0, err
    assert out == here.stdout


def test_nodes_without_gpukeeper_are_named_as_the_reason(bare_cluster: Cluster) -> None:
    ran = backtest(bare_cluster, "--on", bare_cluster.address)
    assert (ran.returncode, ran.stdout) == (1, ""), ran
    assert f"Its nodes need gpukeeper {gpukeeper.__version__} in Ray's Python" in " ".join(ran.stderr.split())


def test_no_cluster_at_the_address_is_an_error_with_the_next_step(cluster: Cluster) -> None:
    ran = backtest(cluster, "--on", "127.0.0.1:1")
    assert (ran.returncode, ran.stdout) == (1, ""), ran
    assert "nothing answers at 127.0.0.1:1" in " ".join(ran.stderr.split())
