"""What is kept of a container, how it is made again, and what would be lost."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.clients.docker import PathChange
from gpukeeper.model.decision import Evidence, NothingToCapture
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker import capture
from gpukeeper.platforms.docker.capture import (
    ContainerCapture,
    CreateRequest,
    demultiplexed,
    losses,
    packages,
    recipe_of,
    restart_policy,
)
from gpukeeper.platforms.docker.translate import container_subject
from tests.unit.platforms.docker.examples import (
    AT,
    DOCKER,
    ID,
    StillClock,
    container,
    decoded,
    docker,
    ended,
    facts,
    recorded,
    told,
)
from tests.unit.platforms.docker.fake_engine import FakeEngine, served


def frame(kind: int, text: bytes) -> bytes:
    return struct.pack(">BxxxL", kind, len(text)) + text


def test_the_recorded_log_is_read() -> None:
    stream = bytes.fromhex(recorded("docker_20_10_answers")["log_hex"])
    assert [line.split(b" ", 1)[1] for line in demultiplexed(stream).splitlines()] == [b"hello", b"bad"]


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=50)), max_size=10))
def test_frames_come_back_as_they_were_written(parts: list[tuple[int, bytes]]) -> None:
    assert demultiplexed(b"".join(frame(*part) for part in parts)) == b"".join(text for _kind, text in parts)


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5), st.data())
def test_a_cut_log_loses_only_what_was_cut(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame(1, part) for part in parts)
    cut = data.draw(st.integers(0, len(stream)))
    assert b"".join(parts).startswith(demultiplexed(stream[:cut]))


@given(st.binary(max_size=200))
def test_no_bytes_break_the_log(stream: bytes) -> None:
    assert isinstance(demultiplexed(stream), bytes)


def test_what_is_in_no_frames_is_kept_as_it_is() -> None:
    assert demultiplexed(b"plain text, longer than a header") == b"plain text, longer than a header"


def saved(one: dict[str, Any], **files: dict[str, Any]) -> Evidence:
    more = {name: json.dumps(value).encode() for name, value in files.items()}
    return Evidence({"manifest.json": json.dumps(one).encode(), **more})


def made(one: dict[str, Any]) -> CreateRequest:
    found = recipe_of(saved(one))
    assert isinstance(found, CreateRequest)
    return found


@pytest.mark.parametrize("name", sorted(DOCKER))
def test_every_recorded_container_can_be_made_again(name: str) -> None:
    found = made(DOCKER[name])
    assert found.name == DOCKER[name]["Name"][1:]
    assert found.image == DOCKER[name]["Image"]
    assert found.body["Cmd"] == DOCKER[name]["Config"]["Cmd"]
    assert found.body["HostConfig"]["DeviceRequests"] == DOCKER[name]["HostConfig"]["DeviceRequests"]
    assert "Hostname" not in found.body
    volumes = [one["Name"] for one in DOCKER[name]["Mounts"]]
    assert [bind.split(":")[0] for bind in found.body["HostConfig"]["Binds"]] == volumes


def test_an_unnamed_volume_of_a_mount_option_is_mounted_once() -> None:
    """The engine refuses two entries for one place."""
    host = made(DOCKER["anonmount"]).body["HostConfig"]
    places = [bind.split(":")[1] for bind in host["Binds"]] + [one["Target"] for one in host["Mounts"] or ()]
    assert sorted(places) == ["/data", "/x"]


@pytest.mark.parametrize(("reported", "given"), [("", "rwm"), ("r", "r")])
def test_a_device_without_its_access_gets_the_usual_one(reported: str, given: str) -> None:
    device = {"PathOnHost": "/dev/nvidia0", "PathInContainer": "/dev/nvidia0", "CgroupPermissions": reported}
    (found,) = made(told(host={"Devices": [device]})).body["HostConfig"]["Devices"]
    assert found == {**device, "CgroupPermissions": given}


def test_a_hostname_that_was_chosen_stays() -> None:
    assert made(told(config={"Hostname": "gpu-box"})).body["Hostname"] == "gpu-box"


def test_only_further_networks_are_joined_afterwards() -> None:
    one = told(host={"NetworkMode": "lab"})
    one["NetworkSettings"] = {"Networks": {"lab": None, "second": {"Aliases": ["a"]}}}
    assert made(one).networks == {"second": {"Aliases": ["a"], "IPAMConfig": None}}


def test_the_restart_policy_is_that_from_before_our_stop() -> None:
    before = told(host={"RestartPolicy": {"Name": "always"}})
    evidence = Evidence({**saved(told()).files, "stop/manifest.json": json.dumps(before).encode()})
    assert restart_policy(evidence) == {"Name": "always"}
    found = recipe_of(evidence)
    assert isinstance(found, CreateRequest)
    assert found.body["HostConfig"]["RestartPolicy"] == {"Name": "always"}


def test_a_garbled_capture_of_the_stop_falls_back() -> None:
    evidence = Evidence({**saved(told()).files, "stop/manifest.json": b"garbage"})
    assert restart_policy(evidence) == {"Name": "no", "MaximumRetryCount": 0}


@pytest.mark.parametrize("whole", [b"", b"garbage", b"[]", b"{}", b'{"Config": ["abc"], "HostConfig": {}}'])
def test_a_description_that_cannot_be_read_is_unknown(whole: bytes) -> None:
    assert isinstance(recipe_of(Evidence({"manifest.json": whole})), Unknown)


CHANGES = [
    PathChange("/usr/lib/python3/dist-packages/torch-2.5.0.dist-info", 1),
    PathChange("/opt/conda/conda-meta/numpy-1.26.4-py311_0.json", 1),
    PathChange("/var/lib/dpkg/info/vim:amd64.list", 1),
    PathChange("/usr/lib/python3/dist-packages/old-1.0.dist-info", 2),
    PathChange("/usr/lib/python3/dist-packages/torch-2.5.0.dist-info/RECORD", 1),
]


def test_packages_by_what_was_added() -> None:
    assert packages(CHANGES) == ("numpy 1.26.4", "torch 2.5.0", "vim")


def test_the_recorded_changes() -> None:
    changes = msgspec.convert(recorded("docker_20_10_answers")["changes"], list[PathChange])
    assert packages(changes) == ("torch 2.5.0",)
    assert losses(docker("sized"), changes)[-1] == "1 packages installed since its start: torch 2.5.0"


def test_unnamed_volumes_are_lost_only_with_what_goes_when_stopped() -> None:
    mounts = [{"Type": "volume", "Name": "a" * 64, "Destination": "/data"}]
    assert losses(container(mounts=mounts), ()) == ()
    assert losses(container(mounts=mounts, host={"AutoRemove": True}), ()) == ("the anonymous volume at /data",)


def take(fake: FakeEngine, what: tuple[str, ...]) -> Any:
    async def run() -> Any:
        async with served(fake) as engine:
            return await ContainerCapture(engine, StillClock()).take(
                container_subject(decoded(told(state=ended())), facts(), AT), what
            )

    return asyncio.run(run())


LOGS, DIFF = f"GET /containers/{ID}/logs", f"GET /containers/{ID}/changes"


def test_everything_requested_is_captured() -> None:
    fake = FakeEngine(told(state=ended(), config={"Tty": True}))
    fake.answers |= {LOGS: (200, "last words\n"), DIFF: (200, '[{"Path": "/a", "Kind": 1}]')}
    found = take(fake, ("manifest", "logs", "events"))
    assert found.files["log.txt"] == b"last words\n"
    assert found.files["changes.txt"] == b"added /a\n"
    assert json.loads(found.files["manifest.json"])["Id"] == ID


def test_of_a_log_that_is_too_long_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "LOG_BYTES", 10)
    fake = FakeEngine(told(state=ended(), config={"Tty": True}))
    fake.answers[DIFF] = (200, "null")
    fake.answers[LOGS] = (200, "a log of more than ten bytes")

    def shorter(call: str) -> None:
        if "tail=1000&" in fake.asked[-1] or fake.asked[-1].endswith("tail=1000"):
            fake.answers[LOGS] = (200, "the end")

    fake.before = shorter
    assert take(fake, ("logs",)).files["log.txt"] == b"the end"


def test_a_log_that_cannot_be_read_keeps_the_container() -> None:
    fake = FakeEngine(told(state=ended()))
    fake.answers[LOGS] = (500, '{"message": "input/output error"}')
    assert isinstance(take(fake, ("logs",)), Unknown)


REFUSED = (409, '{"message": "can not get logs from container which is dead or marked for removal"}')


def test_a_dead_container_is_captured_without_what_the_engine_no_longer_gives() -> None:
    """Its removal began and failed; the engine refuses its log for ever."""
    fake = FakeEngine(told(state=ended(Status="dead", Dead=True)))
    fake.answers |= {LOGS: REFUSED, DIFF: (500, '{"message": "its layer is gone"}')}
    found = take(fake, ("manifest", "logs"))
    assert json.loads(found.files["manifest.json"])["Id"] == ID
    assert b"marked for removal" in found.files["log.txt"]
    assert b"its layer is gone" in found.files["changes.txt"]


def test_a_log_refused_for_a_container_that_is_not_dead_keeps_it() -> None:
    fake = FakeEngine(told(state=ended()))
    fake.answers |= {LOGS: REFUSED, DIFF: (200, "null")}
    assert isinstance(take(fake, ("logs",)), Unknown)


@pytest.mark.parametrize(
    "answers",
    [
        {LOGS: (500, '{"message": "input/output error"}'), DIFF: (200, "null")},
        {LOGS: (404, "page not found"), DIFF: (200, "null")},
        {LOGS: REFUSED, DIFF: (404, "page not found")},
        {LOGS: REFUSED, DIFF: (200, "not json")},
    ],
    ids=["log unreadable", "no page of logs", "no page of changes", "changes unreadable"],
)
def test_any_other_failure_keeps_a_dead_container(answers: dict[str, tuple[int, str]]) -> None:
    fake = FakeEngine(told(state=ended(Status="dead", Dead=True)))
    fake.answers |= answers
    assert isinstance(take(fake, ("logs",)), Unknown)


def test_events_that_are_refused_do_not() -> None:
    fake = FakeEngine(told(state=ended()))
    fake.answers |= {"GET /events": (500, "no"), DIFF: (200, "null")}
    assert take(fake, ("events",)).files["events.jsonl"] == b"\n"


def test_what_is_gone_has_nothing_to_capture() -> None:
    assert isinstance(take(FakeEngine(), ("manifest",)), NothingToCapture)


@pytest.mark.parametrize("what", ["logs", "changes"])
def test_a_page_that_the_engine_does_not_have_is_no_word_about_the_container(what: str) -> None:
    """Evidence first: it would be removed with nothing saved."""
    fake = FakeEngine(told(state=ended()))
    fake.answers[f"GET /containers/{ID}/{what}"] = (404, "page not found")
    assert isinstance(take(fake, ("manifest", "logs")), Unknown)
