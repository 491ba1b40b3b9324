"""The demo: deterministic by seed, touches nothing, and ends with what was reclaimed and why."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.fleet import Fleet, hear_ctrl_c


def test_the_same_seed_gives_the_same_week(fleet: Fleet) -> None:
    one = fleet.run("demo", "--seed", "7", "--days", "1", "--once", "--json")
    two = fleet.run("demo", "--seed", "7", "--days", "1", "--once", "--json")
    assert one.code == two.code == 0, one.err
    assert one.out == two.out
    assert one.json()["schema"] == "gpukeeper/demo/v1"
    assert one.json()["reclaimed"] > 10
    assert not fleet.state.exists()


def test_it_ends_with_what_was_reclaimed_and_why(fleet: Fleet) -> None:
    ran = fleet.run("demo", "--days", "1", "--once")
    assert ran.code == 0
    assert "RULE" in ran.out
    assert "Nothing was changed on this machine" in ran.out


# Ctrl-C in the middle of the week, at a moment that is always the same: after its first pass.
INTERRUPTED = """
import signal
from gpukeeper.wiring import demo
from gpukeeper.__main__ import run
play = demo.play
demo.play = lambda seed, length: play(seed, length, lambda report: signal.raise_signal(signal.SIGINT))
run()
"""


def test_ctrl_c_is_a_sentence_and_130_without_a_traceback(fleet: Fleet) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "demo", "--once"],
        env=fleet.env(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=hear_ctrl_c,
    )
    assert (ran.returncode, ran.stdout) == (130, ""), ran.stderr
    assert ran.stderr == "Interrupted. The next pass inspects any open step first.\n"
