"""From the bus bandwidth of a collective to what a network card carried, and which network that is. Pure.

busbw counts what a link of one flat ring would carry; between nodes it is no wire speed. With one card for each GPU, k
nodes and n ranks, an all-reduce in two levels (tree, NVLS and tree, collnet) sends busbw * (k - 1) / (n - 1) through a
card; a flat ring sends busbw / (GPUs of a node). So the conversion needs the algorithm, which is reported with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpukeeper.acceptance.fleet.group_jobs import Fabric

# Of the line. Not a FAIL: a healthy group of 4 nodes shows 68 to 74 %, and the share of each algorithm is not measured.
LEAST = 0.70
NEAR = 0.75
HALF = 0.50  # of the line: no tuning explains that
MOST = 1.02  # above the line is no measurement
FROM_NODES = 3  # two nodes are a special case: healthy ones show 44 to 65 % by this conversion
PER_NODE = 8
_INFINIBAND = {100: "ib-edr", 200: "ib-hdr", 400: "ib-ndr400", 800: "ib-xdr800"}
_TWO_LEVELS = ("tree", "nvls", "collnet", "pat")


@dataclass(frozen=True)
class NicRate:
    """GB/s that each card carried; `way`: how it was computed. `share`: of the line; None: the line is unknown."""

    gbytes: float
    way: str
    share: float | None


def nic_rate(
    busbw: float, nodes: int, ranks: int, algorithm: str | None, line_gbits: float | None, cards: int = 0
) -> NicRate | None:
    """None: one node, ranks that are not the same number on every node, or an unknown algorithm.

    `cards` of each node; 0: not known, so one for each GPU. GPUs that share a card add up there.
    """
    if nodes < 2 or ranks % nodes or not algorithm:
        return None
    name = algorithm.lower()
    if name.startswith("ring"):
        rate, way = busbw / (ranks // nodes), "flat ring: busbw / GPUs per node"
    elif name.startswith(_TWO_LEVELS):
        rate, way = busbw * (nodes - 1) / (ranks - 1), "two levels: busbw * (nodes - 1) / (ranks - 1)"
    else:
        return None
    each = ranks // nodes
    if 0 < cards < each:
        rate, way = rate * each / cards, f"{way}, {each} GPUs share {cards} card{'s' if cards > 1 else ''}"
    share = rate * 8 / line_gbits if line_gbits else None
    return NicRate(rate, f"{algorithm}, {way}", share)


def common(fabrics: Sequence[Fabric]) -> Fabric:
    """The network that all of them have; unknown if they differ."""
    first = fabrics[0] if fabrics else Fabric()
    alike = all(one == first for one in fabrics)
    return first if alike else Fabric()


def fabric_name(fabric: Fabric, transports: Sequence[str], gpus: int = PER_NODE) -> str:
    """As the reference rows name it: ib-hdr, ib-ndr400, ethernet-100g. "unknown": its rows apply to no method.

    `transports`: what NCCL's log shows. Cards for RDMA that NCCL did not use do not count. `gpus` of a node: the rows
    for InfiniBand were measured with eight, each with a card of its own; another layout has a name of its own.
    """
    over = [one.upper() for one in transports if one.upper().startswith("NET")]
    sockets = any("SOCKET" in one for one in over)
    if not fabric.kind or fabric.gbits is None or (sockets and fabric.kind == "infiniband"):
        return "unknown"
    gbits = round(fabric.gbits)
    if fabric.kind == "infiniband":
        name = _INFINIBAND.get(gbits, f"ib-{gbits}")
        usual = gpus == PER_NODE and fabric.cards >= PER_NODE
        return name if usual else f"{name}-{gpus}x{fabric.cards}"
    return f"ethernet-{gbits}g"
