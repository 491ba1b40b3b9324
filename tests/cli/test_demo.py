"""The demo: deterministic by seed, touches nothing, and ends with what was reclaimed and why."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.cli.fleet import Fleet, hear_ctrl_c
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow


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
    first = ran.out.splitlines()[:4]
    assert "a simulated fleet of 52 GPUs" in first[0]
    assert first[1].endswith("GPU-hours given back")
    assert first[2].endswith("of disk freed")
    assert first[3].startswith("  0 wrong removals")
    assert "Nothing was changed on this machine" in ran.out


def test_its_progress_is_one_line_for_each_day_where_no_screen_is(fleet: Fleet) -> None:
    assert fleet.run("demo", "--days", "2", "--once").err == "simulated: 1 of 2 days\n"
    assert fleet.run("demo", "--days", "2", "--once", "--json").err == ""


# Ctrl-C in the middle of the week, at a moment that is always the same: after its first pass.
INTERRUPTED = """
import signal
from gpukeeper.wiring import demo
from gpukeeper.__main__ import run
play = demo.play
demo.play = lambda seed, length, _: play(seed, length, lambda report: signal.raise_signal(signal.SIGINT))
run()
"""


def test_ctrl_c_is_a_sentence_and_130_without_a_traceback(fleet: Fleet) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "demo", "--once"],
        env=fleet.env(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        preexec_fn=hear_ctrl_c,
    )
    assert (ran.returncode, ran.stdout) == (130, ""), ran.stderr
    assert ran.stderr == "Interrupted. The next pass inspects any open step first.\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("8088",), "To serve one: gpukeeper demo --web 8088"),
        (("--web", "--json"), "cannot be combined with --json or --once"),
        (("--web", "--once"), "cannot be combined with --json or --once"),
        (("--web", "70000"), "Input should be less than or equal to 65535"),
    ],
)
def test_options_that_do_not_fit_are_refused(fleet: Fleet, words: tuple[str, ...], sentence: str) -> None:
    ran = fleet.run("demo", *words)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err


def test_a_port_that_is_taken_is_reported_before_anything_is_simulated(fleet: Fleet) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ran = fleet.run("demo", "--web", str(port))
    assert (ran.code, ran.out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in ran.err
    assert "Nothing was started. Choose another port" in ran.err


MISSING = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "uvicorn" else find_spec(name, *more)
from gpukeeper.__main__ import run
run()
"""


def test_a_missing_extra_is_a_sentence_with_what_to_do(fleet: Fleet) -> None:
    command = [sys.executable, "-c", MISSING, "demo", "--web", "0"]
    ran = subprocess.run(command, env=fleet.env(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "The dashboard needs an extra. In a clone of gpukeeper: pip install '.[web]'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_dashboard_of_the_demo_is_served_and_ends_without_a_trace(fleet: Fleet, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    demo = fleet.start("demo", "--web", "0", TMPDIR=str(temporary))
    try:
        assert demo.stdout is not None
        printed = ""
        for line in demo.stdout:
            printed += line
            if "Press Ctrl-C" in line:
                break
        url = next(word for word in printed.split() if word.startswith("http://"))
        with urllib.request.urlopen(url, timeout=PATIENCE) as reply:
            page = reply.read().decode()
        assert "of a simulated fleet" in page
        assert list(temporary.iterdir()) != []
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE) == 0
    finally:
        demo.kill()
        _, err = demo.communicate()
    assert err == ""
    assert printed.count("/login/") == 2
    assert list(temporary.iterdir()) == []
    assert not fleet.state.exists()
