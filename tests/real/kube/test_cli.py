"""The command as a person or a cron job runs it, on a real control plane: its words, its exit codes, and what the API
server has afterwards."""

from __future__ import annotations

import json
import os
import pwd
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.cli.fleet import Ran
from tests.real.kube import objects
from tests.real.kube.api import Api, EngineLate, Object, condition
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness
from tests.real.kube.runs import CHAIN, FAILS, SUCCEEDS, left, marked
from tests.real.kube.test_rights import ALL

PROGRAM = Path(sys.executable).with_name("gpukeeper")
NOT_SEEN = "is unknown, so it is not changed"
DONE, FAILED, USAGE, PARTLY, FOUND, INVALID = 0, 1, 2, 3, 4, 10


@dataclass
class Shell:
    """A home, a ledger and a policy of its own; nothing of the machine's."""

    folder: Path
    kubeconfig: Path | None
    namespace: str

    def policy(self, **changes: Any) -> Shell:
        made = {
            "preset": "development",
            "mode": "enforce",
            "scope": {"kubernetes": {"namespaces": [self.namespace]}},
            "retention": {"succeeded": "0s", "failed": "7d"},
            "admins": [pwd.getpwuid(os.getuid()).pw_name],
            **changes,
        }
        (self.folder / "policy.yaml").write_text(json.dumps(made))
        return self

    def run(self, *words: str, kubeconfig: Path | None = None, env: Mapping[str, str] = {}) -> Ran:
        config = kubeconfig or self.kubeconfig
        environ = {
            **forked.environment(),
            "HOME": str(self.folder),
            "GPUKEEPER_STATE": str(self.folder / "state"),
            "GPUKEEPER_POLICY": str(self.folder / "policy.yaml"),
            **({} if config is None else {"KUBECONFIG": str(config)}),
            **env,
        }
        ran = Ran(*forked.run("gpukeeper", words, environ, ""))
        assert "Traceback" not in ran.err, ran.err
        return ran

    def path(self, kind: str, name: str) -> str:
        return f"kubernetes/test/{self.namespace}/{kind}/{name}"

    def results(self) -> list[tuple[str, str]]:
        """From its ledger: what of which kind was seen to be done."""
        lines = self.run("ledger", "list", "--type", "outcome", "--json").json()["lines"]
        return [(one["result"], f"{one['ref']['kind']}/{one['ref']['name']}") for one in lines]


@pytest.fixture
def shell(plane: ControlPlane, namespace: str, tmp_path: Path) -> Shell:
    return Shell(tmp_path, plane.keeper_kubeconfig(), namespace).policy()


def ended(api: Api, namespace: str, *made: Object) -> None:
    """Jobs that are made and waited for until they are over."""
    for one in made:
        api.create(one, namespace)
    for one in made:
        job = api.wait_for("jobs", namespace, one["metadata"]["name"], _is_over)
        if '"test/exit-code": "0"' in json.dumps(one) and condition(job, "Complete") != "True":
            # Its pod was lost, most likely with a node that an earlier test was just removing.
            happened = [f"{one['reason']}: {one['message']}" for one in api.list("events", namespace)]
            raise EngineLate(f"a Job that was to succeed has failed: {json.dumps(job['status'])}, events: {happened}")


def _is_over(job: Mapping[str, Any] | None) -> bool:
    return condition(job, "Complete") == "True" or condition(job, "Failed") == "True"


def trained(api: Api, namespace: str, name: str) -> None:
    api.create(objects.training_runtime("torch", annotations=SUCCEEDS), namespace)
    api.create(objects.train_job(name, "torch"), namespace)
    api.wait_condition("trainjobs", namespace, name, "Complete")


