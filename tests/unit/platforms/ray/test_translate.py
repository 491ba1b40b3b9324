"""From facts to subjects: pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpukeeper.disk.tree import PlaceAndTime
from gpukeeper.model.subject import Category, Disk, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.translate import (
    LogFile,
    NodeFacts,
    busy_by,
    identity_in,
    logs_incarnation,
    logs_subject,
    node_subject,
)

NOW = datetime(2026, 11, 15, tzinfo=UTC)
AT = PlaceAndTime("ray", "lab", NOW, "worker-1")
OF_NODE = PlaceAndTime("ray", "lab", NOW)
SILENT = Unknown("Ray was silent")
FILE = LogFile("", "worker.out", 8, 1, 10, 4096, NOW, 1000)


@pytest.mark.parametrize(
    ("ray", "titles", "cpu", "gpu", "busy"),
    [
        (None, None, 1.0, None, None),
        ("actor A is alive", "worker A runs", 99.0, None, "actor A is alive"),
        (None, "worker A runs", 0.0, None, "worker A runs"),
        (SILENT, "worker A runs", 0.0, None, "worker A runs"),
        (None, None, 5.1, None, "its programs use 5 % of a CPU core, allowed 5 %"),
        (None, None, 0.0, "pid 7 (python) has a GPU open", "pid 7 (python) has a GPU open"),
        (SILENT, None, 0.0, "pid 7 (python) has a GPU open", "pid 7 (python) has a GPU open"),
        (SILENT, None, 0.0, None, SILENT),
        (None, None, SILENT, None, SILENT),
        (None, None, 0.0, SILENT, SILENT),
        (None, None, 5.0, None, None),
    ],
)
def test_one_sign_makes_busy_and_all_must_be_known_for_idle(
    ray: str | Unknown | None, titles: str | None, cpu: float | Unknown, gpu: str | Unknown | None, busy: object
) -> None:
    assert busy_by(ray, titles, cpu, 5.0, gpu) == busy


@pytest.mark.parametrize("uid", ["", "x:y", "8", "machine", "8:x", "a:7:logs"])
def test_a_uid_of_something_else_names_no_tree(uid: str) -> None:
    assert identity_in(uid) is None


def test_logs_are_a_set_whatever_its_order() -> None:
    other = msgspec.structs.replace(FILE, name="other.out", inode=2, newest=NOW - timedelta(days=1))
    assert logs_incarnation(5, [FILE, other]) == logs_incarnation(5, [other, FILE])
    assert logs_incarnation(5, [FILE]) != logs_incarnation(5, [msgspec.structs.replace(FILE, ctime_ns=11)])
    found = logs_subject("/tmp/ray/s/logs", (8, 5), [FILE, other], "root", None, AT)
    assert (found.ref.uid, identity_in(found.ref.uid)) == ("8:5:logs", (8, 5))
    assert (found.size, found.last_used, found.labels["files"]) == (8192, NOW, "2")
    assert found.category is Category.DEAD_LOGS


def test_a_node_tells_what_is_known_and_nothing_else() -> None:
    facts = NodeFacts(name="worker-1", uid="abc", incarnation="7@1", size=SILENT, busy=SILENT)
    bare = node_subject(facts, OF_NODE)
    assert (bare.ref.path, bare.shape, bare.busy) == ("ray/lab/worker-1", Shape.NODE, SILENT)
    assert bare.labels == {"sessions_live": "0", "sessions_dead": "0"}
    whole = msgspec.structs.replace(
        facts,
        size=5,
        busy=None,
        cpu=1.25,
        disk=Disk("/", 0.5, 0.1),
        disk_size=100,
        disk_free=50,
        live=1,
        dead=2,
        versions=("2.60.0",),
        addresses=("http://127.0.0.1:8265",),
        sessions=("session_1",),
    )
    assert node_subject(whole, OF_NODE).labels == {
        "sessions_live": "1",
        "sessions_dead": "2",
        "temporary": "5",
        "cpu": "1.2",
        "disk_size": "100",
        "disk_free": "50",
        "ray": "2.60.0",
        "session": "session_1",
        "address": "http://127.0.0.1:8265",
    }


def test_subjects_survive_json() -> None:
    for one in (
        node_subject(NodeFacts(name="n", uid="u", incarnation="1", size=1, busy=None), OF_NODE),
        logs_subject("/l", (8, 5), [FILE], "root", Disk("/", 0.5), AT),
    ):
        assert msgspec.json.decode(msgspec.json.encode(one), type=Subject) == one
