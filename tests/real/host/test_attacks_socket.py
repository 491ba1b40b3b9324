"""Attacks by an ordinary user on the socket of a real `gpukeeper serve` that runs as root."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.interfaces.daemon.server import RateLimits
from tests.engines import require
from tests.real.host.machine import A_WHILE, AS_NOBODY, NOBODY, Host, can_be_nobody, sees_everybody, until

OTHER = 65533  # somebody else
TREES = """
temporary: [{root: ROOT, names: ["tmp*"], above: 1TB, older_than: AGE, under_pressure: 0s}]
schedule: {every: 1s}
"""
# Sends one line and prints the answer, with the rights that it was started with.
ASK = """
import contextlib, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
with contextlib.suppress(BrokenPipeError):  # refused before it was read
    s.sendall(sys.stdin.buffer.read())
with contextlib.suppress(ConnectionResetError):
    while part := s.recv(65536):
        sys.stdout.write(part.decode())
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody can reach, as /tmp is."""
    require("root", can_be_nobody() and sees_everybody())
    folder = Path(tempfile.mkdtemp(prefix="gpukeeper-attack-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


class Attacked(Host):
    """A daemon of root, and an ordinary user who asks it for things."""

    def __init__(self, folder: Path, policy: str, mode: str = "plan") -> None:
        self.mode = mode
        super().__init__(folder, policy)
        self.root.chmod(0o1777)
        self.socket = folder / "socket"

    def write_policy(self, policy: str) -> None:
        super().write_policy(policy)
        self.policy.write_text(self.policy.read_text().replace("mode: enforce", f"mode: {self.mode}"))

    def mine(self, name: str) -> Path:
        """A tree of the attacker."""
        path = self.tree(name)
        for one in (path, *path.rglob("*")):
            os.chown(one, NOBODY, NOBODY)
        return path

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[str]]:
        child = self.start("serve", before=("env", f"GPUKEEPER_SOCKET={self.socket}"))
        try:
            until(self.socket.exists, "it listens")
            until(lambda: self.lines("pass") != [], "a first pass")
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            child.communicate(timeout=60)

    def ask(self, *, as_root: bool = False, **request: Any) -> dict[str, Any]:
        command = [*(() if as_root else AS_NOBODY), sys.executable, "-c", ASK, str(self.socket)]
        line = json.dumps(request) + "\n"
        done = subprocess.run(command, input=line, capture_output=True, text=True, check=True, timeout=120)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def remove(self, path: Path, **more: Any) -> dict[str, Any]:
        """As the client does it for a person who confirms everything. Repeated while the processes and namespaces of
        other tests keep the daemon from knowing what is in use."""
        end = time.monotonic() + A_WHILE
        while True:
            answer = self.ask(verb="remove", workload=str(path), **more)
            if token := answer.get("token"):
                answer = self.ask(verb="remove", workload=str(path), token=token)
            if "whether it is in use is unknown" not in answer["words"] or time.monotonic() > end:
                return answer


@pytest.fixture
def attacked(public: Path) -> Attacked:
    return Attacked(public, TREES.replace("AGE", "0s"))


def test_a_confirmation_cannot_be_claimed(attacked: Attacked) -> None:
    path = attacked.mine("tmp-mine")
    with attacked.serving():
        answer = attacked.ask(verb="remove", workload=str(path), attended=True)
        assert (answer["done"], path.exists()) == (False, True), answer
        assert "invalid request" in answer["words"]
        for forged in ("x" * 32, "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"):
            answer = attacked.ask(verb="remove", workload=str(path), token=forged)
            assert (answer["done"], path.exists()) == (False, True), answer
    assert attacked.lines("intent") == []


def test_a_tree_with_another_users_directory_in_it_is_not_removed(attacked: Attacked) -> None:
    """The top is the attacker's, so a check of the top alone would let it go. `rm -rf` as that user fails."""
    path = attacked.mine("tmp-mixed")
    theirs = path / "below" / "theirs"
    theirs.mkdir()
    (theirs / "results").write_text("a week of work")
    for one in (theirs, theirs / "results"):
        os.chown(one, OTHER, OTHER)
    tried = subprocess.run([*AS_NOBODY, "rm", "-rf", str(path)], capture_output=True, check=False)
    assert tried.returncode != 0
    with attacked.serving():
        for claim in ({}, {"attended": True}, {"confirm": True}):
            answer = attacked.remove(path, **claim)
            assert not answer["done"], answer
    assert (theirs / "results").read_text() == "a week of work"
    assert attacked.lines("outcome") == []