@pytest.mark.usefixtures("jobset", "trainer_v23", "kwok_node")
@pytest.mark.smoke
def test_from_a_plan_to_what_is_gone_and_back_again(shell: Shell, api: Api, namespace: str) -> None:
    trained(api, namespace, "run-7")
    planned = shell.run("plan", "--exit-code")
    assert planned.code == FOUND
    assert [line.split()[:2] for line in planned.out.splitlines()] == [["remove", shell.path("trainjob", "run-7")]]
    assert "kept for 0s" in planned.out
    assert left(api, namespace, *CHAIN).keys() == set(CHAIN), "a plan changes nothing"

    applied = shell.run("apply", "--yes")
    assert applied.code == DONE, applied.err
    assert applied.out.startswith("reclaimed")
    assert "verified: gone" in applied.out
    api.wait_gone("trainjobs", namespace, "run-7")
    for what in CHAIN:
        none_are_left(api, namespace, what)
    assert shell.results() == [("reclaimed", "trainjob/run-7")]

    restored = shell.run("restore", "trainjob/run-7")
    assert restored.code == DONE, restored.err
    again = api.get("trainjobs", namespace, "run-7")
    assert again is not None
    assert again["spec"]["suspend"] is True
    assert "was restored from what was captured" in restored.out + restored.err
    going = shell.run("restore", "trainjob/run-7")
    assert going.code == DONE
    assert "was restored and runs again" in going.out + going.err
    api.wait_condition("trainjobs", namespace, "run-7", "Complete")


def none_are_left(api: Api, namespace: str, what: str) -> None:
    """What was below it goes by the cluster's garbage collector, a little later."""
    ControlPlane.until(lambda: not api.names(what, namespace), f"no {what} are left", 120)


@pytest.mark.usefixtures("jobset", "trainer_v23", "kwok_node")
def test_explain_gives_the_reason_a_whole_stays_and_finds_its_parts(shell: Shell, api: Api, namespace: str) -> None:
    trained(api, namespace, "run-7")
    shell.policy(retention={"succeeded": "1d"})
    whole = shell.run("explain", "trainjob/run-7")
    assert whole.code == DONE
    assert "Decision: keep by retention" in whole.out
    assert "a TrainJob has no TTL in this cluster (its CRD has no spec.ttlSecondsAfterFinished)" in whole.out
    tree = whole.out.partition("Owner tree:\n")[2]
    lines = [line.split()[0] for line in tree.splitlines()[:4]]
    assert lines[:2] == ["trainjob/run-7", "jobset/run-7"]
    assert lines[2].startswith("job/run-7-")
    assert lines[3].startswith("pod/run-7-")

    part = shell.run("explain", "jobset/run-7")
    assert part.code == DONE
    assert "only the root is acted on" in part.out
    assert f"gpukeeper explain {namespace}/trainjob/run-7" in part.out
    assert any("jobset/run-7" in line and line.endswith("<- this one") for line in part.out.splitlines())

    refused = shell.run("workload", "remove", "jobset/run-7", "--yes")
    assert refused.code == USAGE
    assert "is part of kubernetes" in refused.err
    assert left(api, namespace, *CHAIN).keys() == set(CHAIN)

    nothing = shell.run("explain", "trainjob/run-9")
    assert (nothing.code, nothing.out) == (USAGE, "")
    assert 'is named "trainjob/run-9"' in nothing.err


@pytest.mark.usefixtures("kwok_node")
def test_a_plan_can_be_narrowed_and_so_can_what_is_applied(shell: Shell, api: Api, namespace: str) -> None:
    jobs = [objects.job("eval-1", annotations=SUCCEEDS), objects.job("eval-2", annotations=SUCCEEDS)]
    ended(api, namespace, *jobs, objects.job("crashed", annotations=FAILS))
    shell.policy(retention={"succeeded": "0s", "failed": "0s"})

    def names(*words: str) -> set[str]:
        return {line.split()[1].rpartition("/")[2] for line in shell.run("plan", *words).out.splitlines()}

    assert names("--outcome", "failed") == {"crashed"}
    assert names("--name", "eval-*", "--kind", "Job") == {"eval-1", "eval-2"}
    assert names("--older-than", "1h") == set()
    narrowed = shell.run("plan", "--kind", "job", "--name", "eval-1")
    assert "gpukeeper apply, with the same options" in narrowed.err
    wrong = shell.run("plan", "--outcome", "lost")
    assert wrong.code == USAGE
    assert "succeeded, failed, stopped" in wrong.err

    assert shell.run("apply", "--yes", "--name", "eval-1").code == DONE
    assert api.names("jobs", namespace) == {"eval-2", "crashed"}


