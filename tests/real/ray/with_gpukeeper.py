"""Ray clusters whose nodes have gpukeeper in Ray's Python, and the environment of a command that uses one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import cronsim
import msgspec

import gpukeeper
from tests.real.ray.clusters import NEWEST, Cluster, ray_cluster

PROJECT = Path(__file__).parents[3]
NEEDED = (gpukeeper, msgspec, cronsim)
# Read by every Python of the cluster. The command of a test has all packages of the tests, behind those of Ray's own
# environment; a node has gpukeeper and the two that a replay needs: Ray's agent would use others that it finds.
SITE = """
import os, sys
if "FOR_THE_COMMAND" in os.environ:
    sys.path += os.environ["FOR_THE_COMMAND"].split(":")
"""
ON_NODES = "else:\n    sys.path += [{!r}]\n"


def environment(cluster: Cluster) -> dict[str, str]:
    paths = [str(PROJECT / "src"), *(path for path in sys.path if "site-packages" in path)]
    return cluster.env | {"GPUKEEPER_STATE": str(cluster.root / "state"), "FOR_THE_COMMAND": ":".join(paths)}


@contextmanager
def cluster_with(folder: Path, packages: Sequence[ModuleType] = NEEDED) -> Iterator[Cluster]:
    """Two nodes of one core. `packages`: what they have."""
    (folder / "sitecustomize.py").write_text(SITE + ON_NODES.format(str(folder / "packages")))
    (folder / "packages").mkdir()
    for package in packages:
        (folder / "packages" / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    if gpukeeper in packages:
        (metadata,) = Path(str(distribution("gpukeeper").locate_file(""))).glob("gpukeeper-*.dist-info")  # its version
        (folder / "packages" / metadata.name).symlink_to(metadata)
    with ray_cluster(NEWEST, nodes=2, env={"PYTHONPATH": str(folder)}) as cluster:
        yield cluster
