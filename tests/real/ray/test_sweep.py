"""examples/ray/sweep.py: where only Ray reaches the nodes. In a container, as there; everything in it is real."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.engines import has_ray, require
from tests.real.docker.private_engine import DockerEngine
from tests.real.ray.clusters import NEWEST
from tests.real.ray.test_containers import ACTOR, MB, POLICY, ROOT, engine, entries, fill, real_ray, scratch, the_engine

__all__ = ["engine", "the_engine"]
PROJECT = Path(__file__).parents[3]
SCRIPT = PROJECT / "examples/ray/sweep.py"


def sweep(engine: DockerEngine, python: str, number: int) -> tuple[dict[str, Any], str]:
    """What it says of the one node, and beside that."""
    home = scratch(engine, "ray-worker-1")
    gpukeeper = f"env PYTHONPATH={PROJECT / 'src'} {sys.executable} -m gpukeeper"
    words = f"{python} {SCRIPT} --policy {ROOT}/policy.yaml --gpukeeper '{gpukeeper}'"
    said = f"said-{number}"
    engine.exec(
        "ray-worker-1", ["/bin/sh", "-c", f"{words} > {ROOT}/{said} 2> {ROOT}/{said}.err; echo > {ROOT}/{said}.done"]
    )
    engine.until((home / f"{said}.done").exists, "the sweep is over", deadline=180)
    aside = (home / f"{said}.err").read_text()
    lines = (home / said).read_text().splitlines()
    return (json.loads(lines[-1]) if lines else {}), aside


def test_idle_nodes_are_swept_by_a_task_of_their_own_and_busy_ones_left_alone(engine: DockerEngine) -> None:
    require("ray", has_ray(NEWEST))
    python = real_ray(engine, "ray-worker-1", more=[PROJECT])
    fill(engine, "ray-worker-1", "tmpone", 60 * MB)
    (scratch(engine, "ray-worker-1") / "policy.yaml").write_text(json.dumps(POLICY))

    done, aside = sweep(engine, python, 1)
    assert done["exit_code"] == 0, (done, aside)
    assert json.loads(done["report"])["places"][0]["bytes_back"] > 0
    assert "tmpone" not in entries(engine, "ray-worker-1")

    fill(engine, "ray-worker-1", "tmptwo", 60 * MB)
    engine.exec("ray-worker-1", [python, "-c", ACTOR])
    engine.until(lambda: "ready" in entries(engine, "ray-worker-1"), "the actor lives", deadline=60)
    done, aside = sweep(engine, python, 2)
    assert done == {}
    assert "busy, skipped: actor Trainer" in aside
    assert "tmptwo" in entries(engine, "ray-worker-1")
