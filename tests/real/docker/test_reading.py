"""What an ordinary user next to root's daemon is told: the real command, run with that user's rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines import require
from tests.real.docker import programs
from tests.real.docker.harness import MINE, SOMEBODY, SOMEBODY_ELSE
from tests.real.docker.private_engine import DockerEngine, Ran
from tests.real.docker.test_asking import ask, daemon
from tests.real.host.machine import AS_NOBODY, can_be_nobody

LABEL = {"secret": "do-not-tell"}
LIMITS = {"max_runtime": "100h"}


@pytest.fixture(autouse=True)
def _another_user() -> None:
    require("root", can_be_nobody())


def as_user(path: Path, *words: str, **more: str) -> Ran:
    """`gpukeeper` as a person who may read neither root's ledger nor Docker's socket."""
    environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GPUKEEPER_SOCKET": str(path), "COLUMNS": "300"}
    done = subprocess.run(
        [*AS_NOBODY, sys.executable, "-m", "gpukeeper", *words],
        env=environ | more,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def told(path: Path, *words: str) -> Any:
    ran = as_user(path, *words, "--json")
    assert ran.code == 0, ran
    return json.loads(ran.out)


def listed(engine: DockerEngine, path: Path, *names: str) -> None:
    """Until the daemon's passes have seen these."""

    def seen() -> bool:
        found = ask(path, "root", "plan", "")["body"]["places"]
        return set(names) <= {d["seen"]["ref"]["name"] for place in found for d in place["decisions"]}

    engine.until(seen, f"a pass saw {names}", deadline=60)


def test_a_user_is_told_of_their_own_work_in_full_and_of_others_what_observe_shows(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE | LABEL, cmd=programs.trapping_shell())
    docker.run("theirs", gpus=[1], labels={"owner": SOMEBODY_ELSE} | LABEL, cmd=programs.trapping_shell())
    matched = [{"class": "api", "name": "mine"}]
    with daemon(docker, match=matched, schedule={"every": "2s"}) as path:
        listed(docker, path, "mine", "theirs")
        (place,) = told(path, "plan")["places"]
        decisions = {d["seen"]["ref"]["name"]: d for d in place["decisions"]}
        assert decisions["mine"]["reason"] != decisions["theirs"]["reason"]
        assert (decisions["mine"]["class_"], decisions["mine"]["owner"]) == ("api", SOMEBODY)
        assert decisions["theirs"]["reason"] == "shown only to its owner and to admins"
        text = as_user(path, "workload", "list")
        assert text.code == 0, text
        assert [line.split()[1:4] for line in text.out.splitlines() if "/mine " in line] == [
            [f"{place['platform']}/{place['place']}/mine", SOMEBODY, "api"]
        ]
        whole = told(path, "explain", "mine")
        assert whole["whole"]
        assert whole["subject"]["labels"]["secret"] == "do-not-tell"
        assert {one["rule"] for one in whole["answers"]} >= {"idle", "max_runtime"}
        assert "by match in the policy" in as_user(path, "explain", "mine").out
        little = told(path, "explain", "theirs")
        assert not little["whole"]
        assert "do-not-tell" not in json.dumps(little)
        assert (little["answers"], little["history"], little["subject"]["owner"]) == ([], [], SOMEBODY_ELSE)
        assert as_user(path, "explain", "theirs").code == 0
        lines = told(path, "ledger", "list")["lines"]
        assert {line["owner"] for line in lines} == {SOMEBODY}
        refused = as_user(path, "ledger", "list", "--owner", SOMEBODY_ELSE)
        assert (refused.code, "only lines about their own work" in refused.err) == (2, True), refused


