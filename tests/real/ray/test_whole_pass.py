"""One pass over Ray, the host and Docker together, by the policy of examples/policies/ray-workers.yaml; and the
script that it replaces (worker_cleanup.sh), on the same engine with the same things: its effect and ours side by side.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.docs.markdown import ROOT as REPOSITORY
from tests.engines import has_ray, require
from tests.real.docker.harness import ended
from tests.real.docker.private_engine import DockerEngine
from tests.real.ray.clusters import NEWEST
from tests.real.ray.test_containers import (
    ACTOR,
    CALLED,
    MB,
    ROOT,
    entries,
    fill,
    gpukeeper,
    hold,
    real_ray,
    worker,
)

EXAMPLE = REPOSITORY / "examples" / "policies" / "ray-workers.yaml"
GUIDE = REPOSITORY / "docs" / "how-to" / "migrate-from-other-tools.md"
SCRIPT = Path(__file__).parent / "worker_cleanup.sh"
SIZE_MB = """
import os, sys
files = (os.path.join(top, name) for top, _, names in os.walk(sys.argv[1]) for name in names)
print(sum(os.lstat(one).st_blocks * 512 for one in files) // 1_000_000)
"""
DAYS = {"succeeded": "1d", "failed": "7d", "stopped": "1d"}
NOW = {**DAYS, "succeeded": "0s"}

# What removes a tree inspects all processes first, and keeps it while programs start and end faster than they are read.
pytestmark = pytest.mark.alone


def example(**changes: object) -> dict[str, Any]:
    """The file itself; only what a test cannot have differs: its roots, hours and gigabytes."""
    found: dict[str, Any] = YAML(typ="safe").load(EXAMPLE)
    assert found["retention"] == DAYS
    assert found["ray"]["sessions"] == found["ray"]["logs"] == "none"
    short = {"roots": [ROOT], "above": "50MB", "older_than": "1s", "under_pressure": "1s", "window": "1s"}
    here = {"mode": "enforce", "disk": {"high": "100%", "low": "99%"}, "ray": {**found["ray"], **short, "cpu": "50%"}}
    return {**found, **here, **changes}


def containers(engine: DockerEngine) -> None:
    """All without a GPU. The first ones ended a moment ago."""
    ended(engine, "helper", config={"Volumes": {"/data": {}}})
    ended(engine, "crashed", 1)
    ended(engine, "keep-me")
    engine.create("never-started")
    engine.run("database")
    engine.run("flapping", cmd=["sh", "-c", "exit 1"], restart="always")


def due(engine: DockerEngine, policy: dict[str, Any]) -> dict[str, set[str]]:
    """By platform: the last names of what a pass would act on."""
    places = gpukeeper(engine, "plan", policy=policy)["places"]
    return {one["platform"]: {Path(step["seen"]["ref"]["name"]).name for step in one["steps"]} for one in places}


def test_one_pass_over_ray_the_host_and_docker(engine: DockerEngine, tmp_path: Path) -> None:
    """C10.4: trees of an idle worker and of the host, and what is stopped and has no GPU, by one command."""
    require("ray", has_ray(NEWEST))
    python = real_ray(engine, "ray-worker-2")
    worker(engine, "ray-worker-1")
    engine.exec("ray-worker-2", [python, "-c", ACTOR])
    engine.until(lambda: "ready" in entries(engine, "ray-worker-2"), "the actor lives", deadline=60)
    for name in ("ray-worker-1", "ray-worker-2"):
        fill(engine, name, "tmpone", 60 * MB)
    (tmp_path / "tmp-of-the-host").mkdir()
    (tmp_path / "tmp-of-the-host" / "data").write_bytes(b"x" * 10_000)
    containers(engine)
    trees = [{"root": str(tmp_path), "names": ["tmp-*"], "above": "1B", "older_than": "1s", "under_pressure": "1s"}]

    untouched = {"without-gpu": {"untouchable": True}}
    assert due(engine, example(temporary=trees, retention=NOW, classes=untouched))["docker"] == set()
    assert due(engine, example(temporary=trees)) == {
        "ray": {"tmpone"},
        "host": {"tmp-of-the-host"},
        "docker": set(),  # their day is not over
    }
    found = gpukeeper(engine, "apply", "--yes", policy=example(temporary=trees, retention=NOW))
    done = {
        (place["platform"], Path(line["ref"]["name"]).name, line["result"])
        for place in found["places"]
        for line in place["outcomes"]
    }
    assert done == {
        ("ray", "tmpone", "reclaimed"),
        ("host", "tmp-of-the-host", "reclaimed"),
        ("docker", "helper", "reclaimed"),
    }
    assert entries(engine, "ray-worker-1") == []
    assert "tmpone" in entries(engine, "ray-worker-2"), "the actor does nothing, and it lives"
    assert list(tmp_path.iterdir()) == []
    left = engine.containers()
    assert left.pop("flapping") in ("running", "restarting")
    kept = {"crashed": "exited", "keep-me": "exited", "never-started": "created", "database": "running"}
    assert left == kept | dict.fromkeys(("ray-worker-1", "ray-worker-2"), "running")
    assert len(volumes(engine)) == 1


# Side by side.

WORKERS = ("ray-worker-1", "ray-worker-2", "ray-worker-3")


def volumes(engine: DockerEngine) -> set[str]:
    return {one["Name"] for one in (engine.api.must("GET", "/volumes") or {}).get("Volumes") or []}


def set_up(engine: DockerEngine) -> None:
    """What a host has before the hour strikes. A worker is busy at 0 % CPU, as an actor that holds a model is."""
    for name in WORKERS:
        worker(engine, name)
    for tree in ("tmp-closed", "pip-unpack-x", "tmp-open", "mine"):
        fill(engine, "ray-worker-1", tree, 60 * MB)
    hold(engine, "ray-worker-1", f"{ROOT}/tmp-open/data")
    fill(engine, "ray-worker-2", "tmp-of-an-actor", 60 * MB)
    engine.exec("ray-worker-2", ["python3", "-c", CALLED.format("ray::Trainer", "import time; time.sleep(1e6)")])
    fill(engine, "ray-worker-3", "tmp-small", 20 * MB)
    containers(engine)
    engine.remove_container("flapping")
    engine.api.must("POST", "/volumes/create", {"Name": "results"})


def there(engine: DockerEngine) -> set[str]:
    found = {f"{name}: {tree}" for name in WORKERS for tree in entries(engine, name)}
    others = set(engine.containers()) - set(WORKERS)
    named = {one for one in volumes(engine) if len(one) != 64}
    return found | {f"container {one}" for one in others} | {f"volume {one}" for one in named}


def by_the_script(engine: DockerEngine) -> set[str]:
    settings = {"THRESHOLD_MB": "50", "CPU_PERCENT": "5", "FOLDER": ROOT, "SIZE_MB": SIZE_MB}
    before = there(engine)
    subprocess.run([SCRIPT], env=engine.environ() | settings, check=True, capture_output=True, timeout=120)
    return before - there(engine)


def by_a_pass(engine: DockerEngine, **changes: object) -> set[str]:
    before = there(engine)
    gpukeeper(engine, "apply", "--yes", policy=example(**changes))
    return before - there(engine)


def test_the_script_and_gpukeeper_side_by_side(engine: DockerEngine) -> None:
    """The same things twice. Whatever gpukeeper removes, the script removed too; the guide has the table."""
    set_up(engine)
    everything = there(engine)
    theirs = by_the_script(engine)
    engine.clear()
    set_up(engine)
    assert there(engine) == everything
    ours = by_a_pass(engine)
    later = by_a_pass(engine, retention=NOW)
    assert ours | later < theirs, "nothing broader than before"

    def says(thing: str) -> tuple[str, str]:
        own = "removed" if thing in ours else "removed after a day" if thing in later else "kept"
        return ("removed" if thing in theirs else "kept", own)

    table = table_of_the_guide()
    # Since then only `all` takes those with a name.
    if engine.api.must("GET", "/version")["ApiVersion"] >= "1.42":
        table["volume results"] = ("kept", "kept")
    assert {thing: says(thing) for thing in everything} == table


def table_of_the_guide() -> dict[str, tuple[str, str]]:
    """Names, and the first words of both columns."""
    text = GUIDE.read_text().partition("| on the same host |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    first = [[cell.partition(":")[0] for cell in row[1:]] for row in rows]
    return {row[0].split("`")[1]: (theirs, ours) for row, (theirs, ours) in zip(rows, first, strict=True)}
