"""Whose it is: evidence counts, claims are shown as claims, and labels that anybody can write open no door."""

from __future__ import annotations

import json
import pwd
from pathlib import Path

import pytest

from gpukeeper.model.decision import Action
from tests.real.docker import programs
from tests.real.docker.harness import MINE, SOMEBODY, SOMEBODY_ELSE, UID, Harness, ended, policy
from tests.real.docker.private_engine import DockerEngine


def with_labels(engine: DockerEngine, tag: str, *labels: str) -> str:
    """An image like `box:1` that brings these labels along."""
    engine.create("source")
    changes = [f"LABEL {label}" for label in labels]
    engine.api.must(
        "POST", "/commit", {}, query={"container": "source", "repo": "labelled", "tag": tag, "changes": changes}
    )
    engine.remove_container("source")
    return f"labelled:{tag}"


def test_a_label_that_names_another_user_is_only_a_claim(docker: DockerEngine) -> None:
    """C12.1: it gives neither that person's longer limits nor a class of its own."""
    generous = {"friends": {"members": [SOMEBODY_ELSE], "max_runtime": "1000h"}}
    docker.run(
        "spoofed", gpus=[0], labels={"ds01.user": SOMEBODY_ELSE, "ds01.managed": "true"}, cmd=programs.trapping_shell()
    )
    docker.run("theirs", gpus=[1], labels={"owner": SOMEBODY_ELSE}, cmd=programs.trapping_shell())
    harness = Harness(docker, limits={"max_runtime": "2h"}, groups=generous)
    spoofed = harness.subject("spoofed")
    assert (spoofed.owner_verified, spoofed.class_) == (False, "unknown")
    assert any("only claimed" in finding for finding in spoofed.findings)
    harness.later(hours=3)
    harness.again(), harness.again()
    assert (docker.state("spoofed"), docker.state("theirs")) == ("exited", "running")


def test_whose_name_is_written_on_it_is_not_shown_as_its_proven_owner(docker: DockerEngine) -> None:
    """What runs as one person and claims another is said to be unclear."""
    docker.run("split", gpus=[0], user=UID, labels={"ds01.user": SOMEBODY_ELSE})
    found = Harness(docker).subject("split")
    assert found.owner == SOMEBODY
    assert any(SOMEBODY_ELSE in words for words in found.findings)


def test_the_uid_it_runs_as_backs_a_label_and_wins_no_time(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], user=UID, labels={"ds01.user": SOMEBODY, "ds01.managed": "true"})
    found = Harness(docker).subject("mine")
    assert (found.owner, found.owner_verified, found.class_) == (SOMEBODY, False, "managed")


def test_a_directory_in_a_users_home_shows_whose_it_is(docker: DockerEngine) -> None:
    people = [one for one in pwd.getpwall() if 1000 <= one.pw_uid < 60000 and Path(one.pw_dir).is_dir()]
    people = [one for one in people if Path(one.pw_dir).stat().st_uid == one.pw_uid and one.pw_dir != "/"]
    if not people:
        pytest.skip("nobody with a home of their own is on this machine")
    docker.run("mine", gpus=[0], binds=[f"{people[0].pw_dir}:/home"], labels={"ds01.user": SOMEBODY_ELSE})
    docker.run("reads", gpus=[1], binds=[f"{people[0].pw_dir}:/home:ro"])
    found = Harness(docker).subjects()
    assert (found["mine"].owner, found["mine"].owner_verified) == (people[0].pw_name, True)
    assert (found["reads"].owner, found["reads"].owner_verified) == (people[0].pw_name, False)


def test_labels_that_came_with_the_image_make_no_dev_container(docker: DockerEngine) -> None:
    """Those have no idle time; a planted image label must not give that to everybody."""
    image = with_labels(docker, "dev", "devcontainer.local_folder=/nowhere", "ds01.managed=true")
    docker.run("planted", image=image, gpus=[0], labels=MINE)
    docker.run("real", gpus=[1], labels={**MINE, "devcontainer.local_folder": "/nowhere"})
    subjects = Harness(docker).subjects()
    assert (subjects["planted"].class_, subjects["real"].class_) == ("docker", "devcontainer")


