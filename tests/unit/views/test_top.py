"""What `top` shows, as values."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.engine.outlook import Outlooks, PlaceOutlook, PolicyHead
from gpukeeper.engine.view import FleetSnapshot, UnseenAt
from gpukeeper.lifecycle.claims import ClaimState
from gpukeeper.lifecycle.forecast import STAYS_IDLE, NextStep
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.decision import Action, Decision, Verdict, View
from gpukeeper.model.policy import Mode
from gpukeeper.model.series import Series, Signal
from gpukeeper.model.subject import Memory
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.fleet import TopView, ordered, top_view, with_daemon_plan, with_notes
from gpukeeper.views.live import GpuState, GpuTile
from tests.unit.lifecycle.examples import BOOK, DAY, HOUR, MINUTE, NOW, decision, idle_view, quiet, subject, warned
from tests.unit.lifecycle.test_claims import device, named, opened

OFFERS = {("docker", "node-3"): frozenset(Action)}


def shown(*views: View, narrow: Narrow | None = None, **facts: Any) -> TopView:
    return top_view(FleetSnapshot(views=list(views), offers=OFFERS, **facts), BOOK, narrow or Narrow(), NOW)


def test_a_gpu_has_its_memory_its_holder_and_what_comes_by_which_rule() -> None:
    measured = device(0, memory_used_mib="61440", memory_total_mib="81920")
    (line,) = shown(measured, idle_view()).gpus
    assert (line.memory_used_mib, line.memory_total_mib, line.use) == (61440, 81920, 0.0)
    assert (line.how, line.holder, line.owner, line.class_) == (
        ClaimState.RUNNING,
        "docker/node-3/eval",
        "ann",
        "managed",
    )
    assert line.since == NOW - 3 * HOUR
    stop, remove = line.steps
    assert stop == NextStep("stop", None, "idle", STAYS_IDLE), "due, so at the next pass"
    assert remove == NextStep("remove", None, "idle", STAYS_IDLE), "its class removes what was idle"
    assert line.reason.startswith("idle for")


def test_what_comes_later_has_its_warnings_first_and_the_act_last() -> None:
    (line,) = shown(View(subject(class_="api"))).gpus
    assert [one.action for one in line.steps] == ["warn", "warn", "stop"]
    assert line.steps[-1] == NextStep("stop", NOW + 21 * HOUR, "max_runtime")
    assert line.reason.startswith("ran for 3h, allowed 1d")


def test_what_could_not_be_measured_is_unknown_and_never_zero() -> None:
    (line,) = shown(View(subject())).gpus
    assert isinstance(line.use, Unknown)
    assert isinstance(line.memory_used_mib, Unknown)
    for text in ("unknown: the driver is silent", "not known: the driver is silent"):  # now, and of a daemon before
        (line,) = shown(device(0, memory_used_mib=text), View(subject())).gpus
        assert isinstance(line.memory_used_mib, Unknown)


def test_an_old_measurement_is_marked() -> None:
    series = (Series(Signal.GPU, "GPU-0", NOW - 9 * MINUTE, (83.0,)),)
    (line,) = shown(View(subject(), series)).gpus
    assert (line.use, line.use_is_old) == (83.0, True)
    (line,) = shown(View(subject(), quiet())).gpus
    assert not line.use_is_old


def test_a_free_gpu_is_used_by_nothing_and_one_held_by_processes_names_them() -> None:
    (free,) = shown(device(0)).gpus
    assert (free.how, free.use, free.steps) == (ClaimState.FREE, None, ())
    busy = opened("pid 4711 (python, root)")
    labels = {**busy.subject.labels, "utilisation_percent": "37"}
    busy = msgspec.structs.replace(busy, subject=msgspec.structs.replace(busy.subject, labels=labels))
    (held,) = shown(busy).gpus
    assert (held.how, held.holder, held.use) == (ClaimState.HELD, "pid 4711 (python, root)", 37.0)


def test_an_action_that_the_platform_does_not_offer_does_not_come() -> None:
    found = FleetSnapshot(views=[idle_view()], offers={("docker", "node-3"): frozenset[Action]()})
    (line,) = top_view(found, BOOK, Narrow(), NOW).gpus
    assert line.steps == ()
    assert "offers no stop" in line.reason


def test_one_persons_gpus_and_what_was_not_seen() -> None:
    views = (device(0), named("eval", "GPU-0"), named("train", "GPU-1", owner="bob"))
    view = shown(*views, narrow=Narrow(owner="bob"), unseen=[UnseenAt("GPUs", "silent", "host", "node-3")])
    assert [one.holder for one in view.gpus] == ["docker/node-3/train"]
    assert view.notes[0] == "host/node-3: GPUs could not be read (silent)"


def test_a_gpu_with_two_holders_counts_once() -> None:
    view = shown(device(0), device(1), named("eval", "GPU-0"), named("train", "GPU-0", owner="bob"))
    assert len(view.gpus) == 3
    assert view.counts == {ClaimState.RUNNING: 1, ClaimState.FREE: 1}


def told(*decisions: Decision) -> Outlooks:
    place = PlaceOutlook(
        platform="docker",
        place="node-3",
        at=NOW,
        seen=1,
        running=1,
        unseen=(),
        breaker=None,
        decisions=decisions,
        left_out=0,
    )
    policy = PolicyHead("policy.yaml", "d1", "shared-host", Mode.ENFORCE)
    return Outlooks(now=NOW, policy=policy, paused="ann: upgrade", places=(place,), who="bob", admin=False)


def test_the_daemons_decisions_replace_those_made_without_its_ledger() -> None:
    view = shown(View(subject(), quiet(), Memory(warnings=warned())))
    assert view.gpus[0].steps[-1].rule == "idle"
    held = decision(1, Action.KEEP, verdict=Verdict.PROTECT, rule="hold", reason="held by ann for 1h more")
    held = msgspec.structs.replace(held, seen=subject().seen, class_="managed")
    joined = with_daemon_plan(view, told(held))
    assert (joined.gpus[0].steps, joined.gpus[0].reason) == ((), "kept: held by ann for 1h more")
    assert joined.paused == "ann: upgrade"


def test_a_workload_that_only_the_daemon_sees_is_shown_without_its_devices() -> None:
    runs = decision(1, Action.WARN, rule="idle", then=Action.STOP, announced=NOW + HOUR, running=True, gpus=2)
    waits = decision(2, Action.KEEP, verdict=Verdict.WAIT, rule="idle", due=NOW + DAY, running=True, gpus=1)
    ended = decision(3, running=False, gpus=1)
    view = with_daemon_plan(shown(), told(runs, waits, ended))
    first, second = view.gpus
    assert view.counts == {ClaimState.RUNNING: 3}
    assert (first.name, first.holder, isinstance(first.use, Unknown)) == ("2 GPUs", "docker/node-3/job-1", True)
    assert first.steps == (
        NextStep("warn", None, "idle", STAYS_IDLE),
        NextStep("stop", NOW + HOUR, "idle", STAYS_IDLE),
    )
    assert second.steps == (NextStep("", NOW + DAY, "idle"),), "which action, its rule does not say yet"


def test_the_order_puts_what_is_unknown_last() -> None:
    def line(name: str, **facts: Any) -> GpuTile:
        known: dict[str, Any] = dict.fromkeys(("id", "key", "name"), name)
        known |= {"platform": "docker", "place": "n", "state": GpuState.HELD, "how": ClaimState.RUNNING}
        return GpuTile(**known, **facts)

    lines = [
        line("a", use=Unknown("?"), memory_used_mib=5, owner=None),
        line("b", use=3.0, owner="eve", steps=(NextStep("stop", NOW, "idle"),)),
        line("c", use=90.0, memory_used_mib=9, owner="ann", steps=(NextStep("stop", None, "idle"),)),
    ]
    orders = {by: "".join(one.name for one in ordered(lines, by)) for by in ("gpu", "use", "memory", "owner", "next")}
    assert orders == {"gpu": "abc", "use": "cba", "memory": "cab", "owner": "cba", "next": "cba"}
    assert [one.name for one in ordered(lines, "gpu", reverse=True)] == ["c", "b", "a"]


def test_what_a_session_says_comes_after_what_was_not_seen() -> None:
    view = shown(device(0), unseen=[UnseenAt("slices", "silent", "host", "node-3")])
    assert with_notes(view, ["docker: no socket"]).notes[-1] == "docker: no socket"
    assert len(with_notes(view, ["docker: no socket"]).notes) == 2
