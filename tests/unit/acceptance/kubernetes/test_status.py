"""What is said about each node: a stable code, and a sentence with the taint, the resource or the quota."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.acceptance.fleet.launcher import NodeStatus, Phase
from gpukeeper.clients.kubernetes.api import DAEMON_SETS, EVENTS, JOBS, NODES
from tests.unit.acceptance.kubernetes.clusters import add_pod, cluster, ended, launcher, run, spec
from tests.unit.clients.kubernetes.memory_api import MemoryApi


def state_of(api: MemoryApi, node: str = "a") -> NodeStatus:
    summary = run(launcher(api).run("r1"))
    assert summary is not None
    return next(one for one in summary.nodes if one.node == node)


def begun(*nodes: str, **changes: Any) -> tuple[MemoryApi, dict[str, Any]]:
    api = cluster(*(nodes or ("a",)))
    made, wanted = launcher(api), spec(**changes)
    run(made.start(wanted, run(made.targets(wanted))))
    root = next(one for key, one in api.objects.items() if key[0] not in {"nodes", "services"})
    return api, root


def unscheduled(message: str) -> list[dict[str, str]]:
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]


NO_GPU = "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't match Pod's node affinity/selector."
COUNTED = (
    "0/2 nodes are available: 1 node(s) had untolerated taint(s), 1 node(s) didn't satisfy plugin(s) [NodeAffinity]."
)
TAINTED = "0/2 nodes are available: 1 node(s) had untolerated taint {maintenance: yes}, 1 node(s) didn't match."


@pytest.mark.parametrize(
    ("pod", "phase", "code", "words"),
    [
        ({"phase": "Pending", "conditions": unscheduled(NO_GPU)}, "waiting", "resources", "not enough nvidia.com/gpu"),
        ({"phase": "Pending", "conditions": unscheduled(TAINTED)}, "waiting", "taint", "(maintenance: yes)"),
        ({"phase": "Pending", "conditions": unscheduled(COUNTED)}, "waiting", "taint", "not tolerate: 0/2 nodes"),
        ({"phase": "Pending", "conditions": unscheduled("no idea")}, "waiting", "unschedulable", "no idea"),
        (
            {"phase": "Pending", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}},
            "waiting",
            "image",
            "(ErrImagePull): not found",
        ),
        (
            {
                "phase": "Pending",
                "state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}},
            },
            "waiting",
            "config",
            "no secret",
        ),
        ({"phase": "Running", "state": {"running": {}}}, "running", "", ""),
        ({"phase": "Succeeded", "state": ended(0, message="PASS")}, "ended", "", ""),
        ({"phase": "Failed", "state": ended(4, message="FAIL")}, "ended", "failed", "exit code 4"),
        (
            {"phase": "Failed", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}},
            "ended",
            "oom",
            "memory",
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, "ended", "evicted", "low on disk"),
        (
            {
                "phase": "Failed",
                "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}],
            },
            "ended",
            "preempted",
            "higher priority",
        ),
        (
            {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no device"},
            "ended",
            "failed",
            "no device",
        ),
        (
            {"phase": "Running", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "last": ended(1), "restarts": 2},
            "waiting",
            "restarts",
            "exit code 1",
        ),
    ],
)
def test_a_pod_is_explained(pod: dict[str, Any], phase: str, code: str, words: str) -> None:
    api, job = begun()
    ready = [{"type": "Ready", "status": "True"}]
    add_pod(api, job, "p", node="" if "conditions" in pod else "a", **{"conditions": ready, **pod})
    found = state_of(api)
    assert (found.phase, found.code) == (phase, code)
    assert words in found.reason


def test_a_taint_that_the_scheduler_only_counts_is_read_from_the_node() -> None:
    api, job = begun("a")
    taints = [
        {"key": "lab/reserved", "value": "yes", "effect": "NoSchedule"},
        {"key": "x", "effect": "PreferNoSchedule"},
    ]
    next(iter(api.of(NODES)))["spec"]["taints"] = taints
    add_pod(api, job, "p", phase="Pending", conditions=unscheduled(COUNTED))
    assert "does not tolerate (lab/reserved=yes:NoSchedule): 0/2" in state_of(api).reason


def test_the_verdict_in_the_termination_message_is_passed_on() -> None:
    api, job = begun()
    add_pod(api, job, "p", node="a", phase="Failed", state=ended(4, message='{"verdict":"FAIL"}'))
    found = state_of(api)
    assert (found.message, found.exit_code) == ('{"verdict":"FAIL"}', 4)


def test_a_quota_that_refuses_the_pod_is_named() -> None:
    api, job = begun()
    said = 'Error creating: pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8'
    about = {"kind": "Job", "uid": job["metadata"]["uid"]}
    event = {"metadata": {"name": "e"}, "type": "Warning", "reason": "FailedCreate", "message": said}
    api.add(EVENTS, {**event, "involvedObject": about})
    found = state_of(api)
    assert (found.phase, found.code) == (Phase.WAITING, "quota")
    assert "requests.nvidia.com/gpu=8" in found.reason
    api.forbidden = lambda verb, resource, namespace: resource is EVENTS
    assert state_of(api).code == "never-created", "without the right the reason is less exact, not wrong"


def test_a_deadline_is_named_whether_the_pod_is_still_there_or_not() -> None:
    api, job = begun()
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}
    found = state_of(api)
    assert (found.phase, found.code) == (Phase.GONE, "deadline")
    add_pod(api, job, "p", node="a", phase="Failed", state=ended(143))
    found = state_of(api)
    assert (found.phase, found.code) == (Phase.ENDED, "deadline")


def test_a_pod_that_vanished_is_not_a_pod_that_passed() -> None:
    api, job = begun()
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    found = state_of(api)
    assert (found.phase, found.code) == (Phase.GONE, "vanished")


def test_a_node_that_went_away_under_a_running_pod() -> None:
    api, job = begun()
    unready = [{"type": "Ready", "status": "False"}]
    add_pod(api, job, "p", node="a", phase="Running", state={"running": {}}, conditions=unready)
    node = next(one for one in api.of(NODES))
    node["status"]["conditions"] = [
        {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting"}
    ]
    found = state_of(api)
    assert (found.code, "Kubelet stopped posting" in found.reason) == ("node-not-ready", True)
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}
    late = state_of(api)
    assert (late.phase, late.code, late.reason) == (Phase.ENDED, "node-not-ready", found.reason), "more time is no help"
    api.remove(NODES, "a", "")
    assert state_of(api).code == "node-gone"


def test_a_node_that_came_back_is_not_lost_until_nodes_are_listed_the_next_time() -> None:
    """Three reads in a row of a lost node end the wait for it, so they must not be one list of nodes."""
    api, job = begun()
    ready = [{"type": "Ready", "status": "True"}]
    add_pod(api, job, "p", node="a", phase="Running", state={"running": {}}, conditions=ready)
    node = next(one for one in api.of(NODES))
    node["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": "KubeletNotReady"}]
    made = launcher(api)
    assert [one.code for one in run(made.run("r1")).nodes] == ["node-not-ready"]
    node["status"]["conditions"] = ready
    assert [one.code for one in run(made.run("r1")).nodes] == [""]


def test_a_successful_attempt_counts_whatever_came_before() -> None:
    api, job = begun()
    add_pod(api, job, "p1", node="a", phase="Failed", state=ended(137))
    add_pod(api, job, "p2", node="a", phase="Succeeded", state=ended(0, message="PASS"))
    found = state_of(api)
    assert (found.phase, found.code, found.attempt, found.message) == (Phase.ENDED, "", 1, "PASS")


def test_excluded_nodes_are_in_the_status_of_the_run() -> None:
    api = cluster("a")
    made, wanted = launcher(api), spec()
    targets = run(made.targets(wanted))
    gone = type(targets[0])(node="z", excluded="the node is not ready")
    run(made.start(wanted, (*targets, gone)))
    found = state_of(api, "z")
    assert (found.phase, found.code, found.reason) == (Phase.GONE, "excluded", "the node is not ready")
    assert len(api.of(JOBS)) == 1


def test_a_pod_of_a_daemon_set_has_ended_when_it_is_ready() -> None:
    api, root = begun(form="daemonset")
    pod = add_pod(api, root, "p", resource=DAEMON_SETS, node="a", state={"running": {}}, ready=False)
    assert state_of(api).phase == Phase.RUNNING
    pod["status"]["containerStatuses"][0]["ready"] = True
    assert state_of(api).phase == Phase.ENDED


def test_nodes_of_one_run_whose_pods_have_no_place_yet_get_the_scheduler_s_reason() -> None:
    api, root = begun("a", "b", form="indexed-job")
    add_pod(api, root, "p0", node="a", state={"running": {}}, conditions=[{"type": "Ready", "status": "True"}])
    add_pod(api, root, "p1", phase="Pending", conditions=unscheduled(NO_GPU))
    assert state_of(api, "a").phase == Phase.RUNNING
    found = state_of(api, "b")
    assert (found.phase, found.code) == (Phase.WAITING, "resources")
