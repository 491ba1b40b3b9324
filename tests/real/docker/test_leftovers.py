"""Images and the builder's cache: only what nobody uses, only by policy, each by its id, never all at once."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import pytest

from gpukeeper.model.decision import Accepted, Action, Refused, Result, Verdict
from gpukeeper.model.subject import Disk, Shape
from tests.real.docker.harness import MINE, Harness
from tests.real.docker.private_engine import DockerEngine

OURS = ["box:*", "py:*"]  # of the engine itself
UNUSED = {"unused": "1h", "keep": OURS}


@pytest.fixture(autouse=True)
def no_images_are_left(docker: DockerEngine) -> Iterator[None]:
    yield
    for container in docker.containers():
        docker.remove_container(container)
    for image in docker.api.must("GET", "/images/json"):
        if not any(tag in ("box:1", "py:1") for tag in image["RepoTags"] or ()):
            docker.api.call("DELETE", f"/images/{image['Id']}", query={"force": 1})
    docker.api.call("POST", "/build/prune", query={"all": "true"})


def tar_of(files: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return held.getvalue()


def image(engine: DockerEngine, name: str, built: str = "2026-01-01T00:00:00Z", content: bytes | None = None) -> str:
    """Of one file, with this build date; its id."""
    layer = tar_of({"file": name.encode() if content is None else content})
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": built,
        "config": {"Cmd": ["/file"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    raw = json.dumps(config).encode()
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {"config.json": raw, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    engine.api.must("POST", "/images/load", tar_of(files))
    return str(engine.api.must("GET", f"/images/{name}/json")["Id"])


def is_there(engine: DockerEngine, name: str) -> bool:
    return engine.api.call("GET", f"/images/{name}/json").ok


def test_a_container_that_came_and_went_between_two_reads_used_its_image(docker: DockerEngine) -> None:
    """No list ever showed it; only the engine's events did."""
    image(docker, "nightly:1")
    harness = Harness(docker, images=UNUSED)
    harness.again()
    harness.later(minutes=90)
    docker.create("short", image="nightly:1")
    docker.remove_container("short")
    harness.platform.records.forget()  # what a daemon hears at once, a command reads when it begins
    harness.again()
    assert is_there(docker, "nightly:1")
    harness.later(hours=2)
    harness.again()
    assert not is_there(docker, "nightly:1")


def test_an_unused_image_is_only_reported_without_a_policy_for_it(docker: DockerEngine) -> None:
    image(docker, "left:1")
    harness = Harness(docker)
    harness.again()
    harness.later(days=300)
    report = harness.again()
    assert is_there(docker, "left:1")
    decision = next(one for one in report.survey.decisions if one.seen.ref.name == "left:1")
    assert "only reports unused images" in decision.reason


def test_an_image_goes_when_it_was_seen_unused_for_long_enough(docker: DockerEngine) -> None:
    image(docker, "left:1")
    harness = Harness(docker, images=UNUSED)
    harness.again()
    harness.later(minutes=50)
    harness.again()
    assert is_there(docker, "left:1")
    harness.later(minutes=20)
    harness.again()
    assert not is_there(docker, "left:1")
    assert is_there(docker, "box:1") == ("box:1" in docker._images)
    outcome = harness.outcomes("left:1")[-1]
    assert outcome.result is Result.RECLAIMED


def test_how_long_ago_it_was_built_does_not_count(docker: DockerEngine) -> None:
    """Base images are years old on the day they are pulled."""
    image(docker, "ancient:1", built="2015-01-01T00:00:00Z")
    harness = Harness(docker, images=UNUSED)
    harness.again(), harness.again()
    assert is_there(docker, "ancient:1")


def test_an_image_that_a_container_refers_to_is_kept_even_if_that_one_ended(docker: DockerEngine) -> None:
    image(docker, "used:1")
    docker.create("mine", image="used:1", cmd=["/file"])
    harness = Harness(docker, images=UNUSED)
    harness.again()
    harness.later(days=10)
    harness.again()
    assert is_there(docker, "used:1")


def test_time_begins_when_its_last_container_went(docker: DockerEngine) -> None:
    image(docker, "used:1")
    docker.create("mine", image="used:1", cmd=["/file"])
    harness = Harness(docker, images=UNUSED)
    harness.again()
    harness.later(hours=5)
    docker.remove_container("mine")
    harness.again()
    assert is_there(docker, "used:1")
    harness.later(hours=2)
    harness.again()
    assert not is_there(docker, "used:1")


def test_names_on_the_keep_list_stay(docker: DockerEngine) -> None:
    image(docker, "base/torch:2"), image(docker, "left:1")
    harness = Harness(docker, images={"unused": "1h", "keep": [*OURS, "base/*"]})
    harness.again()
    harness.later(days=10)
    harness.again()
    assert (is_there(docker, "base/torch:2"), is_there(docker, "left:1")) == (True, False)


