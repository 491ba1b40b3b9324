"""Which rank a hang is due to."""

from __future__ import annotations

from gpukeeper.acceptance.fleet.group_jobs import RankProgress, blame_for_hang, describe_progress
from gpukeeper.acceptance.group.agent import recorded_counts

WAITS = RankProgress(stage="collectives", step=8, what="all_reduce, round 3", heartbeat_age_s=0.4, state="S")


def late(**more: object) -> RankProgress:
    return RankProgress(
        **{"stage": "collectives", "step": 7, "what": "all_reduce, round 2", "heartbeat_age_s": 0.3} | more
    )


def test_the_rank_that_began_fewer_steps_is_to_blame() -> None:
    found = blame_for_hang({0: WAITS, 1: WAITS, 2: late(), 3: WAITS})
    assert found.ranks == (2,)
    assert "still in step 7 (all_reduce, round 2); the others waited in 8" in found.why


def test_a_stopped_process_is_named_as_such() -> None:
    found = blame_for_hang({0: WAITS, 1: late(state="T", heartbeat_age_s=40.0), 2: WAITS})
    assert found.ranks == (1,)
    assert "does not run: it is stopped by a signal" in found.why


def test_a_process_without_a_heartbeat_is_to_blame_even_in_the_same_step() -> None:
    frozen = RankProgress(stage="collectives", step=8, heartbeat_age_s=60.0, state="D")
    found = blame_for_hang({0: WAITS, 1: frozen})
    assert found.ranks == (1,)
    assert "waits in the kernel" in found.why


def test_one_that_never_started_is_to_blame_before_those_that_wait_for_it() -> None:
    waiting = RankProgress(stage="rendezvous", heartbeat_age_s=0.1)
    assert blame_for_hang({0: waiting, 1: RankProgress(), 2: waiting}).ranks == (1,)
    assert blame_for_hang({0: waiting, 1: RankProgress(stage="start", heartbeat_age_s=0.2)}).ranks == (1,)


def test_the_flight_recorder_counts_before_our_own_steps() -> None:
    """Rank 0 is behind by our steps, which it writes late; NCCL's record shows that rank 1 did not arrive."""
    found = blame_for_hang(
        {0: late(arrived=41, completed=40), 1: RankProgress(stage="collectives", step=8, arrived=40, completed=40)}
    )
    assert found.ranks == (1,)
    assert "it began 40 collectives, the others 41" in found.why


def test_if_all_began_the_same_step_no_rank_is_to_blame() -> None:
    found = blame_for_hang({0: WAITS, 1: WAITS})
    assert found.ranks == ()
    assert "All 2 ranks had begun the same step, step 8 (all_reduce, round 3)" in found.why


def test_unknown_steps_blame_nobody() -> None:
    assert blame_for_hang({0: WAITS, 1: RankProgress(stage="collectives", heartbeat_age_s=0.2)}).ranks == ()
    assert blame_for_hang({0: RankProgress(), 1: RankProgress()}).ranks == ()


def test_a_rank_is_described_by_the_last_it_began() -> None:
    assert describe_progress(WAITS) == "step 8 (all_reduce, round 3)"
    assert describe_progress(RankProgress(stage="rendezvous")) == "stage 'rendezvous'"
    assert describe_progress(RankProgress()) == "not started"


def test_a_flight_recorder_is_read_by_its_sequence_numbers() -> None:
    dump = b"""{"version":"2.10","entries":[
      {"collective_seq_id":1,"state":"completed","profiling_name":"nccl:all_reduce"},
      {"collective_seq_id":3,"state":"scheduled"},{"collective_seq_id":2,"state":"completed"},
      {"collective_seq_id":9,"p2p_seq_id":1,"is_p2p":true,"state":"completed"}]}"""
    assert recorded_counts(dump) == (3, 2)
    assert recorded_counts(b'{"entries":[{"seq_id":4,"state":"started"}]}') == (4, 0)


def test_what_is_no_flight_recorder_is_not_known() -> None:
    for dump in (
        b"",
        b"[]",
        b'{"entries":7}',
        b'{"entries":[{"collective_seq_id":"x"},7]}',
        b'{"entries":[]}',
        b"\xff",
    ):
        assert recorded_counts(dump) == (None, None), dump
