"""Links between pairs, and slices (C1.10)."""

from __future__ import annotations

from itertools import permutations

import msgspec

from gpukeeper.acceptance.check import CheckContext, CheckRun, CheckSize, RunRequest
from gpukeeper.acceptance.checks import topology
from gpukeeper.acceptance.record import Finding
from gpukeeper.model.gpu import Gpu, Grade
from tests.unit.acceptance.machines import context, gpus

LOOK = CheckRun(serving=CheckSize(depth=0, seconds=0, worth=0, what=""))


def links(here: tuple[Gpu, ...], way: str, **odd: str) -> dict[str, dict[str, str]]:
    """`odd`: of pairs such as GPU-0_GPU-1, both ways."""
    found: dict[str, dict[str, str]] = {gpu.uuid: {} for gpu in here}
    for one, two in permutations(here, 2):
        pair = "_".join(sorted((one.uuid, two.uuid))).replace("-", "")
        found[one.uuid][two.uuid] = odd.get(pair, way)
    return found


def read(here: tuple[Gpu, ...], way: str = "nvlink", **odd: str) -> tuple[Finding, ...]:
    return topology.interpret(LOOK, context(here, machine={"topology": links(here, way, **odd)}))


def test_every_pair_over_nvlink() -> None:
    (found,) = read(gpus(8))
    assert (found.verdict, found.code) == (Grade.PASS, "topology-ok")
    assert found.message == "Pairs of GPUs: 28 over nvlink."


def test_a_pair_without_its_nvlink_fails_and_names_both() -> None:
    (found,) = read(gpus(4), GPU0_GPU3="system")
    assert (found.verdict, found.code, found.gpu) == (Grade.FAIL, "topology-no-nvlink", "GPU-0")
    assert found.evidence == {"with": "GPU-3"}


def test_cards_without_nvlink_are_only_described() -> None:
    (found,) = read(gpus(2, name="NVIDIA L4"), "node")
    assert (found.verdict, found.message) == (Grade.PASS, "Pairs of GPUs: 1 over node.")


def test_pairs_of_different_models_are_not_held_against_any() -> None:
    (found,) = read((gpus(1)[0], gpus(2, name="NVIDIA L4")[1]), "system")
    assert found.verdict is Grade.PASS


def test_one_gpu_has_no_pairs() -> None:
    (found,) = read(gpus(1))
    assert found.verdict is Grade.PASS


def test_what_is_unknown_of_a_pair_accuses_nobody_and_passes_nobody() -> None:
    (found,) = read(gpus(8), "not known")
    assert (found.verdict, found.code, found.gpu) == (Grade.INCONCLUSIVE, "topology-not-known", None)
    assert "28 pairs (GPU 0 and 1, " in found.message
    (found,) = topology.interpret(LOOK, context(gpus(2)))
    assert found.verdict is Grade.INCONCLUSIVE


def test_cards_without_nvlink_need_no_known_way() -> None:
    (found,) = read(gpus(2, name="NVIDIA L4"), "not known")
    assert found.verdict is Grade.PASS
    assert "connections are unknown" in found.message


def parts(whole: str, *profiles: str) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(uuid=f"MIG-{whole}-{i}", index=0, name="NVIDIA H200", part_of=whole, profile=profile)
        for i, profile in enumerate(profiles)
    )


def test_slices_are_reported() -> None:
    found = read(parts("GPU-0", "3g.71gb", "3g.71gb", "1g.18gb"))
    assert [one.verdict for one in found] == [Grade.SKIPPED, Grade.PASS]
    assert "1× 1g.18gb, 2× 3g.71gb" in found[0].message


def test_some_cut_and_some_whole_warns() -> None:
    found = read((*parts("GPU-9", "7g.141gb"), *gpus(1)))
    assert [one.code for one in found if one.verdict is Grade.WARN] == ["topology-mixed-slices"]


def test_a_gpu_off_its_numa_node_warns() -> None:
    tied = tuple(msgspec.structs.replace(gpu, facts={"numa": gpu.index or None}) for gpu in gpus(3))
    found = read(tied)
    assert [one.code for one in found] == ["topology-no-numa"]
    assert "GPU 0" in found[0].message


def test_without_a_gpu_it_is_skipped() -> None:
    here: CheckContext = context(gpus(1), wish=RunRequest(device="cpu"))
    (found,) = topology.interpret(LOOK, here)
    assert found.verdict is Grade.SKIPPED
