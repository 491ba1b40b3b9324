"""What the commands of two older tools would remove, and what gpukeeper removes after the migration: the same objects
of a real API server, the same tables as in docs/how-to/migrate-from-other-tools.md. kubectl deletes nothing."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.patience import PATIENCE
from tests.real.kube import binaries, objects
from tests.real.kube.api import Object
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness
from tests.real.kube.runs import FAILS, SUCCEEDS, marked, passes, reclaimed

pytestmark = pytest.mark.usefixtures("kwok_node")
SCRIPTS = Path(__file__).with_name("migrations")
PAGE = ROOT / "docs" / "how-to" / "migrate-from-other-tools.md"
FAR = "2099-01-01T00:00:00Z"  # bound by retention.max
REMOVED, PARTLY, KEPT = "removed", "its pods are removed", "kept"
Effect = dict[str, str]


def test_the_commands_of_a_cleanup_guide(plane: ControlPlane, namespace: str, new_namespace: Callable[[], str]) -> None:
    """C6.1, C6.7: `retention: {succeeded: 1h, failed: 7d}` instead."""
    outside = new_namespace()
    made = {
        "done": objects.job("done", annotations=SUCCEEDS),
        "held": marked(objects.job("held", annotations=SUCCEEDS), hold_until=FAR),
        "failed": objects.job("failed", annotations=FAILS),
        "half": objects.job("half", parallelism=2),
        "runs": objects.job("runs"),
        "bare": objects.pod("bare", annotations=SUCCEEDS),
    }
    for one in made.values():
        plane.api.create(one, namespace)
    plane.api.create(objects.pod("other", annotations=FAILS), outside)
    for name, condition in (("done", "Complete"), ("held", "Complete"), ("failed", "Failed")):
        plane.api.wait_condition("jobs", namespace, name, condition)
    half = plane.until(lambda: pods_of(plane, namespace, "half", "Running")[1:], "both pods run")
    plane.finish_pod(namespace, half[0])
    plane.until(lambda: plane.api.get("jobs", namespace, "half")["status"].get("succeeded") == 1, "one has succeeded")
    plane.until(lambda: pods_of(plane, namespace, "bare", "Succeeded"), "it succeeded")
    plane.until(lambda: pods_of(plane, outside, "other", "Failed"), "it failed")

    names = [*made, "other"]
    before = effect(old_command(plane, "cleanup-guide.sh", namespace), names)
    harness = Harness(plane.keeper_kubeconfig(), namespace, retention={"succeeded": "1h", "failed": "7d"})
    after = ours(harness, names)
    assert plane.api.names("jobs", namespace) == {"held", "failed", "half", "runs"}
    assert plane.api.names("pods", outside) == {"other"}
    compare("What the commands of a guide for leftovers remove", before, after)


def test_the_workaround_for_trainjobs_without_a_ttl(
    trainer_v23: ControlPlane, namespace: str, new_namespace: Callable[[], str]
) -> None:
    """C6.7: `retention: {succeeded: 1h, failed: 1h}` instead."""
    outside, api = new_namespace(), trainer_v23.api
    for place in (namespace, outside):
        api.create(objects.training_runtime("good", annotations=SUCCEEDS), place)
        api.create(objects.training_runtime("bad", annotations=FAILS), place)
    api.create(objects.training_runtime("long"), namespace)
    made = {
        "done": objects.train_job("done", "good"),
        "failed": objects.train_job("failed", "bad"),
        "held": marked(objects.train_job("held", "good"), hold_until=FAR),
        "ttl": marked(objects.train_job("ttl", "good"), ttl="2h"),
        "runs": objects.train_job("runs", "long"),
    }
    for one in made.values():
        api.create(one, namespace)
    api.create(objects.train_job("other", "bad"), outside)
    for name, condition in (("done", "Complete"), ("held", "Complete"), ("ttl", "Complete"), ("failed", "Failed")):
        api.wait_condition("trainjobs", namespace, name, condition)
    api.wait_condition("trainjobs", outside, "other", "Failed")

    names = [*made, "other"]
    before = effect(old_command(trainer_v23, "trainjob-ttl.sh", namespace), names)
    harness = Harness(trainer_v23.keeper_kubeconfig(), namespace, retention={"succeeded": "1h", "failed": "1h"})
    after = ours(harness, names)
    trainer_v23.until(lambda: api.names("jobsets", namespace) == {"held", "ttl", "runs"}, "each goes with its JobSet")
    assert api.names("trainjobs", namespace) == {"held", "ttl", "runs"}
    assert api.names("trainjobs", outside) == {"other"}
    compare("What the workaround for TrainJobs removes", before, after)


def old_command(plane: ControlPlane, script: str, namespace: str) -> set[str]:
    """What it would delete a little more than an hour from now, by name."""
    env = {
        **os.environ,
        "KUBECONFIG": str(plane.kubeconfig()),
        "PATH": f"{Path(binaries.program('kubectl')).parent}:{os.environ['PATH']}",
        "NAMESPACE": namespace,
        "NOW": str(int(time.time()) + 3700),
    }
    words = ["sh", str(SCRIPTS / script), "--dry-run=server", "--output=name"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert not done.stderr.strip(), done.stderr
    return {line.partition("/")[2] for line in done.stdout.splitlines()}


def effect(names: Iterable[str], roots: Iterable[str]) -> Effect:
    deleted = set(names)
    return {
        root: REMOVED if root in deleted else PARTLY if any(one.startswith(f"{root}-") for one in deleted) else KEPT
        for root in roots
    }


def ours(harness: Harness, roots: Iterable[str]) -> Effect:
    harness.later(minutes=62)
    gone = {key.partition("/")[2] for key in reclaimed(passes(harness))}
    return {root: REMOVED if root in gone else KEPT for root in roots}


def compare(heading: str, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Nothing broader than before, and the page says so."""
    assert {root for root in after if after[root] == REMOVED} <= {root for root in before if before[root] == REMOVED}
    section = PAGE.read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([^|;]+?)(?:;[^|]*)? \| ([^|;]+?)(?:;[^|]*)? \|$", section, re.MULTILINE)
    assert {name: (old, new) for name, old, new in rows} == {root: (before[root], after[root]) for root in before}


def pods_of(plane: ControlPlane, namespace: str, root: str, phase: str) -> list[str]:
    found: list[Object] = plane.api.list("pods", namespace)
    return [
        one["metadata"]["name"]
        for one in found
        if one["metadata"]["name"].startswith(root) and one.get("status", {}).get("phase") == phase
    ]
