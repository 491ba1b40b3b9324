"""What a simulated fleet has recorded before the demo begins: three weeks of GPU-hours and outcomes, acceptance runs,
a quarantined GPU. Made by a formula instead of simulated: that would take a minute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

from gpukeeper.model.decision import Action, Result
from gpukeeper.model.durations import due_in_words, in_words
from gpukeeper.model.event import Closed, Event, NodeTested, Quarantined, Restored, WarningSent
from gpukeeper.model.grade import Grade
from gpukeeper.model.identity import Ref
from gpukeeper.model.usage import DevicePresence, Holder, HourUse, UsageFold, minute_of, moment_of
from gpukeeper.platforms.simulated.fleet import PEOPLE, places
from gpukeeper.platforms.simulated.shown import MODELS
from gpukeeper.platforms.simulated.world import SimulatedPlace

SPAN = timedelta(days=21)
LIMIT = timedelta(minutes=30)
LEAD = timedelta(minutes=15)
KINDS = {"docker": "container", "kubernetes": "trainjob", "ray": "process"}
NAMES = ("train", "eval", "tune", "notebook", "sweep", "render")
TESTED = "node-3"
RUNS = (20, 13, 6, 1)  # days ago
FIGURES = {"gemm.tflops bf16": 720.0, "memory_bandwidth.gb_per_s read": 3020.0, "stress.power_w sustained": 688.0}


class Recorded(NamedTuple):
    usage: UsageFold
    lines: tuple[Event, ...]


class Tenancy(NamedTuple):
    """One workload on one GPU, in minutes since 1970: busy, then idle until it was stopped or ended by itself."""

    ref: Ref
    owner: str
    class_: str
    begin: int
    idle: int
    end: int
    stopped: bool


def recorded(seed: int, until: datetime) -> Recorded:
    """The weeks before `until`."""
    rng = random.Random(f"recorded {seed}")
    since, end = minute_of(until - SPAN), minute_of(until)
    devices: list[DevicePresence] = []
    hours: list[HourUse] = []
    lines: list[Event] = []
    for place in places():
        for gpu in place.gpus:
            model = MODELS[place.place][0]
            devices.append(DevicePresence(place=place.place, device=gpu, since=since, until=end, model=model))
            last = since
            for one in _tenancies(rng, place, gpu, since, end):
                hours += _free(place.place, gpu, last, one.begin)
                hours += _held(place.place, gpu, one)
                lines += _reclaimed(rng, one) if one.stopped else ()
                last = one.end
            hours += _free(place.place, gpu, last, end)
    lines += [*_acceptance(rng, until), _quarantine(until)]
    lines.sort(key=lambda line: line.at)
    return Recorded(UsageFold(devices=tuple(devices), hours=tuple(hours)), tuple(lines))


def _tenancies(rng: random.Random, place: SimulatedPlace, gpu: str, since: int, end: int) -> Iterator[Tenancy]:
    """More and longer in working hours."""
    at = since
    while True:
        night = not 7 <= moment_of(at).hour < 19 or moment_of(at).weekday() > 4
        at += int(rng.expovariate(1 / (420 if night else 90)))
        busy, idle = rng.randrange(30, 540), rng.choice((0, 0, rng.randrange(5, 30), rng.randrange(31, 150)))
        if at + busy + idle >= end:
            return
        owner = rng.choice(PEOPLE)
        number = rng.randrange(10**6)
        name = f"{rng.choice(NAMES)}-{owner}-{number % 1000}"
        namespace = rng.choice(place.namespaces) if place.namespaces else ""
        ref = Ref(place.platform, place.place, KINDS[place.platform], name, f"r{number:06d}-{gpu}", namespace)
        class_ = "docker" if place.platform == "docker" else "cluster"
        yield Tenancy(ref, owner, class_, at, at + busy, at + busy + idle, timedelta(minutes=idle) > LIMIT)
        at += busy + idle


def _held(place: str, gpu: str, one: Tenancy) -> list[HourUse]:
    holder = Holder(key=one.ref.key, path=one.ref.path, owner=one.owner, class_=one.class_)
    busy = [
        HourUse(hour=hour, place=place, device=gpu, holder=holder, active=mask)
        for hour, mask in _masks(one.begin, one.idle)
    ]
    idle = [
        HourUse(hour=hour, place=place, device=gpu, holder=holder, idle=mask)
        for hour, mask in _masks(one.idle, one.end)
    ]
    return busy + idle


def _free(place: str, gpu: str, since: int, until: int) -> list[HourUse]:
    return [HourUse(hour=hour, place=place, device=gpu, free=mask) for hour, mask in _masks(since, until)]


def _masks(since: int, until: int) -> Iterator[tuple[int, int]]:
    """The minutes from `since` to `until`, by hour."""
    for hour in range(since // 60, -(-until // 60)):
        first, last = max(since - hour * 60, 0), min(until - hour * 60, 60)
        if first < last:
            yield hour, (1 << last) - (1 << first)


def _reclaimed(rng: random.Random, one: Tenancy) -> list[Event]:
    """Warned, stopped, and a few of them restored."""
    idle = timedelta(minutes=one.end - one.idle)
    at, reason = moment_of(one.end), f"idle for {in_words(idle)}, allowed {in_words(LIMIT)}"
    lines: list[Event] = [
        WarningSent(
            at=at - LEAD,
            ref=one.ref,
            owner=one.owner,
            rule="idle",
            stage=1,
            incarnation="run-1",
            limit=LIMIT,
            delivered=True,
            channel="terminal",
            message=f"{one.ref.path}: idle, will be stopped {due_in_words(at, at - LEAD)}",
            until=at,
        ),
        Closed(
            at=at,
            ref=one.ref,
            owner=one.owner,
            step=f"{one.ref.uid}-stop",
            action=Action.STOP,
            rule="idle",
            result=Result.RECLAIMED,
            reason=reason,
            incarnation="run-1",
            gpus_back=1,
            gpu_hours=idle / timedelta(hours=1),
            bytes_back=rng.randrange(1, 40) * 2**28,
            owner_verified=True,
        ),
    ]
    if rng.random() < 0.03:
        later = at + timedelta(minutes=rng.randrange(5, 300))
        lines.append(Restored(at=later, ref=one.ref, owner=one.owner, by=one.owner, evidence="", result="restored"))
    return lines


def _acceptance(rng: random.Random, until: datetime) -> Iterator[NodeTested]:
    """Four runs of one node; one of its GPUs gets slower, fails, and is replaced."""
    serials = [f"165372300{number:04d}" for number in range(41, 49)]
    for number, days in enumerate(RUNS):
        if number == len(RUNS) - 1:
            serials[5] = "1653723000077"
        slow = {0: 1.0, 1: 0.97, 2: 0.91}.get(number, 1.0)
        values, grades = {}, {}
        for index, serial in enumerate(serials):
            factor = slow if index == 5 else 1.0
            grades[serial] = {0.97: Grade.WARN, 0.91: Grade.FAIL}.get(factor, Grade.PASS)
            values[serial] = {
                name: round(figure * factor * rng.uniform(0.992, 1.008), 1) for name, figure in FIGURES.items()
            }
        verdict = {0.97: Grade.WARN, 0.91: Grade.FAIL}.get(slow, Grade.PASS)
        yield NodeTested(
            at=until - timedelta(days=days),
            ref=Ref("host", TESTED, "node", TESTED, TESTED),
            by="eve",
            run=f"{until - timedelta(days=days):%Y%m%d}-{TESTED}",
            verdict=verdict,
            reason="8 GPUs passed" if verdict is Grade.PASS else f"GPU {serials[5]}: gemm.tflops below its peers",
            device=MODELS[TESTED][0],
            expected=8,
            gpus=grades,
            values=values,
        )


def _quarantine(until: datetime) -> Quarantined:
    return Quarantined(
        at=until - timedelta(days=2),
        ref=Ref("kubernetes", "prod", "gpu", "GPU-31", "GPU-31"),
        by="eve",
        reason="ECC errors; a replacement is ordered",
    )
