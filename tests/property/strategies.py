"""Views and policies near every border that a rule has, and any value of any type of the model.

Views come by the dozen from one drawn seed: a rule's border is met by many of them, and drawing each field would cost
more than deciding about a hundred. A failure names the seed's view in full.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from gpukeeper.model.decision import View
from gpukeeper.model.policy import (
    Activity,
    AfterIdle,
    AtFinish,
    BuildCache,
    ClassSettings,
    Exemption,
    Group,
    Images,
    Kept,
    Match,
    Networks,
    OnLimit,
    PlaceScope,
    Policy,
    Retention,
    Temporary,
    Volumes,
)
from gpukeeper.model.series import NOT_MEASURED, Series, Signal
from gpukeeper.model.subject import (
    KEEP_ALIVE,
    Category,
    Disk,
    Hold,
    Marks,
    Memory,
    Outcome,
    Ref,
    Seen,
    Shape,
    State,
    Stopped,
    Subject,
    Warned,
)
from gpukeeper.model.unknown import Unknown

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
LOST = Unknown("it could not be learned")
SHORT, LONG, LEAD = 30 * MINUTE, 2 * HOUR, 10 * MINUTE  # limits of the policies below
START = NOW - 89 * MINUTE
CLASSES = ("managed", "api", "infrastructure")
REFS = (
    Ref("docker", "node-3", "container", "eval", "c0ffee"),
    Ref("kubernetes", "prod", "trainjob", "run-7", "u7", "research"),
)
LEFTOVERS = {
    Shape.TREE: Ref("host", "node-3", "tree", "/tmp/tmp1", "8:77"),
    Shape.IMAGE: Ref("docker", "node-3", "image", "lab/train:7", "sha256:77"),
    Shape.VOLUME: Ref("docker", "node-3", "volume", "volume-77", "volume 77"),
    Shape.NETWORK: Ref("docker", "node-3", "network", "lab_default", "77"),
    Shape.CACHE: Ref("docker", "node-3", "cache", "k3s9", "k3s9"),
}
AGO = tuple(NOW - n * MINUTE for n in (0, 2, 8, 12, 25, 31, 45, 90, 130, 300, 3000, 50_000))
MANY = 60
T = TypeVar("T")


class Dozens(Generic[T]):
    """Many values from one seed, made while they are looked at."""

    def __init__(self, make: Callable[[random.Random], T], seed: int) -> None:
        self._make, self._seed = make, seed

    def __iter__(self) -> Iterator[T]:
        rng = random.Random(self._seed)
        return (self._make(rng) for _ in range(MANY))

    def __repr__(self) -> str:
        return f"Dozens({self._seed})"


def dozens(make: Callable[[random.Random], T]) -> st.SearchStrategy[Dozens[T]]:
    return st.integers(0, 2**32 - 1).map(lambda seed: Dozens(make, seed))


def pair(rng: random.Random) -> tuple[View, Policy]:
    return view(rng), policy(rng)


def view(rng: random.Random) -> View:
    one = subject(rng)
    live = one.state in (State.RUNNING, State.PAUSED)
    measured = series(rng, one.devices) if live and isinstance(one.devices, tuple) and one.devices else ()
    elsewhere = (Hold("ann", rng.choice(AGO), NOW, devices=("GPU-0",)),) if rng.random() < 0.2 else ()
    return View(one, measured, memory(rng, one), rng.random() < 0.3, elsewhere)


def subject(rng: random.Random) -> Subject:
    shape = rng.choice([*[Shape.WORKLOAD] * 8, Shape.ORPHAN, *[Shape.TREE] * 3, Shape.IMAGE, Shape.CACHE])
    created = rng.choice(AGO)
    started = max(created, rng.choice(AGO))
    state = rng.choice([State.ENDED, State.ENDED, State.RUNNING, State.RUNNING, *State])
    over = state is State.ENDED
    return Subject(
        seen=Seen(LEFTOVERS.get(shape) or rng.choice(REFS), "run-1", "1", NOW),
        shape=shape,
        root="kubernetes/prod/research/trainjob/run-1" if rng.random() < 0.1 else None,
        state=state,
        owner=rng.choice(["ann", "bob", None]),
        owner_verified=rng.random() < 0.8,
        class_=rng.choice(CLASSES),
        environment=rng.choice([None, "ci", "production"]),
        created=created,
        started=started if state is not State.CREATED else None,
        ended=max(started, rng.choice(AGO)) if over and rng.random() < 0.9 else None,
        ends_for_good=rng.random() < 0.3,
        outcome=rng.choice([*Outcome, None]) if over else None,
        devices=rng.choice([(), ("GPU-0",), ("GPU-0", "GPU-1")]),
        slices=rng.choice([(), ("GPU-0",)]),
        live_children=rng.choice([0, 0, 0, 2]),
        size=rng.choice([0, 10**10]),
        last_used=rng.choice([*AGO, None]),
        together=rng.choice([None, 0, 10**10]),
        in_use=rng.random() < 0.2,
        category=rng.choice([Category.TEMPORARY, *Category]),
        busy="a task runs on it" if rng.random() < 0.2 else None,
        disk=rng.choice([Disk("/tmp", 0.85), Disk("/tmp", 0.1, 0.9)]),
        proof=rng.choice([None, "its cgroup"]),
        marks=Marks(
            ttl=rng.choice([None, None, None, SHORT, LONG, 90 * DAY]),
            hold_until=rng.choice([None, None, None, NOW - MINUTE, NOW + HOUR]),
            keep_alive=rng.choice([None, None, None, False, True, True]),
            asks_exemption="ds01.protected=true" if rng.random() < 0.1 else None,
        ),
    )


def memory(rng: random.Random, one: Subject) -> Memory:
    """What may be remembered of this subject: it was first seen ended when it had ended, warned in order."""
    over = one.ended if isinstance(one.ended, datetime) else None
    stopper = rng.choice([("gpukeeper", "idle"), ("gpukeeper", "max_runtime"), ("somebody", "")])
    return Memory(
        first_start=rng.choice([None, *AGO]),
        ran=rng.choice([timedelta(), HOUR]),
        warnings=warnings(rng),
        holds=tuple(hold(rng) for _ in range(rng.choice([0, 0, 0, 1, 2]))),
        stopped=Stopped(*stopper, over, "run-1") if over is not None and rng.random() < 0.3 else None,
        first_seen_ended=max(over, rng.choice(AGO)) if over is not None else None,
        ends_seen=rng.choice([0, 1, 2]),
    )


def hold(rng: random.Random) -> Hold:
    suspends = rng.choice([(), ("max_runtime",), ("*",), ("idle", "retention")])
    admin = rng.random() < 0.5
    by = "ann" if admin else rng.choice(["ann", KEEP_ALIVE])
    return Hold(by, rng.choice(AGO), rng.choice([NOW - MINUTE, NOW + HOUR]), admin=admin, suspends=suspends)


def warnings(rng: random.Random) -> tuple[Warned, ...]:
    """Stage 1, then perhaps stage 2, of some rules; in the order of time."""
    sent = []
    for rule, limits in (("idle", (SHORT, LONG, SHORT / 2)), ("max_runtime", (SHORT, LONG)), ("restart_loop", (LEAD,))):
        limit, times = rng.choice(limits), sorted(rng.sample(AGO[:9], rng.choice([0, 1, 2, 2])))
        sent += [Warned(rule, n, at, rng.random() < 0.7, "run-1", limit) for n, at in enumerate(times, start=1)]
    return tuple(sorted(sent, key=lambda one: one.at))


def series(rng: random.Random, devices: tuple[str, ...]) -> tuple[Series, ...]:
    found = [Series(Signal.GPU, one, START, minutes(rng, 90.0)) for one in devices]
    found += [Series(one, "", START, minutes(rng, 40.0)) for one in (Signal.CPU, Signal.DISK)]
    if rng.random() < 0.2:
        found[-1] = Series(Signal.DISK, "", NOW, (), missing=Unknown("none here", by_design=rng.random() < 0.5))
    return tuple(found)


def minutes(rng: random.Random, busy: float) -> tuple[float, ...]:
    """Ninety minutes, mostly quiet, with some buckets busy or not measured."""
    at, gaps = rng.sample(range(90), rng.choice([0, 0, 1, 2])), rng.sample(range(90), rng.choice([0, 0, 3, 20]))
    return tuple(busy if n in at else NOT_MEASURED if n in gaps else 0.0 for n in range(90))


def group(rng: random.Random) -> Group:
    """Stricter or more generous than the classes, by a span or a factor."""
    limits = [None, SHORT / 2, LONG, 0.5, 2.0]
    return Group(members=("ann",), idle=rng.choice(limits), max_runtime=rng.choice(limits))


def policy(rng: random.Random) -> Policy:
    limit, keep = [None, SHORT, LONG], [None, timedelta(), SHORT, DAY]
    managed = ClassSettings(
        idle=rng.choice([SHORT, SHORT, LONG, None]),
        on_idle=rng.choice([OnLimit.STOP, OnLimit.STOP, OnLimit.REPORT]),
        after_idle=rng.choice([*AfterIdle]),
        idle_when_large=rng.choice(limit),
        max_runtime=rng.choice(limit),
        never_started=rng.choice(limit),
    )
    kept = [rng.choice(keep) for _ in range(3)]
    retention = Retention(succeeded=kept[0], failed=kept[1], stopped=kept[2], max=rng.choice([DAY, 30 * DAY]))
    at_once = Retention(succeeded=timedelta(), failed=timedelta(), stopped=timedelta())
    return Policy(
        scope={"docker": PlaceScope(), "host": PlaceScope(), "kubernetes": PlaceScope(namespaces=("research",))},
        retention=retention,
        environments=rng.choice([{}, {"ci": at_once}]),
        at_finish=rng.choice([*AtFinish]),
        own_ttl=rng.random() < 0.7,
        classes={
            "managed": managed,
            "api": ClassSettings(max_runtime=LONG, idle=SHORT),
            "infrastructure": ClassSettings(untouchable=rng.random() < 0.7),
        },
        groups={} if rng.random() < 0.4 else {"some": group(rng), "more": group(rng)},
        match=rng.choice([(), (), (Match(class_="infrastructure", owner="bob"),)]),
        exemptions=tuple(exemption(rng) for _ in range(rng.choice([0, 0, 0, 1, 2]))),
        activity=Activity(signals=("cpu", "disk")),
        temporary=(Temporary(root="/tmp", names=("tmp*",), above=5 * 10**9, keep=rng.choice([(), (), (), ("tmp1",)])),),
        kept={
            one.value: Kept(older_than=rng.choice(keep), under_pressure=rng.choice([None, SHORT / 2]))
            for one in Category
            if one not in (Category.TEMPORARY, Category.REPORT)
        }
        | {"report": Kept(older_than=rng.choice(keep))},
        images=Images(
            unused=rng.choice(limit),
            under_pressure=rng.choice([None, SHORT / 2]),
            above=rng.choice([None, 10**9]),
            keep=rng.choice([(), ("base/*",), ("lab/*",)]),
        ),
        build_cache=BuildCache(unused=rng.choice(limit)),
        volumes=Volumes(anonymous_unused=rng.choice(limit)),
        networks=Networks(unused=rng.choice(limit)),
    )


def exemption(rng: random.Random) -> Exemption:
    return Exemption(
        reason="thesis",
        owner=rng.choice([None, "ann"]),
        class_=rng.choice([None, None, "managed"]),
        rules=rng.choice([(), ("idle",), ("max_runtime", "retention")]),
        until=rng.choice([None, NOW - HOUR, NOW + HOUR, LOST]),
        refused=rng.random() < 0.3,
    )


# Any value of a type.

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    int: st.integers(-(2**53), 2**53),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
    msgspec.UnsetType: st.just(msgspec.UNSET),
    datetime: st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
    timedelta: st.timedeltas(timedelta(days=-9999), timedelta(days=9999)),
}


def any_of(wanted: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of the model, by its annotations."""
    if wanted in _PLAIN:
        return _PLAIN[wanted]
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return st.one_of(*(any_of(one) for one in inner))
    if origin is tuple:
        return st.lists(any_of(inner[0]), max_size=2).map(tuple)
    if origin is frozenset:
        return st.frozensets(any_of(inner[0]), max_size=2)
    if origin is Mapping:
        return st.dictionaries(any_of(inner[0]), any_of(inner[1]), max_size=2)
    if issubclass(wanted, Enum):
        return st.sampled_from(wanted)
    assert issubclass(wanted, msgspec.Struct), wanted
    hints = get_type_hints(wanted)
    fields = {name: any_of(hints[name]) for name in wanted.__struct_fields__}
    return st.fixed_dictionaries(fields).map(lambda given: wanted(**given))
