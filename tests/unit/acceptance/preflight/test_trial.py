"""The trial: what its pod printed, how it ended, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import pytest

from gpukeeper.acceptance.fleet.preflight.facts import Finding
from gpukeeper.acceptance.fleet.preflight.kubernetes import (
    TrialFacts,
    drivers_of_trials,
    facts_printed,
    judge_trial,
    network_advice,
)
from gpukeeper.acceptance.launchers.trial import SCRIPT, TrialRequest, leftovers, manifest, removed, tried
from gpukeeper.clients.kubernetes.api import PODS
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.patience import PATIENCE
from tests.unit.acceptance.preflight.clusters import REQUEST, the
from tests.unit.clients.kubernetes.memory_api import MemoryApi

ASKED = TrialRequest(run="r1", owner="ann", cluster=REQUEST, deadline_s=3)
GOOD = """cpus 64
memory 1056 kB
shm 65536k
memlock unlimited
user 10001
interface eth0 up 10000 Mb/s
port mlx5_0/1 InfiniBand 4: ACTIVE 400 Gb/sec (4X NDR)
gpu NVIDIA H100, GPU-1, 123
driver 570.86.15
gpukeeper gpukeeper 1.0
end"""


def output(facts: str = GOOD) -> str:
    return "noise\n" + "\n".join(f"gpukeeper-fact {line}" for line in facts.splitlines())


def trial(**changes: Any) -> TrialFacts:
    made = {"run": "r1", "namespace": "lab", "name": "t", "image": "accept:1", "node": "gpu-1", "exit_code": 0}
    return TrialFacts(**{**made, "output": output(), **changes})


def judged(**changes: Any) -> tuple[Finding, ...]:
    return tuple(judge_trial(trial(**changes)))


async def at_once(seconds: float) -> None:
    await asyncio.sleep(0)


def test_a_good_trial_reports_the_node() -> None:
    found = judged()
    assert {one.verdict for one in found} == {Grade.PASS}
    assert the("trial-gpu", found).message == "gpu-1: one GPU in the pod: NVIDIA H100, GPU-1, 123"
    assert "cpus 64, memory 1056 kB, shm 65536k" in the("trial-node", found).message
    assert "mlx5_0/1 InfiniBand 4: ACTIVE 400 Gb/sec" in the("trial-network", found).message


def test_a_pod_without_a_gpu_is_a_fail_and_says_which_part_is_missing() -> None:
    bare = GOOD.replace("gpu NVIDIA H100, GPU-1, 123\n", "")
    assert "runtime did not add them" in the("trial-gpu", judged(output=output(bare))).message
    broken = bare.replace("end", "nvidia-smi NVML: Driver/library version mismatch\nend")
    assert "version mismatch" in the("trial-gpu", judged(output=output(broken))).message


def test_more_gpus_than_requested_are_not_isolated() -> None:
    assert the("trial-gpu", judged(output=output("gpu A\n" + GOOD))).verdict is Grade.WARN


def test_limited_locked_memory_a_port_that_is_down_and_an_image_without_gpukeeper() -> None:
    found = judged(output=output(GOOD.replace("unlimited", "8192").replace("4: ACTIVE", "1: DOWN")))
    assert the("trial-node", found, Grade.WARN).fix[-1] == "sudo systemctl restart containerd kubelet"
    assert the("trial-network", found).verdict is Grade.WARN
    assert the("trial-node", judged(output=output(GOOD.replace("gpukeeper gpukeeper 1.0\n", ""))), Grade.FAIL)


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("ImagePullBackOff", Grade.FAIL),
        ("Unschedulable", Grade.FAIL),
        ("Forbidden", Grade.FAIL),
        ("Deadline", Grade.INCONCLUSIVE),
        ("Vanished", Grade.INCONCLUSIVE),
    ],
)
def test_a_trial_that_did_not_run_gives_the_reason_and_the_events(reason: str, verdict: Grade) -> None:
    one = the("trial", judged(exit_code=None, reason=reason, events=("Failed: no such host",)))
    assert one.verdict is verdict
    assert reason in one.message
    assert "Events: Failed: no such host" in one.message


def test_a_program_that_failed_or_was_cut_off_is_no_pass() -> None:
    assert the("trial", judged(exit_code=1)).verdict is Grade.FAIL
    assert the("trial", judged(output=output(GOOD.removesuffix("end")))).verdict is Grade.FAIL
    assert the("trial", judged(output=Unknown("no log"))).verdict is Grade.INCONCLUSIVE


def test_a_pod_that_is_left_comes_with_the_command() -> None:
    one = the("trial-left", judged(left="it is being deleted"))
    assert one.fix == ("kubectl -n lab delete pod -l gpukeeper.io/run=r1",)


def test_drivers_and_link_layers_of_several_trials() -> None:
    other = trial(node="gpu-2", output=output(GOOD.replace("570.86.15", "580.1")))
    assert (
        next(iter(drivers_of_trials([trial(), other]))).message
        == "driver versions differ: 570.86.15 on gpu-1; 580.1 on gpu-2"
    )
    assert network_advice([trial()])[0].message.startswith("InfiniBand:")
    roce = output(GOOD.replace("InfiniBand", "Ethernet"))
    assert network_advice([trial(output=roce)])[0].message.startswith("RoCE:")
    assert network_advice([trial(output=output("end"))]) == ()


def test_the_pod_has_the_least_privilege() -> None:
    spec = manifest(ASKED, "t", "gpu-1")["spec"]
    (main,) = spec["containers"]
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert [list(one) for one in spec["volumes"]] == [["name", "emptyDir"]]


def test_the_script_runs_in_a_plain_shell_and_prints_facts() -> None:
    ran = subprocess.run(["/bin/sh", "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=PATIENCE)
    found = facts_printed(ran.stdout)
    assert int(found["cpus"][0]) > 0
    assert found["memory"][0].endswith("kB")
    assert any(one.startswith("lo ") for one in found["interface"])
    assert "end" in found


def ends(api: MemoryApi, **status: Any) -> None:
    """As the kubelet: each pod that is created ends at once."""

    def end(resource: object, one: dict[str, Any]) -> None:
        one["spec"]["nodeName"] = "gpu-1"
        one["status"] = status or {
            "phase": "Succeeded",
            "containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}],
        }
        api.logs[one["metadata"]["namespace"], one["metadata"]["name"], False] = output().encode()

    api.created = end


def test_a_trial_is_followed_and_removed() -> None:
    api = MemoryApi("lab")
    ends(api)
    (one,) = asyncio.run(tried(api, ASKED, at_once))
    assert (one.exit_code, one.node, one.left) == (0, "gpu-1", "")
    assert the("trial", tuple(judge_trial(one))).verdict is Grade.PASS
    assert api.of(PODS) == []


def test_one_trial_on_each_node() -> None:
    api = MemoryApi("lab")
    ends(api)
    asked = TrialRequest(run="r1", owner="ann", cluster=REQUEST, nodes=("gpu-1", "gpu-2"))
    assert [one.wanted for one in asyncio.run(tried(api, asked, at_once))] == ["gpu-1", "gpu-2"]


def test_a_pod_that_waits_for_its_image_is_ended_early_and_removed() -> None:
    api = MemoryApi("lab")
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    ends(api, phase="Pending", containerStatuses=[{"state": {"waiting": waiting}}])
    (one,) = asyncio.run(tried(api, ASKED, at_once))
    assert (one.reason, one.message, one.exit_code) == ("ImagePullBackOff", "not found", None)
    assert api.of(PODS) == []


def test_a_pod_that_no_node_takes_gives_the_words_of_the_scheduler() -> None:
    api = MemoryApi("lab")
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    ends(api, phase="Pending", conditions=[condition])
    (one,) = asyncio.run(tried(api, ASKED, at_once))
    assert (one.reason, one.message) == ("Unschedulable", "0/3 nodes")


def test_a_pod_that_is_refused_is_a_fail() -> None:
    api = MemoryApi("lab")
    api.forbidden = lambda verb, resource, namespace: verb == "create"
    (one,) = asyncio.run(tried(api, ASKED, at_once))
    assert the("trial", tuple(judge_trial(one))).verdict is Grade.FAIL


def test_interrupted_it_removes_its_pod() -> None:
    api = MemoryApi("lab")

    async def interrupted() -> None:
        made = asyncio.Event()
        api.created = lambda resource, one: made.set()
        task = asyncio.create_task(tried(api, ASKED))
        await made.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(interrupted())
    assert api.of(PODS) == []


def trial_pod(name: str, run: str, phase: str = "Failed", owner: str = "ann", **meta: Any) -> dict[str, Any]:
    labels = {"gpukeeper.io/run": run, "gpukeeper.io/trial": "preflight"}
    about = {"name": name, "labels": labels, "annotations": {"gpukeeper.io/owner": owner}, **meta}
    return {"metadata": about, "status": {"phase": phase}}


FOREIGN = (
    trial_pod("gpukeeper-trial-other-0", "other"),
    trial_pod("training", "r1"),
    trial_pod("gpukeeper-trial-r1-1", "r1", owner="eve"),
    trial_pod("gpukeeper-trial-r1-2", "r1", ownerReferences=[{"kind": "Job", "name": "x", "uid": "u"}]),
    {"metadata": {"name": "gpukeeper-trial-r1-3", "labels": {"gpukeeper.io/run": "r1"}}},
)


def test_a_pod_that_only_has_labels_of_a_trial_is_left_alone() -> None:
    api = MemoryApi("lab")
    for one in FOREIGN:
        api.add(PODS, one)
    api.add(PODS, trial_pod("gpukeeper-trial-r1-0", "r1"))
    assert asyncio.run(removed(api, ASKED, at_once)) == {}
    assert [one["metadata"]["name"] for one in api.of(PODS)] == [one["metadata"]["name"] for one in FOREIGN]


def test_a_removal_that_is_refused_is_reported() -> None:
    api = MemoryApi("lab")
    ends(api)
    api.fail = lambda verb, resource, name: ApiError(403, "", "pods is forbidden") if verb == "delete" else None
    (one,) = asyncio.run(tried(api, ASKED, at_once))
    assert one.left == "the cluster answered 403: pods is forbidden"


def test_what_a_killed_command_left_is_removed_by_the_next_one_when_it_has_ended() -> None:
    api = MemoryApi("lab")
    api.add(PODS, trial_pod("gpukeeper-trial-old-0", "old"))
    api.add(PODS, trial_pod("gpukeeper-trial-now-0", "now", "Running"))
    api.add(PODS, trial_pod("gpukeeper-trial-hers-0", "hers", owner="eve"))
    api.add(PODS, trial_pod("training", "old"))
    found = asyncio.run(leftovers(api, "lab", "ann"))
    assert [one["metadata"]["name"] for one in api.of(PODS)] == [
        "gpukeeper-trial-now-0",
        "gpukeeper-trial-hers-0",
        "training",
    ]
    warnings = [one for one in found if one.verdict is Grade.WARN]
    assert [one.about for one in warnings] == [("gpukeeper-trial-now-0",), ("gpukeeper-trial-hers-0", "training")]
    assert warnings[0].fix == ("kubectl -n lab delete pod gpukeeper-trial-now-0",)
