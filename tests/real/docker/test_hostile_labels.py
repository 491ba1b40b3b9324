"""Labels as an attacker writes them, on a real engine under a real `serve`: work goes on for everybody else.

Who may start containers may write any label. Each of these once stopped every pass, or ended the daemon.
"""

from __future__ import annotations

import json

import pytest

from tests.real.docker import programs
from tests.real.docker.harness import MINE, SOMEBODY
from tests.real.docker.private_engine import DockerEngine
from tests.real.docker.test_asking import ask, daemon

LONG = "9" * 65536  # durationpy needed a minute and more for it, at each look, with the event loop held up
LABELS = {
    "a number of 64 KB": {"gpukeeper.io/ttl": LONG, "gpukeeper.io/hold-until": LONG, "ds01.user": LONG},
    "times that no calendar has": {
        "gpukeeper.io/ttl": "999999999999999999w",
        "gpukeeper.io/hold-until": "9999-12-31T23:59:59-12:00",
    },
    "signs": {
        "gpukeeper.io/ttl": "{x}",
        "{x}": "{0}",
        "ds01.user": "[red]\x1b[2J\u2028",
        "ds01.gpu.uuid": "%s{}\u202e",
    },
}
SHORT = {"succeeded": "1s", "failed": "1s", "stopped": "1s"}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_an_overdue_one_is_stopped_and_a_hold_is_answered_beside_it(
    docker: DockerEngine, labels: dict[str, str]
) -> None:
    docker.run("hostile", gpus=[0], labels=labels, cmd=["true"])
    docker.until(lambda: docker.state("hostile") == "exited", "it ended")
    docker.run("overdue", gpus=[1], labels=MINE, cmd=programs.trapping_shell())
    docker.run("mine", gpus=[2], labels={**MINE, "role": "kept"}, cmd=programs.trapping_shell())
    with daemon(
        docker,
        limits={"idle": "none", "max_runtime": "3s", "grace": "1s", "hold_after_stop": "0s"},
        match=[{"class": "patient", "label": "role=kept"}],
        classes={"patient": {"idle": "none", "max_runtime": "100h"}},
        retention={"succeeded": "1d", "failed": "1d", "stopped": "1d"},
        warnings={"runtime": ["1%"], "lead": "0s", "undelivered": "0s"},
        schedule={"every": "5s"},
    ) as path:
        held = ask(path, SOMEBODY, "hold", "mine", seconds=3600.0)
        assert held["done"], held
        docker.until(lambda: docker.state("overdue") == "exited", "the overdue one was stopped", 120)
        assert docker.state("mine") == "running"
        assert docker.state("hostile") == "exited"  # its own marks cannot be read, so it is kept
        asked = ask(path, SOMEBODY, "release", "mine")
        assert asked["done"], asked


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_what_people_read_of_it_is_plain_text(docker: DockerEngine, labels: dict[str, str]) -> None:
    docker.run("hostile", gpus=[0], labels=labels, cmd=["true"])
    docker.until(lambda: docker.state("hostile") == "exited", "it ended")
    for verb in ("observe", "plan", "explain"):
        ran = docker.gpukeeper(verb, *(["hostile"] if verb == "explain" else []), policy="scope: {docker: {}}")
        assert "hostile" in ran.out + ran.err, ran
        shown = ran.out + ran.err
        assert "Traceback" not in shown
        assert [sign for sign in shown if not sign.isprintable() and sign != "\n"] == []
        assert max(map(len, shown.split("\n"))) < 2000, "64 KB of somebody's digits are nothing to read"
    told = docker.gpukeeper("plan", "--json", policy="scope: {docker: {}}")
    assert json.loads(told.out)
