"""`gpukeeper doctor`: an address proves nothing; what does not answer is a problem."""

from __future__ import annotations

from pathlib import Path

from tests.cli.fleet import Fleet


def test_an_engine_that_does_not_answer_is_a_problem(fleet: Fleet, tmp_path: Path) -> None:
    ran = fleet.run("doctor", DOCKER_HOST=f"unix://{tmp_path}/nobody")
    (line,) = [line for line in ran.out.splitlines() if line.split()[1] == "docker"]
    assert line.startswith("problem")
    assert "No such file or directory; is it running?" in line
    assert ran.code == 1


def test_an_address_that_is_none_is_a_problem(fleet: Fleet) -> None:
    ran = fleet.run("doctor", "--json", DOCKER_HOST="ssh://node-3")
    (found,) = [one for one in ran.json()["findings"] if one["about"] == "docker"]
    assert found["verdict"] == "problem"
    assert "is not unix://PATH or tcp://HOST:PORT" in found["words"]
