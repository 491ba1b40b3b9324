"""The manifests of every form: what each object and each pod must have."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from gpukeeper.acceptance.fleet.launcher import RunSpec, Target
from gpukeeper.acceptance.launchers.kubernetes import objects
from gpukeeper.acceptance.launchers.kubernetes.forms import FORMS
from gpukeeper.acceptance.launchers.kubernetes.objects import Item
from gpukeeper.model.errors import UsageError
from tests.unit.acceptance.kubernetes.clusters import launcher, spec
from tests.unit.clients.kubernetes.memory_api import MemoryApi

GPU = "nvidia.com/gpu"
NODES = tuple(Target(node=name, gpus=8, resource=GPU) for name in ("a", "b", "c"))


def items(wanted: RunSpec, targets: tuple[Target, ...] = NODES, **options: str) -> list[Item]:
    return launcher(MemoryApi(), **options).items(wanted, targets)


def templates(value: Any) -> list[dict[str, Any]]:
    """Every pod template, at any depth."""
    if isinstance(value, list):
        return [found for one in value for found in templates(one)]
    if not isinstance(value, dict):
        return []
    if "containers" in value.get("spec", {}):
        return [value]
    return [found for one in value.values() for found in templates(one)]


def variables(template: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in template["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize("form", FORMS)
def test_every_object_and_every_pod_carries_run_and_owner(form: str) -> None:
    for item in items(spec(form=form)):
        meta = item.manifest["metadata"]
        assert meta["labels"].items() >= {objects.RUN_LABEL: "r1", objects.ACCEPTANCE_LABEL: "run"}.items()
        assert meta["labels"]["app"] in {"gpu-accept-daemon", "gpu-accept-ddp", "gpu-acceptance-test"}
        assert meta["annotations"][objects.OWNER_ANNOTATION] == "ann"
        found = objects.spec_of(meta["annotations"])
        assert found is not None
        assert found.run == "r1"
        for template in templates(item.manifest):
            assert template["metadata"]["labels"][objects.RUN_LABEL] == "r1"
            assert template["metadata"]["annotations"][objects.OWNER_ANNOTATION] == "ann"


@pytest.mark.parametrize("form", FORMS)
def test_every_pod_has_what_the_probes_need_and_no_more(form: str) -> None:
    options = {
        "shm": "32Gi",
        "rdma": "rdma/ib=8",
        "priority": "low",
        "pull-secrets": "reg1,reg2",
        "runtime-class": "nvidia",
        "cpu": "14",
        "memory": "150Gi",
    }
    found = [one for item in items(spec(form=form), **options) for one in templates(item.manifest)]
    assert found
    for template in found:
        pod, container = template["spec"], template["spec"]["containers"][0]
        assert container["command"][:4] == ["gpukeeper", "accept", "--report-to-log", "r1"]
        assert container["resources"]["limits"] == {GPU: 8, "rdma/ib": 8, "cpu": "14", "memory": "150Gi"}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["terminationMessagePath"] == variables(template)["GPUKEEPER_TERMINATION_LOG"]
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}} in pod["volumes"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["tolerations"] == [{"operator": "Exists"}]
        assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("low", "nvidia")
        assert pod["imagePullSecrets"] == [{"name": "reg1"}, {"name": "reg2"}]


@pytest.mark.parametrize("form", sorted(frozenset(FORMS) - {"daemonset"}))
def test_a_run_over_all_nodes_states_their_number_and_keeps_them_apart(form: str) -> None:
    made = items(spec(form=form, together=True))
    for template in [one for item in made for one in templates(item.manifest)]:
        assert variables(template)["GPUKEEPER_GROUP_SIZE"] == "3"
        affinity = template["spec"]["affinity"]
        places = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        if form == "job":
            assert len(places) == 1
            continue
        assert len(places) == 3
        apart = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert apart[0]["topologyKey"] == "kubernetes.io/hostname"


@pytest.mark.parametrize("form", ["job", "indexed-job", "statefulset"])
def test_the_headless_service_publishes_pods_that_are_not_ready(form: str) -> None:
    made = items(spec(form=form, together=True))
    service = next(one.manifest for one in made if one.resource.kind == "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["ports"] == [{"name": "rendezvous", "port": 29500}]
    template = next(one for item in made for one in templates(item.manifest))
    first = variables(template)["MASTER_ADDR"]
    assert first.endswith(f"0.{service['metadata']['name']}")
    assert variables(template)["MASTER_PORT"] == "29500"
    assert "GPUKEEPER_GROUP_INDEX" in variables(template)


def test_limits_of_a_job() -> None:
    job = items(spec())[0].manifest["spec"]
    assert (job["backoffLimit"], job["activeDeadlineSeconds"], job["ttlSecondsAfterFinished"]) == (3, 3600, 86400)
    actions = [(one["action"], one.get("onExitCodes", {}).get("values")) for one in job["podFailurePolicy"]["rules"]]
    assert actions == [("FailJob", [2, 3, 4, 5]), ("Ignore", None)]
    assert "ttlSecondsAfterFinished" not in items(spec(), ttl="never")[0].manifest["spec"]
    assert items(spec(), ttl="1h")[0].manifest["spec"]["ttlSecondsAfterFinished"] == 3600


@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_ends_has_a_deadline_and_a_limit_of_retries(form: str) -> None:
    """C5.6: a DaemonSet and a StatefulSet have no such fields."""
    limits = [one for item in items(spec(form=form)) for one in limited(item.manifest)]
    if form in {"daemonset", "statefulset"}:
        assert limits == []
        return
    assert limits
    for one in limits:
        assert one["activeDeadlineSeconds"] == 3600
        assert one.get("backoffLimit", one.get("backoffLimitPerIndex")) == 3
    pods = [one for item in items(spec(form=form)) for one in templates(item.manifest)]
    assert form == "pytorchjob" or len(limits) == len(pods), "each pod template is in a Job with both"


def limited(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [found for one in value for found in limited(one)]
    if not isinstance(value, dict):
        return []
    here = {"activeDeadlineSeconds", "backoffLimit", "backoffLimitPerIndex"} & set(value)
    return ([value] if here else []) + [found for one in value.values() for found in limited(one)]


def test_sets_stay_and_are_ready_when_they_have_reported() -> None:
    for form in ("daemonset", "statefulset"):
        (template,) = [one for item in items(spec(form=form)) for one in templates(item.manifest)]
        assert template["spec"]["restartPolicy"] == "Always"
        assert variables(template)["GPUKEEPER_STAY"] == "1"
        probe = template["spec"]["containers"][0]["readinessProbe"]
        assert probe["exec"]["command"] == ["test", "-s", "/dev/termination-log"]
    stateful = next(one.manifest for one in items(spec(form="statefulset")) if one.resource.kind == "StatefulSet")
    assert stateful["spec"]["podManagementPolicy"] == "Parallel"


def test_a_manifest_for_every_node_with_a_label_names_no_node() -> None:
    wanted = spec(form="daemonset", selector="nvidia.com/gpu.present=true,pool=h100", gpus_per_node=4)
    (one,) = YAML(typ="safe").load_all(launcher(MemoryApi()).render(wanted, NODES))
    pod = one["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true", "pool": "h100"}
    assert "affinity" not in pod
    assert pod["containers"][0]["resources"]["limits"] == {GPU: 4}
    (started,) = items(wanted)
    assert "nodeSelector" not in started.manifest["spec"]["template"]["spec"], "one that is started leaves nodes out"
    with pytest.raises(UsageError, match="No node can be tested"):
        items(wanted, ())
    with pytest.raises(UsageError, match="by KEY=VALUE"):
        launcher(MemoryApi()).render(spec(form="daemonset", selector="pool in (a,b)", gpus_per_node=4), NODES)


def test_an_image_without_gpukeeper_gets_it_from_config_maps() -> None:
    for form in FORMS:
        for template in [pod for item in items(spec(form=form), program="prog") for pod in templates(item.manifest)]:
            container = template["spec"]["containers"][0]
            assert container["command"][:2] == ["sh", "-c"]
            assert container["command"][3:7] == ["gpukeeper", "accept", "--report-to-log", "r1"]
            assert {"name": "program", "mountPath": "/gpukeeper", "readOnly": True} in container["volumeMounts"]
            (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == "program"]
            parts = [one["configMap"] for one in volume["projected"]["sources"]]
            assert [(one["name"], one["optional"]) for one in parts[:2]] == [("prog-1", False), ("prog-2", True)]


def test_a_pytorch_job_has_one_master_and_the_rest_are_workers() -> None:
    (item,) = items(spec(form="pytorchjob"))
    replicas = item.manifest["spec"]["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 2}
    (alone,) = items(spec(form="pytorchjob"), NODES[:1])
    assert list(alone.manifest["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_nodes_with_different_gpus() -> None:
    mixed = (Target(node="a", gpus=8, resource=GPU), Target(node="b", gpus=4, resource="amd.com/gpu"))
    limits = [
        templates(item.manifest)[0]["spec"]["containers"][0]["resources"]["limits"] for item in items(spec(), mixed)
    ]
    assert limits == [{GPU: 8}, {"amd.com/gpu": 4}]
    assert len({one.manifest["metadata"]["name"] for one in items(spec(form="daemonset"), mixed)}) == 2
    with pytest.raises(UsageError, match="different GPUs"):
        items(spec(form="indexed-job"), mixed)
    assert items(spec(form="indexed-job", gpus_per_node=2), NODES)


@pytest.mark.parametrize("form", FORMS)
def test_names_are_valid_and_unique_for_long_node_names(form: str) -> None:
    stem = "gpu-h200-sxm.rack-17.row-a.hall-2.datacenter-north.cluster.internal.example.org." * 3
    long = tuple(Target(node=f"{stem}{number}", gpus=8, resource=GPU) for number in range(4))
    made = items(spec(run="2026-01-05T10.00_Ann." + "x" * 40, form=form), long)
    names = [(one.resource.kind, one.manifest["metadata"]["name"]) for one in made]
    assert len(set(names)) == len(names)
    for _, name in names:
        assert len(name) <= objects.NAME_MAX
        assert name.replace("-", "").isalnum()
        assert name == name.lower()
    assert objects.name_of("r1", "a.b") != objects.name_of("r1", "a-b")
    assert objects.name_of("r1", "a") == objects.name_of("r1", "a")


def test_the_old_and_new_variables_of_the_user_reach_the_pod_and_cannot_replace_ours() -> None:
    given = {"QUICK": "0", "NCCL_DEBUG": "INFO", "GPUKEEPER_TERMINATION_LOG": "/elsewhere"}
    found = variables(templates(items(spec(environment=given))[0].manifest)[0])
    assert (found["QUICK"], found["NCCL_DEBUG"], found["GPUKEEPER_NODE"]) == ("0", "INFO", "a")
    assert found["GPUKEEPER_TERMINATION_LOG"] == "/dev/termination-log"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shmm": "1Gi"}, "did you mean shm"),
        ({"shm": "much"}, "is not a quantity"),
        ({"rdma": "ib"}, "is not a resource"),
        ({"tolerate": "maybe"}, "neither yes nor no"),
        ({"ttl": "soon"}, "is not a duration"),
        ({"namespace": "A_B"}, "is not a valid name"),
        ({"at-once": "0"}, "between 1 and 256"),
        ({"busy": "kill"}, "is none of exclude, wait"),
    ],
)
def test_a_wrong_option_is_refused_with_the_reason(options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        launcher(MemoryApi(), **options)


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown form"):
        items(spec(form="cronjob"))
    with pytest.raises(UsageError, match="no stable names"):
        items(spec(form="daemonset", together=True))
    with pytest.raises(UsageError, match="image is needed"):
        items(spec(image=""))
    with pytest.raises(UsageError, match="No node can be tested"):
        items(spec(), (Target(node="a", excluded="cordoned"),))
    with pytest.raises(UsageError, match="cannot be a label"):
        items(spec(run="a/b"))
