"""Warnings reach people where they sit, and leave nothing behind; a planted link leads nowhere."""

from __future__ import annotations

from pathlib import Path

from tests.real.docker import programs
from tests.real.docker.harness import MINE, Harness
from tests.real.docker.private_engine import DockerEngine


def due_to_be_warned(engine: DockerEngine, name: str, **changes: object) -> Harness:
    harness = Harness(engine, **{"limits": {"max_runtime": "2h", "idle": "none"}, **changes})
    harness.again()
    harness.later(hours=1, minutes=30)
    return harness


def changes_in(engine: DockerEngine, name: str) -> object:
    return engine.api.must("GET", f"/containers/{name}/changes")


def screen(engine: DockerEngine, name: str) -> str:
    """What a container with a terminal printed, our words on that terminal included."""
    return bytes(engine.api.call("GET", f"/containers/{name}/logs", query={"stdout": 1}).raw).decode("utf-8", "replace")


def test_a_terminal_inside_shows_the_warning_and_no_file_is_written(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, tty=True, cmd=programs.trapping_shell())
    before = changes_in(docker, "mine")
    harness = due_to_be_warned(docker, "mine")
    harness.again()
    docker.until(lambda: "will be stopped" in screen(docker, "mine"), "the warning is on the screen")
    assert "[gpukeeper]" in screen(docker, "mine")
    assert changes_in(docker, "mine") == before
    assert harness.warnings("mine")[-1].delivered
    assert docker.state("mine") == "running"


def test_without_a_terminal_it_is_undelivered_and_the_stop_waits_longer(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    late = {"runtime": ["50%"], "lead": "10m", "undelivered": "10m"}
    harness = due_to_be_warned(docker, "mine", warnings=late)
    harness.later(minutes=35)
    harness.again()
    assert not harness.warnings("mine")[-1].delivered
    harness.later(minutes=15)
    harness.again()
    assert docker.state("mine") == "running"
    harness.later(minutes=10)
    harness.again()
    assert docker.state("mine") == "exited"


def test_a_file_in_place_of_a_terminal_is_not_written_to(docker: DockerEngine, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    redirected = ["sh", "-c", "exec </out/f >/out/f 2>&1; trap 'exit 0' 15; while sleep 1 & wait $!; do :; done"]
    (tmp_path / "f").write_text("")
    docker.run("mine", gpus=[0], labels=MINE, cmd=redirected, binds=[f"{tmp_path}:/out"])
    harness = due_to_be_warned(docker, "mine")
    harness.again()
    assert not harness.warnings("mine")[-1].delivered
    assert (tmp_path / "f").read_text() == ""


def test_links_planted_where_terminals_are_lead_nowhere(docker: DockerEngine, tmp_path: Path) -> None:
    """Opened by name from outside they would be resolved on the host."""
    target = tmp_path / "precious"
    target.write_text("untouched")
    plant = "cd /dev; rm -f console tty; ln -s {0} console; ln -s {0} tty; rm -rf pts; ln -s {1} pts; exec sleep 1000"
    docker.run("evil", gpus=[0], labels=MINE, cmd=["sh", "-c", plant.format(target, tmp_path)])
    harness = due_to_be_warned(docker, "evil")
    harness.again()
    assert harness.warnings("evil")
    assert target.read_text() == "untouched"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["precious"]


def test_the_warning_shows_what_would_be_lost(docker: DockerEngine) -> None:
    site = "/usr/lib/python3/site-packages"
    work = f"mkdir -p {site}/flashy-2.1.dist-info; echo x > {site}/flashy-2.1.dist-info/METADATA; "
    shell = programs.trapping_shell()
    docker.run("mine", gpus=[0], labels=MINE, rm=True, tty=True, cmd=["sh", "-c", work + shell[2]])
    docker.until(lambda: docker.output("mine", ["ls", site])[0] == 0, "it installed something")
    harness = due_to_be_warned(docker, "mine")
    harness.again()
    assert "flashy 2.1" in harness.warnings("mine")[-1].message


def test_a_paused_container_does_not_block_the_warning(docker: DockerEngine) -> None:
    docker.run("frozen", gpus=[0], labels=MINE, tty=True, cmd=programs.trapping_shell())
    docker.pause_container("frozen")
    harness = due_to_be_warned(docker, "frozen")
    harness.again()
    assert harness.warnings("frozen")
    assert docker.state("frozen") == "paused"
