"""Which GPU a name means. The slices are made by hand, as NVIDIA's documents number them; none was at hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts, resolve_names
from gpukeeper.model.unknown import Unknown


def part(index: int, gi: int, ci: int = 0) -> SliceFacts:
    return SliceFacts(uuid=f"MIG-{index}a{gi}{ci}", index=index, gpu_instance=gi, compute_instance=ci)


# Index and minor differ, as they do after a GPU was reset; the instance ids are not the slice indexes.
WHOLE = GpuFacts(uuid="GPU-aaaa-1", index=0, minor=1)
CUT = GpuFacts(uuid="GPU-aaab-2", index=1, minor=0, slices=(part(0, 7), part(1, 9), part(2, 1, 0), part(3, 1, 1)))
HERE = (WHOLE, CUT)
SLICES = ("MIG-0a70", "MIG-1a90", "MIG-2a10", "MIG-3a11")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("0", ("GPU-aaaa-1",)),
        ("1", SLICES),
        ("all", ("GPU-aaaa-1", *SLICES)),
        ("0,1", ("GPU-aaaa-1", *SLICES)),
        ("0,0", ("GPU-aaaa-1",)),
        ("GPU-aaaa-1", ("GPU-aaaa-1",)),
        ("GPU-aaaa", ("GPU-aaaa-1",)),
        ("GPU-aaab-2", SLICES),
        ("MIG-1a90", ("MIG-1a90",)),
        ("MIG-1", ("MIG-1a90",)),
        ("MIG-GPU-aaab-2/9/0", ("MIG-1a90",)),
        ("MIG-GPU-aaab-2/1/1", ("MIG-3a11",)),
        ("1:1", ("MIG-1a90",)),  # the index of the slice
        ("1.1", ("MIG-2a10", "MIG-3a11")),  # the GPU instance
        ("1.9", ("MIG-1a90",)),
        ("MIG-1a90::3", ("MIG-1a90",)),
        ("GPU-aaaa-1::0", ("GPU-aaaa-1",)),
        ("nvidia1", ("GPU-aaaa-1",)),
        ("nvidia0/gi9", ("MIG-1a90",)),
        ("/dev/nvidia1", ("GPU-aaaa-1",)),
        ("nvidia.com/gpu=0", ("GPU-aaaa-1",)),
        ("nvidia.com/gpu=gpu0", ("GPU-aaaa-1",)),
        ("nvidia.com/gpu=all", ("GPU-aaaa-1", *SLICES)),
        ("nvidia.com/gpu=1:0", ("MIG-0a70",)),
        ("nvidia.com/gpu=mig1:0", ("MIG-0a70",)),
        ("nvidia.com/gpu=GPU-aaaa-1", ("GPU-aaaa-1",)),
        ("runtime.nvidia.com/gpu=MIG-0a70", ("MIG-0a70",)),
    ],
)
def test_every_way_to_write_it(name: str, meant: tuple[str, ...]) -> None:
    assert resolve_names(name, HERE) == meant


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("2", "does not exist"),
        ("", "not the name"),
        ("void", "not the name"),
        ("none", "not the name"),
        ("0,7", "does not exist"),
        ("GPU-aaa", "matches 2"),
        ("GPU-x", "matches no"),
        ("MIG-", "matches 4"),
        ("MIG-x", "matches no"),
        ("0:0", "is not split"),
        ("0.0", "is not split"),
        ("1:7", "does not exist"),
        ("1.2", "does not exist"),
        ("nvidia7", "/dev/nvidia7"),
        ("nvidia0/gi2", "does not exist"),
        ("MIG-GPU-aaab-2/9/1", "does not exist"),
        ("MIG-GPU-aaaa-1/9/1", "is not split"),
        ("amd.com/gpu=0", "not the name"),
        ("-1", "not the name"),
    ],
)
def test_what_fits_nothing_or_not_only_one_is_unknown(name: str, why: str) -> None:
    found = resolve_names(name, HERE)
    assert isinstance(found, Unknown)
    assert why in found.why


def test_an_exact_uuid_wins_over_those_it_begins() -> None:
    longer = GpuFacts(uuid="GPU-aaaa-12", index=2)
    assert resolve_names("GPU-aaaa-1", (longer, WHOLE)) == ("GPU-aaaa-1",)


def test_what_the_driver_does_not_tell_is_unknown() -> None:
    lost = GpuFacts(uuid=Unknown("GPU is lost"), index=2)
    unlisted = GpuFacts(uuid="GPU-c", index=3, slices=Unknown("driver"))
    assert isinstance(resolve_names("2", (lost,)), Unknown)
    assert isinstance(resolve_names("3", (unlisted,)), Unknown)
    assert isinstance(resolve_names("3:0", (unlisted,)), Unknown)
    assert isinstance(resolve_names("all", (WHOLE, lost)), Unknown)
    assert isinstance(resolve_names("nvidia1", (lost,)), Unknown)


def test_all_of_none_is_none() -> None:
    assert resolve_names("all", ()) == ()


@given(st.text(alphabet="0123456789aGPUMIGnvid-/:.=,", max_size=20))
def test_no_text_means_what_is_not_there(name: str) -> None:
    found = resolve_names(name, HERE)
    assert isinstance(found, Unknown) or set(found) <= {"GPU-aaaa-1", *SLICES}
