"""From the engine's words to subjects: states, outcomes, classes, marks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.clients.docker import Engine, EngineEvent, ImageSummary, when
from gpukeeper.model.subject import Outcome, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.owners import Ownership
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import (
    NEVER,
    GpuRequest,
    anonymous_volumes,
    class_of,
    container_subject,
    image_subject,
    incarnation,
    marks_of,
    outcome_of,
    state_of,
    version,
)
from tests.unit.platforms.docker.examples import AT, ID, container, docker, ended, facts, podman, recorded


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("created", State.CREATED),
        ("nobinary", State.CREATED),  # a failed start, exit code 127
        ("nogpu", State.CREATED),  # a failed start, exit code 128
        ("running", State.RUNNING),
        ("paused", State.PAUSED),
        ("restarting", State.RUNNING),
        ("exited0", State.ENDED),
        ("exited1", State.ENDED),
        ("exited137", State.ENDED),
        ("exited143", State.ENDED),
        ("oom", State.ENDED),
    ],
)
def test_states_of_docker(name: str, state: State) -> None:
    assert state_of(docker(name)) is state


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("created", State.CREATED),
        ("nobinary", State.CREATED),
        ("running", State.RUNNING),
        ("paused", State.PAUSED),
        ("exited1", State.ENDED),
        ("stopped", State.ENDED),
    ],
)
def test_states_of_podman(name: str, state: State) -> None:
    assert state_of(podman(name)) is state


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (ended(Status="dead", Dead=True), State.ENDED),
        (ended(Status="dead", StartedAt="0001-01-01T00:00:00Z"), State.CREATED),
        (ended(Status="stopped"), State.ENDED),
        (ended(Status="configured"), State.CREATED),
        (ended(Status="initialized"), State.CREATED),
        ({"Status": "removing", "Running": True}, State.REMOVING),
        ({"Status": "running", "Running": True, "Paused": True}, State.PAUSED),
    ],
)
def test_states_that_were_not_recorded(said: dict[str, Any], state: State) -> None:
    assert state_of(container(state=said)) is state


@pytest.mark.parametrize("status", ["", "stopping", "unknown", "\x1b[31m"])
def test_a_state_nobody_knows_is_unknown(status: str) -> None:
    assert isinstance(state_of(container(state=ended(Status=status))), Unknown)


def test_while_it_runs_the_end_is_that_of_the_run_before() -> None:
    subject = container_subject(container(state={"FinishedAt": "2026-11-15T08:00:00Z"}), facts(), AT)
    assert subject.ended is None
    assert subject.outcome is None
    assert subject.previous_end == datetime(2026, 11, 15, 8, tzinfo=UTC)


def test_two_starts_within_a_microsecond_are_two_incarnations() -> None:
    first, second = (container(state={"StartedAt": f"2026-11-15T09:00:01.12345678{last}Z"}) for last in (1, 2))
    assert incarnation(first) != incarnation(second)
    assert version(first) != version(second)


def test_what_never_started_has_one_incarnation() -> None:
    assert incarnation(docker("nogpu")) == incarnation(docker("created")) == NEVER


def test_a_new_name_is_a_new_version_of_the_same_thing() -> None:
    old, new = container(name="/a1"), container(name="/b1")
    assert incarnation(old) == incarnation(new)
    assert version(old) != version(new)


def heard(name: str) -> datetime | None:
    """What is remembered of stops after the recorded events of one container."""
    records = Records(Engine("unix:///nowhere"))
    for told in recorded("docker_20_10_answers")["events"]:
        records.record_event(msgspec.convert(told, EngineEvent))
    return records.stopped_at(docker(name))


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("exited0", Outcome.SUCCEEDED),
        ("exited1", Outcome.FAILED),
        ("exited137", Outcome.STOPPED),
        ("exited143", Outcome.STOPPED),
        ("killed", Outcome.STOPPED),
        ("oom", Outcome.FAILED),
    ],
)
def test_outcomes_with_the_recorded_events(name: str, outcome: Outcome) -> None:
    assert outcome_of(docker(name), heard(name)) is outcome


@pytest.mark.parametrize("name", ["exited137", "exited143", "killed", "exited1", "oom"])
def test_without_word_of_a_stop_an_exit_code_is_a_failure(name: str) -> None:
    assert outcome_of(docker(name), None) is Outcome.FAILED


@pytest.mark.parametrize(
    ("stopped_at", "outcome"),
    [
        (timedelta(seconds=-1), Outcome.STOPPED),
        (timedelta(seconds=-80), Outcome.STOPPED),
        (timedelta(seconds=-100), Outcome.FAILED),  # it lived on after that signal
        (timedelta(hours=-2), Outcome.FAILED),  # before this start
    ],
)
def test_only_a_stop_close_to_the_end_ended_it(stopped_at: timedelta, outcome: Outcome) -> None:
    one = container(state=ended(ExitCode=1))
    end = when(one.state.finished_at)
    assert isinstance(end, datetime)
    assert outcome_of(one, end + stopped_at) is outcome


@pytest.mark.parametrize(("before", "outcome"), [(1, Outcome.FAILED), (0, Outcome.STOPPED), (-1, Outcome.STOPPED)])
def test_a_stop_of_an_earlier_run_did_not_stop_this_one(before: int, outcome: Outcome) -> None:
    """It was stopped, started again, and failed within seconds."""
    one = container(state=ended(ExitCode=1, StartedAt="2026-11-15T09:59:50Z"))
    began = when(one.state.started_at)
    assert isinstance(began, datetime)
    assert outcome_of(one, began - timedelta(seconds=before)) is outcome


def test_out_of_memory_is_a_failure_whatever_else_was_heard() -> None:
    one = container(state=ended(ExitCode=137, OOMKilled=True))
    end = when(one.state.finished_at)
    assert isinstance(end, datetime)
    assert outcome_of(one, end) is Outcome.FAILED


CLAIMED = Ownership("ann", False, (), (), only_claimed=True)


@pytest.mark.parametrize(
    ("labels", "known", "host", "expected"),
    [
        ({}, {}, {}, "docker"),
        ({}, {}, {"PortBindings": {"80/tcp": [{"HostPort": "80"}]}}, "serving"),
        ({}, {}, {"PublishAllPorts": True}, "serving"),
        ({"com.docker.compose.project": "lab"}, {}, {}, "compose"),
        ({"devcontainer.local_folder": "/home/ann/x"}, {}, {}, "devcontainer"),
        ({"vsch.local.folder": "c:\\x"}, {}, {}, "devcontainer"),
        ({"devcontainer.metadata": "[]"}, {}, {}, "docker"),
        ({"devcontainer.metadata": "[]"}, {"image_labels": Unknown("gone")}, {}, "docker"),
        ({"devcontainer.local_folder": "/x"}, {"image_labels": {"devcontainer.local_folder": "/x"}}, {}, "docker"),
        ({"com.docker.compose.project": "x"}, {"image_labels": {"com.docker.compose.project": "x"}}, {}, "docker"),
        ({"ds01.managed": "true"}, {}, {}, "managed"),
        ({"aime.mlc": "ann"}, {}, {}, "managed"),
        ({"ds01.interface": "api"}, {}, {}, "api"),
        ({"ds01.managed": "true", "ds01.container_type": "compose"}, {}, {}, "compose"),
        ({"ds01.managed": "true", "ds01.container_type": "docker"}, {}, {}, "docker"),
        ({"ds01.managed": "true", "ds01.container_type": "devcontainer"}, {}, {}, "devcontainer"),
        ({"ds01.managed": "true", "ds01.container_type": "atomic"}, {}, {}, "managed"),
        ({"ds01.managed": "true", "ds01.interface": "orchestration"}, {}, {}, "managed"),
        ({"ds01.container_type": "docker"}, {}, {"PublishAllPorts": True}, "serving"),
        ({"ds01.container_type": "unknown"}, {}, {}, "unknown"),
        ({"ds01.container_type": "portainer"}, {}, {}, "docker"),
        ({"ds01.container_type": "compose"}, {"image_labels": {"ds01.container_type": "compose"}}, {}, "docker"),
        ({"ds01.managed": "true", "ds01.user": "bob"}, {"owned": CLAIMED}, {}, "unknown"),
        ({}, {"owned": Ownership(None, False, (), ())}, {}, "unknown"),
        ({"ds01.monitoring": "true"}, {}, {}, "docker"),
        ({"devcontainer.local_folder": "/x"}, {"devices": (), "asks": GpuRequest()}, {}, "without-gpu"),
    ],
)
def test_classes(labels: dict[str, str], known: dict[str, Any], host: dict[str, Any], expected: str) -> None:
    assert class_of(container(labels=labels, host=host), facts(**known)) == expected


def test_a_name_that_ends_in_a_uid_is_one_of_the_wrappers() -> None:
    assert class_of(container(name="train._.1007"), facts()) == "managed"


def test_an_owner_that_could_not_be_learned_gives_no_class() -> None:
    found = class_of(container(), facts(owned=Ownership(Unknown("no answer"), False, (), ())))
    assert isinstance(found, Unknown)


def test_who_asks_for_gpus_that_cannot_be_named_is_not_without_gpu() -> None:
    assert class_of(container(), facts(devices=Unknown("no driver"))) == "docker"


def test_a_planted_label_does_not_pass_for_the_image() -> None:
    subject = container_subject(container(labels={"image": "trusted:1", "image_id": "sha256:trusted"}), facts(), AT)
    assert subject.labels["image"] == "lab:1"
    assert subject.labels["image_id"] == "sha256:" + "1" * 64


@pytest.mark.parametrize("key", ["ds01.monitoring", "ds01.protected", "gpukeeper.io/infrastructure"])
def test_a_label_only_asks_for_exemption(key: str) -> None:
    one = container(labels={key: "TRUE"})
    assert marks_of(one, {}, None).asks_exemption == f"{key}=true"
    assert class_of(one, facts()) == "docker"
    assert marks_of(container(labels={key: "false"}), {}, None).asks_exemption is None


def test_a_kubelets_container_is_managed_elsewhere() -> None:
    pods = container(labels={"io.kubernetes.pod.uid": "1"}, host={"CgroupParent": "/kubepods/burstable/pod1"})
    assert marks_of(pods, {}, None).managed_elsewhere is not None
    assert marks_of(container(labels={"io.kubernetesque": "1"}), {}, None).managed_elsewhere is None


def test_who_only_writes_a_pods_label_asks() -> None:
    """Left alone until an admin answers, and listed: a label must not make anybody's work vanish from sight."""
    marks = marks_of(container(labels={"io.kubernetes.pod.uid": "1"}), {}, None)
    assert marks.managed_elsewhere is None
    assert marks.asks_exemption == "labels of a pod, without the cgroup of a pod"