@pytest.mark.usefixtures("kwok_node")
def test_mode_plan_acts_for_nobody(shell: Shell, api: Api, namespace: str) -> None:
    ended(api, namespace, objects.job("eval", annotations=SUCCEEDS))
    asks = shell.run("apply")
    assert (asks.code, asks.out) == (USAGE, "")
    assert "stdin is not a terminal" in asks.err
    refused = shell.policy(mode="plan").run("apply", "--yes")
    assert refused.code == USAGE
    assert "mode: enforce" in refused.err
    assert api.names("jobs", namespace) == {"eval"}


@pytest.mark.usefixtures("kwok_node")
def test_what_is_held_is_kept_until_it_is_released(shell: Shell, api: Api, namespace: str) -> None:
    ended(api, namespace, objects.job("eval", annotations=SUCCEEDS))
    held = shell.run("workload", "hold", "job/eval", "--for", "2h", "--reason", "paper")
    assert held.code == DONE, held.err
    kept = shell.run("apply", "--yes")
    assert kept.code == DONE
    assert "Nothing was done." in kept.err
    assert api.names("jobs", namespace) == {"eval"}
    assert shell.run("workload", "release", "job/eval").code == DONE
    assert shell.run("apply", "--yes").code == DONE
    api.wait_gone("jobs", namespace, "eval")


@pytest.mark.usefixtures("kwok_node")
def test_a_pause_stops_all_acting(shell: Shell, api: Api, namespace: str) -> None:
    ended(api, namespace, objects.job("eval", annotations=SUCCEEDS))
    assert shell.run("pause", "maintenance").code == DONE
    paused = shell.run("apply", "--yes")
    assert paused.code == PARTLY
    assert "All actions are paused: maintenance" in paused.err
    assert api.names("jobs", namespace) == {"eval"}
    assert shell.run("resume").code == DONE
    assert "paused" not in shell.run("plan").err


