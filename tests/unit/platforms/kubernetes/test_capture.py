"""What is saved before something goes: enough to bring it back and to know why it failed, within the limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gpukeeper.clients.kubernetes.wire import Pod
from gpukeeper.model.decision import Evidence, NothingToCapture
from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import capture as module
from gpukeeper.platforms.kubernetes.capture import ALL_BYTES, CUT, CUT_BELOW, PODS, EvidenceCapture
from gpukeeper.platforms.kubernetes.kinds.builtin import JOB
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from tests.unit.platforms.kubernetes.stored import NAMESPACE, Object, StoredApi, refused, with_cluster

EVERYTHING = ("manifest", "logs", "events", "reports")
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
NODE = "/api/v1/nodes/node-3"


async def first_version(kind: Kind) -> str | Unknown | None:
    return kind.versions[0]


def owned_by(kind: Kind, name: str) -> list[Object]:
    version = f"{kind.group}/{kind.versions[0]}"
    return [{"apiVersion": version, "kind": kind.kind, "name": name, "uid": f"uid-{name}", "controller": True}]


def a_pod(api: StoredApi, name: str, phase: str = "Failed", **parts: Any) -> str:
    restarts, node = parts.get("restarts", 0), parts.get("node", "node-3")
    ended = {"terminated": {"exitCode": 1, "finishedAt": "2026-09-01T00:00:00Z"}}
    return api.put(
        POD,
        {
            "metadata": {"name": name, "ownerReferences": parts.get("owners", owned_by(JOB, "x"))},
            "spec": {"nodeName": node, "containers": [{"name": "main"}]},
            "status": {
                "phase": phase,
                "containerStatuses": [{"name": "main", "restartCount": restarts, "state": ended}],
            },
        },
    )


def take(
    api: StoredApi, path: str, pods: Sequence[str] = (), what: Sequence[str] = EVERYTHING, kind: Kind = JOB
) -> Any:
    meta = api.objects[path]["metadata"] if path in api.objects else {"name": "x", "uid": "uid-x"}
    ref = Ref("kubernetes", "test", kind.name, meta["name"], meta["uid"], NAMESPACE)
    below = [msgspec.json.decode(json.dumps(api.objects[one]), type=Pod) for one in pods]
    return with_cluster(api, lambda cluster: EvidenceCapture(cluster, first_version).capture(kind, ref, what, below))


def files(evidence: object) -> dict[str, bytes]:
    assert isinstance(evidence, Evidence), evidence
    return dict(evidence.files)


def test_a_job_leaves_its_description_tree_events_pods_and_logs() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x", "managedFields": [{"manager": "kubectl"}]}, "status": {"failed": 1}})
    pod = a_pod(api, "x-1", restarts=2)
    api.logs = {"x-1/main": "step 1\nCUDA out of memory\n", "x-1/main.previous": "before\n"}
    event = {"involvedObject": {"uid": "uid-x-1"}, "reason": "BackOff", "message": "again", "metadata": {"name": "e"}}
    api.objects[f"{EVENTS}/e"] = event
    saved = files(take(api, path, [pod]))
    assert set(saved) == {
        "manifest.json",
        "tree.json",
        "events.json",
        "pods/x-1.json",
        "logs/x-1/main.log",
        "logs/x-1/main.previous.log",
    }
    manifest = json.loads(saved["manifest.json"])
    assert manifest["status"] == {"failed": 1}
    assert "managedFields" not in manifest["metadata"]
    assert saved["logs/x-1/main.log"] == b"step 1\nCUDA out of memory\n"
    assert saved["logs/x-1/main.previous.log"] == b"before\n"
    [line] = json.loads(saved["tree.json"])["pods"]
    assert (line["uid"], line["owner"], line["phase"], line["exit codes"]) == (
        "uid-x-1",
        "uid-x",
        "Failed",
        {"main": 1},
    )
    assert json.loads(saved["events.json"])["items"] == [
        {"reason": "BackOff", "message": "again", "involvedObject": {"uid": "uid-x-1"}}
    ]


def test_for_a_stop_the_description_is_enough() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    assert set(files(take(api, path, [a_pod(api, "x-1")], ["manifest"]))) == {"manifest.json"}
    assert api.asked == [f"GET {path}"]


def test_a_bare_pod_is_described_once() -> None:
    api = StoredApi()
    pod = a_pod(api, "p", owners=[])
    api.logs = {"p/main": "hello\n"}
    saved = files(take(api, pod, [pod], kind=POD))
    assert set(saved) == {"manifest.json", "tree.json", "events.json", "logs/p/main.log"}


def test_the_tree_is_climbed_from_the_pods() -> None:
    api = StoredApi()
    path = api.put(JOBSET, {"metadata": {"name": "x"}})
    job = {"metadata": {"name": "x-0", "ownerReferences": owned_by(JOBSET, "x")}}
    api.put(JOB, {**job, "status": {"conditions": [{"type": "Failed", "status": "True"}]}})
    pods = [a_pod(api, name, owners=owned_by(JOB, "x-0")) for name in ("a", "b")]
    tree = json.loads(files(take(api, path, pods, ["manifest", "reports"], JOBSET))["tree.json"])
    [between] = tree["between"]
    assert (between["kind"], between["uid"], between["owner"]) == ("Job", "uid-x-0", "uid-x")
    assert between["conditions"][0]["type"] == "Failed"
    assert [pod["name"] for pod in tree["pods"]] == ["a", "b"]


def test_what_is_gone_has_nothing_to_capture() -> None:
    api = StoredApi()
    assert take(api, JOB.path("v1", NAMESPACE, "x")) == NothingToCapture("it no longer exists")


def test_another_object_of_the_name_is_not_taken_for_it() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x", "uid": "another"}})
    ref = Ref("kubernetes", "test", "job", "x", "uid-x", NAMESPACE)
    answer = with_cluster(
        api, lambda cluster: EvidenceCapture(cluster, first_version).capture(JOB, ref, EVERYTHING, ())
    )
    assert isinstance(answer, NothingToCapture)
    assert api.asked == [f"GET {path}"]


@pytest.mark.parametrize(
    "said",
    [
        refused(403, "Forbidden", "jobs is forbidden"),
        refused(404, "NotFound", "the server could not find the requested resource"),
        refused(422, "Invalid", "no"),
    ],
)
def test_a_description_that_is_not_given_is_unknown(said: Any) -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    api.answers[f"GET {path}"] = [said]
    assert isinstance(take(api, path), Unknown)


@pytest.mark.parametrize("status", [403, 401])
def test_logs_that_we_may_not_read_keep_it(status: int) -> None:
    api = StoredApi()
    path, pod = api.put(JOB, {"metadata": {"name": "x"}}), a_pod(api, "x-1")
    api.answers[f"GET {pod}/log"] = [refused(status, "Forbidden", "no")] * 2
    answer = take(api, path, [pod])
    assert isinstance(answer, Unknown)
    assert set(files(take(api, path, [pod], ["manifest", "events"]))) >= {"manifest.json", "pods/x-1.json"}


@pytest.mark.parametrize(
    "said",
    [
        refused(404, "NotFound", "the server could not find the requested resource ( pods/log x-1)", name="x-1"),
        refused(400, "BadRequest", 'container "main" in pod "x-1" is waiting to start: ContainerCreating'),
    ],
)
def test_a_log_that_provably_is_not_there_leaves_a_note(said: Any) -> None:
    api = StoredApi()
    path, pod = api.put(JOB, {"metadata": {"name": "x"}}), a_pod(api, "x-1")
    api.answers[f"GET {pod}/log"] = [said]
    saved = files(take(api, path, [pod]))
    assert "log" in saved["logs/x-1/main.txt"].decode()
    assert "logs/x-1/main.log" not in saved


def test_a_log_on_a_node_that_does_not_answer_keeps_it() -> None:
    api = StoredApi()
    path, pod = api.put(JOB, {"metadata": {"name": "x"}}), a_pod(api, "x-1")
    api.objects[NODE] = {"metadata": {"name": "node-3"}}
    api.answers[f"GET {pod}/log"] = [refused(500, "InternalError", "dial tcp: no route to host")] * 4
    assert isinstance(take(api, path, [pod]), Unknown)


@pytest.mark.parametrize(
    "said",
    [
        refused(500, "InternalError", "no such host"),
        refused(404, "NotFound", 'pods "node-3" not found', name="node-3", kind="pods"),  # as the server says it
    ],
)
def test_a_log_on_a_node_that_is_provably_gone_leaves_a_note(said: Any) -> None:
    api = StoredApi()
    path, pod = api.put(JOB, {"metadata": {"name": "x"}}), a_pod(api, "x-1")
    api.answers[f"GET {pod}/log"] = [said] * 4
    saved = files(take(api, path, [pod]))
    assert saved["logs/x-1/main.txt"] == b"Its node node-3 no longer exists, so its log is lost.\n"


def test_a_node_that_we_may_not_look_at_is_not_gone() -> None:
    api = StoredApi()
    path, pod = api.put(JOB, {"metadata": {"name": "x"}}), a_pod(api, "x-1")
    api.answers[f"GET {pod}/log"] = [refused(500, "InternalError", "no such host")] * 4
    api.answers[f"GET {NODE}"] = [refused(403, "Forbidden", "nodes is forbidden")]
    assert isinstance(take(api, path, [pod]), Unknown)


def test_a_pod_that_was_never_placed_has_no_log() -> None:
    api = StoredApi()
    path, pod = api.put(JOB, {"metadata": {"name": "x"}}), a_pod(api, "x-1", "Pending", node="")
    saved = files(take(api, path, [pod]))
    assert "logs/x-1/none.txt" in saved
    assert f"GET {pod}/log" not in api.asked


def test_a_pod_that_goes_meanwhile_is_noted() -> None:
    api = StoredApi()
    path, pod = api.put(JOB, {"metadata": {"name": "x"}}), a_pod(api, "x-1")

    def vanish(call: str) -> None:
        if call == f"GET {pod}":
            api.objects.pop(pod)

    api.before = vanish
    saved = files(take(api, path, [pod]))
    assert saved["pods/x-1.txt"] == b"It was deleted while its root was captured.\n"
    assert "was deleted with its pod" in saved["logs/x-1/main.txt"].decode()


def test_events_that_we_may_not_read_are_noted_and_keep_nothing() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    api.answers[f"GET {EVENTS}"] = [refused(403, "Forbidden", "events is forbidden")]
    told = json.loads(files(take(api, path))["events.json"])
    assert told["items"] == []
    assert "events is forbidden" in told["notes"][0]


def test_a_cluster_that_breaks_off_is_unknown() -> None:
    api = StoredApi()
    path, pod = api.put(JOB, {"metadata": {"name": "x"}}), a_pod(api, "x-1")
    api.answers[f"GET {pod}/log"] = ["<html>bad gateway</html>"] * 4
    api.objects[NODE] = {"metadata": {"name": "node-3"}}
    assert isinstance(take(api, path, [pod]), Unknown)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of each, so that logs beyond them are small, too."""
    for name in ("LOG_BYTES", "ALL_BYTES", "ROOM_FOR_NOTES"):
        monkeypatch.setattr(module, name, getattr(module, name) // 100)
    monkeypatch.setattr(module, "LOG_LINES", tuple(lines // 100 for lines in module.LOG_LINES))


@pytest.mark.usefixtures("small_limits")
def test_of_a_long_log_the_end_is_kept_and_the_cut_is_marked() -> None:
    api = StoredApi()
    path, pod = api.put(JOB, {"metadata": {"name": "x"}}), a_pod(api, "x-1")
    api.logs = {"x-1/main": "".join(f"{number} {'.' * 1500}\n" for number in range(120))}  # 180 kB
    log = files(take(api, path, [pod]))["logs/x-1/main.log"]
    assert log.startswith(CUT)
    assert len(log) <= module.LOG_BYTES
    assert log.splitlines()[-1].startswith(b"119 ")
    assert [query["tailLines"] for query in api.queries if "tailLines" in query] == ["1000", "100", "10"]


@pytest.mark.usefixtures("small_limits")
def test_lines_of_any_length_stay_within_the_limit() -> None:
    api = StoredApi()
    path, pod = api.put(JOB, {"metadata": {"name": "x"}}), a_pod(api, "x-1")
    api.logs = {"x-1/main": "=" * (module.LOG_BYTES + 5) + "\n"}
    log = files(take(api, path, [pod]))["logs/x-1/main.log"]
    assert len(log) <= module.LOG_BYTES
    assert log.startswith(CUT)
    assert log.endswith(CUT_BELOW)


@pytest.mark.usefixtures("small_limits")
def test_all_together_stay_within_the_limit_and_the_last_get_fewer_lines() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    good = [a_pod(api, f"good-{number}", "Succeeded") for number in range(5)]
    bad = a_pod(api, "zz-bad", "Failed")
    lines = "".join(f"{'.' * 999}\n" for _ in range(100))  # 100 kB
    api.logs = {f"{name}/main": lines for name in ("zz-bad", *(f"good-{number}" for number in range(5)))}
    saved = files(take(api, path, [*good, bad]))
    assert sum(len(one) for one in saved.values()) <= module.ALL_BYTES
    assert saved["logs/zz-bad/main.log"] == lines.encode()
    assert saved["logs/good-4/main.log"] == CUT + lines.encode()[-10_000:]


@pytest.mark.slow
@pytest.mark.usefixtures("small_limits")
def test_where_nothing_more_fits_it_reports_it_and_the_failed_came_first() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    good = [a_pod(api, f"good-{number}", "Succeeded") for number in range(5)]
    bad = a_pod(api, "zz-bad", "Failed")
    line = "=" * (module.LOG_BYTES + 5) + "\n"
    api.logs = {f"{name}/main": line for name in ("zz-bad", *(f"good-{number}" for number in range(5)))}
    saved = files(take(api, path, [*good, bad]))
    assert sum(len(one) for one in saved.values()) <= module.ALL_BYTES
    assert "logs/zz-bad/main.log" in saved
    assert "logs/good-4/main.log" not in saved
    assert "of 6 pods were not captured completely" in saved["left-out.txt"].decode()


def test_of_very_many_pods_some_are_left_out_and_all_are_listed() -> None:
    api = StoredApi()
    path = api.put(JOB, {"metadata": {"name": "x"}})
    pods = [a_pod(api, f"p-{number:03}", node="") for number in range(PODS + 5)]
    saved = files(take(api, path, pods, ["manifest", "logs"]))
    assert len(json.loads(saved["tree.json"])["pods"]) == PODS + 5
    assert sum(name.startswith("pods/") for name in saved) == PODS
    assert "5 of 105" in saved["left-out.txt"].decode()


def test_the_limits_leave_room_for_what_must_be_there() -> None:
    assert module.OBJECT_BYTES + module.EVENT_BYTES * module.ASKED_FOR_EVENTS + module.ROOM_FOR_NOTES < ALL_BYTES
