"""Who has which GPU, and what does not fit together. All of it said, none of it repaired."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpukeeper.interfaces.terminal.show import claim_row
from gpukeeper.lifecycle.claims import (
    ClaimState,
    Contradiction,
    GpuClaim,
    Inventory,
    MayUse,
    claims,
    contradictions,
    left_alone,
    may_use,
    runs_on_gpus,
    why_nothing,
)
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, Verdict, View
from gpukeeper.model.gpu import GpuMemory
from gpukeeper.model.policy import Exemption
from gpukeeper.model.series import NOT_MEASURED, Series, Signal
from gpukeeper.model.subject import EMPTY, Marks, Memory, Outcome, Ref, Seen, Shape, State, Stopped, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.fleet import one_row_each
from tests.unit.lifecycle.examples import BOOK, HOUR, MINUTE, NOW, POLICY, ended, idle_view, subject

ALL = {("docker", "node-3"): frozenset(Action), ("host", "node-3"): frozenset[Action]()}


def device(number: int, *, whole: int | None = None, **labels: str) -> View:
    """GPU-n of node-3, or slice MIG-n of a whole one."""
    uid = f"GPU-{number}" if whole is None else f"MIG-{number}"
    ref = Ref("host", "node-3", "gpu" if whole is None else "slice", f"{uid.lower()}", uid)
    root = None if whole is None else f"host/node-3/gpu-{whole}"
    never = Unknown("a GPU neither begins nor ends", by_design=True)
    told = {"memory_used_mib": "4", **labels}
    return View(
        Subject(seen=Seen(ref, uid, "", NOW), shape=Shape.DEVICE, root=root, state=never, created=never, labels=told)
    )


def opened(by: str | Unknown | None, used: str = "4") -> View:
    """GPU-0, and what has it open."""
    view = device(0, memory_used_mib=used)
    return msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, busy=by))


def named(name: str, *devices: str, **facts: Any) -> View:
    known = {"ref": Ref("docker", "node-3", "container", name, f"uid-{name}"), "devices": devices}
    memory = facts.pop("memory", EMPTY)
    return View(subject(**(known | facts)), memory=memory)


def bare(name: str, *devices: str, **facts: Any) -> View:
    ref = Ref("host", "node-3", "process", name, "77@5")
    return View(subject(**({"ref": ref, "devices": devices, "class_": "bare", "owner": "eve"} | facts)))


def stopped_by_hand(name: str, *devices: str, **facts: Any) -> View:
    memory = Memory(state="ended", stopped=Stopped("somebody", "", NOW - 5 * MINUTE, "run-1"))
    ref = Ref("docker", "node-3", "container", name, f"uid-{name}")
    known = {"ref": ref, "devices": devices, "outcome": Outcome.STOPPED}
    return View(ended(5 * MINUTE, **(known | facts)), (), memory)


def claimed(*views: View, **more: Any) -> tuple[GpuClaim, ...]:
    return claims(views, BOOK, NOW, offers=ALL, **more)


def found(*views: View, **more: Any) -> list[tuple[str, str]]:
    return [(one.kind, one.words) for one in contradictions(views, BOOK, NOW, **more)]


def lines(all_claims: tuple[GpuClaim, ...]) -> list[tuple[str, str, str]]:
    return [(one.how.value, one.name, one.holder.name if one.holder else "-") for one in all_claims]


# What free means


def test_a_device_that_any_process_has_open_is_held_and_says_by_whom() -> None:
    (one,) = claimed(opened("pid 4711 (python, root)", "3686"))
    assert (one.how, one.by, one.holder) == (ClaimState.HELD, "pid 4711 (python, root)", None)


@pytest.mark.parametrize(
    ("view", "baseline", "how", "words"),
    [
        (opened(None), None, ClaimState.FREE, ""),
        (opened(None, "580"), 540, ClaimState.FREE, ""),
        (
            opened(None, "3686"),
            540,
            ClaimState.UNSURE,
            "3686 MiB are in use without a visible process, 540 MiB when it is",
        ),
        (opened(None, "615"), None, ClaimState.FREE, ""),  # an H200 without clients
        (opened(None, "3686"), None, ClaimState.UNSURE, "its baseline is unknown"),
        (opened(None, "unknown: not supported"), 4, ClaimState.UNSURE, "its used memory is unknown"),
        (opened(None, "not known: not supported"), 4, ClaimState.UNSURE, "its used memory is unknown"),  # text before
        (
            opened(Unknown("that needs root")),
            4,
            ClaimState.UNSURE,
            "which processes have it open is unknown: that needs root",
        ),
        (opened(Unknown("nothing listed", by_design=True), "620"), 615, ClaimState.FREE, ""),
        (opened(Unknown("nothing listed", by_design=True), "1200"), 615, ClaimState.UNSURE, "1200 MiB are in use"),
        (
            opened(Unknown("nothing listed", by_design=True)),
            None,
            ClaimState.UNSURE,
            "which processes have it open is unknown",
        ),
    ],
)
def test_free_needs_memory_at_its_baseline_and_a_read_of_all_processes(
    view: View, baseline: int | None, how: ClaimState, words: str
) -> None:
    recorded = {"host/node-3/GPU-0": Memory(gpu=GpuMemory(baseline_mib=baseline))}
    (one,) = claimed(view, recorded=recorded)
    assert one.how is how
    assert words in one.next


def test_what_a_workload_has_is_its_own_whatever_has_it_open() -> None:
    told = claimed(opened("pid 77 (python, ann)", "3686"), named("eval", "GPU-0"))
    assert [one.how for one in told] == [ClaimState.RUNNING]


# Who has which


def test_each_device_and_each_who_has_it_is_one_line_and_free_ones_are_reported() -> None:
    """C11.4, C13.1"""
    told = claimed(device(0), device(1), device(2), named("eval", "GPU-0"), named("train", "GPU-2", "GPU-0"))
    assert lines(told) == [
        ("running", "host/node-3/gpu-0", "eval"),
        ("running", "host/node-3/gpu-0", "train"),
        ("free", "host/node-3/gpu-1", "-"),
        ("running", "host/node-3/gpu-2", "train"),
    ]
    assert told[0].since == NOW - 3 * HOUR
    assert told[0].owner == "ann"


def test_without_an_inventory_a_claim_has_the_workloads_own_word_and_nothing_is_free() -> None:
    assert lines(claimed(named("eval", "GPU-9"))) == [("running", "GPU-9", "eval")]


@pytest.mark.parametrize(
    ("view", "how"),
    [
        (named("a", "GPU-0", state=State.PAUSED), ClaimState.PAUSED),
        (named("a", "GPU-0", class_="infrastructure"), ClaimState.INFRASTRUCTURE),
        (named("a", "GPU-0", shape=Shape.ORPHAN, root="docker/node-3/gone"), ClaimState.ORPHAN),
        (named("a", "GPU-0", state=State.ENDED, live_children=2), ClaimState.CHILDREN),
        (bare("python-77", "GPU-0"), ClaimState.BARE),
        (stopped_by_hand("a", "GPU-0"), ClaimState.KEPT),
    ],
)
def test_how_it_is_had(view: View, how: ClaimState) -> None:
    """C11.4: those outside any workload too."""
    assert [one.how for one in claimed(view)] == [how]


@pytest.mark.parametrize(
    "view",
    [
        named("a"),
        named("a", "GPU-0", state=State.CREATED),
        named("a", "GPU-0", state=State.ENDED),
        named("a", "GPU-0", state=State.SUSPENDED),
        named("a", "GPU-0", state=Unknown("silent")),
        named("part", "GPU-0", root="docker/node-3/whole"),
        named("tree", "GPU-0", shape=Shape.TREE),
    ],
)
def test_what_runs_no_more_or_is_a_part_has_none(view: View) -> None:
    assert claimed(view) == ()


def test_what_its_owner_stopped_keeps_the_gpu_until_a_named_time() -> None:
    (one,) = claimed(stopped_by_hand("a", "GPU-0"))
    assert one.next_at == NOW + 10 * MINUTE
    assert "stays reserved for its owner for 10m more" in one.next
    assert one.since == NOW - 5 * MINUTE


def test_what_infrastructure_may_have_open_is_not_called_unknown() -> None:
    """Beside the row that has it. Whether the process is a part of it is not known, so the device is not free."""
    infrastructure, held = claimed(
        opened("pid 4711 (server, root)", "3686"), named("server", "GPU-0", class_="infrastructure")
    )[::-1]
    assert (infrastructure.how, held.how) == (ClaimState.INFRASTRUCTURE, ClaimState.HELD)
    assert held.next == "nothing: only infrastructure has it, of which these processes may be a part"


def test_infrastructure_is_in_nobodys_way() -> None:
    told = claimed(device(0), named("exporter", "GPU-0", class_="infrastructure"))
    assert {one.how for one in told} == {ClaimState.FREE, ClaimState.INFRASTRUCTURE}


def test_an_exporter_that_has_every_gpu_takes_no_row_of_its_own() -> None:
    """`observe --gpus` had two rows for each GPU: the driver's and the exporter's."""
    exporter = named("exporter", "GPU-0", "GPU-1", "GPU-2", class_="infrastructure")
    second = named("monitor", "GPU-0", class_="infrastructure")
    gpus = one_row_each(claimed(device(0), device(1), exporter, second, named("eval", "GPU-1")))
    assert [(one.device, one.how, len(beside)) for one, beside in gpus] == [
        ("GPU-0", ClaimState.FREE, 2),
        ("GPU-1", ClaimState.RUNNING, 1),
        ("GPU-2", ClaimState.INFRASTRUCTURE, 0),  # the driver does not list it
    ]
    assert claim_row(gpus[1][0], NOW, gpus[1][1])[2] == "docker/node-3/eval, docker/node-3/exporter (infrastructure)"


def test_two_workloads_on_one_gpu_keep_a_row_each() -> None:
    gpus = one_row_each(claimed(device(0), named("eval", "GPU-0"), named("train", "GPU-0")))
    assert [one.how for one, _beside in gpus] == [ClaimState.RUNNING] * 2


def test_a_gpu_that_is_cut_is_its_slices() -> None:
    told = claimed(device(0), device(1, whole=0), device(2, whole=0), named("eval", "MIG-1"))
    assert lines(told) == [("running", "host/node-3/mig-1", "eval"), ("free", "host/node-3/mig-2", "-")]
    assert lines(claimed(device(0), device(1, whole=0))) == [("free", "host/node-3/mig-1", "-")]


def test_who_has_a_whole_gpu_has_its_slices() -> None:
    told = claimed(device(0), device(1, whole=0), named("eval", "GPU-0"))
    assert lines(told) == [("running", "host/node-3/gpu-0", "eval")]


def test_an_unknown_gpu_is_reported_and_leaves_no_other_surely_free() -> None:
    told = claimed(device(0), named("eval", devices=Unknown("the driver did not answer")))
    assert [one.how for one in told] == [ClaimState.UNSURE, ClaimState.RUNNING]
    assert "the driver did not answer" in told[1].name


def test_a_gpu_in_quarantine_is_not_free() -> None:
    gone = Memory(gpu=GpuMemory(quarantined=NOW - HOUR, quarantine_reason="memory stays in use"))
    told = claimed(device(0), device(1), recorded={"host/node-3/GPU-0": gone, "host/node-3/GPU-1": Memory()})
    assert [one.how for one in told] == [ClaimState.QUARANTINE, ClaimState.FREE]
    assert "memory stays in use" in told[0].next
    assert told[0].since == NOW - HOUR


def test_the_newest_measured_minute_is_its_use() -> None:
    series = (
        Series(Signal.CPU, "", NOW - 3 * MINUTE, (9.0, 9.0)),
        Series(Signal.GPU, "GPU-1", NOW - 3 * MINUTE, (9.0, 9.0)),
        Series(Signal.GPU, "GPU-0", NOW - 3 * MINUTE, (1.0, 83.0, NOT_MEASURED)),
    )
    (one,) = claimed(View(subject(), series))
    assert (one.use, one.use_at) == (83.0, NOW - 2 * MINUTE)


def test_without_one_measured_minute_its_use_is_unknown() -> None:
    series = (Series(Signal.GPU, "GPU-0", NOW - MINUTE, (NOT_MEASURED, NOT_MEASURED)),)
    (one,) = claimed(View(subject(), series))
    assert (one.use, one.use_at) == (Unknown("not measured"), None)


@pytest.mark.parametrize(("labels", "use"), [({"utilisation_percent": "41"}, 41.0), ({}, None)])
def test_else_what_the_driver_says_of_the_device(labels: dict[str, str], use: float | None) -> None:
    (one,) = claimed(device(0, **labels), named("eval", "GPU-0"))
    assert one.use == (use if use is not None else Unknown("not measured"))


@pytest.mark.parametrize("text", ["unknown: not supported", "not known: not supported"])  # now, and before
def test_use_that_the_driver_could_not_report_is_not_measured(text: str) -> None:
    (one,) = claimed(device(0, utilisation_percent=text), named("eval", "GPU-0"))
    assert one.use == Unknown("not measured")


# What happens next


def decided(action: Action = Action.KEEP, verdict: Verdict = Verdict.WAIT, **more: Any) -> Decision:
    return Decision(
        seen=subject().seen, action=action, rule="idle", reason="idle for 10m, allowed 30m", verdict=verdict, **more
    )


@pytest.mark.parametrize(
    ("decision", "begins"),
    [
        (decided(due=NOW + 14 * MINUTE), "kept: idle for 10m"),
        (decided(verdict=Verdict.REPORT), "reported only: idle"),
        (decided(verdict=Verdict.UNKNOWN), "kept: idle"),
        (decided(verdict=Verdict.PROTECT, due=NOW + HOUR), "kept: idle"),
        (decided(verdict=Verdict.SILENT), "nothing: no rule"),
        (decided(Action.STOP, Verdict.DUE), "idle for 10m"),
    ],
)
def test_where_nothing_comes_next_the_decision_says_why(decision: Decision, begins: str) -> None:
    assert why_nothing(decision, ALL).startswith(begins)
    assert why_nothing(decision).startswith(begins)


def test_nobody_is_told_of_a_stop_that_is_not_offered() -> None:
    nothing = {("docker", "node-3"): frozenset({Action.REMOVE})}
    for decision in (decided(Action.STOP, Verdict.DUE), decided(Action.WARN, Verdict.DUE, then=Action.STOP)):
        assert why_nothing(decision, nothing).endswith("docker offers no stop")


# What does not fit together


def test_everything_in_order_has_no_finding() -> None:
    """C13.2"""
    running = named("eval", "GPU-0", memory=Memory(state="running", incarnation="run-1"))
    views = (
        device(0),
        device(1, whole=0),
        running,
        named("train"),
        named("exporter", "GPU-0", class_="infrastructure"),
    )
    assert found(*views, recorded={v.subject.ref.key: v.memory for v in views}) == []


def test_what_an_adapter_found_is_passed_on() -> None:
    """C13.2"""
    (one,) = contradictions([named("eval", "GPU-0", findings=("its owner label names nobody here: zoe",))], BOOK, NOW)
    ref = Ref("docker", "node-3", "container", "eval", "uid-eval")
    words = "docker/node-3/eval: its owner label names nobody here: zoe"
    assert one == Contradiction(kind="reported", about=(ref,), words=words)


def test_two_running_workloads_on_one_gpu_are_a_duplicate() -> None:
    """C13.2"""
    ((kind, words),) = found(device(0), named("eval", "GPU-0"), named("train", "GPU-0", owner="bob"))
    assert kind == "duplicate"
    assert words == (
        "host/node-3/gpu-0 is claimed by 2 running workloads: docker/node-3/eval (ann), docker/node-3/train (bob)"
    )


def test_who_was_started_again_onto_a_gpu_with_a_new_tenant_is_named() -> None:
    """C9.4"""
    back = named("eval", "GPU-0", started=NOW - HOUR, previous_end=NOW - 5 * HOUR)
    ((_, words),) = found(device(0), back, named("train", "GPU-0", owner="bob", started=NOW - 2 * HOUR))
    assert words.endswith(f"docker/node-3/eval was restarted on it at {NOW - HOUR:%Y-%m-%d %H:%M} UTC")
    first = named("eval", "GPU-0", started=NOW - 3 * HOUR, previous_end=NOW - 5 * HOUR)
    ((_, words),) = found(device(0), first, named("train", "GPU-0", owner="bob", started=NOW - 2 * HOUR))
    assert "started again" not in words


def test_the_same_name_at_another_place_is_another_gpu() -> None:
    elsewhere = named("train", "GPU-0", ref=Ref("docker", "node-4", "container", "train", "uid-train"))
    assert found(named("eval", "GPU-0"), elsewhere) == []


def test_a_whole_gpu_and_its_slice_are_a_duplicate_said_once() -> None:
    inventory = (device(0), device(1, whole=0), device(2, whole=0))
    ((kind, words),) = found(*inventory, named("eval", "GPU-0"), named("train", "MIG-1"))
    assert kind == "duplicate"
    assert words.startswith("host/node-3/gpu-0 is claimed by 2")
    assert found(*inventory, named("eval", "MIG-1"), named("train", "MIG-2")) == []
    assert found(*inventory, named("eval", "GPU-0", "MIG-1")) == []  # with itself


def test_what_may_be_a_part_of_the_other_is_no_duplicate() -> None:
    assert found(named("eval", "GPU-0"), bare("python-77", "GPU-0", class_=Unknown("its group is hidden"))) == []


def test_a_claim_on_a_gpu_that_is_not_there_is_found() -> None:
    """C13.2"""
    ((kind, words),) = found(device(0), named("eval", "GPU-0", "GPU-7"))
    assert (kind, words) == ("missing device", "docker/node-3/eval: it claims GPU-7, and node-3 has no such GPU")


def test_what_was_not_seen_is_not_missing() -> None:
    assert found(named("eval", "GPU-7")) == []  # no inventory at all
    assert found(device(0), named("eval", "GPU-7"), doubtful={"node-3"}) == []
    assert found(device(0), named("eval", devices=Unknown("silent"))) == []


@pytest.mark.parametrize(
    ("proof", "says"),
    [
        ("same cgroup", "it outlived its workload (same cgroup)"),
        (Unknown("?"), "perhaps of another engine"),
        (None, "perhaps of another engine"),
    ],
)
def test_an_orphan_is_found(proof: str | Unknown | None, says: str) -> None:
    """C13.2"""
    ((kind, words),) = found(named("left", "GPU-0", shape=Shape.ORPHAN, proof=proof))
    assert kind == "orphan"
    assert says in words


def test_a_user_outside_any_workload_on_a_claimed_gpu_is_found() -> None:
    """C11.4"""
    ((kind, words),) = found(device(0), named("eval", "GPU-0"), bare("python-77", "GPU-0"))
    assert kind == "bare"
    assert "host/node-3/python-77 (eve) runs outside any workload on host/node-3/gpu-0" in words
    assert found(device(0), bare("python-77", "GPU-0")) == []


def test_a_new_tenant_on_what_is_kept_for_another_owner_is_found() -> None:
    kept = stopped_by_hand("mine", "GPU-0")
    ((kind, words),) = found(kept, named("theirs", "GPU-0", owner="bob"))
    assert kind == "duplicate"
    assert (
        "GPU-0 is kept for docker/node-3/mine (ann) after its stop, and in use by docker/node-3/theirs (bob)" in words
    )
    assert found(kept, named("next", "GPU-0")) == []  # the owner's own


def test_the_record_against_what_is_there() -> None:
    """C13.2"""
    running = named("eval", "GPU-0")
    key = running.subject.ref.key
    ((kind, words),) = found(running, recorded={key: Memory(state="ended", incarnation="run-1")})
    assert kind == "record"
    assert "the ledger has it as ended" in words
    for fine in (Memory(state="ended", incarnation="run-0"), Memory(state="running", incarnation="run-1")):
        assert found(running, recorded={key: fine}) == []
    assert found(named("old", state=State.ENDED), recorded={"docker/node-3/uid-old": Memory(state="ended")}) == []


def test_what_the_ledger_has_and_nobody_lists_is_found() -> None:
    """C13.2"""
    gone = Ref("docker", "node-3", "container", "gone", "u9")
    ((kind, words),) = found(absent=[gone])
    assert kind == "record"
    assert words.startswith("docker/node-3/gone: it is in the ledger and no longer listed")


# The emergency stop


def test_what_an_emergency_stop_is_about() -> None:
    """C16.5"""
    assert runs_on_gpus(subject())
    assert runs_on_gpus(subject(devices=Unknown("silent")))
    for other in ({"devices": ()}, {"state": State.ENDED}, {"root": "x"}, {"shape": Shape.ORPHAN}):
        assert not runs_on_gpus(subject(**other))


def test_what_it_leaves_alone() -> None:
    """C16.5"""
    assert left_alone(idle_view(), BOOK, NOW, ALL) is None
    assert "never touched" in str(left_alone(named("a", "GPU-0", class_="infrastructure"), BOOK, NOW, ALL))
    assert "offers no stop" in str(left_alone(idle_view(), BOOK, NOW, {}))
    asks = named("a", "GPU-0", marks=Marks(asks_exemption="please"))
    assert "an admin has to grant or refuse" in str(left_alone(asks, BOOK, NOW, ALL))


@pytest.mark.parametrize(("rules", "left"), [((), True), (("idle",), False)])
def test_an_exemption_from_every_rule_is_one_from_the_emergency_stop(rules: tuple[str, ...], left: bool) -> None:
    import msgspec

    book = Rulebook(msgspec.structs.replace(POLICY, exemptions=(Exemption(reason="demo", owner="ann", rules=rules),)))
    assert (left_alone(idle_view(), book, NOW, ALL) is not None) == left


def test_a_claim_shows_what_its_decision_says() -> None:
    view = idle_view()
    (one,) = claims([view], BOOK, NOW)
    assert one.next == why_nothing(decide(view, BOOK, NOW))
    assert one.next_at is None  # it is due now


def kept(owner: str | Unknown | None = "ann") -> View:
    """Stopped by its owner a minute ago."""
    by_hand = Stopped("somebody", "", NOW - MINUTE, "run-1")
    memory = Memory(incarnation="run-1", first_seen_ended=NOW - MINUTE, stopped=by_hand)
    facts: dict[str, Any] = {"state": State.ENDED, "ended": NOW - MINUTE, "outcome": Outcome.STOPPED, "owner": owner}
    return named("train", "GPU-0", memory=memory, **facts)


def asked(*views: View, whole: int = 0, user: str = "ann", unread: tuple[str, ...] = (), **recorded: Memory) -> MayUse:
    inventory = Inventory([view.subject for view in views])
    return may_use("node-3", f"GPU-{whole}", user, claims(views, BOOK, NOW, recorded=recorded), inventory, unread)[0]


def test_a_gpu_may_be_given_to_a_user_if_it_is_free_or_kept_for_that_user() -> None:
    assert asked(device(0)) is MayUse.YES
    assert asked(device(0), named("eval", "GPU-0")) is MayUse.NO
    assert [asked(device(0), kept(), user=user) for user in ("ann", "bob")] == [MayUse.YES, MayUse.NO]
    assert asked(device(0), kept(None), user="ann") is MayUse.NO


def test_a_gpu_that_is_kept_for_a_user_and_held_by_others_is_not_given_out() -> None:
    assert asked(opened("pid 20 (python, root)"), kept()) is MayUse.NO
    assert asked(opened(Unknown("no root")), kept()) is MayUse.UNKNOWN


def test_a_gpu_in_quarantine_is_given_to_nobody() -> None:
    quarantined = Memory(gpu=GpuMemory(quarantined=NOW, quarantine_reason="fan", quarantined_by="root"))
    view = device(0)
    inventory = Inventory([view.subject])
    found = claims([view], BOOK, NOW, recorded={view.subject.ref.key: quarantined})
    assert may_use("node-3", "GPU-0", "ann", found, inventory) == (
        MayUse.NO,
        "quarantine: until an admin returns it: fan",
    )


def test_what_is_unknown_is_no_permission() -> None:
    assert asked(device(0, memory_used_mib="not measured")) is MayUse.UNKNOWN
    assert asked(device(0), unread=("containers of docker/node-3",)) is MayUse.UNKNOWN
    assert asked(device(0), named("eval", devices=Unknown("no inspect"))) is MayUse.UNKNOWN
    assert asked(device(0), kept(Unknown("no directory service"))) is MayUse.UNKNOWN
    assert asked(kept()) is MayUse.UNKNOWN, "without an inventory other holders are not known"
    assert asked(named("eval", "GPU-0")) is MayUse.NO


def test_of_a_divided_gpu_the_slices_are_given_out() -> None:
    views = [device(0), device(1, whole=0), device(2, whole=0), named("eval", "MIG-1")]
    inventory, found = Inventory([view.subject for view in views]), claims(views, BOOK, NOW)
    answers = [may_use("node-3", one, "ann", found, inventory)[0] for one in ("GPU-0", "MIG-1", "MIG-2")]
    assert answers == [MayUse.NO, MayUse.NO, MayUse.YES]
