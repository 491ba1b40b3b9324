"""The operator as a program, two of them where it matters, against a real API server: who leads, who takes over, what
probes are told, and that the rights of the examples are enough."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.real.kube.api import Api, condition
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.objects import job
from tests.real.kube.processes import Program
from tests.real.kube.proxy import proxy
from tests.real.kube.test_examples import EXAMPLES, documents, placed

PROGRAM = Path(sys.executable).with_name("gpukeeper")
LEASE = "gpukeeper"
DURATION, RETRY = 15.0, 2.4  # seconds; the retry with its jitter
SLOW = 8.0  # seconds that a loaded machine may add


class Operator:
    """One operator with a ledger and a policy of its own."""

    def __init__(self, plane: ControlPlane, folder: Path, name: str, kubeconfig: Path, namespace: str) -> None:
        self.folder, self.name, self.namespace = folder / name, name, namespace
        self.port = plane.block.port()
        self.policy = self.folder / "policy" / "policy.yaml"
        self._generation = 0
        self.folder.mkdir()
        command = [str(PROGRAM), "operator", "--policy", str(self.policy), "--health", str(self.port)]
        command += ["--lease-namespace", namespace, "--json"]
        env = {"KUBECONFIG": str(kubeconfig), "GPUKEEPER_STATE": str(self.folder / "state")}
        self.program = Program(self.folder, "operator", command, env=env)

    def start(self) -> Operator:
        self.program.start(lambda: self.ask("/healthz")[0] == 200)
        return self

    def set_policy(self, text: str) -> None:
        """As a kubelet does with a ConfigMap: a new folder, and a link that is swung to it in one step."""
        self._generation += 1
        made = self.folder / f"..{self._generation}"
        made.mkdir()
        (made / "policy.yaml").write_text(text)
        link = self.folder / "..new"
        link.symlink_to(made.name)
        link.replace(self.folder / "policy")

    def ask(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=15)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()

    def metric(self, name: str) -> float | None:
        lines = [line.rpartition(" ") for line in self.ask("/metrics")[1].splitlines()]
        return next((float(value) for key, _, value in lines if key == name), None)

    @property
    def leads(self) -> bool:
        return self.metric("gpukeeper_leader") == 1

    def outcomes(self) -> list[dict[str, Any]]:
        """Lines of its journal."""
        path = self.folder / "state" / "ledger.db"
        if not path.exists():
            return []
        import sqlite3

        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as ledger:
            rows = ledger.execute("SELECT line FROM journal WHERE type = 'outcome'").fetchall()
        return [msgspec.json.decode(row[0]) for row in rows]

    def reclaimed(self) -> list[str]:
        return [one["ref"]["uid"] for one in self.outcomes() if one["result"] == "reclaimed"]


def policy(namespace: str, **changes: Any) -> str:
    made = {
        "preset": "ci",
        "mode": "enforce",
        "scope": {"kubernetes": {"namespaces": [namespace]}},
        "retention": {"succeeded": "0s", "failed": "0s", "stopped": "0s"},
        "schedule": {"every": "5s"},
        **changes,
    }
    return json.dumps(made)


Make = Callable[..., Operator]


@pytest.fixture
def make(plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Make]:
    """Operators; they end with the test."""
    made: list[Operator] = []

    def one(name: str = "one", kubeconfig: Path | None = None, **changes: Any) -> Operator:
        operator = Operator(plane, tmp_path, name, kubeconfig or plane.keeper_kubeconfig(), namespace)
        operator.set_policy(policy(namespace, **changes))
        made.append(operator)
        return operator.start()

    yield one
    for operator in made:
        operator.program.kill()


def finished(api: Api, namespace: str, name: str, **annotations: str) -> str:
    """A Job that is over; its uid."""
    ends = {"test/exit-code": "0", **annotations}
    made = api.create(job(name, annotations=ends), namespace)
    api.wait_for("jobs", namespace, name, lambda seen: seen is None or condition(seen, "Complete") == "True")
    return str(made["metadata"]["uid"])


def holder(api: Api, namespace: str) -> str:
    return str((api.get("leases", namespace, LEASE) or {}).get("spec", {}).get("holderIdentity") or "")


def until(read: Callable[[], Any], what: str, deadline: float) -> float:
    """How long it took."""
    began = time.monotonic()
    while not read():
        assert time.monotonic() - began < deadline, f"not within {deadline:.0f} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began


def two(make: Make) -> tuple[Operator, Operator]:
    leader, other = make("one"), make("two")
    until(lambda: leader.leads, "the first one leads", SLOW)
    return leader, other


@pytest.mark.usefixtures("kwok_node")
def test_a_leader_that_is_killed_is_followed_when_its_lease_ran_out(make: Make, api: Api, namespace: str) -> None:
    leader, other = two(make)
    first = finished(api, namespace, "first")
    api.wait_gone("jobs", namespace, "first")
    until(lambda: leader.reclaimed() == [first], "the leader wrote that down", SLOW)
    leader.program.kill()
    second = finished(api, namespace, "second")
    took = until(lambda: other.leads, "the other leads", DURATION + RETRY + SLOW)
    assert took > DURATION / 2
    api.wait_gone("jobs", namespace, "second")
    until(lambda: other.reclaimed() == [second], "its ledger says so", SLOW)
    assert leader.reclaimed() == [first]
    assert api.get("leases", namespace, LEASE)["spec"]["leaseTransitions"] == 1  # type: ignore[index]


@pytest.mark.usefixtures("kwok_node")
def test_a_leader_that_is_stopped_hands_over_at_once(make: Make, api: Api, namespace: str) -> None:
    leader, other = two(make)
    finished(api, namespace, "first")
    api.wait_gone("jobs", namespace, "first")
    child = leader.program._child
    assert child is not None
    child.terminate()
    assert child.wait(timeout=20) == 0
    took = until(lambda: other.leads, "the other leads", RETRY + SLOW)
    assert took < DURATION / 2
    finished(api, namespace, "second")
    api.wait_gone("jobs", namespace, "second")


@pytest.mark.usefixtures("kwok_node")
def test_two_never_act_on_the_same_thing(make: Make, api: Api, namespace: str) -> None:
    """Leaders are frozen while there is work, and wake when another leads."""
    one, other = two(make)
    uids, names = [], []
    for round_, frozen in enumerate((one, other)):
        until(lambda frozen=frozen: frozen.leads, f"{frozen.name} leads in round {round_}", DURATION + RETRY + SLOW)
        frozen.program.pause()
        for number in range(3):
            names.append(f"run-{round_}-{number}")
            uids.append(finished(api, namespace, names[-1]))
        successor = other if frozen is one else one
        until(lambda successor=successor: successor.leads, "the other leads", DURATION + RETRY + SLOW)
        frozen.program.resume()
        until(lambda frozen=frozen: frozen.metric("gpukeeper_leader") == 0, "it knows that it does not lead", SLOW)
    for name in names:
        api.wait_gone("jobs", namespace, name)
    until(lambda: len(one.reclaimed()) + len(other.reclaimed()) >= len(uids), "all is written down", SLOW)
    assert sorted(one.reclaimed() + other.reclaimed()) == sorted(uids)


def test_probes_and_metrics_are_answered(
    make: Make, plane: ControlPlane, api: Api, namespace: str, kwok_node: str
) -> None:
    keeps = make("one", mode="plan")
    until(lambda: keeps.leads, "it leads", SLOW)
    finished(api, namespace, "first")
    assert keeps.ask("/healthz") == (200, "ok\n")
    assert keeps.ask("/readyz") == (200, "ok\n")
    counted = 'gpukeeper_workloads{kind="job",outcome="succeeded",state="ended"}'
    until(lambda: keeps.metric(counted) == 1, "the finished Job is counted", 120)
    assert keeps.metric('gpukeeper_finished{age="<1h",kind="job"}') == 1
    until(lambda: keeps.metric("gpukeeper_overdue") == 1, "it is overdue, because the mode is plan", 120)
    assert keeps.metric("gpukeeper_acting") == 0
    assert api.get("jobs", namespace, "first") is not None
    plane.stop_apiserver()
    until(lambda: keeps.ask("/readyz")[0] == 503, "it is not ready without an API server", 120)
    assert keeps.ask("/healthz") == (200, "ok\n")
    plane.start_apiserver()
    until(lambda: keeps.ask("/readyz")[0] == 200, "it is ready again", 120)
    until(lambda: keeps.leads, "it leads again", DURATION + RETRY + SLOW)


@pytest.mark.usefixtures("kwok_node")
def test_a_changed_policy_is_picked_up_and_a_broken_one_stops_acting(make: Make, api: Api, namespace: str) -> None:
    one = make("one", mode="plan")
    finished(api, namespace, "first")
    until(lambda: one.metric("gpukeeper_overdue") == 1, "it sees what is due", 120)
    one.set_policy(policy(namespace))
    api.wait_gone("jobs", namespace, "first")
    one.set_policy("mode: enforced\n")
    until(lambda: one.ask("/readyz")[0] == 503, "it is not ready", 120)
    assert "the policy is not valid" in one.ask("/readyz")[1]
    finished(api, namespace, "second")
    until(lambda: one.metric("gpukeeper_overdue") == 1, "it sees what is due", 120)
    assert api.get("jobs", namespace, "second") is not None
    one.set_policy(policy(namespace))
    api.wait_gone("jobs", namespace, "second")


def test_who_cannot_reach_the_lease_does_not_act(
    make: Make, plane: ControlPlane, api: Api, namespace: str, kwok_node: str
) -> None:
    every = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch", "delete", "patch"]}
    user = plane.new_user([every])  # reads leases, and may not write one
    finished(api, namespace, "first")

    def refused() -> int:
        leases = [asked for asked in list(between.asked) if "/leases" in asked.path and asked.method != "GET"]
        return sum(asked.status == 403 for asked in leases)

    with proxy(plane) as between:
        one = make("one", plane.kubeconfig(user, server=between.address))
        until(lambda: refused() > 1, "it tried again", 120)
        assert not one.leads
        assert between.count("DELETE") == 0
        assert api.get("jobs", namespace, "first") is not None
        assert one.ask("/healthz")[0] == 200
        one.program.kill()


# The rights of the examples


def grant_examples(api: Api, namespace: str, *files: str) -> list[tuple[str, str]]:
    """Their roles, for the account `gpukeeper` of this namespace; what was made cluster-wide."""
    made = []
    for file in files:
        for one in documents(EXAMPLES / file):
            if "Role" not in one["kind"]:
                continue
            where, whole = placed(one, namespace)
            for rule in whole.get("rules", ()):
                if rule.get("resourceNames") == ["team-a"]:
                    rule["resourceNames"] = [namespace]
            if one["kind"].startswith("Cluster"):
                whole["metadata"]["name"] += f"-{namespace}"
            if "roleRef" in whole:
                whole["subjects"][0]["namespace"] = namespace
                if whole["roleRef"]["kind"] == "ClusterRole":
                    whole["roleRef"]["name"] += f"-{namespace}"
            api.must("POST", where, whole)
            if one["kind"].startswith("Cluster"):
                made.append((where, whole["metadata"]["name"]))
    return made


@pytest.fixture
def account(plane: ControlPlane, api: Api, namespace: str) -> Iterator[Callable[..., Path]]:
    """A kubeconfig of the account `gpukeeper` with the roles of these files."""
    wide: list[tuple[str, str]] = []

    def log_in(*files: str) -> Path:
        token = plane.service_account(namespace, "gpukeeper")
        wide.extend(grant_examples(api, namespace, *files))
        return plane.kubeconfig(token=token, namespace=namespace)

    yield log_in
    for where, name in wide:
        api.call("DELETE", f"{where}/{name}")


@pytest.mark.usefixtures("kwok_node")
@pytest.mark.smoke
def test_the_rights_of_the_examples_are_enough_to_reclaim(
    make: Make, account: Callable[..., Path], api: Api, namespace: str
) -> None:
    one = make("one", account("operator.yaml", "rbac-observe.yaml", "rbac-reclaim.yaml"))
    until(lambda: one.leads, "it leads", SLOW)
    finished(api, namespace, "first")
    api.wait_gone("jobs", namespace, "first")
    done = 'gpukeeper_reclaimed_total{action="remove",kind="job",rule="retention"}'
    until(lambda: one.metric(done) == 1, "it is counted", SLOW)
    until(lambda: one.metric("gpukeeper_unseen") == 0, "a look at everything saw everything", SLOW)
    assert (one.metric('gpukeeper_captured_bytes_total{what="logs"}') or 0) > 0


@pytest.mark.usefixtures("kwok_node")
def test_observing_alone_removes_nothing_and_shows_what_is_missing(
    make: Make, account: Callable[..., Path], api: Api, namespace: str
) -> None:
    one = make("one", account("operator.yaml", "rbac-observe.yaml"))
    finished(api, namespace, "first")
    refused = 'gpukeeper_failed_total{kind="job",result="refused"}'
    until(lambda: one.metric(refused) == 1, "the removal is refused", 120)
    assert api.get("jobs", namespace, "first") is not None
    assert one.metric("gpukeeper_unseen") == 0
    (outcome,) = [line for line in one.outcomes() if line["result"] == "refused"]
    assert "delete" in outcome["reason"]


@pytest.mark.usefixtures("kwok_node")
def test_roles_of_one_namespace_are_enough_for_it(
    make: Make, account: Callable[..., Path], api: Api, namespace: str
) -> None:
    one = make("one", account("namespaced.yaml"))
    until(lambda: one.leads, "it leads", SLOW)
    finished(api, namespace, "first")
    api.wait_gone("jobs", namespace, "first")
    until(lambda: one.metric("gpukeeper_unseen") == 0, "a look at everything saw everything", SLOW)


def test_the_policy_of_the_example_is_what_the_operator_reads(make: Make, namespace: str) -> None:
    (given,) = [one for one in documents(EXAMPLES / "operator.yaml") if one["kind"] == "ConfigMap"]
    one = make("one", mode="plan")
    one.set_policy(given["data"]["policy.yaml"])
    until(lambda: one.leads, "it leads", SLOW)
    until(lambda: one.ask("/readyz")[0] == 200, "it is ready", 120)
