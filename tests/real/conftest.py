"""Which tests on real engines may be run again when they fail, and the engines they share.

Those below, by name: they look at an engine or measure it, and what can go wrong in them is that it starts or answers
too late on a crowded machine. Every other test, a new file included, stops, removes, races or crashes something, and
there a failure that comes once in a hundred runs is the finding: it is run again only where Kubernetes itself was late
(EngineLate: what gpukeeper was to be tried on never came about). The summary names a test that was run again (RERUN).

Engines that several folders use are fixtures of this file, so that a worker starts each of them once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.docker.fixtures import docker, engine, podman, the_docker, the_podman  # noqa: F401
from tests.real.kube.api import EngineLate
from tests.real.kube.fixtures import (  # noqa: F401
    api,
    cluster,
    jobset,
    kuberay,
    kwok_node,
    namespace,
    new_namespace,
    plane,
    pytest_runtest_makereport,
    real_node,
    the_plane,
    trainer_v21,
    trainer_v23,
    training_operator,
)
from tests.real.package.fixtures import bundle_for  # noqa: F401

_HERE = Path(__file__).parent
RERUN = frozenset(
    {
        "docker/test_private_engine.py",
        "docker/test_scale.py",
        "gpu/test_health.py",
        "gpu/test_inventory.py",
        "gpu/test_serve.py",
        "gpu/test_usage.py",
        "kube/test_control_plane.py",
        "kube/test_diagnose.py",
        "kube/test_examples.py",
        "kube/test_idle_prometheus.py",
        "ray/test_versions.py",
        "torch/test_accept.py",
        "torch/test_ranks.py",
        "torch/test_ranks_collectives.py",
        "torch/test_throughput.py",
        "torch/test_workbench.py",
        "torch/test_worker.py",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        if item.path.relative_to(_HERE).as_posix() in RERUN:
            item.add_marker(pytest.mark.flaky(reruns=3))
        else:
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=EngineLate))
