"""kill -9 of the launcher for Kubernetes at named points: nothing is left, and no report is lost that a node sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from gpukeeper.acceptance.fleet.launcher import RunSpec, RunSummary, Target
from gpukeeper.acceptance.launchers.kubernetes import objects
from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher
from gpukeeper.model.decision import Action
from gpukeeper.model.unknown import Unknown
from tests.real.kube.harness import Harness
from tests.real.kube.runs import passes, reclaimed
from tests.real.launch.beds import Bed
from tests.real.launch.killed_launchers import NOWHERE, killed_launcher, report_of, reporting, until_killed
from tests.real.launch.passes import Moment, Point, finish, forked, reports, was_killed

# Requests of the operation in the first round of a run over two nodes; the points before it have created nothing more.
OPERATIONS = {
    "list jobs": 1,
    "create jobs": 2,
    "create services": 1,
    "list services": 2,
    "list pods": 1,
    "log": 2,
    "delete jobs": 2,
    "delete services": 1,
}
POINTS = {
    f"{operation.replace(' ', '-')}-{moment}": (operation, moment, requests)
    for operation, requests in OPERATIONS.items()
    for moment in Moment
}
COMPLETE = ("list-pods", "log", "delete")  # from here on both nodes run


def described(made: Bed, run: str, **changes: object) -> RunSpec:
    return made.spec(run, nodes=made.nodes, together=True, **changes)


def test_a_launcher_killed_at_any_point_leaves_nothing_and_loses_no_report(
    bed: Callable[[int], Bed], tmp_path: Path
) -> None:
    """All are killed at about the same time; the next pass is another launcher, for all of them."""
    assert len(POINTS) >= 21
    made = bed(2)
    with reporting(made, list(POINTS)):
        children = {}
        for seed, (run, (operation, moment, requests)) in enumerate(POINTS.items()):
            point = Point(operation, moment, requests, seed=seed)
            children[run] = forked(partial(until_killed, made, described(made, run), point, tmp_path))
        for child in children.values():
            was_killed(child)
        begun = {run: _begun(made, run) for run in POINTS}
        made.tell(lambda launcher: _next_pass(launcher, tmp_path))
    for run in POINTS:
        expected = made.nodes if run.startswith(COMPLETE) else begun[run]
        for node in expected:
            assert reports(tmp_path, run, node) == {report_of(run, node)}, f"{run}, {node}"
    made.plane.until(lambda: not made.left(), "nothing is left")
    assert sum(len(one) for one in begun.values()) >= len(POINTS), "most were killed in the middle of a run"


def _begun(made: Bed, run: str) -> list[str]:
    """The nodes that have a Job, and so will send a report."""
    jobs = made.plane.api.list("jobs", made.namespace, labels=f"{objects.RUN_LABEL}={run}")
    return [one["metadata"]["annotations"][objects.NODE_ANNOTATION] for one in jobs]


async def _next_pass(launcher: KubernetesLauncher, into: Path) -> None:
    runs = await launcher.runs()
    assert not isinstance(runs, Unknown), runs
    await asyncio.gather(*(finish(launcher, one.spec.run, into) for one in runs))


@pytest.mark.parametrize(
    ("form", "ttl", "kept", "due"),
    [("job", "never", 0.8, 1.2), ("indexed-job", "1d", 23, 25), ("statefulset", "1d", 24, 26)],
)
def test_what_a_killed_launcher_left_is_reclaimed_as_any_workload_with_its_service(
    bed: Callable[[int], Bed], tmp_path: Path, form: str, ttl: str, kept: float, due: float
) -> None:
    """Killed right after its Service; of the job form the second Job may be missing then: it is created at the same
    time. Jobs go by the retention of the policy, or by their own TTL; a set has no end, and is over after a day.
    `kept`, `due`: hours."""
    made = bed(2)
    point, spec = Point("create services", Moment.AFTER, 1), described(made, "r1", form=form)
    was_killed(forked(partial(until_killed, made, spec, point, tmp_path, ttl=ttl)))
    plural = "statefulsets" if form == "statefulset" else "jobs"
    names = made.plane.api.names(plural, made.namespace)
    assert names
    assert len(made.plane.api.names("services", made.namespace)) == 1
    for name in names:
        if plural == "jobs":
            made.plane.api.wait_condition("jobs", made.namespace, name, "Complete")
        else:  # the log of a pod that has not started cannot be captured: the step would fail, and be retried later
            made.plane.api.wait_for(
                plural, made.namespace, name, lambda one: bool(one and one["status"].get("readyReplicas") == 2)
            )
    harness = Harness(made.plane.kubeconfig(), made.namespace)
    harness.later(hours=kept)
    assert passes(harness) == []
    harness.later(hours=due - kept)
    done = passes(harness)
    # KWOK ends the pods of a set, and its controller creates them again: a pass that finds one running warns first, and
    # one that finds another state than it planned with does nothing.
    ends = time.monotonic() + 120
    while plural == "statefulsets" and not reclaimed(done) and time.monotonic() < ends:
        done += passes(harness)
    why = [(one.result, one.reason) for one in done]
    assert reclaimed(done) == {f"{plural.removesuffix('s')}/{name}": Action.REMOVE for name in names}, why
    made.plane.until(lambda: not made.left(), "nothing is left, and no Service")


def test_a_run_that_was_applied_with_kubectl_goes_too(bed: Callable[[int], Bed]) -> None:
    """Its Service has no owner: a pass removes the Job and names the Service; `accept remove` removes the Service."""
    made = bed(2)
    api, spec = made.plane.api, described(made, "r1", form="indexed-job")
    launcher = killed_launcher(made, NOWHERE, ttl="never")
    for one in YAML(typ="safe").load_all(launcher.render(spec, [Target(node=node) for node in made.nodes])):
        if one["kind"] == "Job":
            one["spec"]["template"]["metadata"]["annotations"]["test/exit-code"] = "0"
        api.create(one, made.namespace)
    (job,) = api.names("jobs", made.namespace)
    api.wait_condition("jobs", made.namespace, job, "Complete")
    harness = Harness(made.plane.kubeconfig(), made.namespace)
    harness.later(minutes=62)
    assert reclaimed(passes(harness)) == {f"job/{job}": Action.REMOVE}
    made.plane.until(lambda: made.left() == [f"services/{job}"], "only the Service is left")
    harness.later(hours=25)
    (named,) = harness.subjects().values()
    assert named.findings[0].endswith(f"kubectl -n {made.namespace} delete service {job}")

    found = made.tell(lambda one: one.run("r1"))
    assert isinstance(found, RunSummary)
    assert found.objects == (f"service/{job}",)
    assert made.tell(lambda one: one.remove("r1")).removed == (f"service/{job}",)
    assert not made.left()
