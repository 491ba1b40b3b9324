"""Events on objects: short enough, not twice, and never a reason to fail."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.model.subject import Ref
from gpukeeper.platforms.kubernetes.acts import LONGEST_MESSAGE, EventWriter, shortened
from gpukeeper.platforms.kubernetes.kinds.builtin import JOB
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from tests.unit.platforms.kubernetes.stored import NAMESPACE, StoredApi, refused, with_cluster

EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
REF = Ref("kubernetes", "test", "job", "train", "uid-train", NAMESPACE)


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.time = datetime(2026, 9, 1, 12, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time


def events(api: StoredApi) -> list[str]:
    return [str(one["message"]) for path, one in api.objects.items() if "/events/" in path]


def test_an_event_names_the_object_by_uid_and_names_who_speaks() -> None:
    api = StoredApi()
    assert with_cluster(
        api, lambda cluster: EventWriter(cluster, Hands()).write(JOB, "v1", REF, "IdleGPU", "idle for 9h", warning=True)
    )
    sent = api.body_of(f"POST {EVENTS}")
    assert sent["involvedObject"] == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "namespace": NAMESPACE,
        "name": "train",
        "uid": "uid-train",
    }
    assert (sent["type"], sent["reason"], sent["message"]) == ("Warning", "IdleGPU", "idle for 9h")
    assert (sent["reportingComponent"], sent["metadata"]["namespace"]) == ("gpukeeper", NAMESPACE)
    assert sent["firstTimestamp"] == "2026-09-01T12:00:00Z"


def test_a_core_object_is_named_without_a_group() -> None:
    api = StoredApi()
    with_cluster(api, lambda cluster: EventWriter(cluster, Hands()).write(POD, "v1", REF, "Kept", "kept"))
    sent = api.body_of(f"POST {EVENTS}")
    assert (sent["involvedObject"]["apiVersion"], sent["type"]) == ("v1", "Normal")


def test_the_same_words_are_not_repeated_for_ten_minutes() -> None:
    api, clock = StoredApi(), Hands()

    async def write(cluster: Cluster) -> list[bool]:
        notes = EventWriter(cluster, clock)
        said = [await notes.write(JOB, "v1", REF, "IdleGPU", "idle") for _ in range(2)]
        said.append(await notes.write(JOB, "v1", REF, "IdleGPU", "idle, still"))
        clock.time += timedelta(minutes=10)
        return [*said, await notes.write(JOB, "v1", REF, "IdleGPU", "idle")]

    assert with_cluster(api, write) == [True] * 4
    assert events(api) == ["idle", "idle, still", "idle"]


def test_a_refusal_is_false_and_is_tried_again_the_next_time() -> None:
    api = StoredApi()
    api.answers[f"POST {EVENTS}"] = [refused(403, "Forbidden", "no")]

    async def write(cluster: Cluster) -> list[bool]:
        notes = EventWriter(cluster, Hands())
        return [await notes.write(JOB, "v1", REF, "IdleGPU", "idle") for _ in range(2)]

    assert with_cluster(api, write) == [False, True]


def test_a_cluster_that_breaks_off_is_no_failure() -> None:
    api = StoredApi()
    api.answers[f"POST {EVENTS}"] = ["<html>bad gateway</html>"]
    assert not with_cluster(api, lambda cluster: EventWriter(cluster, Hands()).write(JOB, "v1", REF, "IdleGPU", "idle"))


def test_a_long_message_is_cut_at_a_whole_character() -> None:
    cut = shortened("ü" * 1000)
    assert len(cut.encode()) <= LONGEST_MESSAGE
    assert cut.startswith("üü")
    assert cut.endswith("ü...")
    assert shortened("x" * LONGEST_MESSAGE) == "x" * LONGEST_MESSAGE


def test_a_name_of_full_length_leaves_room_for_the_suffix() -> None:
    api = StoredApi()
    long = Ref("kubernetes", "test", "job", "a" * 253, "uid", NAMESPACE)
    assert with_cluster(api, lambda cluster: EventWriter(cluster, Hands()).write(JOB, "v1", long, "IdleGPU", "idle"))
    assert len(api.body_of(f"POST {EVENTS}")["metadata"]["generateName"]) < 240
