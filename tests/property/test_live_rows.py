"""Rows that are kept up to date are those that are built anew, whatever changed in between, and deltas lead to them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.engine.live import LiveFact, LiveState, PlaceState
from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.lifecycle.activity import wasted
from gpukeeper.lifecycle.claims import Inventory, claims, contradictions
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Unseen, View
from gpukeeper.model.gpu import GpuMemory
from gpukeeper.model.policy import Mode
from gpukeeper.model.series import Sample, Series, Signal
from gpukeeper.model.subject import EMPTY, Hold, Memory, Shape, State, Stopped, Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import MachineView, gpu_order, patched
from gpukeeper.views.live_rows import NOTHING, LiveRows, gpu_tile, live_tile, next_of, workload_line
from tests.unit.lifecycle.examples import BOOK, NOW, POLICY
from tests.unit.lifecycle.test_claims import bare, device, named, stopped_by_hand

MINUTE, NO_TIME = timedelta(minutes=1), timedelta()
DOCKER = cast(Platform, SimpleNamespace(name="docker", place="node-3", guards=dict.fromkeys(Action)))
HOST = cast(Platform, SimpleNamespace(name="host", place="node-3", guards={}))
OTHER_BOOK = Rulebook(msgspec.structs.replace(POLICY, mode=Mode.PLAN))
DEVICES = ("GPU-0", "GPU-1", "MIG-3", "MIG-4", "GPU-9")
# The moments at which something may change by time alone are hit exactly, and passed by.
spans = st.sampled_from([NO_TIME, timedelta(microseconds=1), timedelta(seconds=17), MINUTE, 2 * MINUTE, 5 * MINUTE])
HEAD = MachineView(
    machine="m",
    at=NOW,
    version="1",
    policy=PolicyHead("file", "digest", "preset", Mode.PLAN),
    paused=None,
    places=(),
    gpus=(),
    workloads=(),
)


@st.composite
def workloads(draw: st.DrawFn) -> View:
    name = draw(st.sampled_from("abcd"))
    least = draw(st.sampled_from([0, 1, 1]))
    devices = tuple(draw(st.lists(st.sampled_from(DEVICES), unique=True, min_size=least, max_size=2)))
    kind = draw(st.sampled_from(["runs", "unsure", "kept", "bare", "infrastructure", "ended", "orphan"]))
    minutes = NOW + draw(st.integers(-3, 6)) * MINUTE
    memory = Memory(
        holds=(Hold("ann", NOW, minutes, "paper"),) if draw(st.booleans()) else (),
        warnings=(Warned("idle", 1, NOW, True, "run-1", MINUTE, until=minutes),) if draw(st.booleans()) else (),
    )
    match kind:
        case "unsure":
            view = named(name, devices=Unknown("not listed"), memory=memory)
        case "kept":
            stopped = Memory(state="ended", stopped=Stopped("somebody", "", minutes - 14 * MINUTE, "run-1"))
            return msgspec.structs.replace(stopped_by_hand(name, *devices), memory=stopped)
        case "bare":
            view = bare(name, *devices)
        case "orphan":
            view = named(name, *devices, shape=Shape.ORPHAN, proof=None)
        case "infrastructure":
            view = named(name, *devices, class_="infrastructure", memory=memory)
        case "ended":
            view = named(name, *devices, state=State.ENDED, ended=NOW - MINUTE, memory=memory)
        case _:
            view = named(name, *devices, findings=("odd",) if draw(st.booleans()) else (), memory=memory)
    series = tuple(Series(Signal.GPU, one, minutes - 40 * MINUTE, (0.0,) * 40) for one in devices)
    return msgspec.structs.replace(view, series=series if draw(st.booleans()) else ())


places = st.lists(workloads(), max_size=4, unique_by=lambda one: one.subject.ref.key)
gpus = st.sampled_from(
    [
        (device(0), device(1)),
        (device(0), device(1), device(3, whole=0), device(4, whole=0)),
        (device(0, model="new", memory_used_mib="900"), device(1)),
        (device(1),),
        (),
    ]
)
operations = st.one_of(
    st.tuples(st.just("pass"), places),
    st.tuples(st.just("narrow"), workloads()),
    st.tuples(st.just("gpus"), gpus),
    st.tuples(st.just("unseen"), st.booleans()),
    st.tuples(st.just("measured"), st.sampled_from(DEVICES), st.floats(0, 100)),
    st.tuples(st.just("nothing")),
    st.tuples(st.just("forecast"), st.integers(0, 3)),
    st.tuples(st.just("removed"), st.sampled_from("abcd")),
    st.tuples(st.just("remembered"), st.sampled_from([0, 1]), st.booleans()),
    st.tuples(st.just("policy"), st.sampled_from([BOOK, OTHER_BOOK])),
    st.tuples(st.just("unfinished"), st.integers(1, 4)),
)


class Machine:
    def __init__(self) -> None:
        self.live = LiveState(enabled=True)
        self.book, self.now = BOOK, NOW
        self.remembered: Mapping[str, Memory] = {}

    def find(self, platform: Platform, views: Any, *, whole: bool = True, unseen: tuple[Unseen, ...] = ()) -> None:
        live, now = self.live, self.now
        live.begin(platform, whole=whole)
        for view in views:
            live.note(platform, view, decide(view, self.book, now), now, wasted(view, self.book, now))
        name, place = key_of(platform)
        live.finish(PlaceState(platform=name, place=place, at=now, seen=0, running=0, unseen=unseen), [], whole=whole)

    def change(self, rows: LiveRows, what: str, *words: Any) -> None:
        match what, *words:
            case "pass", views:
                self.find(DOCKER, views)
            case "narrow", view:
                self.find(DOCKER, [view], whole=False)
            case "gpus", views:
                self.find(HOST, views)
            case "unseen", unseen:
                self.find(DOCKER, [], unseen=(Unseen("all", "timeout"),) if unseen else ())
            case "measured", gpu, value:
                keys = [key for place in self.live.places.values() for key in place.facts]
                self.live.measured([Sample(key, Signal.GPU, gpu, self.now, value) for key in keys])
            case "forecast", count:
                list(islice(self.live.forecast(self.book, self.now), count))
            case "removed", name:
                for ref in self.live.named(name):
                    self.live.remove(ref)
            case "remembered", number, quarantined:
                memory = Memory(gpu=GpuMemory(quarantined=NOW, quarantine_reason="hot")) if quarantined else EMPTY
                self.remembered = {**self.remembered, device(number).subject.ref.key: memory}
            case "policy", book:
                self.book = book
            case "unfinished", count:
                list(islice(self.updating(rows), count))

    def updating(self, rows: LiveRows) -> Any:
        yield from rows.update(self.live, self.book, self.now)
        yield from rows.update_gpus(self.live, self.now, self.remembered)

    def whole(self) -> MachineView:
        """Built at once, from everything."""
        facts = {key: one for place in self.live.places.values() for key, one in place.facts.items()}
        views = [one.view for one in facts.values()]
        doubtful = {key[1] for key, place in self.live.places.items() if place.state.unseen}
        notes = contradictions(views, self.book, self.now, recorded=self.remembered, doubtful=doubtful)
        lines = [
            workload_line(one, "m", self.now) for one in facts.values() if one.view.subject.shape is not Shape.DEVICE
        ]
        return msgspec.structs.replace(
            HEAD,
            gpus=self.tiles(facts, views),
            workloads=tuple(sorted(lines, key=lambda one: one.path)),
            notes=tuple(sorted(one.words for one in notes)),
        )

    def tiles(self, facts: Mapping[str, LiveFact], views: list[View]) -> Any:
        devices = Inventory([view.subject for view in views]).devices
        decisions = {key: one.decision for key, one in facts.items()}
        found = []
        for one in claims(views, self.book, self.now, recorded=self.remembered, decisions=decisions):
            gpu = devices.get((one.place, one.device))
            memory = EMPTY if gpu is None else self.remembered.get(gpu.ref.key, EMPTY)
            history = self.live.history.get((one.key, one.device))
            fact = facts.get(one.key)
            coming = NOTHING if fact is None else next_of(fact, self.now, would=False)
            found.append(live_tile(gpu_tile(one, gpu, coming, memory, self.now, "m"), fact, history, self.now))
        return tuple(sorted(found, key=gpu_order))


@given(gpus, places, st.lists(st.tuples(operations, spans), min_size=1, max_size=6))
def test_rows_kept_up_to_date_are_those_that_are_built_anew(
    inventory: tuple[View, ...], first: list[View], steps: list[tuple[Any, timedelta]]
) -> None:
    machine, rows = Machine(), LiveRows("m")
    shown, generation = None, 0
    begin: list[tuple[Any, timedelta]] = [(("gpus", inventory), NO_TIME), (("pass", first), NO_TIME)]
    for operation, span in begin + steps:
        machine.now += span
        machine.change(rows, *operation)
        list(machine.updating(rows))
        head = msgspec.structs.replace(HEAD, notes=rows.notes)
        whole = machine.whole()
        assert rows.view(head) == whole
        shown = patched(shown, rows.delta(head, generation))
        generation = rows.generation
        assert shown == whole


def test_only_what_changed_is_built_again() -> None:
    machine, rows = Machine(), LiveRows("m")
    machine.find(HOST, [device(number) for number in range(50)])
    machine.find(DOCKER, [named(f"w{number}", f"GPU-{number}") for number in range(50)])
    list(machine.live.forecast(machine.book, machine.now))
    assert len(list(machine.updating(rows))) > 150
    assert list(machine.updating(rows)) == []
    machine.find(DOCKER, [named("w7", "GPU-7", owner="bob")], whole=False)
    assert len(list(machine.updating(rows))) == 3  # its line, its notes, its GPU
    delta = rows.delta(HEAD, rows.generation - 1)
    assert ([one.owner for one in delta.gpus], [one.owner for one in delta.workloads]) == (["bob"], ["bob"])


def test_what_a_slice_changes_is_noted_at_the_whole_gpu() -> None:
    machine, rows = Machine(), LiveRows("m")
    machine.find(HOST, [device(0), device(3, whole=0)])
    machine.find(DOCKER, [named("a", "GPU-0"), named("b", "MIG-3")])
    list(machine.updating(rows))
    machine.find(DOCKER, [named("b", "MIG-3", owner="bob")], whole=False)
    list(machine.updating(rows))
    assert rows.notes == machine.whole().notes
    assert any("docker/node-3/b (bob)" in words for words in rows.notes)


def test_a_reader_that_is_too_old_gets_everything() -> None:
    machine, rows = Machine(), LiveRows("m")
    machine.find(DOCKER, [named("a", "GPU-0")])
    list(machine.updating(rows))
    rows.oldest = rows.generation + 1
    assert len(rows.delta(HEAD, rows.generation).workloads) == 1
