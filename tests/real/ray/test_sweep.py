"""`gpukeeper plan` and `apply --on ray`: where only Ray reaches the nodes. Everything in it is real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines import has_ray, require
from tests.real.docker.private_engine import DockerEngine
from tests.real.ray.clusters import NEWEST, until
from tests.real.ray.machines import HEAD, WORKER, Machines, network_of, two_machines
from tests.real.ray.test_containers import ACTOR, MB, POLICY, ROOT, entries, fill, real_ray, scratch

PROJECT = Path(__file__).parents[3]
PROGRAM = f"#!/bin/sh\nPYTHONPATH={PROJECT / 'src'} exec {sys.executable} -m gpukeeper"


def pass_in(engine: DockerEngine, python: str, number: int) -> dict[str, Any]:
    """The row of the one node, the head. In its container, whose dashboard is reached by nobody else."""
    home = scratch(engine, "ray-worker-1")
    (home / "gpukeeper").write_text(f'{PROGRAM} "$@"\n')
    (home / "gpukeeper").chmod(0o755)
    options = f"--option python={python} --option program={ROOT}/gpukeeper --option again=0s"
    words = f"{ROOT}/gpukeeper apply --on ray --yes --json --policy {ROOT}/policy.yaml {options}"
    said = f"{ROOT}/said-{number}"
    engine.exec("ray-worker-1", ["/bin/sh", "-c", f"{words} > {said} 2> {said}.err; echo > {said}.done"])
    engine.until((home / f"said-{number}.done").exists, "the pass is over", deadline=240)
    printed = (home / f"said-{number}").read_text()
    assert printed, (home / f"said-{number}.err").read_text()
    (row,) = json.loads(printed)["hosts"]
    return dict(row)


def test_an_idle_head_is_cleaned_by_a_task_of_its_own_and_a_busy_one_left_alone(engine: DockerEngine) -> None:
    """The driver of the job and its supervisor are on the head as well, and no work."""
    require("ray", has_ray(NEWEST))
    python = real_ray(engine, "ray-worker-1", more=[PROJECT])
    fill(engine, "ray-worker-1", "tmpone", 60 * MB)
    (scratch(engine, "ray-worker-1") / "policy.yaml").write_text(json.dumps(POLICY))

    done = pass_in(engine, python, 1)
    assert (done["outcome"], done["words"]) == ("applied", []), done
    assert done["places"][0]["bytes_back"] > 0, done
    assert "tmpone" not in entries(engine, "ray-worker-1")

    fill(engine, "ray-worker-1", "tmptwo", 60 * MB)
    engine.exec("ray-worker-1", [python, "-c", ACTOR])
    engine.until(lambda: "ready" in entries(engine, "ray-worker-1"), "the actor lives", deadline=120)
    done = pass_in(engine, python, 2)
    assert done["outcome"] == "skipped", done
    assert done["words"][0].startswith("busy: ")
    assert "tmptwo" in entries(engine, "ray-worker-1")


def on_ray(here: Machines, verb: str, *more: str) -> dict[str, Any]:
    """From the machine of the head, by the name of each node."""
    root = here.cluster.root
    program = root / "gpukeeper"
    program.write_text(f'{PROGRAM.replace("PYTHONPATH", f"GPUKEEPER_STATE={here.scratch}/state PYTHONPATH")} "$@"\n')
    program.chmod(0o755)
    policy = {
        "mode": "enforce",
        "scope": {"ray": {}},
        "ray": {"roots": [str(here.scratch)], "sessions": "none", "logs": "none", "cpu": "100%", "above": "1B"},
        "temporary": [{"root": str(here.scratch), "names": ["tmp*"], "above": "1B", "older_than": "0s"}],
    }
    (root / "policy.yaml").write_text(json.dumps(policy))
    options = {"address": f"http://{HEAD}:8265", "python": str(here.cluster.python), "program": str(program)}
    words = [word for key, value in options.items() for word in ("--option", f"{key}={value}")]
    command = ["ip", "netns", "exec", network_of(HEAD), sys.executable, "-m", "gpukeeper", verb, "--on", "ray"]
    done = subprocess.run(
        [*command, "--json", "--policy", str(root / "policy.yaml"), *words, *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout, done.stderr
    return {row["host"]: row for row in json.loads(done.stdout)["hosts"]}


def work_on_the_worker(here: Machines) -> None:
    program = (
        f"import ray; ray.init(address='{HEAD}:6379', log_to_driver=False); "
        "from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At; "
        f"there = [n['NodeID'] for n in ray.nodes() if n['NodeManagerAddress'] == '{WORKER}'][0]; "
        "ray.get(ray.remote(lambda: 1).options(scheduling_strategy=At(there, soft=False)).remote())"
    )
    inside = ["nsenter", "--target", str(here.head), "--net", "--mount", "--pid"]
    subprocess.run(
        [*inside, str(here.cluster.python), "-c", program], env=here.cluster.env, cwd=here.cluster.root, check=True
    )


def test_a_worker_is_visited_once_in_an_idle_period_and_again_after_work() -> None:
    """So that an autoscaler can remove it. These machines are namespaces: whether a tree is in use by a process outside
    is not known there, so it is kept."""
    require("ray", has_ray(NEWEST))
    with two_machines(NEWEST, "--dashboard-host=0.0.0.0") as here:
        tree = here.worker_files / "tmpold"
        tree.mkdir()
        (tree / "data").write_bytes(b"x" * 8192)
        assert {name: row["outcome"] for name, row in on_ray(here, "plan").items()} == {
            HEAD: "planned",
            WORKER: "planned",
        }
        done = on_ray(here, "apply", "--yes")
        assert [(row["outcome"], row["words"]) for row in done.values()] == [("applied", [])] * 2, done

        again = on_ray(here, "apply", "--yes")[WORKER]
        assert again["outcome"] == "skipped", again
        assert "nothing ran there since the last pass" in again["words"][0]

        work_on_the_worker(here)
        until(lambda: on_ray(here, "apply", "--yes")[WORKER]["outcome"] == "applied", "it is idle, and visited again")
        assert (tree / "data").exists()
        assert here.cluster.processes(), "the cluster runs"