def test_a_tree_in_a_directory_that_the_user_may_not_write_to_is_not_removed(attacked: Attacked) -> None:
    path = attacked.mine("tmp-mine")
    attacked.root.chmod(0o755)
    with attacked.serving():
        answer = attacked.remove(path)
    assert (answer["done"], path.exists()) == (False, True), answer
    assert "may not write to its directory" in answer["words"]


def test_the_ages_of_the_policy_apply_to_a_users_request(public: Path) -> None:
    attacked = Attacked(public, TREES.replace("AGE", "1h"))
    path = attacked.mine("tmp-young")
    with attacked.serving():
        answer = attacked.remove(path)
    assert (answer["done"], path.exists()) == (False, True), answer
    assert "allowed 1h" in answer["words"]


def test_ones_own_tree_goes_after_a_confirmation_and_a_token_works_once(attacked: Attacked) -> None:
    first, second = attacked.mine("tmp-one"), attacked.mine("tmp-two")
    with attacked.serving():
        asked = attacked.ask(verb="remove", workload=str(first))
        assert (asked["done"], first.exists()) == (False, True)
        assert str(first) in asked["words"]
        stolen = attacked.ask(as_root=True, verb="remove", workload=str(first), token=asked["token"])
        assert (stolen["done"], first.exists()) == (False, True), stolen
        done = attacked.ask(verb="remove", workload=str(second), token=asked["token"])
        assert (done["done"], first.exists(), second.exists()) == (True, False, True), done
        again = attacked.ask(verb="remove", workload=str(second), token=asked["token"])
        assert (again["done"], second.exists()) == (False, True), again


def test_what_changed_since_the_question_is_left_alone(attacked: Attacked) -> None:
    path = attacked.mine("tmp-mine")
    with attacked.serving():
        asked = attacked.ask(verb="remove", workload=str(path))
        (path / "below" / "new").write_text("from somebody else, written after the question")
        answer = attacked.ask(verb="remove", workload=str(path), token=asked["token"])
    assert (answer["done"], path.exists()) == (False, True), answer
    assert "has changed since the confirmation was requested" in answer["words"]


# Using it up

# Opens N connections, sends the given text on each, counts the answers and keeps the connections open.
FLOOD = """
import socket, sys
held = []
for _ in range(int(sys.argv[2])):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(5)
    try:
        s.connect(sys.argv[1])
        s.sendall(sys.argv[3].encode())
    except OSError:
        pass
    held.append(s)
print("held", flush=True)
answers = []
for s in held:
    try:
        answers.append(s.recv(65536).decode())
    except OSError:
        pass
refused = sum("too many concurrent requests" in one for one in answers)
print(refused, sum(map(bool, answers)) - refused, flush=True)
sys.stdin.read()
"""
EACH = RateLimits().each
REQUEST = json.dumps({"verb": "hold", "workload": "no-such-thing", "seconds": 60}) + "\n"


@contextmanager
def flooding(attacked: Attacked, connections: int, words: str) -> Iterator[subprocess.Popen[str]]:
    command = [*AS_NOBODY, sys.executable, "-c", FLOOD, str(attacked.socket), str(connections), words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout.readline() == "held\n"
        yield child
        child.communicate(timeout=60)


@pytest.mark.parametrize("words", ["", REQUEST], ids=["idle", "requests"])
def test_a_flood_of_connections_does_not_stop_passes_nor_an_admin(attacked: Attacked, words: str) -> None:
    with attacked.serving() as daemon:
        limit = min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 50)
        with flooding(attacked, limit, words) as flood:
            assert attacked.ask(as_root=True, verb="pause", reason="under attack")["done"]
            passes = len(attacked.lines("pass"))
            until(lambda: len(attacked.lines("pass")) > passes + 1, "passes go on")
            assert attacked.ask(as_root=True, verb="resume")["done"]
            assert flood.stdout is not None
            refused, served = map(int, flood.stdout.readline().split())
            assert refused > 0
            assert words or served <= EACH  # idle connections are limited per user
        daemon.send_signal(signal.SIGTERM)
        _, said = daemon.communicate(timeout=60)
    assert "Traceback" not in said
    assert said.count("\n") < 20, said


def test_after_a_flood_the_same_user_is_served_again(attacked: Attacked) -> None:
    path = attacked.mine("tmp-mine")
    with attacked.serving():
        with flooding(attacked, 50, ""):
            assert (
                "too many concurrent requests of uid"
                in attacked.ask(verb="hold", workload=str(path), seconds=60)["words"]
            )
        until(lambda: bool(attacked.ask(verb="hold", workload=str(path), seconds=60)["done"]), "served again")