@pytest.mark.usefixtures("kwok_node")
def test_what_is_garbled_strange_or_stuck_stays_and_reports_it(shell: Shell, api: Api, namespace: str) -> None:
    stuck = objects.job("stuck", annotations=SUCCEEDS)
    stuck["metadata"]["finalizers"] = ["example.com/keep"]
    ended(api, namespace, marked(objects.job("garbled", annotations=SUCCEEDS), ttl="two weeks"), stuck)
    api.delete("jobs", namespace, "stuck", propagation="Background")
    above = api.create({"kind": "ConfigMap", "metadata": {"name": "mystery"}}, namespace)
    strange = objects.pod("strange", gpus=2)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "mystery", "uid": above["metadata"]["uid"]}
    strange["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    api.create(strange, namespace)
    api.wait_for("pods", namespace, "strange", lambda seen: seen and seen["status"]["phase"] == "Running")

    try:
        applied = shell.run("apply", "--yes")
        assert applied.out == ""
        assert "needs an admin" in applied.err
        assert "gpukeeper.io/ttl='two weeks'" in applied.err
        assert api.names("jobs", namespace) == {"garbled", "stuck"}
        assert "finalizers example.com/keep" in shell.run("explain", "job/stuck").out
        gpus = shell.run("observe", "--gpus").out.splitlines()
        assert sum(shell.path("pod", "strange") in line for line in gpus) == 2, "a GPU that somebody has is shown"
        assert shell.run("workload", "remove", "pod/strange", "--yes").code == PARTLY
        assert "strange" in api.names("pods", namespace)
    finally:
        api.patch("jobs", namespace, "stuck", {"metadata": {"finalizers": None}})


@pytest.mark.usefixtures("kwok_node")
def test_what_runs_is_stopped_by_its_own_lever_and_brought_back(shell: Shell, api: Api, namespace: str) -> None:
    api.create(objects.deployment("serve"), namespace)
    api.wait_pods(namespace, 1)

    def replicas() -> int:
        found = api.get("deployments", namespace, "serve")
        assert found is not None
        return int(found["spec"]["replicas"])

    assert shell.run("workload", "stop", "deployment/serve").code == USAGE, "nobody can be asked here"
    assert replicas() == 1
    stopped = shell.run("workload", "stop", "deployment/serve", "--yes")
    assert stopped.code == DONE, stopped.err
    assert replicas() == 0
    none_are_left(api, namespace, "pods")
    assert shell.run("restore", "deployment/serve").code == DONE
    assert replicas() == 1


@pytest.mark.usefixtures("kwok_node")
def test_the_runs_of_a_cronjob_go_and_the_cronjob_stays(shell: Shell, api: Api, namespace: str) -> None:
    inner = objects.job("unused", annotations=SUCCEEDS)["spec"]
    whole = {"schedule": "0 3 * * *", "jobTemplate": {"spec": inner}}
    made = api.create({"kind": "CronJob", "metadata": {"name": "nightly"}, "spec": whole}, namespace)
    run = objects.job("nightly-1", annotations=SUCCEEDS)
    owner = {"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": made["metadata"]["uid"]}
    run["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    ended(api, namespace, run)
    assert shell.run("apply", "--yes").code == DONE
    api.wait_gone("jobs", namespace, "nightly-1")
    assert api.names("cronjobs", namespace) == {"nightly"}


@pytest.mark.usefixtures("kwok_node")
def test_without_rights_it_shows_what_is_missing_and_nothing_vanishes(
    shell: Shell, plane: ControlPlane, api: Api, namespace: str
) -> None:
    ended(api, namespace, objects.job("eval", annotations=SUCCEEDS), objects.job("held", annotations=SUCCEEDS))
    assert shell.run("workload", "hold", "job/held", "--for", "2h").code == DONE
    assert shell.run("apply", "--yes", "--name", "held").code == DONE  # the ledger knows both now
    user = plane.new_user()
    nobody = plane.kubeconfig(user)

    planned = shell.run("plan", "--exit-code", kubeconfig=nobody)
    assert (planned.code, planned.out) == (PARTLY, "")
    said = planned.err.splitlines()
    assert f'User "{user}" cannot list resource "pods"' in said[0]
    assert f"pods in {namespace}" in said[0]
    assert NOT_SEEN in said[0]
    assert f"for the same reason: jobs in {namespace}" in said[1]
    assert len(said) <= 5, "a dozen kinds with one reason are no dozen lines"
    assert "Nothing is due of what could be read" in planned.err

    applied = shell.run("apply", "--yes", kubeconfig=nobody)
    assert (applied.code, applied.out) == (PARTLY, "")
    assert api.names("jobs", namespace) == {"eval", "held"}
    listed = shell.run("plan", "--verbose").out
    assert "held by" in listed, "what could not be seen did not vanish, nor did its hold"
    assert shell.results() == []


@pytest.mark.usefixtures("kwok_node")
def test_a_pass_by_hand_over_one_namespace_leaves_the_others(
    shell: Shell, api: Api, namespace: str, new_namespace: Callable[[], str]
) -> None:
    """C6.2: both are due, and only the one of that namespace goes."""
    other = new_namespace()
    for place in (namespace, other):
        ended(api, place, objects.job("eval", annotations=SUCCEEDS))
    shell.policy(scope={"kubernetes": {"namespaces": [namespace, other]}}, retention={"succeeded": "0s"})
    assert shell.run("apply", "--yes", "--namespace", other, "--older-than", "0s").code == DONE
    assert api.names("jobs", namespace) == {"eval"}
    assert api.names("jobs", other) == set()
    assert shell.run("apply", "--yes", "--namespace", namespace, "--older-than", "1h").code == DONE
    assert api.names("jobs", namespace) == {"eval"}, "it ended a moment ago"


@pytest.mark.usefixtures("kwok_node")
def test_an_api_server_that_is_down_is_reported_and_nothing_vanishes(
    shell: Shell, plane: ControlPlane, api: Api, namespace: str
) -> None:
    ended(api, namespace, objects.job("eval", annotations=SUCCEEDS))
    assert shell.run("workload", "hold", "job/eval", "--for", "2h").code == DONE
    plane.stop_apiserver()
    try:
        planned = shell.run("plan", "--exit-code")
        assert (planned.code, planned.out) == (FAILED, "")
        assert "kubernetes/test could not be read" in planned.err
        assert "Connection refused" in planned.err
        applied = shell.run("apply", "--yes")
        assert applied.code == PARTLY
        assert NOT_SEEN in applied.err
        checked = shell.run("doctor")
        assert checked.code == FAILED
        assert any(line.split()[:2] == ["problem", "kubernetes"] for line in checked.out.splitlines())
        asked = shell.run("explain", "job/eval")
        assert asked.code == USAGE
        assert "Not everything could be read" in asked.err
        assert NOT_SEEN in shell.run("workload", "list").err
    finally:
        plane.start_apiserver()
    assert "held by" in shell.run("plan", "--verbose").out


Spoil = Callable[[Object], object]


def _no_such_plugin(config: Object) -> None:
    spec = {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-plugin", "interactiveMode": "Never"}
    config["users"][0]["user"] = {"exec": {**spec, "installHint": "Ask your platform team."}}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda config: config["contexts"].clear(), 'context "test" not found'),
        (lambda config: config["users"][0]["user"].update(token="wrong"), "the credentials are invalid or expired"),
        (
            lambda config: config["clusters"][0]["cluster"].pop("certificate-authority-data"),
            "certificate verify failed",
        ),
        (_no_such_plugin, "Ask your platform team."),
        (None, "not valid YAML"),
    ],
    ids=["context", "token", "certificate", "plugin", "garbage"],
)
def test_a_kubeconfig_that_cannot_be_used_is_no_empty_cluster(
    shell: Shell, tmp_path: Path, spoil: Spoil | None, words: str
) -> None:
    assert shell.kubeconfig is not None
    config = json.loads(shell.kubeconfig.read_text())
    if spoil is not None:
        spoil(config)
    spoiled = tmp_path / "kubeconfig"
    spoiled.write_text(": : {" if spoil is None else json.dumps(config))
    checked = shell.run("doctor", kubeconfig=spoiled)
    assert checked.code == FAILED
    (line,) = [line for line in checked.out.splitlines() if line.split()[1] == "kubernetes"]
    assert line.startswith("problem")
    assert words in line
    applied = shell.run("apply", "--yes", kubeconfig=spoiled)
    assert applied.code == PARTLY, "a cron job must not take it for a cluster where nothing is due"
    assert words in applied.err


