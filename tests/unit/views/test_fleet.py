"""What `observe` shows, as values."""

from __future__ import annotations

from gpukeeper.engine.view import FleetSnapshot, UnseenAt
from gpukeeper.lifecycle.claims import ClaimState
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.decision import Unseen
from gpukeeper.views.fleet import fleet_view, gpus_view, unseen_everywhere, unseen_lines, untouched, waste_view
from tests.unit.lifecycle.examples import BOOK, NOW, idle_view
from tests.unit.lifecycle.test_claims import device, named

EVERYTHING = Narrow()


def snapshot() -> FleetSnapshot:
    """Two workloads on one GPU, and a free GPU."""
    twins = [named("eval", "GPU-0"), named("train", "GPU-0", owner="bob")]
    return FleetSnapshot(views=[device(0), device(1), *twins])


def test_a_narrowed_view_shows_the_other_half_of_a_finding() -> None:
    view = fleet_view(snapshot(), BOOK, Narrow(owner="bob"), NOW)
    assert [one.ref.name for one in view.subjects] == ["train"]
    (finding,) = view.findings
    assert (finding.kind, finding.about) == ("duplicate", ("docker/node-3/eval", "docker/node-3/train"))
    assert not fleet_view(snapshot(), BOOK, Narrow(owner="eve"), NOW).findings


def test_a_free_gpu_belongs_to_no_narrowed_view() -> None:
    whole = gpus_view(snapshot(), BOOK, EVERYTHING, NOW)
    assert [one.how for one in whole.gpus] == [ClaimState.RUNNING, ClaimState.RUNNING, ClaimState.FREE]
    narrow = gpus_view(snapshot(), BOOK, Narrow(owner="bob"), NOW)
    assert [one.holder.name for one in narrow.gpus if one.holder] == ["train"]
    assert len(narrow.gpus) == 1


def test_waste_is_what_holds_gpus_without_use() -> None:
    found = FleetSnapshot(views=[idle_view(), *snapshot().views])
    (one,) = waste_view(found, BOOK, EVERYTHING, NOW).waste
    assert one.ref.name == "eval"


def test_a_place_of_which_not_everything_was_listed_proves_nothing_missing() -> None:
    found = FleetSnapshot(views=[device(0), named("eval", "GPU-7")])
    assert [one.kind for one in fleet_view(found, BOOK, EVERYTHING, NOW).findings] == ["missing device"]
    found.unseen = [UnseenAt("slices", "the driver is silent", "host", "node-3")]
    assert not fleet_view(found, BOOK, EVERYTHING, NOW).findings


def test_one_reason_for_many_kinds_is_one_sentence() -> None:
    missed = [Unseen(f"{kind} (all)", f'may not list "{kind}"') for kind in ("jobs", "pods")]
    lines = unseen_lines("kubernetes", "prod", [*missed, Unseen("nodes", "the server is silent")])
    assert lines == [
        'kubernetes/prod: jobs (all) could not be read (may not list "jobs")',
        "kubernetes/prod: could not be read for the same reason: pods (all)",
        "kubernetes/prod: nodes could not be read (the server is silent)",
    ]
    assert untouched(lines)[2].endswith("Its state is unknown, so it is not changed.")


def test_each_place_has_its_own_sentences() -> None:
    unseen = [UnseenAt("GPUs", "silent", "host", "a"), UnseenAt("host/b", "silent", "host", "b")]
    assert unseen_everywhere(unseen) == ["host/a: GPUs could not be read (silent)", "host/b could not be read (silent)"]
