"""Why a workload is still there, what comes next and what would change it, as its owner reads it."""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.signals import open_signals
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Ref, State
from gpukeeper.model.unknown import Unknown
from tests.cli.fleet import Fleet, ago
from tests.docs.markdown import ROOT
from tests.patience import PATIENCE

MANIFEST = ROOT / "tests" / "unit" / "platforms" / "kubernetes" / "trainjob.yaml"
PATIENT = """\
preset: development
mode: enforce
scope: {docker: {}}
admins: [root, ADMIN]
classes: {docker: {idle: 2h, max_runtime: 2d}}
"""


def measured(fleet: Fleet, key: str, minutes: int) -> None:
    """What `serve` would have written: no use for the last `minutes`, use of the GPU before."""
    path = fleet.state / "ledger.db"
    open_ledger(path, write=True).close()
    signals = open_signals(path, write=True)
    now = datetime.now(UTC)
    samples = [
        Sample(
            key,
            one,
            "GPU-0" if one is Signal.GPU else "",
            now - timedelta(minutes=back),
            _value(one, back, minutes),
            since=now - timedelta(minutes=back + 1),
        )
        for back in reversed(range(150))
        for one in (Signal.GPU, Signal.CPU, Signal.DISK, Signal.TERMINAL)
    ]
    absent = Unknown("it has the network of its host", by_design=True)
    asyncio.run(signals.add([*samples, Sample(key, Signal.NETWORK, "", now, absent)]))
    signals.close()


def _value(one: Signal, back: int, quiet: int) -> float:
    return 83.0 if one is Signal.GPU and back >= quiet else 0.0


def key_of(fleet: Fleet, name: str) -> str:
    facts = (fleet.folder / f"{name}.json").stat()
    return f"docker/node-1/{facts.st_dev}:{facts.st_ino}"


def test_every_signal_stage_and_remedy_is_reported(fleet: Fleet) -> None:
    fleet.write_policy(PATIENT)
    fleet.add("eval", state=State.RUNNING, started=ago(hours=10), devices=("GPU-0",))
    measured(fleet, key_of(fleet, "eval"), minutes=40)
    ran = fleet.run("explain", "eval")
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())
    assert "gpu GPU-0 0 % (just now); at most 83 % in 2h, in use from 5 %; measured without a gap for 2h30m" in said
    assert "network absent by design: it has the network of its host" in said
    assert "terminal no input (just now)" in said
    _, _, after = ran.out.partition("If nothing changes:")
    assert [line.split()[0] for line in after.splitlines()[1:5]] == ["warn", "warn", "stop", "remove"]
    assert "use the GPU above 5 %" in after
    assert "gpukeeper workload hold docker/node-1/eval" in after


def test_explain_for_programs(fleet: Fleet) -> None:
    fleet.write_policy(PATIENT)
    fleet.add("eval", state=State.RUNNING, started=ago(hours=10), devices=("GPU-0",))
    fleet.add("twin", state=State.RUNNING, started=ago(hours=10), devices=("GPU-0",), owner="bob")
    measured(fleet, key_of(fleet, "eval"), minutes=40)
    document = fleet.run("explain", "eval", "--json").json()
    by_signal = {one["signal"]: one for one in document["signals"]}
    assert by_signal["gpu"]["maximum"] == 83.0
    assert by_signal["network"]["missing"]["by_design"] is True
    assert [one["action"] for one in document["ahead"]] == ["warn", "warn", "stop", "remove"]
    assert "use the GPU above 5 %" in document["would_change_it"]
    assert [one["kind"] for one in document["findings"]] == ["duplicate"]
    assert fleet.run("workload", "show", "eval", "--json").json().keys() == document.keys()


def test_a_warning_that_was_not_delivered_is_reported(fleet: Fleet) -> None:
    """C14.1"""
    fleet.write_policy(PATIENT.replace("idle: 2h", "idle: 40m"))
    fleet.add("eval", state=State.RUNNING, started=ago(hours=10), devices=("GPU-0",), owner="no-such-user")
    measured(fleet, key_of(fleet, "eval"), minutes=100)
    assert fleet.run("apply", "--yes").code == 0
    assert "idle, stage 1, not delivered" in fleet.run("explain", "eval").out