def test_an_image_goes_after_those_that_are_built_on_it_and_is_not_tried_before(docker: DockerEngine) -> None:
    """A classic engine refuses it as long as there is one."""
    image(docker, "base:1")
    docker.create("builder", image="base:1")
    docker.api.must("POST", "/commit", {}, query={"container": "builder", "repo": "lab", "tag": "1"})
    docker.remove_container("builder")
    parents = [one["ParentId"] for one in docker.api.must("GET", "/images/json") if "lab:1" in one["RepoTags"]]
    if parents == [""]:
        pytest.skip("this engine has no parents of images")
    kept = Harness(docker, images={**UNUSED, "keep": [*OURS, "lab:1"]})
    kept.again()
    kept.later(hours=2)
    kept.again()
    assert is_there(docker, "base:1")
    assert kept.outcomes("base:1") == []
    harness = Harness(docker, images=UNUSED)
    harness.again()
    harness.later(hours=2)
    harness.again()
    assert not is_there(docker, "lab:1")
    harness.again()
    assert not is_there(docker, "base:1")
    assert [one.result for one in harness.outcomes("base:1")] == [Result.RECLAIMED]


def test_an_image_stays_as_long_as_the_container_that_was_made_from_it_can_be_restored(docker: DockerEngine) -> None:
    image(docker, "nightly:1")
    docker.create("job", image="nightly:1", gpus=[0], labels=MINE)
    harness = Harness(docker, images=UNUSED, capture={"keep": "5h"})
    harness.again()
    harness.later(minutes=40)
    harness.again()
    assert docker.inspect("job") is None
    harness.again()
    harness.later(hours=3)
    harness.again()
    assert is_there(docker, "nightly:1"), "unused for longer than an hour"
    assert harness.ask("root", "restore", "job").done
    assert docker.state("job") == "created"
    docker.remove_container("job")
    harness.again()
    harness.later(hours=3)
    harness.again()
    assert not is_there(docker, "nightly:1")


def test_an_image_with_two_names_is_kept_until_one_is_removed(docker: DockerEngine) -> None:
    image(docker, "one:1")
    docker.api.must("POST", "/images/one:1/tag", query={"repo": "two", "tag": "1"})
    harness = Harness(docker, images=UNUSED)
    harness.again()
    harness.later(hours=2)
    harness.again()
    assert harness.outcomes("one:1") == []
    reason = harness.decisions()["one:1"].reason
    assert reason == "it has several names (one:1, two:1); remove the unneeded ones by hand"
    docker.api.must("DELETE", "/images/two:1")
    harness.again()
    harness.later(hours=2)
    harness.again()
    assert not is_there(docker, "one:1")


def test_an_image_that_got_a_second_name_at_the_last_moment_is_refused(docker: DockerEngine) -> None:
    image(docker, "one:1")
    harness = Harness(docker, images=UNUSED)
    harness.again()
    harness.later(hours=2)
    step = harness.step("one:1")
    assert step.decision.action is Action.REMOVE
    docker.api.must("POST", "/images/one:1/tag", query={"repo": "two", "tag": "1"})
    assert harness.take(step).result in {Result.CHANGED, Result.REFUSED}
    assert is_there(docker, "one:1")
    assert is_there(docker, "two:1")


def test_an_image_that_is_used_at_the_last_moment_is_not_removed(docker: DockerEngine) -> None:
    image(docker, "left:1")
    harness = Harness(docker, images=UNUSED)
    harness.again()
    harness.later(hours=2)
    step = harness.step("left:1")
    assert step.decision.action is Action.REMOVE
    docker.create("mine", image="left:1", cmd=["/file"])
    assert harness.take(step).result is Result.CHANGED
    assert is_there(docker, "left:1")


def test_a_layer_that_others_share_is_not_counted_as_given_back(docker: DockerEngine) -> None:
    docker.create("source")
    docker.api.must(
        "POST", "/commit", {"Labels": {"a": "1"}}, query={"container": "source", "repo": "copy", "tag": "1"}
    )
    docker.remove_container("source")
    harness = Harness(docker, images=UNUSED)
    harness.again()
    harness.later(hours=2)
    harness.again()
    assert not is_there(docker, "copy:1")
    assert is_there(docker, "box:1")
    assert harness.outcomes("copy:1")[-1].bytes_back == 0


def built(engine: DockerEngine) -> set[str]:
    """Two images are built; the pieces of cache that remain."""
    for number in (1, 2):
        context = tar_of({"Dockerfile": b"FROM scratch\nCOPY file /\n", "file": str(number).encode() * 5000})
        query = {"version": "2", "t": f"built:{number}"}
        answer = engine.api.call("POST", "/build", context, query=query, deadline=60)
        if not answer.ok or b"errorDetail" in answer.raw:
            pytest.skip(f"this engine builds nothing here: {answer.raw[-200:]!r}")
    if not cached(engine):
        pytest.skip("this engine has no builder's cache")
    return settled(engine)


def settled(engine: DockerEngine) -> set[str]:
    """After a build the engine still lets go of pieces for a moment: those that are there for good."""
    reads = [cached(engine)]

    def same() -> bool:
        time.sleep(0.5)
        reads.append(cached(engine))
        return reads[-1] == reads[-2]

    engine.until(same, "the builder's cache no longer changes")
    return reads[-1]


