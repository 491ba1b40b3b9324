"""The log of NCCL, as different releases write it."""

from __future__ import annotations

from gpukeeper.acceptance.probes.collectives import read_nccl_log

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
    said = read_nccl_log(NEW.splitlines())
    assert said.algorithms == {"all_reduce": "NVLS/SIMPLE", "all_gather": "RING/SIMPLE"}
    assert (said.transports, said.nvls) == ({"P2P/CUMEM": 2}, True)


def test_numbers_of_older_releases_are_named() -> None:
    said = read_nccl_log(OLD.splitlines())
    assert said.algorithms == {"all_reduce": "RING/SIMPLE"}
    assert (said.transports, said.nvls) == ({"SHM/direct": 1, "NET/IB": 1}, False)


def test_a_log_that_says_nothing_is_unknown() -> None:
    assert (
        read_nccl_log(None) == read_nccl_log([]) == read_nccl_log(["node-1:1:1 [0] NCCL INFO Bootstrap : Using eth0"])
    )
    assert (read_nccl_log([]).transports, read_nccl_log([]).nvls) == (None, None)
