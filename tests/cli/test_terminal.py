"""On a narrow terminal, with and without colours: what every verb shows is whole, and fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpukeeper.model.subject import Outcome, State
from tests.cli.fleet import Fleet, ago
from tests.cli.terminal import on_terminal
from tests.cli.test_explain import PATIENT, key_of, measured

COLUMNS = 60
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LONG = "jupyter-of-ann-for-the-paper"
UUID = "GPU-8f6a2c1e-0b44-4a7e-9d1c-2f5b7a90c3de"
DUE = "train-llama-8b-seed-42"


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A fleet that a pass was made on, with work in every state and an acceptance run."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    fleet.write_policy(PATIENT)
    fleet.add(LONG, state=State.RUNNING, started=ago(hours=10), devices=(UUID,))
    fleet.add("eval", state=State.RUNNING, started=ago(hours=60), devices=("GPU-1", "GPU-2"))
    fleet.ended("failed-sweep", days=9, outcome=Outcome.FAILED, owner="bob")
    measured(fleet, key_of(fleet, LONG), minutes=40)
    assert fleet.run("apply", "--yes").code == 0
    fleet.ended(DUE, days=2)
    fleet.run("accept", "--device", "simulated", "--ranks", "3", "--check", "gemm,exact")
    return fleet


VERBS = {
    "plan": (DUE,),
    "plan --verbose": (LONG, DUE),
    "observe": (LONG, DUE),
    "observe --gpus": (LONG, UUID),
    "observe --waste": (),
    "workload list": (LONG, DUE),
    f"workload show {LONG}": (LONG, UUID),
    f"explain {LONG}": (LONG, UUID),
    "explain eval": ("GPU-1,",),
    "ledger list": (LONG, "failed-sweep"),
    "ledger totals": ("bob",),
    "report": ("bob",),
    "ledger status": (),
    "ledger show 1": (),
    "check list": ("collectives_network",),
    "check show gemm": ("gemm.dtypes",),
    "node list": (),
    "node register": (),
    "accept list": (),
    "accept --device simulated --ranks 3 --check gemm,exact": (),
    "policy show": ("classes.devcontainer.hold_after_stop",),
    "policy show classes.managed": ("classes.managed.idle_when_large",),
    "policy try --owner ann": ("example",),
    "policy show --owner ann": ("hold_after_stop",),
    "doctor": (),
    "demo --once --days 1": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", VERBS)
def test_every_table_fits_and_every_name_can_be_copied(lived: Fleet, words: str) -> None:
    code, shown = on_terminal(words.split(), lived.env(TERM="xterm"), COLUMNS)
    assert code in (0, 1, 5), shown
    lines = COLOUR.sub("", shown).replace("\r", "\n").split("\n")
    too_long = [line for line in lines if len(line) > COLUMNS and len(line.split()) > 1]
    assert not too_long
    whole = {word.rpartition("/")[2] for line in lines for word in line.split()}
    assert not [name for name in VERBS[words] if name not in whole]


def test_columns_overrides_the_width_of_the_terminal(lived: Fleet) -> None:
    _, narrow = on_terminal(["workload", "list"], lived.env(TERM="xterm", COLUMNS="60"), 200)
    _, wide = on_terminal(["workload", "list"], lived.env(TERM="xterm"), 200)
    assert len(narrow.splitlines()) > len(wide.splitlines())


def test_in_a_pipe_each_row_is_one_line_without_colours(lived: Fleet) -> None:
    out = lived.run("workload", "list", COLUMNS="40", TERM="xterm").out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 4
    (line,) = [line for line in out.splitlines() if DUE in line]
    assert line.startswith("remove ")
    assert "succeeded 2d ago, kept for 1d" in line


RED = "\x1b[31mremove\x1b[0m"


@pytest.mark.parametrize(
    ("environ", "terminal", "pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_colours(lived: Fleet, environ: dict[str, str], terminal: bool, pipe: bool) -> None:
    environ = {"TERM": "xterm", **environ}
    _, shown = on_terminal(["plan"], lived.env(**environ), 120)
    assert (RED in shown) is terminal
    assert terminal or "\x1b" not in shown
    out = lived.run("plan", **environ).out
    assert (RED in out) is pipe
    assert pipe or "\x1b" not in out


def test_json_has_no_colours(lived: Fleet) -> None:
    assert lived.run("plan", "--json", FORCE_COLOR="1").json()["schema"] == "gpukeeper/plan/v1"


def test_a_dumb_terminal_is_not_drawn_on(lived: Fleet, tmp_path: Path) -> None:
    words = ["accept", "--device", "simulated", "--ranks", "2", "--check", "gemm", "--report-dir", str(tmp_path)]
    _, shown = on_terminal(words, lived.env(TERM="dumb"), 80)
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "[COMPUTE]" in shown
