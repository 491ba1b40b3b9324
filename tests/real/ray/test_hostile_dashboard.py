"""A program that calls itself a raylet, of an ordinary user, and a dashboard that answers what it likes. No Ray needed.

Its names and states are words of an attacker: they are shown as plain text, keep what they speak of, and end nothing.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.engines import require
from tests.real.host.machine import AS_NOBODY, Host, can_be_nobody, until
from tests.unit.platforms.ray.test_state import NODE, SESSION, Dashboard, served

EVIL = "{x}{0}%s[red]\x1b[2J\u2028"
ROWS: dict[str, list[dict[str, Any]]] = {
    "jobs": [{"status": EVIL, "job_id": None, "submission_id": EVIL}],
    "actors": [{"actor_id": "a", "class_name": EVIL, "state": "ALIVE", "node_id": NODE}],
    "tasks": [{"task_id": "t", "name": EVIL, "state": "RUNNING", "node_id": NODE}],
    "placement_groups": [{"state": "CREATED", "name": EVIL, "bundles": [{"node_id": NODE}]}],
    "nodes": [{"node_id": NODE, "node_ip": "10.0.0.1", "state": EVIL, "is_head_node": True}],
}
CALLED = 'exec -a /x/raylet bash -c "echo ready; read -r line" "$@"'


@contextmanager
def raylet(folder: Path, address: str) -> Iterator[int]:
    """argv[0] is the name it gave itself."""
    said = [f"--session_dir={folder}/ray/{SESSION}", f"--session-name={SESSION}", f"--node_id={NODE}"]
    command = [*AS_NOBODY, "bash", "-c", CALLED, "-", *said, f"--webui={address.removeprefix('http://')}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield child.pid
        child.stdin.close()


def real_raylets() -> list[Path]:
    """Of tests that run at the same time. The one above is called bash."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            found += [comm] if comm.read_bytes() == b"raylet\n" else []
    return found


@pytest.fixture
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    require("root", can_be_nobody())
    dashboard = Dashboard()
    dashboard.rows[request.param] = ROWS[request.param]
    made = Host(tmp_path, "")
    made.policy.write_text(json.dumps({"mode": "enforce", "scope": {"ray": {}}, "schedule": {"every": "5s"}}))
    with (Path(tempfile.gettempdir()) / "gpukeeper-hostile-raylet.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two of them at once, in two workers of pytest, are seen as one machine's
        beside = real_raylets()
        with served(dashboard.answer) as dashboard.url, raylet(tmp_path, dashboard.url):
            yield made
    if not beside and not real_raylets():  # a busy one on this machine is reason enough to ask nobody else
        assert f"/api/v0/{request.param}" in " ".join(dashboard.asked), "nobody read the words"


@pytest.mark.parametrize("host", ROWS, indirect=True)
def test_a_plan_shows_its_words_as_plain_text(host: Host) -> None:
    for words in (("plan", "--verbose"), ("plan", "--json")):
        ran = host.run(*words, "--platform", "ray")
        assert "Traceback" not in ran.err, ran.err
        assert ran.code == 0, ran
        assert [sign for sign in ran.out + ran.err if not sign.isprintable() and sign != "\n"] == []
    (place,) = json.loads(ran.out)["places"]
    nodes = [one for one in place["decisions"] if one["seen"]["ref"]["kind"] == "node"]
    assert nodes  # a Ray of another test may run on this machine, too
    assert {one["action"] for one in nodes} == {"keep"}


@pytest.mark.parametrize("host", ["jobs"], indirect=True)
def test_serve_goes_on_pass_after_pass(host: Host) -> None:
    with host.start("serve") as serving:
        try:
            until(lambda: len(host.lines("pass")) >= 3, "three passes")
            assert serving.poll() is None
        finally:
            serving.terminate()
            _out, err = serving.communicate(timeout=30)
    assert "Traceback" not in err
    assert serving.returncode == 0
    assert [line for line in host.lines("pass") if line.get("failed")] == []
