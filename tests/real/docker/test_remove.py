"""A removal: captured before, unforced, only of what was looked at, and volumes stay."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpukeeper.model.decision import Action, Changed, Result
from tests.real.docker import programs
from tests.real.docker.harness import MINE, Harness, ended, policy
from tests.real.docker.private_engine import DockerEngine
from tests.real.docker.proxy import proxy


@pytest.mark.smoke
def test_the_command_removes_what_is_over_and_reports_it(docker: DockerEngine) -> None:
    ended(docker, "old", gpus=[0], labels=MINE)
    docker.run("young", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    ran = docker.gpukeeper("apply", "--yes", policy=policy(retention={"succeeded": "0s"}))
    assert ran.code == 0, ran
    assert docker.containers() == {"young": "running"}
    assert "1 of 1 due reclaimed" in ran.err


def test_with_short_times_a_named_container_goes_in_seconds_instead_of_minutes(docker: DockerEngine) -> None:
    """Divided by 3600, so that no test has to wait. What is not named stays, however long it is due."""
    for name in ("named", "other"):
        ended(docker, name, gpus=[0], labels=MINE)
    minutes = policy(retention={"succeeded": "10m"})
    place = json.loads(docker.gpukeeper("plan", "--json", policy=minutes).out)["places"][0]["place"]
    short = ("apply", "--yes", "--compress", "3600", "--workload", f"docker/{place}/named")
    ran = docker.gpukeeper("apply", "--yes", policy=minutes)
    assert docker.containers() == {"named": "exited", "other": "exited"}, ran
    ran = docker.gpukeeper(*short, policy=minutes)
    assert ran.code == 0, ran
    assert docker.containers() == {"other": "exited"}
    assert "(times divided by 3600)" in docker.gpukeeper("ledger", "list", policy=minutes).out


def test_a_dead_container_is_removed_though_the_engine_refuses_its_log(docker: DockerEngine) -> None:
    """A removal failed half-way, for example since the engine was killed: Docker calls the container dead."""
    made = ended(docker, "old", gpus=[0], labels=MINE)
    with _cannot_be_deleted(docker, "old"):
        assert not docker.remove_container("old").ok
    assert docker.state("old") == "dead"
    assert docker.api.call("GET", "/containers/old/logs", query={"stdout": 1}).status == 409
    # The error of the removal is in its state, so it counts as failed.
    ran = docker.gpukeeper("apply", "--yes", policy=policy(retention={"succeeded": "0s", "failed": "0s"}))
    assert ran.code == 0, ran
    assert docker.containers() == {}
    (manifest,) = docker.folder.glob("state/evidence/*/old-*/manifest.json")
    assert json.loads(manifest.read_text())["Id"] == made
    assert "dead or marked for removal" in (manifest.parent / "log.txt").read_text()


@contextmanager
def _cannot_be_deleted(docker: DockerEngine, name: str) -> Iterator[None]:
    """One file of its own layer."""
    found = docker.inspect(name)
    assert found is not None
    path = Path(found["GraphDriver"]["Data"]["UpperDir"]) / "stays"
    path.touch()
    if subprocess.run(["chattr", "+i", path], check=False).returncode != 0:
        pytest.skip("this filesystem has no immutable files")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


def test_mode_plan_removes_nothing_unattended(docker: DockerEngine) -> None:
    ended(docker, "old", gpus=[0], labels=MINE)
    ran = docker.gpukeeper("apply", "--yes", policy=policy(mode="plan", retention={"succeeded": "0s"}))
    assert ran.code == 2, ran
    assert docker.containers() == {"old": "exited"}


def test_a_container_that_was_started_meanwhile_is_not_removed(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    docker.stop_container("mine")
    harness = Harness(docker)
    fresh = harness.looked("mine")
    docker.start_container("mine")
    answer = harness.run(harness.platform.act(harness.asked("mine", Action.REMOVE), fresh))
    assert isinstance(answer, Changed)
    assert docker.state("mine") == "running"


@pytest.mark.smoke
def test_the_engine_itself_refuses_what_was_started_at_the_last_moment(docker: DockerEngine) -> None:
    """Between our last look and our command: the removal is unforced, so that Docker says no."""
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    docker.stop_container("mine")
    harness = Harness(docker)
    fresh = harness.looked("mine")
    engine = harness.platform._engine
    delete = engine.delete

    async def started_first(path: str, **query: object) -> bytes:
        docker.start_container("mine")
        return await delete(path, **query)  # type: ignore[arg-type]

    engine.delete = started_first  # type: ignore[method-assign, assignment]
    answer = harness.run(harness.platform.act(harness.asked("mine", Action.REMOVE), fresh))
    assert isinstance(answer, Changed)
    assert docker.state("mine") == "running"


def test_a_run_that_began_and_ended_at_the_last_moment_is_reported_as_lost(docker: DockerEngine) -> None:
    """Between our last look and our command. Docker refuses what runs, and this does not run any more."""
    made = ended(docker, "old", gpus=[0], labels=MINE)

    def run_once_more() -> None:
        before = _finished(docker, "old")
        docker.start_container("old")
        docker.until(lambda: docker.state("old") == "exited" and _finished(docker, "old") != before, "it ran again")

    with proxy(docker.folder / "between", docker.socket) as between:
        between.meanwhile = run_once_more
        text = policy(retention={"succeeded": "0s"})
        ran = docker.gpukeeper("apply", "--yes", policy=text, env={"DOCKER_HOST": between.host})
    assert docker.inspect("old") is None, ran
    told = docker.gpukeeper("ledger", "list", "--json", "--last", "1000", "--type", "complaint", "--type", "outcome")
    lines = json.loads(told.out)["lines"]
    whole = [one for one in lines if one["ref"]["uid"] == made]
    assert ["that run ended before" in one.get("what", one.get("reason", "")) for one in whole] == [True, True], whole


def _finished(docker: DockerEngine, name: str) -> str:
    found = docker.inspect(name)
    assert found is not None
    return str(found["State"]["FinishedAt"])


def test_a_removal_without_such_a_run_reports_none(docker: DockerEngine) -> None:
    ended(docker, "old", gpus=[0], labels=MINE)
    assert docker.gpukeeper("apply", "--yes", policy=policy(retention={"succeeded": "0s"})).code == 0
    told = docker.gpukeeper("ledger", "list", "--json", "--last", "1000", "--type", "complaint")
    assert json.loads(told.out)["lines"] == []


def test_one_that_was_renamed_since_the_plan_is_left_for_the_next_pass(docker: DockerEngine) -> None:
    made = ended(docker, "old", gpus=[0], labels=MINE)
    harness = Harness(docker)
    fresh = harness.looked("old")
    step = harness.asked("old", Action.REMOVE)
    docker.api.must("POST", "/containers/old/rename", query={"name": "precious"})
    assert isinstance(harness.run(harness.platform.act(step, fresh)), Changed)
    assert docker.id("precious") == made


def test_one_of_the_same_name_that_took_its_place_is_not_removed(docker: DockerEngine) -> None:
    ended(docker, "old", gpus=[0], labels=MINE)
    harness = Harness(docker)
    harness.later(minutes=90)
    step = harness.step("old")
    assert step.decision.action is Action.REMOVE
    docker.remove_container("old")
    second = ended(docker, "old", gpus=[0], labels=MINE)
    assert harness.take(step).result is Result.CHANGED
    assert docker.id("old") == second


def test_volumes_stay_named_and_unnamed(docker: DockerEngine) -> None:
    docker.run(
        "old", gpus=[0], labels=MINE, cmd=["sh", "-c", "echo kept > /data/file; echo kept > /named/file"],
        config={"Volumes": {"/data": {}}}, binds=["models:/named"],
    )  # fmt: skip
    docker.until(lambda: docker.state("old") == "exited", "it ended")
    found = docker.inspect("old")
    assert found is not None
    mounts = {mount["Destination"]: mount for mount in found["Mounts"]}
    harness = Harness(docker)
    harness.later(minutes=90)
    harness.again()
    assert docker.inspect("old") is None
    for where in ("/data", "/named"):
        assert docker.api.call("GET", f"/volumes/{mounts[where]['Name']}").ok
        assert Path(mounts[where]["Source"], "file").read_text() == "kept\n"


def test_log_description_and_installed_packages_are_captured_first(docker: DockerEngine) -> None:
    site = "/usr/local/lib/python3/site-packages"
    work = f"echo result 42; mkdir -p {site}/flashy-2.1.dist-info; touch {site}/flashy-2.1.dist-info/METADATA"
    made = docker.run("old", gpus=[0], labels=MINE, cmd=["sh", "-c", work])
    docker.until(lambda: docker.state("old") == "exited", "it ended")
    harness = Harness(docker)
    assert harness.looked("old").loses
    harness.later(minutes=90)
    harness.again()
    assert docker.inspect("old") is None
    files = harness.captured("old")
    assert b"result 42" in files["log.txt"]
    assert files["packages.txt"] == b"flashy 2.1\n"
    assert made.encode() in files["manifest.json"]


@pytest.mark.smoke
def test_evidence_on_disk_is_complete_before_the_command_removes(docker: DockerEngine) -> None:
    ended(docker, "old", gpus=[0], labels=MINE)
    text = policy(retention={"succeeded": "0s"}, capture={"what": ["manifest", "logs", "events", "reports"]})
    assert docker.gpukeeper("apply", "--yes", policy=text).code == 0
    assert docker.inspect("old") is None
    saved = list((docker.folder / "state" / "evidence").rglob("*"))
    assert [one for one in saved if one.is_file() and one.stat().st_size > 0]


def test_without_room_for_evidence_it_is_kept(docker: DockerEngine) -> None:
    ended(docker, "old", gpus=[0], labels=MINE)
    text = policy(retention={"succeeded": "0s"}, capture={"quota": "1B"})
    ran = docker.gpukeeper("apply", "--yes", policy=text)
    assert ran.code == 3, ran
    assert docker.state("old") == "exited"


def test_its_own_shorter_time_counts(docker: DockerEngine) -> None:
    ended(docker, "quick", gpus=[0], labels={**MINE, "gpukeeper.io/ttl": "5m"})
    ended(docker, "usual", gpus=[0], labels=MINE)
    ended(docker, "garbled", gpus=[0], labels={**MINE, "gpukeeper.io/ttl": "soon"})
    harness = Harness(docker)
    harness.later(minutes=10)
    harness.again()
    assert docker.containers() == {"usual": "exited", "garbled": "exited"}
    harness.later(days=2)
    harness.again()
    assert docker.containers() == {"garbled": "exited"}


def test_a_hold_keeps_it_and_a_release_lets_it_go(docker: DockerEngine) -> None:
    ended(docker, "mine", gpus=[0], labels=MINE)
    harness = Harness(docker)
    harness.later(minutes=90)
    assert harness.ask("nobody", "hold", "mine", seconds=3600.0).done
    harness.again()
    assert docker.state("mine") == "exited"
    assert harness.ask("nobody", "release", "mine").done
    harness.again()
    assert docker.inspect("mine") is None


def test_no_more_than_the_budget_goes_in_one_pass(docker: DockerEngine) -> None:
    for number in range(3):
        ended(docker, f"old-{number}", gpus=[0], labels=MINE)
    ran = docker.gpukeeper("apply", "--yes", policy=policy(retention={"succeeded": "0s"}, budget={"per_pass": 2}))
    assert ran.code == 3, ran
    assert list(docker.containers()) == ["old-2"]


@pytest.fixture
def lab_train(docker: DockerEngine) -> Iterator[None]:
    """An image of its own with two tags. Images outlive a test, so it takes them away again."""
    docker.create("source")
    docker.api.must("POST", "/commit", {}, query={"container": "source", "repo": "lab/train", "tag": "1"})
    docker.remove_container("source")
    docker.api.must("POST", "/images/lab/train:1/tag", query={"repo": "lab/train", "tag": "2"})
    yield
    for name in docker.containers():
        docker.remove_container(name)
    for tag in ("1", "2"):
        docker.api.call("DELETE", f"/images/lab/train:{tag}", query={"force": 1})


@pytest.mark.usefixtures("lab_train")
def test_stopped_containers_of_one_image_are_listed_and_removed_singly_or_together(docker: DockerEngine) -> None:
    """C6.4: by any tag of it; what runs and what was made from another image stays, and so does the image."""
    ended(docker, "other", gpus=[0], labels=MINE)
    for name, image in (("one", "lab/train:1"), ("two", "lab/train:2"), ("three", "lab/train:2")):
        ended(docker, name, image=image, gpus=[0], labels=MINE)
    docker.run("runs", image="lab/train:1", gpus=[1], labels=MINE, cmd=programs.trapping_shell())
    text = policy(retention={"succeeded": "0s"})
    listed = docker.gpukeeper("workload", "list", "--image", "lab/train", policy=text)
    assert listed.code == 0, listed
    assert {line.split()[1].rpartition("/")[2] for line in listed.out.splitlines()[1:]} == {
        "one",
        "two",
        "three",
        "runs",
    }
    planned = docker.gpukeeper("plan", "--image", "lab/train:1", policy=text)
    assert [line.split()[1].rpartition("/")[2] for line in planned.out.splitlines()] == ["one"]
    one = docker.gpukeeper("apply", "--yes", "--image", "lab/train:2", "--name", "two", policy=text)
    assert one.code == 0, one
    assert docker.containers() == {"one": "exited", "three": "exited", "other": "exited", "runs": "running"}
    assert docker.gpukeeper("apply", "--yes", "--image", "lab/train", policy=text).code == 0
    assert docker.containers() == {"other": "exited", "runs": "running"}
    assert docker.api.call("GET", "/images/lab/train:2/json").ok


def test_stopped_containers_without_a_gpu_go_if_configured(docker: DockerEngine) -> None:
    """C10.4: by their retention, like others. What runs, what never started and every volume stays."""
    ended(docker, "old", config={"Volumes": {"/data": {}}})
    ended(docker, "crashed", 1)
    docker.create("never")
    docker.run("database", cmd=programs.trapping_shell())
    found = docker.inspect("old")
    assert found is not None
    (volume,) = [mount["Name"] for mount in found["Mounts"]]
    included = {"without-gpu": {"untouchable": False}}
    kept = policy(retention={"succeeded": "0s", "failed": "7d"})
    assert docker.gpukeeper("apply", "--yes", policy=kept).code == 0
    assert len(docker.containers()) == 4, "not unless the policy says so"
    harness = Harness(docker, classes=included, retention={"succeeded": "1h", "failed": "7d"})
    harness.later(minutes=50)
    harness.again()
    assert docker.inspect("old") is not None, "its hour is not over"
    harness.later(minutes=20)
    harness.again()
    assert docker.containers() == {"crashed": "exited", "never": "created", "database": "running"}
    harness.later(days=400)
    harness.again(), harness.again()
    assert docker.containers() == {"never": "created", "database": "running"}
    assert docker.api.call("GET", f"/volumes/{volume}").ok
