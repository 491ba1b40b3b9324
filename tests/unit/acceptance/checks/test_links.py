"""Reading copies between GPUs: a bad GPU, a bad link and wrong data are told apart."""

from __future__ import annotations

from gpukeeper.acceptance.checks import links
from gpukeeper.acceptance.record import Finding
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.checks import results
from tests.unit.acceptance.checks.results import trial


def read(count: int = 8, **more: object) -> tuple[Finding, ...]:
    return tuple(links.interpret(trial(results.links(count, **more)), results.node(count)))  # type: ignore[arg-type]


def of(found: tuple[Finding, ...], *, worse_than: Grade = Grade.PASS) -> list[tuple[str, str | None, Grade]]:
    return [(one.metric, one.gpu, one.verdict) for one in found if one.verdict is not worse_than]


def test_equal_links_pass() -> None:
    found = read()
    assert of(found) == []
    assert {one.metric for one in found} == {"data", "p2p", "pairs p2p"}
    assert len(found[1].evidence["matrix"]) == 56


def test_one_slow_link_is_named_and_neither_gpu_is_blamed() -> None:
    found = read(slow={(2, 5): 190.0})
    assert of(found) == [("pair 2 to 5", None, Grade.FAIL)]
    slow = next(one for one in found if one.metric == "pair 2 to 5")
    assert (slow.code, slow.confirm) == ("links-slow-pair", True)
    assert "GPU 2 to GPU 5: 190.0 GB/s, 51.3 % below the median of 56 such pairs" in slow.message


def test_a_slow_gpu_is_named_and_the_others_stay_good() -> None:
    slow = {pair: 200.0 for other in range(8) for pair in ((3, other), (other, 3))}
    found = read(slow=slow)
    judged = {one.gpu: one.verdict for one in found if one.metric == "p2p"}
    assert judged["GPU-3"] is Grade.FAIL
    assert {grade for gpu, grade in judged.items() if gpu != "GPU-3"} == {Grade.PASS}


def test_a_little_slower_link_warns() -> None:
    assert of(read(slow={(0, 1): 390.0 * 0.94})) == [("pair 0 to 1", None, Grade.WARN)]


def test_links_all_slow_are_seen_by_the_floor() -> None:
    """Through the memory of the machine instead of NVLink: no peer differs, the floor of 335 GB/s speaks."""
    assert {verdict for _, _, verdict in of(read(gbps=45.0))} == {Grade.WARN}


def test_a_wrong_word_fails_at_once_with_its_pair_and_place() -> None:
    said = results.links(4)
    pair = next(one for one in said[0]["pairs"] if (one["from"], one["to"]) == (1, 2))
    pair |= {"wrong": 1, "where": [{"index": 9, "got": 5, "want": 4}]}
    found = next(one for one in links.interpret(trial(said), results.node(4)) if one.code == "links-wrong-data")
    assert (found.verdict, found.gpu, found.confirm) == (Grade.FAIL, "GPU-2", False)
    assert "1 of the words that GPU 1 sent arrived wrong at GPU 2. Word 9 is 5, expected 4." in found.message


def test_pairs_that_were_not_measured_are_missing() -> None:
    said = results.links(4)
    said[0]["pairs"] = said[0]["pairs"][:-1]
    found = next(one for one in links.interpret(trial(said), results.node(4)) if one.metric == "pairs")
    assert (found.verdict, found.code) == (Grade.INCONCLUSIVE, "links-missing")


def test_two_gpus_without_a_floor_are_noted() -> None:
    found = links.interpret(trial(results.links(2)), results.node(2, "NVIDIA Unheard-of"))
    assert {one.code for one in found if one.metric == "p2p"} == {"links-noted"}


def test_pairs_through_the_memory_of_the_machine_are_held_against_each_other() -> None:
    said = results.links(4, 20.0)
    for pair in said[0]["pairs"]:
        pair["p2p"] = False
    found = links.interpret(trial(said), results.node(4))
    assert [one.metric for one in found if one.code == "links-pairs-ok"] == ["pairs host"]


def test_pairs_are_compared_with_those_that_are_connected_alike() -> None:
    """Half of the pairs go over the switch and half over the bridge, slower: nothing is wrong with them."""
    uuids = [f"GPU-{i}" for i in range(4)]
    near = {(0, 1), (1, 0), (2, 3), (3, 2)}
    topology = {
        one: {other: "switch" if (i, j) in near else "system" for j, other in enumerate(uuids) if i != j}
        for i, one in enumerate(uuids)
    }
    slow = {(i, j): 20.0 for i in range(4) for j in range(4) if (i, j) not in near}
    context = results.node(4, "NVIDIA L40S", machine={"topology": topology})
    found = links.interpret(trial(results.links(4, 26.0, slow)), context)
    assert [one.code for one in found if one.metric.startswith("pair")] == ["links-pairs-ok"]


def test_the_job_is_small_on_a_cpu() -> None:
    assert links.request(links.CHECK.servings[0], results.node()).params["bytes"] == 2**28
    assert links.request(links.CHECK.servings[0], results.cpu()).params["bytes"] == 2**20
