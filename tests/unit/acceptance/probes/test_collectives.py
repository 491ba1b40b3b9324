"""What of collectives needs no GPU: figures, and the ranges of a pattern."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.acceptance.probes.collectives import bus_factor, default_bytes, pieces
from gpukeeper.acceptance.probes.ranks import SWITCHES, BadSetting, switches


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


def test_variants_are_made_of_switches_that_nccl_reads_at_its_start() -> None:
    """C1.6: NVLink only; network only with P2P and SHM off."""
    assert switches("network") | {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"} == switches("network")
    assert switches("nvlink")["NCCL_P2P_LEVEL"] == "NVL"
    assert switches("default") == {}
    with pytest.raises(BadSetting, match=r"valid values: default, nvlink, network, no_nvls"):
        switches("carrier-pigeon")
    assert set(SWITCHES) == {"default", "nvlink", "network", "no_nvls"}
