"""Real ranks over gloo: joining, records, and what is told of those that never came or died."""

from __future__ import annotations

from pathlib import Path

from tests.real.torch import together

SMALL = {"samples": 512, "batch": 128}


def test_a_rank_that_dies_leaves_no_record_but_its_last_stage(tmp_path: Path) -> None:
    """C1.2: told apart from one that never joined."""
    left = together.torchrun(tmp_path, 2, "ddp", **SMALL, inject={"die": 1})
    assert left.exit_code != 0
    assert left.record(1) is None
    assert "exitcode  : -9" in left.words


def test_ranks_that_wait_for_one_that_never_comes_report_it_and_give_up(tmp_path: Path) -> None:
    """C17.2: rendezvous. The group's timeout is a setting (C1.4: 600 s unless said)."""
    left = together.torchrun(tmp_path, 2, "ddp", **SMALL, timeout_s=3, inject={"absent": 1})
    assert left.exit_code != 0
    assert left.stage(0) == "rendezvous"
    assert left.stage(1) is None
    last = left.broken(0).splitlines()[-1]
    assert last.startswith("RendezvousError: rank 0 of 2 could not connect to all other ranks at ")


def test_ranks_of_another_users_launcher_find_each_other(tmp_path: Path) -> None:
    """C1.9: PET_*, K8S_MASTER_ADDR and MASTER_PORT, without torchrun."""
    left = together.by_hand(tmp_path, 2, "ddp", **SMALL)
    assert left.exit_code == 0
    assert [left.done(rank)["rank"] for rank in range(2)] == [0, 1]
    assert left.done(1)["hashes_equal"] is True


def test_contradictions_stop_a_rank_before_it_waits_for_anybody(tmp_path: Path) -> None:
    """C1.9: the record says what to change."""
    left = together.torchrun(tmp_path, 1, "nonsense")
    assert left.exit_code != 0
    assert "Unknown probe 'nonsense' over several GPUs" in left.broken(0)


def test_parameters_are_the_same_on_all_ranks_after_every_step(tmp_path: Path) -> None:
    """C1.2, C1.4: 2 epochs, batch 256, loss down by 20 % or more."""
    left = together.torchrun(tmp_path, 2, "ddp")
    for rank in range(2):
        result = left.done(rank)
        assert (result["rank"], result["world"], result["backend"]) == (rank, 2, "gloo")
        assert (result["epochs"], result["batch_size"], result["steps"]) == (2, 256, 30)
        assert result["fall"] >= result["min_fall"] == 0.20
        assert (result["hashes_equal"], result["differing"]) == (True, [])
    assert left.done(0)["digest"] == left.done(1)["digest"]


def test_one_flipped_bit_of_one_parameter_names_the_rank_by_majority(tmp_path: Path) -> None:
    left = together.torchrun(tmp_path, 3, "ddp", **SMALL, inject={"wrong_rank": 1})
    for rank in range(3):
        result = left.done(rank)
        assert result["hashes_equal"] is False
        assert (result["differing"], result["majority"]) == ([1], True)
        assert result["first_step"] == result["steps"] // 2


def test_links_name_the_pair_and_the_word_that_arrived_wrong(tmp_path: Path) -> None:
    """The first rank copies between all; the others only say so."""
    left = together.torchrun(tmp_path, 2, "links", bytes=4 * 4096, repeats=2, inject={"flip": [1, 0]})
    pairs = {(pair["from"], pair["to"]): pair for pair in left.done(0)["pairs"]}
    assert {pair: one["wrong"] for pair, one in pairs.items()} == {(0, 1): 0, (1, 0): 1}
    place = pairs[1, 0]["where"][0]
    assert (place["index"], place["got"] ^ place["want"]) == (2048, 1)
    assert all(len(one["gbps"]) == 2 and min(one["gbps"]) > 0 for one in pairs.values())
    assert left.done(1)["by"] == 0
