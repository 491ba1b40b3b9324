"""Who has which GPU, and what does not fit together, as a user sees it."""

from __future__ import annotations

from datetime import UTC, datetime

from gpukeeper.interfaces.terminal import show
from gpukeeper.lifecycle.claims import ClaimState, GpuClaim
from gpukeeper.model.subject import State
from tests.cli.fleet import Fleet, ago


def running(fleet: Fleet, name: str, *devices: str, **facts: object) -> None:
    fleet.add(name, **{"state": State.RUNNING, "started": ago(hours=3), "devices": devices, **facts})


def test_one_line_for_each_gpu_and_holder(fleet: Fleet) -> None:
    """C11.4"""
    running(fleet, "eval", "GPU-0")
    running(fleet, "train", "GPU-1", "GPU-2", owner="bob")
    fleet.ended("old", days=2, devices=("GPU-3",))
    ran = fleet.run("observe", "--gpus")
    assert ran.code == 0, ran.err
    head, *lines = ran.out.splitlines()
    assert head.split() == ["STATE", "GPU", "HELD", "BY", "OWNER", "SINCE", "USE", "NEXT"]
    assert [line.split()[:5] for line in lines] == [
        ["running", "GPU-0", "docker/node-1/eval", "ann", "3h"],
        ["running", "GPU-1", "docker/node-1/train", "bob", "3h"],
        ["running", "GPU-2", "docker/node-1/train", "bob", "3h"],
    ]
    assert "GPU use was not measured yet" in lines[0]


def test_the_gpus_of_one_person(fleet: Fleet) -> None:
    """C11.4"""
    running(fleet, "eval", "GPU-0")
    running(fleet, "train", "GPU-1", owner="bob")
    ran = fleet.run("observe", "--gpus", "--owner", "bob")
    assert "docker/node-1/train" in ran.out
    assert "eval" not in ran.out
    assert "1 row at" in ran.err


def test_gpus_for_programs(fleet: Fleet) -> None:
    running(fleet, "eval", "GPU-0")
    document = fleet.run("observe", "--gpus", "--json").json()
    assert document["schema"] == "gpukeeper/observe-gpus/v1"
    (one,) = document["gpus"]
    assert (one["device"], one["how"], one["holder"]["name"], one["owner"]) == ("GPU-0", "running", "eval", "ann")
    assert one["use"] == {"why": "not measured", "by_design": False}


def test_findings_are_reported_and_nothing_is_repaired(fleet: Fleet) -> None:
    """C13.2: exit 0 all the same; looking is no verdict."""
    running(fleet, "eval", "GPU-0")
    running(fleet, "train", "GPU-0", owner="bob")
    before = {path: path.read_bytes() for path in fleet.folder.iterdir()}
    ran = fleet.run("observe")
    assert ran.code == 0
    finding = "GPU-0 is claimed by 2 running workloads: docker/node-1/eval (ann), docker/node-1/train (bob)"
    assert f"finding: {finding}" in ran.err
    assert "finding" not in ran.out
    assert finding in fleet.run("observe", "--gpus").err
    assert finding in fleet.run("observe", "--owner", "bob").err  # also the other half of it
    assert finding not in fleet.run("observe", "--owner", "eve").err
    assert fleet.run("observe", "--quiet").err == ""
    (told,) = fleet.run("observe", "--json").json()["findings"]
    assert (told["kind"], told["words"]) == ("duplicate", finding)
    assert told["about"] == ["docker/node-1/eval", "docker/node-1/train"]
    assert {path: path.read_bytes() for path in fleet.folder.iterdir()} == before


def test_what_the_ledger_has_and_is_not_there_is_a_finding_until_the_next_pass(fleet: Fleet) -> None:
    """C13.2"""
    running(fleet, "eval", "GPU-0")
    fleet.ended("other", days=0.1)
    assert fleet.run("apply", "--yes").code == 0
    (fleet.folder / "eval.json").unlink()
    words = "docker/node-1/eval: it is in the ledger and no longer listed"
    assert words in fleet.run("observe").err
    (fleet.folder / "broken.json").write_text("{")
    assert words not in fleet.run("observe").err  # not everything was seen, so nothing is missing
    (fleet.folder / "broken.json").unlink()
    assert fleet.run("apply", "--yes").code == 0
    assert words not in fleet.run("observe").err


def test_names_cannot_drive_the_terminal_of_who_looks(fleet: Fleet) -> None:
    running(fleet, "eval\x1b[2J", "GPU-0", owner="a\x1b]0;x\x07")
    running(fleet, "twin\x1b[2J", "GPU-0")
    ran = fleet.run("observe", "--gpus")
    assert ran.code == 0
    assert "\x1b" not in ran.out + ran.err
    assert "finding:" in ran.err


def test_the_workloads_of_one_person_with_what_happens_next(fleet: Fleet) -> None:
    """C16.5"""
    running(fleet, "eval", "GPU-0")
    running(fleet, "train", "GPU-1", owner="bob")
    ran = fleet.run("workload", "list", "--owner", "bob")
    assert ran.code == 0, ran.err
    assert "docker/node-1/train" in ran.out
    assert "eval" not in ran.out


def test_a_gpu_held_by_processes_outside_any_workload_names_them() -> None:
    claim = GpuClaim(device="GPU-0", name="host/n/gpu-0", place="n", how=ClaimState.HELD, by="pid 4711 (python, root)")
    row = show.claim_row(claim, datetime(2026, 3, 2, tzinfo=UTC))
    assert row[:3] == ("held", "host/n/gpu-0", "pid 4711 (python, root)")


def test_claims_are_what_the_platform_says_whatever_the_ledger_has(fleet: Fleet) -> None:
    """C13.1: no second database. Who has which GPU is the same without a ledger, and follows the platform at once."""

    def claims() -> list[list[str]]:
        return [line.split()[:5] for line in fleet.run("observe", "--gpus").out.splitlines()[1:]]

    running(fleet, "eval", "GPU-0")
    running(fleet, "train", "GPU-1", owner="bob")
    without = claims()
    assert [line[1:4] for line in without] == [
        ["GPU-0", "docker/node-1/eval", "ann"],
        ["GPU-1", "docker/node-1/train", "bob"],
    ]
    assert fleet.run("apply", "--yes").code == 0
    assert fleet.lines("noticed"), "the ledger has them"
    assert claims() == without
    running(fleet, "eval", "GPU-2")
    (fleet.folder / "train.json").unlink()
    assert [line[1:3] for line in claims()] == [["GPU-2", "docker/node-1/eval"]], "not what the ledger remembers"


def test_an_allocator_gets_its_answer_as_an_exit_code(fleet: Fleet) -> None:
    running(fleet, "eval", "GPU-0")
    held = fleet.run("node", "may-use", "GPU-0", "--user", "bob", "--json")
    assert (held.code, held.json()["answer"]) == (4, "no")
    assert held.json()["reason"] == "running: docker/node-1/eval (ann)"
    unknown = fleet.run("node", "may-use", "GPU-9", "--user", "bob")
    assert unknown.code == 2
    assert "do not hand it out" in unknown.err