def test_a_removal_that_came_to_nothing_is_retried_not_due(fleet: Fleet) -> None:
    """The reader of a ledger has no daemon that remembers it."""
    fleet.ended("old", days=2)
    key, at = key_of(fleet, "old"), datetime.now(UTC) - timedelta(minutes=9)
    platform, place, uid = key.split("/")
    ref = Ref(platform, place, "container", "old", uid)
    line = Closed(
        at=at, ref=ref, step="1.1", action=Action.REMOVE, rule="retention", result=Result.REFUSED, reason="it is busy"
    )
    ledger = open_ledger(fleet.state / "ledger.db", write=True)
    asyncio.run(ledger.append([line]))
    ledger.close()
    said = " ".join(fleet.run("explain", "old").out.split())
    assert "Decision: keep by retention, due in 1" in said
    assert "a step on it was refused 9m" in said
    assert "ago (it is busy), retried after 20m" in said


def test_explain_goes_on_until_ctrl_c(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    process = fleet.start("explain", "old", "--watch", "--every", "1s")
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "docker/node-1/old" in first
    for line in process.stdout:  # the second look
        if line == first:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "\x1b" not in first + rest  # no screen to clear


def test_a_wrong_interval_is_a_sentence(fleet: Fleet) -> None:
    ran = fleet.run("explain", "old", "--watch", "--every", "soon")
    assert ran.code == 2
    assert "--every" in ran.err


def test_waste_is_listed_with_its_owner_and_nothing_follows(fleet: Fleet) -> None:
    """C8.11"""
    fleet.write_policy(PATIENT)
    fleet.add("eval", state=State.RUNNING, started=ago(hours=10), devices=("GPU-0",))
    fleet.add("train", state=State.RUNNING, started=ago(hours=10), devices=("GPU-0",), owner="bob")
    measured(fleet, key_of(fleet, "eval"), minutes=40)
    measured(fleet, key_of(fleet, "train"), minutes=20)
    before = {path: path.read_bytes() for path in fleet.folder.iterdir()}
    ran = fleet.run("observe", "--waste")
    assert ran.code == 0, ran.err
    head, *lines = ran.out.splitlines()
    assert head.split() == ["UNUSED", "FOR", "WORKLOAD", "OWNER", "CLASS", "GPUS"]
    assert [line.split()[1:] for line in lines] == [["docker/node-1/eval", "ann", "docker", "GPU-0"]]
    assert "1 row at" in ran.err
    assert fleet.run("observe", "--waste", "--owner", "bob").out == ""
    (one,) = fleet.run("observe", "--waste", "--json").json()["waste"]
    assert (one["ref"]["name"], one["devices"], one["at_least"]) == ("eval", ["GPU-0"], False)
    assert {path: path.read_bytes() for path in fleet.folder.iterdir()} == before
    both = fleet.run("observe", "--waste", "--gpus")
    assert (both.code, both.out) == (2, "")
    assert "--gpus and --waste cannot be combined" in both.err


def test_a_trainjob_is_explained_from_files_without_asking_a_cluster(fleet: Fleet, tmp_path: Path) -> None:
    """C17.4"""
    runtime, train = MANIFEST.read_text().split("\n---\n")
    files = (tmp_path / "runtime.yaml", tmp_path / "train.yaml")
    for path, text in zip(files, (runtime, train), strict=True):
        path.write_text(text)
    ran = fleet.run("explain", "run-7", "--manifest", str(files[0]), "--manifest", str(files[1]))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[:4] == [
        "trainjob/run-7 on ClusterTrainingRuntime torch, from these files only",
        "job node: 2 init containers",
        "  1. wait  busybox:1.36",
        "  2. fetch  registry.lab/fetch:2",
    ]
    assert "     DATASET=imagenet  (TrainJob)" in ran.out
    assert "     CACHE=/cache  (runtime)" in ran.out
    assert not fleet.state.exists(), "not even a ledger"
    alone = fleet.run("explain", "run-7", "--manifest", str(files[1]))
    assert "problem: ClusterTrainingRuntime torch not found in these files" in alone.out
    files[1].write_text(train.replace("run-7", "\x1b[2Jrun-7").replace("name: torch", "name: 'to\x07rch'"))
    for words in (("run-9", files[0]), ("run-7", tmp_path / "none.yaml"), ("run-7", files[1])):
        wrong = fleet.run("explain", words[0], "--manifest", str(words[1]))
        assert (wrong.code, wrong.out) == (2, "")
        assert "\x1b" not in wrong.err