def test_an_owner_that_came_with_the_image_is_nobodys_word(docker: DockerEngine) -> None:
    image = with_labels(docker, "owned", f"ds01.user={SOMEBODY_ELSE}")
    docker.run("planted", image=image, gpus=[0])
    found = Harness(docker).subject("planted")
    assert not (found.owner == SOMEBODY_ELSE and found.owner_verified)
    assert found.class_ == "unknown"


@pytest.mark.parametrize("trusted", [True, False])
def test_who_publishes_an_image_has_no_power_over_what_others_start_from_it(
    docker: DockerEngine, trusted: bool
) -> None:
    """Even where the policy trusts the label: it was inherited from the image, not set at the start."""
    label = "owner" if trusted else "ds01.user"
    image = with_labels(docker, f"trap-{trusted}".lower(), f"{label}={SOMEBODY_ELSE}")
    docker.run("victim", image=image, gpus=[0], cmd=programs.trapping_shell())
    harness = Harness(docker)
    found = harness.subject("victim")
    assert (found.owner, found.owner_verified) == (SOMEBODY_ELSE, False)
    for verb in ("stop", "remove"):
        reply = harness.ask(SOMEBODY_ELSE, verb, "victim")
        assert not reply.done
        assert "is only claimed" in reply.words
        assert "Ask an admin: root" in reply.words
    assert docker.state("victim") == "running"
    assert harness.ask(SOMEBODY_ELSE, "hold", "victim").done
    assert harness.ask("root", "hold", "victim").done
    assert "Still held: by root" in harness.ask(SOMEBODY_ELSE, "release", "victim").words
    assert harness.ask("root", "release", "victim").done
    assert harness.ask("root", "stop", "victim").done
    assert not harness.ask(SOMEBODY_ELSE, "restore", "victim").done
    assert docker.state("victim") == "exited"


def test_a_label_that_asks_to_be_left_alone_asks_until_an_admin_answers(docker: DockerEngine) -> None:
    labels = {**MINE, "ds01.monitoring": "true"}
    ended(docker, "exporter", gpus=[0], labels=labels)
    harness = Harness(docker)
    harness.later(days=10)
    report = harness.again()
    assert docker.state("exporter") == "exited"
    asking = next(one for one in report.survey.decisions if one.seen.ref.name == "exporter")
    assert "an admin has to" in asking.reason
    refused = [{"workload": "exporter", "reason": "it is a training run", "refused": True}]
    text = policy(exemptions=refused, retention={"succeeded": "0s"})
    assert docker.gpukeeper("apply", "--yes", policy=text).code == 0
    assert docker.inspect("exporter") is None


def test_asking_through_the_image_is_still_only_asking(docker: DockerEngine) -> None:
    image = with_labels(docker, "asks", "gpukeeper.io/infrastructure=true")
    ended(docker, "planted", image=image, gpus=[0], labels=MINE)
    refused = [{"workload": "planted", "reason": "no", "refused": True}]
    harness = Harness(docker, exemptions=refused)
    harness.later(days=10)
    harness.again()
    assert docker.inspect("planted") is None


def test_infrastructure_is_what_an_admin_says(docker: DockerEngine) -> None:
    ended(docker, "dcgm-exporter", gpus=[0], labels=MINE)
    harness = Harness(docker, match=[{"class": "infrastructure", "name": "dcgm-*"}])
    harness.later(days=400)
    harness.again()
    assert docker.state("dcgm-exporter") == "exited"


def test_what_has_no_owner_gets_the_rules_of_the_unknown(docker: DockerEngine) -> None:
    docker.run("whose", gpus=[0], cmd=programs.trapping_shell())
    docker.run("mine", gpus=[1], labels=MINE, cmd=programs.trapping_shell())
    harness = Harness(docker, classes={"unknown": {"max_runtime": "1h"}})
    harness.later(hours=2)
    harness.again(), harness.again()
    assert (docker.state("whose"), docker.state("mine")) == ("exited", "running")