@pytest.mark.parametrize(("text", "ttl"), [("2h", timedelta(hours=2)), ("1d", timedelta(days=1)), ("0s", timedelta())])
def test_a_time_to_live(text: str, ttl: timedelta) -> None:
    assert marks_of(container(labels={"gpukeeper.io/ttl": text}), {}, None).ttl == ttl


@pytest.mark.parametrize("text", ["", "soon", "-1h", "9" * 5000 + "h", "1h; rm", "NaN", "\x00"])
def test_a_garbled_time_to_live_is_unknown(text: str) -> None:
    assert isinstance(marks_of(container(labels={"gpukeeper.io/ttl": text}), {}, None).ttl, Unknown)


def test_a_time_to_live_that_came_with_the_image_is_not_its_owners() -> None:
    labels = {"gpukeeper.io/ttl": "1s"}
    assert marks_of(container(labels=labels), labels, None).ttl is None
    assert isinstance(marks_of(container(labels=labels), Unknown("the image is gone"), None).ttl, Unknown)
    assert marks_of(container(labels={"gpukeeper.io/ttl": "2h"}), labels, None).ttl == timedelta(hours=2)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-12-01T18:00:00Z", datetime(2026, 12, 1, 18, tzinfo=UTC)),
        ("2026-12-01T18:00:00+02:00", datetime(2026, 12, 1, 16, tzinfo=UTC)),
        ("2026-12-01", datetime(2026, 12, 1, tzinfo=UTC)),
    ],
)
def test_hold_until(text: str, moment: datetime) -> None:
    assert marks_of(container(labels={"gpukeeper.io/hold-until": text}), {}, None).hold_until == moment