def cached(engine: DockerEngine) -> set[str]:
    return {one["ID"] for one in engine.api.must("GET", "/system/df")["BuildCache"] or ()}


def test_one_piece_of_build_cache_goes_and_the_others_stay(docker: DockerEngine) -> None:
    before = built(docker)
    harness = Harness(docker, build_cache={"unused": "0s"})
    pieces = [one for one in harness.subjects().values() if one.shape is Shape.CACHE and one.in_use is False]
    assert {piece.ref.uid for piece in pieces} == before
    made = harness.clock.now()
    docker.until(lambda: harness.clock.now() - made > timedelta(seconds=4), "the engine finds it old enough")
    seen = harness.clock.now() - timedelta(seconds=62)  # the adapter takes a minute off, for clocks that differ
    for piece in pieces:
        asked = harness.asked(piece.ref.name, Action.REMOVE)
        answer = harness.run(harness.platform.act(asked, msgspec.structs.replace(piece, last_used=seen)))
        if isinstance(answer, Accepted):  # some are still needed by others, and the engine says so
            break
        assert cached(docker) == before
    assert isinstance(answer, Accepted), answer
    assert before - cached(docker) == {piece.ref.uid}


def test_the_engine_itself_keeps_cache_that_was_used_since_we_looked(docker: DockerEngine) -> None:
    before = built(docker)
    harness = Harness(docker, build_cache={"unused": "1h"})
    harness.later(hours=2)  # our clock is wrong; the engine's is not
    harness.again()
    assert cached(docker) == before


def test_build_cache_is_only_reported_without_a_policy_for_it(docker: DockerEngine) -> None:
    """As one line of `plan` with all its bytes, however many pieces there are; and it cannot be removed as a whole."""
    before = built(docker)
    since = time.time()
    harness = Harness(docker)
    harness.again()
    (whole,) = [one for one in harness.subjects().values() if one.shape is Shape.CACHE]
    sizes = {one["ID"]: one["Size"] for one in docker.api.must("GET", "/system/df")["BuildCache"]}
    assert (whole.size, whole.labels["pieces"]) == (sum(sizes.values()), str(len(before)))
    decided = harness.decisions()["build-cache"]
    assert (decided.action, decided.verdict) == (Action.KEEP, Verdict.REPORT)
    assert decided.reason.endswith("the policy only reports build cache")
    answer = harness.run(harness.platform.act(harness.asked("build-cache", Action.REMOVE), whole))
    assert isinstance(answer, Refused)
    assert "prune" not in docker.actions(since)
    assert cached(docker) == before


def test_an_image_cannot_be_stopped(docker: DockerEngine) -> None:
    image(docker, "left:1")
    harness = Harness(docker)
    answer = harness.run(harness.platform.act(harness.asked("left:1", Action.STOP), harness.subject("left:1")))
    assert isinstance(answer, Refused)
    assert is_there(docker, "left:1")


def test_while_the_disk_is_too_full_the_least_recently_used_go_first_until_it_is_not(
    docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    image(docker, "old:1")
    marks = {"high": "99%", "low": "98%"}
    harness = Harness(docker, images={"unused": "30d", "under_pressure": "1h", "keep": OURS}, disk=marks)
    real = harness.subject("old:1").disk
    assert real is not None, "the disk of the engine's data is read"

    async def disk() -> Disk:
        return Disk(real.name, 0.995 if is_there(docker, "old:1") else 0.5)

    harness.again()
    harness.later(minutes=30)
    image(docker, "new:1")
    harness.again()
    harness.later(hours=2)
    harness.again()
    assert (is_there(docker, "old:1"), is_there(docker, "new:1")) == (True, True), "the disk has space"
    monkeypatch.setattr(harness.platform._leftovers, "_disk", disk)
    harness.again()
    assert (is_there(docker, "old:1"), is_there(docker, "new:1")) == (False, True)
    assert "while the disk is too full" in harness.outcomes("old:1")[-1].reason
    assert "below 98%" in harness.outcomes("new:1")[-1].reason


def test_beyond_a_limit_of_bytes_only_the_least_recently_used_go(docker: DockerEngine) -> None:
    for name in ("oldest:1", "used:1", "old:1", "new:1"):
        image(docker, name, content=name.encode() * 200_000)
    docker.create("mine", image="used:1", cmd=["/file"])
    sizes = {one["RepoTags"][0]: one["Size"] for one in docker.api.must("GET", "/images/json")}
    limit = sizes["old:1"] + sizes["new:1"] + 1000
    harness = Harness(docker, images={"unused": "30d", "under_pressure": "1h", "above": f"{limit}B", "keep": OURS})
    for name in ("old:1", "new:1"):
        harness.again()
        harness.later(minutes=20)
        docker.create("short", image=name, cmd=["/file"])
        docker.remove_container("short")
    harness.again()
    harness.later(minutes=50)
    harness.again()
    assert is_there(docker, "oldest:1") is False
    assert [is_there(docker, name) for name in ("used:1", "old:1", "new:1")] == [True] * 3
    harness.later(days=20)
    harness.again()
    assert [is_there(docker, name) for name in ("used:1", "old:1", "new:1")] == [True] * 3