def test_a_user_whom_this_machine_does_not_know_is_reported(docker: DockerEngine) -> None:
    docker.run("stranger", gpus=[0], labels={"ds01.user": "no-such-person"})
    ran = docker.gpukeeper("observe", policy=policy())
    assert "no-such-person" in ran.err
    assert docker.state("stranger") == "running"


def test_words_in_labels_do_not_drive_the_admins_terminal(docker: DockerEngine) -> None:
    """C12.4: labels are data."""
    docker.run("evil", gpus=[0], labels={"ds01.user": "x\x1b]0;owned\x07\x1b[2J", **MINE})
    for command in (["observe"], ["explain", "evil"]):
        ran = docker.gpukeeper(*command, policy=policy())
        assert ran.code == 0, ran
        assert "\x1b" not in ran.out + ran.err
        assert "\x07" not in ran.out + ran.err


def test_an_owner_stops_and_removes_their_own_and_no_other_users(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    docker.run("theirs", gpus=[1], labels={"owner": SOMEBODY_ELSE}, cmd=programs.trapping_shell())
    docker.run("whose", gpus=[2], cmd=programs.trapping_shell())
    harness = Harness(docker)
    for other in ("theirs", "whose"):
        for verb in ("stop", "remove", "hold"):
            reply = harness.ask(SOMEBODY, verb, other)
            assert not reply.done
            assert "may not change it" in reply.words
    assert harness.ask(SOMEBODY, "stop", "mine").done
    assert docker.containers() == {"mine": "exited", "theirs": "running", "whose": "running"}
    assert harness.ask(SOMEBODY, "remove", "mine").done
    assert "mine" not in docker.containers()


def test_a_removal_that_is_requested_does_not_force(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    reply = Harness(docker).ask(SOMEBODY, "remove", "mine")
    assert not reply.done
    assert docker.state("mine") == "running"


def test_class_by_what_it_is(docker: DockerEngine) -> None:
    docker.create("compose", gpus=[0], labels={**MINE, "com.docker.compose.project": "x"})
    docker.create("server", gpus=[0], labels=MINE, ports={8080: 0})
    docker.create("job", gpus=[0], labels={**MINE, "ds01.interface": "api"})
    docker.create("plain", gpus=[0], labels=MINE)
    docker.create("none", labels=MINE)
    subjects = Harness(docker).subjects()
    wanted = {"compose": "compose", "server": "serving", "job": "api", "plain": "docker", "none": "without-gpu"}
    assert {name: subjects[name].class_ for name in wanted} == wanted
    assert Harness(docker).due("none") is Action.KEEP


def test_other_labels_of_a_wrapper_are_read_as_data(docker: DockerEngine) -> None:
    """C12.4: shown and selectable; they change neither owner nor class, and nothing of them is run."""
    written = {
        "ds01.project": "vision",
        "ds01.gpu.slots": "2",
        "ds01.created_at": "2026-03-10",
        "ds01.image": "$(touch /tmp/owned)",
        "ds01.note": "x\x1b[2J; reboot",
    }
    docker.run("mine", gpus=[0], labels={**MINE, **written})
    docker.run("plain", gpus=[1], labels=MINE)
    found = Harness(docker).subjects()
    assert written.items() <= found["mine"].labels.items()
    assert (found["mine"].owner, found["mine"].class_) == (found["plain"].owner, found["plain"].class_)
    assert found["mine"].marks == found["plain"].marks
    told = docker.gpukeeper("explain", "mine", policy=policy())
    assert told.code == 0, told
    assert "ds01.project=vision" in told.out
    assert "ds01.gpu.slots=2" in told.out
    assert "$(touch /tmp/owned)" in told.out
    assert "\x1b" not in told.out + told.err
    for wanted, names in (
        ("ds01.project=vision", {"mine"}),
        ("ds01.project=vis*", {"mine"}),
        ("ds01.project=nlp", set()),
    ):
        ran = docker.gpukeeper("plan", "--label", wanted, "--json", policy=policy())
        decided = [one for place in json.loads(ran.out)["places"] for one in place["decisions"]]
        assert {one["seen"]["ref"]["name"] for one in decided} == names