@pytest.mark.parametrize(
    "text", ["", "tomorrow", "2026-13-01", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"]
)
def test_a_garbled_hold_until_is_unknown(text: str) -> None:
    assert isinstance(marks_of(container(labels={"gpukeeper.io/hold-until": text}), {}, None).hold_until, Unknown)


@given(st.dictionaries(st.sampled_from(["gpukeeper.io/ttl", "gpukeeper.io/hold-until", "ds01.gpu.uuid"]), st.text()))
def test_no_label_breaks_the_read(labels: dict[str, str]) -> None:
    subject = container_subject(container(labels=labels), facts(), AT)
    assert subject.ref.uid == ID
    assert all(words.isprintable() for words in subject.findings)


def test_a_label_that_names_a_gpu_it_has_nothing_to_do_with_is_a_finding() -> None:
    subject = container_subject(container(labels={"ds01.gpu.uuids": "GPU-a, GPU-b"}), facts(), AT)
    assert len(subject.findings) == 1
    assert "GPU-b" in subject.findings[0]
    assert container_subject(container(labels={"ds01.gpu.uuids": "GPU-a"}), facts(), AT).findings == ()


def test_unnamed_volumes_are_told_from_named_ones() -> None:
    assert anonymous_volumes(docker("exited1")) == ("/data",)
    named = [{"Type": "volume", "Name": "models", "Destination": "/m"}, {"Type": "bind", "Destination": "/b"}]
    assert anonymous_volumes(container(mounts=named)) == ()


def test_a_container_that_goes_when_stopped_reports_it() -> None:
    assert container_subject(container(host={"AutoRemove": True}), facts(), AT).goes_when_stopped
    assert not container_subject(container(), facts(), AT).goes_when_stopped


@pytest.mark.parametrize("created", [-62135596800, 0, 1794726490])
def test_the_date_of_an_image(created: int) -> None:
    assert isinstance(image_subject(ImageSummary("sha256:a", created=created), 0, None, None, AT).created, datetime)


@pytest.mark.parametrize("created", [-62167219200, 2**62, -(2**62)])
def test_a_date_that_cannot_be_is_unknown(created: int) -> None:
    """Whoever builds an image writes its date."""
    assert isinstance(image_subject(ImageSummary("sha256:a", created=created), 0, None, None, AT).created, Unknown)


def test_an_image_that_a_container_was_made_from_is_in_use() -> None:
    assert image_subject(ImageSummary("sha256:a"), 1, None, None, AT).in_use is True
    unused = image_subject(ImageSummary("sha256:a", repo_tags=["<none>:<none>"]), 0, None, None, AT)
    assert unused.in_use is False
    assert unused.ref.name == "untagged-a"
