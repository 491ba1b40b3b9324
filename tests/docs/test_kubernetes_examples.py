"""The manifests and alert rules in examples/kubernetes say what they should. That a real API server takes them is for
tests/real/kube/test_examples.py."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpukeeper.config.load import load_text
from gpukeeper.model.policy import Mode
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Lever
from gpukeeper.wiring import kubernetes
from tests import engines
from tests.patience import PATIENCE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
FILES = sorted(EXAMPLES.glob("*.yaml"))
TIERS = ("observe", "reclaim", "stop", "finalizers", "sets", "restore")
Right = tuple[str, str, str]  # verb, group, plural
# What makes itself anew is no root: it goes with what owns it.
NEVER_REMOVED = {"ReplicaSet", "RayService", "Deployment", "StatefulSet", "DaemonSet"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in YAML(typ="safe").load_all(path) if one is not None]


def objects(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in FILES:
        yield from ((path.name, one) for one in documents(path) if one.get("kind") == kind)


def rights(role: dict[str, Any]) -> set[Right]:
    return {
        (verb, group, plural)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for plural in rule["resources"]
        for verb in rule["verbs"]
    }


def of_tier(tier: str) -> set[Right]:
    (role,) = [one for one in documents(EXAMPLES / f"rbac-{tier}.yaml") if one["kind"] == "ClusterRole"]
    return rights(role)


def every(verb: str, kinds: list[Kind]) -> set[Right]:
    return {(verb, kind.group, kind.plural) for kind in kinds}


def test_the_policies_in_config_maps_are_valid() -> None:
    found = list(objects("ConfigMap"))
    assert len(found) == 4
    for name, one in found:
        loaded = load_text(one["data"]["policy.yaml"], name)
        assert loaded.warnings == ()
        assert set(loaded.policy.scope) == ({"host", "ray"} if name == "agent.yaml" else {"kubernetes"})


def test_nobody_gets_everything() -> None:
    roles = [one for kind in ("Role", "ClusterRole") for _, one in objects(kind)]
    assert len(roles) == len(TIERS) + 1 + 4 + 1 + 2
    for role in roles:
        assert not [right for right in rights(role) if "*" in "".join(right)]
        assert not [
            right for right in rights(role) if right[0] in {"deletecollection", "impersonate", "escalate", "bind"}
        ]


def test_observe_looks_at_every_kind_and_changes_nothing() -> None:
    for verb in ("get", "list", "watch"):
        assert every(verb, list(KINDS)) <= of_tier("observe")
    assert {verb for verb, _, _ in of_tier("observe")} == {"get", "list", "watch"}


def test_a_preflight_only_reads() -> None:
    assert {verb for verb, _, _ in of_tier("preflight")} == {"get", "list"}


def test_marks_change_nodes_only_and_delete_nothing() -> None:
    read = {(verb, "", "nodes") for verb in ("get", "list")}
    assert of_tier("mark") == read | {("patch", "", "nodes"), ("patch", "", "nodes/status")}
    (lease,) = [one for _, one in objects("Role") if one["metadata"]["name"] == "gpukeeper-mark"]
    assert lease["metadata"]["namespace"] == kubernetes.NAMESPACE
    assert rights(lease) == {(verb, "coordination.k8s.io", "leases") for verb in ("get", "update", "create")}
    (named,) = [rule["resourceNames"] for rule in lease["rules"] if "create" not in rule["verbs"]]
    assert named == [kubernetes.LEASE]


def test_reclaim_deletes_roots_only() -> None:
    roots = [kind for kind in KINDS if kind.kind not in NEVER_REMOVED]
    assert of_tier("reclaim") == every("delete", roots) | {("create", "", "events")}


def test_stop_moves_every_lever_and_deletes_nothing() -> None:
    levers = [kind for kind in KINDS if kind.lever is not Lever.NONE]
    scaled = {(kind.group, f"{kind.plural}/scale") for kind in KINDS if kind.lever is Lever.SCALE}
    wanted = every("patch", levers) | {("create", "", "pods/eviction")}
    wanted |= {("patch", "", "pods")}  # announced times are noted on what is warned about
    wanted |= {(verb, group, plural) for group, plural in scaled for verb in ("get", "patch")}
    assert of_tier("stop") == wanted


def test_finalizers_is_a_tier_of_its_own() -> None:
    assert of_tier("finalizers") == {
        ("patch", "", "pods"),
        ("patch", "batch", "jobs"),
        ("patch", "trainer.kubeflow.org", "trainjobs"),
    }


def test_sets_are_removed_by_a_tier_of_their_own() -> None:
    assert of_tier("sets") == {("delete", "apps", name) for name in ("deployments", "statefulsets", "daemonsets")}


def test_restore_makes_what_reclaim_and_sets_remove_and_sets_it_going() -> None:
    """But for a DaemonSet: it is made again by whoever runs the acceptance."""
    removed = {right[1:] for right in of_tier("reclaim") | of_tier("sets") if right[0] == "delete"}
    made = removed - {("apps", "daemonsets")}
    scaled = {(kind.group, f"{kind.plural}/scale") for kind in KINDS if kind.lever is Lever.SCALE}
    wanted = {(verb, *what) for what in made for verb in ("create", "patch")}
    wanted |= {(verb, *what) for what in scaled for verb in ("get", "patch")}
    differ = sorted(of_tier("restore") ^ wanted)
    assert not differ, f"rbac-restore.yaml: create and patch all that can be removed, see add-a-kind.md: {differ}"


def test_the_admission_policy_covers_everything_that_the_tiers_create_or_patch() -> None:
    """Without a subresource: `scale` has one field, and nothing else is granted there."""
    written = {
        (group, plural)
        for tier in TIERS
        for verb, group, plural in of_tier(tier)
        if verb in {"create", "patch", "update"} and "/" not in plural and plural != "events"
    }
    ((_, policy),) = objects("ValidatingAdmissionPolicy")
    covered = policy["spec"]["matchConstraints"]["resourceRules"]
    assert {(group, plural) for one in covered for group in one["apiGroups"] for plural in one["resources"]} == written
    assert all(set(one["operations"]) == {"CREATE", "UPDATE"} for one in covered)


def test_the_namespaced_variant_has_no_rights_on_the_cluster() -> None:
    found = documents(EXAMPLES / "namespaced.yaml")
    assert {one["metadata"]["namespace"] for one in found} == {"team-a"}
    roles = {one["metadata"]["name"]: rights(one) for one in found if one["kind"] == "Role"}
    for tier in TIERS[:3]:
        assert roles[f"gpukeeper-{tier}"] <= of_tier(tier)
    absent = {
        (verb, group, plural)
        for verb in ("get", "list", "watch")
        for group, plural in (
            ("", "namespaces"),
            ("", "nodes"),
            ("coordination.k8s.io", "leases"),
            ("trainer.kubeflow.org", "clustertrainingruntimes"),
        )
    }
    assert of_tier("observe") - roles["gpukeeper-observe"] == absent - {("get", "", "namespaces")}


def test_the_cron_job_never_overlaps_and_keeps_three_of_each() -> None:
    """C6.7: history 3/3; failed work goes after an hour."""
    ((name, cron),) = objects("CronJob")
    assert name == "cronjob.yaml"
    spec = cron["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert (spec["successfulJobsHistoryLimit"], spec["failedJobsHistoryLimit"]) == (3, 3)
    (container,) = spec["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["apply", "--yes"]
    (policy,) = [one for file, one in objects("ConfigMap") if file == "cronjob.yaml"]
    loaded = load_text(policy["data"]["policy.yaml"]).policy
    assert (loaded.mode, loaded.retention.failed) == (Mode.ENFORCE, timedelta(hours=1))
    assert len(loaded.scope["kubernetes"].namespaces) > 1, "not one that is hard-coded"


def test_every_image_is_pinned_and_every_pod_is_ours_by_label() -> None:
    """C6.3: of whatever kind, now or later; by the digest, which names one image for good."""
    found = [(path.name, one) for path in FILES for document in documents(path) for one in pod_templates(document)]
    assert {name for name, _ in found} == {
        *("agent.yaml", "cronjob.yaml", "namespaced.yaml", "operator.yaml", "operator-standby.yaml"),
    }
    for name, template in found:
        assert template["metadata"]["labels"]["app.kubernetes.io/name"] in {"gpukeeper", "gpukeeper-agent"}, name
        spec = template["spec"]
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", container["image"]), name


def pod_templates(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "containers" in value.get("spec", ()):
            yield value
        for one in value.values():
            yield from pod_templates(one)
    elif isinstance(value, list):
        for one in value:
            yield from pod_templates(one)


def test_both_forms_of_the_alerts_are_the_same() -> None:
    (plain,), (wrapped,) = documents(EXAMPLES / "alerts.yaml"), documents(EXAMPLES / "prometheusrule.yaml")
    assert wrapped["spec"] == plain


def promtool(*arguments: str | Path) -> None:
    engines.require("promtool", engines.has_promtool())
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_alerts() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", EXAMPLES / "alerts.yaml")


@pytest.mark.parametrize(
    ("story", "series", "alerts"),
    [
        ("nobody is scraped", {}, {"GpukeeperSilent"}),
        ("passes happen", {"gpukeeper_last_pass_timestamp_seconds": "0+60x100", "gpukeeper_leader": "1x100"}, set()),
        (
            "passes stopped",
            {"gpukeeper_last_pass_timestamp_seconds": "0x100", "gpukeeper_leader": "1x100"},
            {"GpukeeperSilent"},
        ),
        (
            "only a host passes",
            {
                'gpukeeper_last_pass_timestamp_seconds{instance="host"}': "0+60x100",
                'gpukeeper_leader{instance="operator"}': "1x100",
            },
            {"GpukeeperSilent"},
        ),
        (
            "two lead",
            {
                "gpukeeper_last_pass_timestamp_seconds": "0+60x100",
                'gpukeeper_leader{pod="a"}': "1x100",
                'gpukeeper_leader{pod="b"}': "1x100",
            },
            {"GpukeeperTwoLeaders"},
        ),
        (
            "an operator without rights on its lease",
            {
                "gpukeeper_last_pass_timestamp_seconds": "0+60x100",
                'gpukeeper_leader{pod="a"}': "1x100",
                'gpukeeper_lease_denied{pod="b"}': "1x100",
            },
            {"GpukeeperLeaseDenied"},
        ),
        (
            "overdue",
            {
                "gpukeeper_last_pass_timestamp_seconds": "0+60x100",
                "gpukeeper_leader": "1x100",
                "gpukeeper_oldest_overdue_seconds": "30000x100",
                "gpukeeper_breaker_open": "1x100",
                "gpukeeper_unseen": "2x100",
            },
            {"GpukeeperOverdue", "GpukeeperBreakerOpen", "GpukeeperUnseen"},
        ),
        (
            "refused again and again",
            {
                "gpukeeper_last_pass_timestamp_seconds": "0+60x100",
                "gpukeeper_leader": "1x100",
                'gpukeeper_failed_total{kind="job",result="refused"}': "0+1x100",
            },
            {"GpukeeperFailing"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_alerts_fire_when_they_should_and_only_then(
    tmp_path: Path, story: str, series: dict[str, str], alerts: set[str]
) -> None:
    names = [rule["alert"] for group in documents(EXAMPLES / "alerts.yaml")[0]["groups"] for rule in group["rules"]]
    # 1: fires, 0: does not; the annotations are not compared this way.
    asked = [
        {
            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) > bool 0 or vector(0)',
            "eval_time": "90m",
            "exp_samples": [{"value": float(name in alerts), "labels": "{}"}],
        }
        for name in names
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test = {
        "rule_files": [str(EXAMPLES / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": [{"name": story, "interval": "1m", "input_series": inputs, "promql_expr_test": asked}],
    }
    file = tmp_path / "test.yaml"
    with file.open("w") as out:
        YAML(typ="safe").dump(test, out)
    promtool("test", "rules", file)
