"""What Prometheus gets from the real command: over HTTP from `serve`, as a file from `plan` and `apply`."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from gpukeeper.ledger.files import ledger_path
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.model.event import NodeTested
from gpukeeper.model.gpu import Grade
from gpukeeper.model.subject import Ref, State
from tests import engines
from tests.cli.fleet import Fleet, ago
from tests.docs.markdown import ROOT
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

ALERTS = ROOT / "examples" / "prometheus" / "ray-alerts.yaml"
KNOWN = 'gpukeeper_gpu_hours_returned_total use base unit "seconds"'  # GPU-hours are what people count in
HOST = """\
preset: development
mode: plan
scope: {host: {}}
temporary: [{root: TREES, names: ["tmp*"], above: 0, older_than: 1h}]
"""


@contextmanager
def serving(fleet: Fleet, *flags: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    daemon = fleet.start("serve", *flags, **env)
    try:
        yield daemon
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=PATIENCE)


def page_of(daemon: subprocess.Popen[str]) -> str:
    """Where it says that its metrics are."""
    assert daemon.stderr is not None
    said = []
    for line in daemon.stderr:
        said.append(line)
        if found := re.search(r"metrics on (http://\S+)", line):
            return found[1]
    raise AssertionError("".join(said))


def got(page: str) -> str:
    with urllib.request.urlopen(page, timeout=PATIENCE) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text: str = answer.read().decode()
    return text


def of_this_machine(tmp_path: Path) -> Fleet:
    """No fleet of files, but the machine itself, with one tree of its own."""
    tree = tmp_path / "trees" / "tmpabc"
    tree.mkdir(parents=True)
    (tree / "checkpoint").write_bytes(b"x" * 100_000)
    return Fleet(tmp_path, HOST.replace("TREES", str(tree.parent)))


def series(text: str) -> set[str]:
    return set(re.findall(r"^(gpukeeper_\w+)[ {]", text, re.MULTILINE))


def test_serve_tells_on_loopback_what_its_passes_did(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    with serving(fleet, "--metrics", "0") as daemon:
        page = page_of(daemon)
        assert page.startswith("http://127.0.0.1:")
        assert daemon.stdout is not None
        assert "Z reclaimed  docker/node-1/old" in daemon.stdout.readline()
        text = got(page)
    assert 'gpukeeper_reclaimed_total{action="remove",kind="container",rule="retention"} 1.0' in text
    assert "gpukeeper_last_pass_timestamp_seconds" in series(text)
    assert "process_resident_memory_bytes" in text
    assert "gpukeeper_leader" not in text


def test_serve_listens_on_no_port_unless_asked(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    with serving(fleet) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        sockets = set()
        for one in Path(f"/proc/{daemon.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(str(one.readlink()))
        listening = {f"socket:[{line.split()[9]}]" for line in tcp() if line.split()[3] == "0A"}
    assert not sockets & listening


def tcp() -> list[str]:
    return [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]


def test_a_port_that_is_taken_ends_serve_with_2(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = fleet.run("serve", "--metrics", str(taken.getsockname()[1]))
    assert ran.code == 2
    assert "cannot listen on" in ran.err
    assert "Use another one with --metrics." in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "--metrics", "yes"), '--metrics "yes" is not PORT or ADDRESS:PORT'),
        (("plan", "--textfile", "metrics.txt"), "reads only files with the suffix .prom"),
        (("plan", "--textfile", "/nowhere/at/all/gpukeeper.prom"), "the directory /nowhere/at/all does not exist"),
        (("apply", "--yes", "--kind", "tree", "--textfile", "gpukeeper.prom"), "cannot be combined with filters"),
    ],
)
def test_wrong_usage_reports_it_before_anything_is_done(fleet: Fleet, words: tuple[str, ...], said: str) -> None:
    fleet.ended("old", days=2)
    ran = fleet.run(*words)
    assert ran.code == 2
    assert said in ran.err
    assert fleet.names() == {"old"}


@pytest.mark.parametrize("words", [("serve", "--metrics", "0"), ("plan", "--textfile", "gpukeeper.prom")])
def test_without_the_extra_it_shows_what_to_install(fleet: Fleet, words: tuple[str, ...]) -> None:
    program = "import sys; sys.modules['prometheus_client'] = None; from gpukeeper.__main__ import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=fleet.env(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=fleet.folder,
    )
    assert done.returncode == 2, done.stderr
    assert "pip install '.[metrics]'" in done.stderr


def test_apply_writes_a_file_that_counts_on(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "gpukeeper.prom"
    for number in (1, 2):
        fleet.ended(f"old-{number}", days=2)
        assert fleet.run("apply", "--yes", "--textfile", str(path)).code == 0
        assert f'rule="retention"}} {number}.0' in path.read_text()
    before = path.read_text()
    assert fleet.run("plan", "--textfile", str(path)).code == 0
    assert "gpukeeper_acting 0.0" in path.read_text()
    assert "gpukeeper_acting 1.0" in before
    assert 'rule="retention"} 2.0' in path.read_text()
    assert "process_" not in before


def test_a_file_has_the_gpus_their_owners_and_the_events_of_the_day(fleet: Fleet, tmp_path: Path) -> None:
    fleet.add("train", state=State.RUNNING, owner="ann", devices=("GPU-0", "GPU-1"))
    path = tmp_path / "gpukeeper.prom"
    for words in (("plan",), ("apply", "--yes")):
        path.unlink(missing_ok=True)
        assert fleet.run(*words, "--textfile", str(path)).code == 0
        text = path.read_text()
        assert 'gpukeeper_owner_gpus{owner="ann",state="held"} 2.0' in text
        assert text.count("gpukeeper_gpu_holder{") == 2
        assert 'gpukeeper_events_last_day{type="outcome"} 0.0' in text
        assert "gpukeeper_image_bytes" not in series(text), "an engine is not asked to walk its disk for a file"


def test_a_pass_that_did_not_happen_leaves_the_old_file(fleet: Fleet, tmp_path: Path) -> None:
    """So that its time tells how long ago the last one was."""
    path = tmp_path / "gpukeeper.prom"
    fleet.run("apply", "--yes", "--textfile", str(path))
    before = path.read_text()
    fleet.write_policy("mode: sometimes\n")
    assert fleet.run("apply", "--yes", "--textfile", str(path)).code == 10
    assert path.read_text() == before


def test_promtool_finds_nothing_to_mend_in_the_file(tmp_path: Path) -> None:
    engines.require("promtool", engines.has_promtool())
    fleet, path = of_this_machine(tmp_path), tmp_path / "gpukeeper.prom"
    assert fleet.run("plan", "--textfile", str(path), GPUKEEPER_FLEET="").code == 0
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=path.read_text(),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert [line for line in (done.stdout + done.stderr).splitlines() if KNOWN not in line] == []


def test_every_series_that_the_alerts_ask_for_is_told_of_a_real_machine(tmp_path: Path) -> None:
    """Those of nodes and counters may have no value here; they are announced, so that their names cannot drift."""
    rules = [rule for group in YAML(typ="safe").load(ALERTS)["groups"] for rule in group["rules"]]
    asked = {name for rule in rules for name in re.findall(r"\bgpukeeper_\w+", rule["expr"])} - {"gpukeeper_leader"}
    fleet = of_this_machine(tmp_path)
    with serving(fleet, "--metrics", "0", GPUKEEPER_FLEET="") as daemon:
        page = page_of(daemon)
        text = got(page)
        while "gpukeeper_last_pass_timestamp_seconds" not in series(text):
            text = got(page)
    announced = set(re.findall(r"^# TYPE (gpukeeper_\w+) ", text, re.MULTILINE))
    assert asked <= announced
    assert {"gpukeeper_disk_used_ratio", "gpukeeper_disk_size_bytes", "gpukeeper_not_measured"} <= series(text)
    assert 'gpukeeper_trees{category="temporary"} 1.0' in text


def test_a_directory_of_sessions_makes_this_machine_a_node_with_every_series_its_alerts_ask_for(tmp_path: Path) -> None:
    (tmp_path / "short" / "ray" / "session_2026-01-01_00-00-00_000000_1" / "logs").mkdir(parents=True)
    policy = f"mode: plan\nscope: {{ray: {{}}}}\nray: {{roots: [{tmp_path}/short], window: 1s}}\n"
    fleet, path = Fleet(tmp_path, policy), tmp_path / "gpukeeper.prom"
    ran = fleet.run("plan", "--textfile", str(path), GPUKEEPER_FLEET="", RAY_TMPDIR=f"{tmp_path}/short")
    assert ran.code == 0, ran.err
    (group,) = [one for one in YAML(typ="safe").load(ALERTS)["groups"] if one["name"] == "ray_cluster_monitoring"]
    asked = {name for rule in group["rules"] for name in re.findall(r"\bgpukeeper_\w+", rule["expr"])}
    told = [line for line in path.read_text().splitlines() if 'platform="ray"' in line]
    assert asked <= series("\n".join(told))


def record_acceptance(fleet: Fleet) -> None:
    node = socket.gethostname()
    line = NodeTested(
        at=datetime.now(UTC),
        ref=Ref("host", node, "node", node, node),
        run="run-1",
        verdict=Grade.PASS,
        reason="all checks passed",
        device="cuda",
        report="",
        expected=1,
        gpus={"serial-1": Grade.PASS},
        values={"serial-1": {"gemm.speed float32": 1.0}},
    )
    fleet.run("pause")  # makes the ledger
    fleet.run("resume")
    ledger = open_ledger(ledger_path(fleet.env()), write=True)
    asyncio.run(ledger.append([line]))
    ledger.close()


def test_serve_tells_which_gpus_are_held_by_whom_and_what_acceptance_found(fleet: Fleet) -> None:
    fleet.add("train", state=State.RUNNING, started=ago(days=1), devices=("GPU-0", "GPU-1"))
    record_acceptance(fleet)
    with serving(fleet, "--metrics", "0") as daemon:
        page = page_of(daemon)
        text = got(page)
        while "gpukeeper_gpu_state" not in series(text):
            text = got(page)
    assert 'gpukeeper_gpus{model="",place="node-1",state="held"} 2.0' in text
    for gpu in ("GPU-0", "GPU-1"):
        of_it = f'gpu="{gpu}",owner="ann",place="node-1",platform="docker",uuid="{gpu}"'
        assert f'gpukeeper_gpu_holder{{class="docker",{of_it}}} 1.0' in text
    assert 'gpukeeper_acceptance_verdict{gpu="serial-1",verdict="PASS"} 1.0' in text
    assert "gpukeeper_decisions" in series(text)
    assert "gpukeeper_gpu_use_ratio" not in series(text)  # not measured
    assert "gpukeeper_fleet_copy_connected" not in series(text)
