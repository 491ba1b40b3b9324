"""gpukeeper beside a real Ray in another container, with the rights of examples/ray: as in a pod, both share processes
and network, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.engines import has_ray, require
from tests.real.docker.private_engine import DockerEngine
from tests.real.ray.clusters import NEWEST
from tests.real.ray.test_containers import MB, POLICY, entries, fill, real_ray, scratch

PROJECT = Path(__file__).parents[3]
EXAMPLE = PROJECT / "examples" / "ray" / "kuberay-sidecar.yaml"
RAYS_USER = 1000


def container_of_the_example() -> dict[str, Any]:
    (cluster,) = [one for one in YAML(typ="safe").load_all(EXAMPLE) if one["kind"] == "RayCluster"]
    (group,) = cluster["spec"]["workerGroupSpecs"]
    return dict(group["template"]["spec"]["containers"][1])


def sidecar(engine: DockerEngine, beside: str, folder: Path, policy: dict[str, object]) -> None:
    asked = container_of_the_example()
    guard = asked["securityContext"]
    (folder / "policy.yaml").write_text(json.dumps(policy))
    (folder / "policy.yaml").chmod(0o644)
    mounts = {"/usr", "/lib", "/lib64", str(PROJECT), os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}
    engine.run(
        "sidecar",
        network=f"container:{beside}",
        binds=[f"{folder}:/etc/gpukeeper:ro", *(f"{path}:{path}:ro" for path in mounts)],
        env={
            "PYTHONPATH": str(PROJECT / "src"),
            "GPUKEEPER_STATE": "/var/lib/gpukeeper",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        user=str(guard["runAsUser"]),
        host_config={
            "PidMode": f"container:{beside}",
            "CapDrop": guard["capabilities"]["drop"],
            "CapAdd": guard["capabilities"]["add"],
            "ReadonlyRootfs": guard["readOnlyRootFilesystem"],
            "SecurityOpt": [] if guard["allowPrivilegeEscalation"] else ["no-new-privileges"],
            "Tmpfs": {"/tmp": "", "/var/lib/gpukeeper": "mode=0700"},
        },
        cmd=[sys.executable, "-m", "gpukeeper", *asked["args"]],
    )


def test_what_an_idle_ray_left_in_its_own_container_goes(engine: DockerEngine, tmp_path: Path) -> None:
    """Only if Ray itself says that it is idle: the sidecar reached its dashboard."""
    require("ray", has_ray(NEWEST))
    real_ray(engine, "ray-worker-1")
    home = scratch(engine, "ray-worker-1")
    home.chmod(0o1777)
    fill(engine, "ray-worker-1", "tmpone", 60 * MB)
    os.chown(home / "tmpone", RAYS_USER, RAYS_USER)
    os.chown(home / "tmpone" / "data", RAYS_USER, RAYS_USER)

    sidecar(engine, "ray-worker-1", tmp_path, POLICY | {"schedule": {"every": "10s"}})
    engine.until(lambda: "tmpone" not in entries(engine, "ray-worker-1"), "the tree is gone", deadline=120)
    assert "ray" in entries(engine, "ray-worker-1")  # its live session
