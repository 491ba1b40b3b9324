"""From bus bandwidth to the line rate of a network card."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.fleet.group_jobs import Fabric
from gpukeeper.acceptance.fleet.group_judge import common_fabric, fabric_name, nic_rate


def test_the_published_figure_of_four_nodes_with_eight_b200() -> None:
    """facts: 381.8 GB/s over 4 x 8 is 36.9 of 50 GB/s, 74 %."""
    found = nic_rate(381.8, 4, 32, "TREE/SIMPLE", 400.0)
    assert found is not None
    assert found.gbytes == pytest.approx(36.9, abs=0.1)
    assert found.share == pytest.approx(0.74, abs=0.005)


def test_a_flat_ring_sends_its_share_through_each_card() -> None:
    found = nic_rate(320.0, 4, 32, "RING/SIMPLE", 400.0)
    assert found is not None
    assert found.gbytes == pytest.approx(40.0)
    assert "busbw / GPUs per node" in found.way


def test_with_one_gpu_per_node_both_conversions_agree() -> None:
    tree, ring = (nic_rate(40.0, 8, 8, name, 400.0) for name in ("NVLS_TREE/SIMPLE", "RING/LL"))
    assert tree is not None
    assert ring is not None
    assert tree.gbytes == ring.gbytes == 40.0


@pytest.mark.parametrize(
    ("nodes", "ranks", "algorithm"), [(1, 8, "RING/LL"), (3, 8, "RING/LL"), (2, 16, None), (2, 16, "NEW/LL")]
)
def test_what_cannot_be_converted_is_not_known(nodes: int, ranks: int, algorithm: str | None) -> None:
    assert nic_rate(300.0, nodes, ranks, algorithm, 400.0) is None


def test_without_a_line_there_is_a_rate_and_no_share() -> None:
    found = nic_rate(300.0, 4, 32, "RING/LL", None)
    assert found is not None
    assert found.share is None


@pytest.mark.parametrize(
    ("fabric", "transports", "name"),
    [
        (Fabric(kind="infiniband", gbits=200.0, cards=8), ["NET/IB"], "ib-hdr"),
        (Fabric(kind="infiniband", gbits=400.0, cards=9), ["P2P/CUMEM", "NET/IB"], "ib-ndr400"),
        (Fabric(kind="infiniband", gbits=400.0, cards=2), ["NET/IB"], "ib-ndr400-8x2"),
        (Fabric(kind="infiniband", gbits=56.0, cards=8), ["NET/IB"], "ib-56"),
        (Fabric(kind="ethernet", gbits=100.0), ["NET/Socket"], "ethernet-100g"),
        (Fabric(kind="infiniband", gbits=400.0), ["NET/Socket"], "unknown"),
        (Fabric(), ["NET/IB"], "unknown"),
    ],
)
def test_a_network_is_named_as_the_reference_rows_name_it(fabric: Fabric, transports: list[str], name: str) -> None:
    assert fabric_name(fabric, transports) == name


def test_gpus_that_share_a_card_add_up_there() -> None:
    found = nic_rate(20.0, 4, 32, "RING/SIMPLE", 200.0, cards=1)
    assert found is not None
    assert found.gbytes == pytest.approx(20.0)
    assert "8 GPUs share 1 card" in found.way


def test_nodes_with_different_networks_have_none_in_common() -> None:
    slow, fast = Fabric(kind="ethernet", gbits=25.0), Fabric(kind="ethernet", gbits=100.0)
    assert common_fabric([fast, fast]) == fast
    assert common_fabric([fast, slow]) == Fabric()