def test_no_kubeconfig_and_no_extra_say_what_to_do(shell: Shell, tmp_path: Path) -> None:
    without = Shell(tmp_path, None, shell.namespace)
    assert without.run("apply", "--yes").code == PARTLY
    asked = without.run("plan", "--platform", "kubernetes")
    assert asked.code == USAGE
    assert "no kubeconfig and not inside a cluster" in asked.err
    hides = tmp_path / "hides"
    hides.mkdir()
    (hides / "sitecustomize.py").write_text("import sys\nsys.modules['lightkube'] = sys.modules['httpx2'] = None\n")
    bare = shell.run("plan", "--platform", "kubernetes", env={"PYTHONPATH": str(hides)})
    assert bare.code == USAGE
    assert "pip install '.[kubernetes]'" in bare.err


def test_mistakes_of_a_policy_are_told_at_once_with_their_lines(shell: Shell) -> None:
    (shell.folder / "policy.yaml").write_text(
        "preset: development\n"
        "scope: {kubernetes: {namespace: [research]}}\n"
        "kubernetes:\n"
        "  context: 5\n"
        "  prometheus: prometheus.monitoring\n"
        "  releese: [foregroundDeletion]\n"
    )
    checked = shell.run("policy", "check")
    assert checked.code == INVALID
    told = checked.out + checked.err
    for line, words in ((2, '"namespaces" is missing'), (4, "not text"), (5, "prometheus"), (6, 'mean "release"')):
        assert any(f"policy.yaml:{line}:" in one and words in one for one in told.splitlines()), (line, told)
    assert shell.run("plan").code == INVALID


HOLD_UNTIL = "gpukeeper.io/hold-until"


def held_until(api: Api, namespace: str, name: str) -> str | None:
    found = api.get("jobs", namespace, name)
    assert found is not None
    return (found["metadata"].get("annotations") or {}).get(HOLD_UNTIL)


