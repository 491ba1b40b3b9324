"""What of collectives needs no GPU: figures, the ranges of a pattern, and what NCCL's log says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.acceptance.probes.collectives import bus_factor, default_bytes, pieces, read_log
from gpukeeper.acceptance.probes.group import SWITCHES, BadSetting, switches


@pytest.mark.parametrize(("world", "elements"), [(1, 2**24), (2, 2**23), (4, 2**22), (8, 2**22), (64, 2**22)])
def test_the_old_kits_payload(world: int, elements: int) -> None:
    """C1.4: 16.7 million elements shared by the ranks, but at least 4.2 million."""
    assert default_bytes(world, "fp32") == 4 * elements
    assert default_bytes(world, "bf16") == 2 * elements


def test_bus_bandwidth_factors() -> None:
    assert bus_factor("all_reduce", 8) == 1.75
    assert [bus_factor(op, 8) for op in ("all_gather", "reduce_scatter", "all_to_all")] == [0.875] * 3
    assert bus_factor("broadcast", 8) == 1.0


@given(start=st.integers(0, 500), length=st.integers(0, 500), period=st.integers(1, 60))
def test_pieces_are_the_range_itself(start: int, length: int, period: int) -> None:
    """Every element once, in order, with the row and the column it has in the whole pattern."""
    seen = [
        (piece.offset + row * piece.width + column, piece.row + row, piece.column + column)
        for piece in pieces(start, length, period)
        for row in range(piece.rows)
        for column in range(piece.width)
    ]
    assert seen == [(i, (start + i) // period, (start + i) % period) for i in range(length)]


NEW = """\
node-1:4117:4117 [0] NCCL INFO NCCL version 2.27.5+cuda13.0
node-1:4117:4201 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
node-1:4117:4201 [0] NCCL INFO Channel 00/24 : 0 1 2 3 4 5 6 7
node-1:4117:4201 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node-1:4117:4201 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node-1:4117:4201 [0] NCCL INFO 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels
node-1:4117:4117 [0] NCCL INFO AllReduce: 4 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}
node-1:4117:4117 [0] NCCL INFO AllReduce: 1073741824 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}
node-1:4117:4117 [0] NCCL INFO AllReduce: 8 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
node-1:4117:4117 [0] NCCL INFO AllGather: 134217728 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}
"""
OLD = """\
a:1:2 [0] NCCL INFO Channel 00 : 0[1000] -> 1[2000] via SHM/direct/direct
a:1:2 [0] NCCL INFO Channel 00/0 : 1[2000] -> 2[3000] [send] via NET/IB/0/GDRDMA
a:1:2 [0] NCCL INFO 16 coll channels, 0 nvls channels, 16 p2p channels, 2 p2p channels per peer
a:1:1 [0] NCCL INFO 805306368 Bytes -> Algo 1 proto 2 time 3970.683594
"""


def test_the_algorithm_of_the_largest_size_is_reported() -> None:
    said = read_log(NEW.splitlines())
    assert said.algorithms == {"all_reduce": "NVLS/SIMPLE", "all_gather": "RING/SIMPLE"}
    assert (said.transports, said.nvls) == ({"P2P/CUMEM": 2}, True)


def test_numbers_of_older_releases_are_named() -> None:
    said = read_log(OLD.splitlines())
    assert said.algorithms == {"all_reduce": "RING/SIMPLE"}
    assert (said.transports, said.nvls) == ({"SHM/direct": 1, "NET/IB": 1}, False)


def test_a_log_that_says_nothing_is_unknown() -> None:
    assert read_log(None) == read_log([]) == read_log(["node-1:1:1 [0] NCCL INFO Bootstrap : Using eth0"])
    assert (read_log([]).transports, read_log([]).nvls) == (None, None)


def test_variants_are_made_of_switches_that_nccl_reads_at_its_start() -> None:
    """C1.6: NVLink only; network only with P2P and SHM off."""
    assert switches("network") | {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"} == switches("network")
    assert switches("nvlink")["NCCL_P2P_LEVEL"] == "NVL"
    assert switches("default") == {}
    with pytest.raises(BadSetting, match=r"valid values: default, nvlink, network, no_nvls"):
        switches("carrier-pigeon")
    assert set(SWITCHES) == {"default", "nvlink", "network", "no_nvls"}
