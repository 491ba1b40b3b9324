"""`gpukeeper doctor`: an address proves nothing; what does not answer is a problem."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukeeper.interfaces.cli import doctor
from tests.cli.fleet import Fleet

NOBODY = 65534


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


def test_the_cleaner_of_the_machine_is_read_where_a_cluster_keeps_its_sessions(fleet: Fleet, tmp_path: Path) -> None:
    """Which one it is depends on the machine; that the folder counts does not."""
    (tmp_path / "short" / "ray").mkdir(parents=True)
    ran = fleet.run("doctor", "--json", RAY_TMPDIR=str(tmp_path / "short"))
    (found,) = [one for one in ran.json()["findings"] if one["about"] == "ray"]
    assert found["verdict"] == "ok"
    assert "this machine" in found["words"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """That everybody may read, as pytest's own is not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_who_is_not_root_is_told_what_cannot_be_seen(open_folder: Path) -> None:
    policy = open_folder / "policy.yaml"
    policy.write_text("mode: plan\nscope: {host: {}}\ntemporary: [{root: /tmp, names: ['tmp*']}]\n")
    assert "open files of other users cannot be read without root" in as_nobody(policy)
    policy.write_text("mode: plan\nscope: {docker: {}}\n")
    assert "cannot be seen" not in as_nobody(policy)


def as_nobody(policy: Path) -> str:
    """What is said about files to somebody who is not root."""
    doctor._files(policy)  # what it imports, a child without rights may not be able to read
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(theirs, repr(doctor._files(policy)).encode())
        except BaseException as problem:
            os.write(theirs, f"cannot be seen: {problem!r}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text
