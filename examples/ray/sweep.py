"""Run `gpukeeper apply` on every idle node of a Ray cluster, by one short task pinned to each.

For clusters whose nodes only Ray can reach. gpukeeper must be installed on the nodes (in their image); if it is not in
Ray's own environment, set its command with --gpukeeper. A task resets the idle timer of its node, so run this rarely:
once a night, not every five minutes. Nodes that Ray reports as busy get no task.

    python sweep.py --policy ray-host.yaml [--address auto] [--node NODE_ID ...] [--plan] [--gpukeeper COMMAND]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

DEADLINE = 600  # seconds per node


@ray.remote(num_cpus=0, max_retries=0)  # reserves no CPU, and is never retried
def sweep(gpukeeper: list[str], verb: list[str], policy: str, job: str) -> dict[str, Any]:
    """Runs on the node itself."""
    with tempfile.NamedTemporaryFile("w", prefix="gpukeeper-", suffix=".yaml") as file:
        file.write(policy)
        file.flush()
        program = gpukeeper or [sys.executable, "-m", "gpukeeper"]
        command = [*program, *verb, "--policy", file.name, "--platform", "ray", "--json"]
        # This job's own task and driver do not count as work on the node.
        environment = os.environ | {"GPUKEEPER_RAY_JOB": job}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE)
    return {"exit_code": done.returncode, "messages": done.stderr.strip(), "report": done.stdout}


def busy_nodes() -> dict[str, str]:
    """By node id: what runs there according to Ray. Called before our first task is submitted."""
    from ray.util.state import list_actors, list_tasks

    job = ray.get_runtime_context().get_job_id()
    found: dict[str, str] = {}
    for actor in list_actors(limit=10_000, detail=True):
        if actor.state not in {"DEAD"} and actor.node_id and actor.job_id != job:
            found[actor.node_id] = f"actor {actor.class_name}"
    for task in list_tasks(limit=10_000, detail=True, filters=[("state", "=", "RUNNING")]):
        if task.node_id and task.job_id != job:
            found[task.node_id] = f"task {task.name}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--address", default="auto")
    parser.add_argument("--node", action="append", default=[], help="only these nodes, by a prefix of their id")
    parser.add_argument("--plan", action="store_true", help="run plan instead of apply; changes nothing")
    parser.add_argument("--gpukeeper", default="", help="command that runs gpukeeper on the nodes")
    options = parser.parse_args()

    ray.init(address=options.address, log_to_driver=False)
    job, busy, policy = ray.get_runtime_context().get_job_id(), busy_nodes(), options.policy.read_text()
    verb, program, running = ["plan"] if options.plan else ["apply", "--yes"], shlex.split(options.gpukeeper), {}
    for node in ray.nodes():
        name, address = node["NodeID"], node["NodeManagerAddress"]
        if not node["Alive"] or (options.node and not name.startswith(tuple(options.node))):
            continue
        if name in busy:
            print(f"{name[:12]} {address}: busy, skipped: {busy[name]}", file=sys.stderr)
            continue
        here = NodeAffinitySchedulingStrategy(node_id=name, soft=False)
        running[sweep.options(scheduling_strategy=here).remote(program, verb, policy, job)] = (name, address)

    failed = 0
    while running:
        # One node that hangs or dies must not hide the results of the others.
        (first, *_), _ = ray.wait(list(running), num_returns=1)
        name, address = running.pop(first)
        try:
            result = ray.get(first)
        except ray.exceptions.RayError as problem:
            result = {"exit_code": 1, "messages": str(problem), "report": ""}
        failed += result["exit_code"] != 0
        print(json.dumps({"node": name, "address": address, **result}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