def test_who_is_only_claimed_to_be_the_owner_is_told_what_a_warning_says(docker: DockerEngine) -> None:
    docker.run("claimed", gpus=[0], labels={"ds01.user": SOMEBODY} | LABEL, cmd=programs.trapping_shell())
    with daemon(docker, schedule={"every": "2s"}) as path:
        listed(docker, path, "claimed")
        found = told(path, "explain", "claimed")
        assert (found["subject"]["owner"], found["subject"]["owner_verified"], found["whole"]) == (
            SOMEBODY,
            False,
            False,
        )
        assert found["decision"]["reason"] not in ("", "shown only to its owner and to admins")
        assert "do-not-tell" not in json.dumps(found)


def test_a_user_asks_though_the_state_directory_named_is_roots(docker: DockerEngine) -> None:
    """GPUKEEPER_STATE is set for everybody: its ledger cannot be opened by this user, and need not be."""
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    with daemon(docker, schedule={"every": "2s"}) as path:
        listed(docker, path, "mine")
        state = {"GPUKEEPER_STATE": str(docker.folder / "state"), "GPUKEEPER_POLICY": str(docker.folder / "none.yaml")}
        for words in (("plan", "--verbose"), ("workload", "list"), ("explain", "mine"), ("ledger", "list")):
            ran = as_user(path, *words, **state)
            assert ran.code == 0, (words, ran)
            assert "/mine" in ran.out, (words, ran)


def test_what_was_stopped_shows_how_it_comes_back_and_a_restore_how_long_it_stays(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    with daemon(docker, limits=LIMITS, schedule={"every": "2s"}) as path:
        listed(docker, path, "mine")
        assert ask(path, SOMEBODY, "stop", "mine")["done"]
        docker.until(lambda: docker.state("mine") == "exited", "it is stopped")

        def remedies() -> str:
            return " ".join(told(path, "explain", "mine")["would_change_it"])

        docker.until(lambda: "gpukeeper restore" in remedies(), "explain names the command", deadline=60)
        assert "It will be deleted at 20" in remedies()
        back = as_user(path, "restore", "mine")
        assert back.code == 0, back
        assert docker.state("mine") == "running"
        assert "It is running now. What comes next: " in back.out, back
        assert ask(path, SOMEBODY, "stop", "mine")["done"]
        assert ask(path, SOMEBODY, "remove", "mine")["done"]
        gone = as_user(path, "explain", "mine")
        assert (gone.code, "was removed by gpukeeper" in gone.err) == (2, True), gone
        assert "Restore it: gpukeeper restore " in gone.err


def test_a_hold_shows_what_it_does_not_prevent(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    with daemon(docker, limits={"max_runtime": "1h"}, schedule={"every": "2s"}) as path:
        listed(docker, path, "mine")
        held = as_user(path, "workload", "hold", "mine", "--for", "3h")
        assert held.code == 0, held
        assert "The hold does not prevent max_runtime: will be stopped at 20" in held.out, held
        short = as_user(path, "workload", "hold", "mine", "--for", "5m")
        assert "does not prevent" not in short.out, short


def test_a_forecast_knows_that_gpus_are_scarce(docker: DockerEngine) -> None:
    """Only the daemon knows; a look of its own beside it forecast twice the idle time that was used."""
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    scarce = {"above": "1%", "below": "0.5%", "settle": "0s", "idle_factor": "50%"}
    with daemon(docker, demand=scarce, schedule={"every": "2s"}, activity={"settle": "0s", "tick": "1s"}) as path:
        listed(docker, path, "mine")
        docker.until(lambda: ask(path, "root", "explain", "mine")["body"]["signals"], "it is measured", deadline=60)
        docker.until(lambda: ask(path, "root", "standing", "")["body"]["scarce"], "demand is high", deadline=60)
        same = {"GPUKEEPER_SOCKET": str(path), "GPUKEEPER_POLICY": str(docker.folder / "policy.yaml")}
        beside = docker.gpukeeper("explain", "mine", "--json", env=same)
        assert beside.code == 0, beside
        for found in (json.loads(beside.out), told(path, "explain", "mine")):
            assert {one["window"] for one in found["signals"]} == {"PT300S"}, found["signals"]