@pytest.mark.usefixtures("kwok_node")
def test_a_hold_is_written_onto_the_object_and_binds_who_has_another_ledger(
    plane: ControlPlane, shell: Shell, api: Api, namespace: str
) -> None:
    ended(api, namespace, objects.job("run", annotations=SUCCEEDS), objects.job("other", annotations=SUCCEEDS))
    held = shell.run("workload", "hold", shell.path("job", "run"), "--for", "2h")
    assert held.code == DONE, held.err
    assert held_until(api, namespace, "run") is not None
    operator = Harness(plane.keeper_kubeconfig(), namespace, retention={"succeeded": "0s"})
    operator.again()
    api.wait_gone("jobs", namespace, "other")
    assert api.names("jobs", namespace) == {"run"}
    assert operator.decisions()["job/run"].rule == "hold"

    shorter = shell.run("workload", "hold", shell.path("job", "run"), "--for", "1h")
    assert shorter.code == DONE, shorter.err
    until = held_until(api, namespace, "run")
    assert until is not None
    assert datetime.fromisoformat(until) > datetime.now(UTC) + timedelta(hours=1, minutes=30), "it is never shortened"

    released = shell.run("workload", "release", shell.path("job", "run"))
    assert released.code == DONE, released.err
    assert held_until(api, namespace, "run") is None
    operator.again()
    api.wait_gone("jobs", namespace, "run")


@pytest.mark.usefixtures("kwok_node")
def test_who_may_not_write_onto_the_object_is_told_the_command(
    plane: ControlPlane, shell: Shell, api: Api, namespace: str
) -> None:
    ended(api, namespace, objects.job("run", annotations=SUCCEEDS))
    reader = plane.kubeconfig(plane.new_user(ALL, namespace=namespace))
    refused = shell.run("workload", "hold", shell.path("job", "run"), kubeconfig=reader)
    assert refused.code == USAGE
    assert f"kubectl -n {namespace} annotate --overwrite jobs run {HOLD_UNTIL}=20" in refused.err
    assert "is held until" not in refused.out + refused.err
    lines = shell.run("ledger", "list", "--type", "hold", "--json").json()["lines"]
    assert lines == [], "nor does its own ledger claim it"

    assert shell.run("workload", "hold", shell.path("job", "run")).code == DONE
    refused = shell.run("workload", "release", shell.path("job", "run"), kubeconfig=reader)
    assert refused.code == USAGE
    assert f"kubectl -n {namespace} annotate jobs run {HOLD_UNTIL}-" in refused.err
    assert held_until(api, namespace, "run") is not None


def test_a_plan_that_saw_nothing_does_not_end_with_0(plane: ControlPlane, shell: Shell, namespace: str) -> None:
    nobody = plane.kubeconfig(plane.new_user())
    forbidden = shell.run("plan", kubeconfig=nobody)
    assert forbidden.code == PARTLY, forbidden.err
    assert "forbidden" in forbidden.err
    broken = Path(shell.folder / "old-login")
    broken.write_text(re.sub(r'("?token"?): *"?[^",\s]+"?', r'\1: "expired"', nobody.read_text()))
    unauthorized = shell.run("plan", kubeconfig=broken)
    assert unauthorized.code == FAILED, unauthorized.err
    assert "log in again" in unauthorized.err
    assert shell.run("plan").code == DONE, "an empty namespace is nothing wrong"


@pytest.mark.usefixtures("kwok_node")
def test_explain_with_rights_in_one_namespace_does_not_send_people_to_all(
    plane: ControlPlane, shell: Shell, api: Api, namespace: str
) -> None:
    plane.need("jobset")
    api.create(objects.jobset("run", annotations=SUCCEEDS), namespace)
    api.wait_for("jobsets", namespace, "run", lambda one: condition(one, "Completed") == "True")
    reader = plane.kubeconfig(plane.new_user(ALL, namespace=namespace))
    found = shell.run("explain", shell.path("jobset", "run"), kubeconfig=reader)
    assert found.code == DONE, found.err
    assert "--all-namespaces" not in found.out + found.err
    assert "Ask an admin of the cluster whether" in found.out
