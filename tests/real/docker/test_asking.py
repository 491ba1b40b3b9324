"""What people ask the daemon for, with the rights that the kernel says they have."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.real.docker import programs
from tests.real.docker.harness import MINE, SOMEBODY, SOMEBODY_ELSE, policy
from tests.real.docker.private_engine import DockerEngine


@contextmanager
def daemon(engine: DockerEngine, **changes: Any) -> Iterator[Path]:
    """`serve`, and where it listens."""
    folder = Path(tempfile.mkdtemp(prefix="gkask-", dir="/tmp"))
    folder.chmod(0o755)
    path = folder / "socket"
    child = engine.popen("serve", policy=policy(**changes), env={"GPUKEEPER_SOCKET": str(path)})
    try:
        engine.until(path.exists, "the daemon listens")
        yield path
        child.terminate()
        child.communicate(timeout=30)
        assert child.returncode == 0
    finally:
        child.kill()
        shutil.rmtree(folder)


def ask(path: Path, who: str, verb: str, workload: str, **more: object) -> dict[str, Any]:
    """One request, by this person: the kernel tells the daemon who connects."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        os.seteuid(pwd.getpwnam(who).pw_uid)
        try:
            connection.connect(str(path))
        finally:
            os.seteuid(0)
        connection.sendall(json.dumps({"verb": verb, "workload": workload, **more}).encode() + b"\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    found: dict[str, Any] = json.loads(answer)
    if found.get("exit_code") == 11:  # a pass of the daemon itself is at work; people ask again, too
        time.sleep(0.5)
        return ask(path, who, verb, workload, **more)
    return found


def test_an_owner_holds_and_releases_through_the_daemon(docker: DockerEngine) -> None:
    """Held, it outlives its retention; released, it goes with the next pass."""
    docker.run("mine", gpus=[0], labels=MINE, cmd=["sh", "-c", "exit 0"])
    docker.until(lambda: docker.state("mine") == "exited", "it ended")
    short = {"succeeded": "8s", "failed": "1h", "stopped": "8s"}
    with daemon(docker, retention=short, schedule={"every": "5s"}) as path:
        held = ask(path, SOMEBODY, "hold", "mine", seconds=3600.0)
        assert held["done"], held
        docker.until(lambda: _age(docker, "mine") > 12, "its retention is over")
        assert docker.state("mine") == "exited"
        released = ask(path, SOMEBODY, "release", "mine")
        assert released["done"], released
        docker.until(lambda: docker.inspect("mine") is None, "it went")


def test_an_owner_stops_their_own_and_no_other_users_through_the_daemon(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=programs.trapping_shell())
    docker.run("theirs", gpus=[1], labels={"owner": SOMEBODY_ELSE}, cmd=programs.trapping_shell())
    with daemon(docker) as path:
        refused = ask(path, SOMEBODY, "stop", "theirs")
        assert not refused["done"]
        assert f"belongs to {SOMEBODY_ELSE}" in refused["words"]
        assert docker.state("theirs") == "running"
        done = ask(path, SOMEBODY, "stop", "mine")
        assert done["done"], done
        assert docker.containers() == {"mine": "exited", "theirs": "running"}
        assert not ask(path, SOMEBODY, "pause", "")["done"]


@pytest.mark.parametrize("verb", ["hold", "stop", "remove", "release"])
def test_what_is_not_there_is_refused_with_a_sentence(docker: DockerEngine, verb: str) -> None:
    docker.run("mine", gpus=[0], labels=MINE)
    arguments = ["workload", verb, "no-such-thing", *(["--yes"] if verb in ("stop", "remove") else [])]
    ran = docker.gpukeeper(*arguments, policy=policy())
    assert ran.code == 2, ran
    assert "no-such-thing" in ran.err
    assert docker.state("mine") == "running"


def test_a_pause_stops_every_pass_until_a_user_goes_on(docker: DockerEngine) -> None:
    docker.run("mine", gpus=[0], labels=MINE, cmd=["sh", "-c", "exit 0"])
    docker.until(lambda: docker.state("mine") == "exited", "it ended")
    text = policy(retention={"succeeded": "0s"})
    assert docker.gpukeeper("pause", policy=text).code == 0
    assert docker.gpukeeper("apply", "--yes", policy=text).code == 3
    assert docker.state("mine") == "exited"
    assert docker.gpukeeper("resume", policy=text).code == 0
    assert docker.gpukeeper("apply", "--yes", policy=text).code == 0
    assert docker.inspect("mine") is None


def _age(engine: DockerEngine, name: str) -> float:
    found = engine.inspect(name)
    assert found is not None
    return (datetime.now(UTC) - datetime.fromisoformat(found["State"]["FinishedAt"][:19] + "+00:00")).total_seconds()
