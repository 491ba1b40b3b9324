"""Views of a mixed fleet, seeded: what a pass over shared Docker hosts and a cluster meets. Same seed, same views."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from gpukeeper.config.load import load_text
from gpukeeper.model.decision import View
from gpukeeper.model.policy import Policy
from gpukeeper.model.series import NOT_MEASURED, Series, Signal
from gpukeeper.model.subject import Hold, Marks, Memory, Outcome, Ref, Seen, Shape, State, Subject, Warned
from gpukeeper.model.unknown import Unknown

NOW = datetime(2026, 3, 10, 12, 0, 20, 123456, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
GIB = 1024**3
WINDOW = 30 * MINUTE
PEOPLE = ("ann", "bob", "eve", "kim", *(f"user-{n}" for n in range(36)))
CLASSES = ("managed", "docker", "compose", "unknown")
NO_TERMINAL = Unknown("it has no terminal", by_design=True)

POLICY = """
preset: shared-host
mode: enforce
scope: {docker: {}, kubernetes: {namespaces: [research, "team-*"]}, host: {}}
at_finish: Running
classes:
  managed: {idle: 30m, on_max_runtime: stop}
  docker: {idle: 30m, on_max_runtime: stop}
  compose: {idle: 30m, on_max_runtime: stop}
  unknown: {idle: 15m, on_idle: stop}
groups: {researcher: {members: [bob, kim], idle: 1h}}
match:
  - {class: serving, label: app=triton}
  - {class: infrastructure, image: "registry.lab/dcgm-exporter*"}
exemptions: [{owner: eve, rules: [idle], until: 2026-03-12T00:00:00Z, reason: paper deadline}]
temporary: [{root: /tmp, names: ["ray_tmp_*", "pip-*", "tmp*"], above: 5GB, older_than: 1h}]
"""


def policy() -> Policy:
    return load_text(POLICY, "benchmark policy").policy


def population(count: int, seed: int = 7) -> dict[str, list[View]]:
    """By shape; the shares below add up to `count`."""
    rng = random.Random(seed)
    total = sum(share for share, _ in MIX.values())
    made: dict[str, list[View]] = {}
    for name, (share, make) in MIX.items():
        made[name] = [
            make(rng, f"{name.replace(', ', '-').replace(' ', '-')}-{i}") for i in range(count * share // total)
        ]
    return made


def running_busy(rng: random.Random, name: str) -> View:
    subject = _running(rng, name)
    return View(subject, _signals(rng, subject, busy=True), _since_start(subject))


def running_idle(rng: random.Random, name: str) -> View:
    """A third of them were not warned yet, a third once, a third twice and are due."""
    subject = _running(rng, name)
    stages = rng.randrange(3)
    warned = tuple(
        Warned("idle", stage, NOW - (16 - 5 * stage) * MINUTE, True, subject.seen.incarnation, WINDOW)
        for stage in range(1, stages + 1)
    )
    return View(subject, _signals(rng, subject, busy=False), _since_start(subject, warned))


def running_unmeasured(rng: random.Random, name: str) -> View:
    subject = _running(rng, name)
    return View(subject, (), _since_start(subject))


def ended_succeeded(rng: random.Random, name: str) -> View:
    return _ended(rng, name, Outcome.SUCCEEDED)


def ended_failed(rng: random.Random, name: str) -> View:
    return _ended(rng, name, Outcome.FAILED)


def ended_stopped(rng: random.Random, name: str) -> View:
    return _ended(rng, name, Outcome.STOPPED)


def created(rng: random.Random, name: str) -> View:
    return View(_subject(rng, name, state=State.CREATED, created=_ago(rng, 1, 90)))


def held(rng: random.Random, name: str) -> View:
    view = running_idle(rng, name)
    hold = Hold(rng.choice(PEOPLE), NOW - HOUR, NOW + rng.randrange(1, 300) * MINUTE, "paper deadline")
    return View(view.subject, view.series, Memory(first_start=view.memory.first_start, holds=(hold,)))


def tree(rng: random.Random, name: str) -> View:
    subject = Subject(
        seen=_seen(rng, "host", "tree", f"/tmp/tmp{name}"),  # noqa: S108 - a name, nothing is written there
        shape=Shape.TREE,
        state=State.ENDED,
        class_="tree",
        created=NOW - DAY,
        size=rng.randrange(GIB, 40 * GIB),
        together=60 * GIB,
        last_used=_ago(rng, 1, 600),
    )
    return View(subject)


def orphan(rng: random.Random, name: str) -> View:
    subject = Subject(
        seen=_seen(rng, "host", "orphan", name),
        shape=Shape.ORPHAN,
        state=State.RUNNING,
        owner=rng.choice(PEOPLE),
        created=_ago(rng, 1, 600),
        devices=("GPU-0",),
        proof=rng.choice(("its cgroup is that of a workload that ended", None)),
    )
    return View(subject)


def cluster_root(rng: random.Random, name: str) -> View:
    """Half of them ended; their retention or their own TTL decides."""
    ended = rng.random() < 0.5
    subject = _subject(
        rng,
        name,
        platform="kubernetes",
        kind="trainjob",
        class_="cluster",
        state=State.ENDED if ended else State.RUNNING,
        ended=_ago(rng, 60, 12_000) if ended else None,
        outcome=Outcome.SUCCEEDED if ended else None,
        marks=Marks(ttl=rng.choice((None, None, DAY, 3 * DAY))),
    )
    return View(subject, () if ended else _signals(rng, subject, busy=True), _since_start(subject))


def cluster_child(rng: random.Random, name: str) -> View:
    root = f"kubernetes/prod/research/trainjob/run-{rng.randrange(500)}"
    return View(_subject(rng, name, platform="kubernetes", kind="pod", class_="cluster", root=root))


# Shape: its share of all, and how one is made.
MIX: dict[str, tuple[int, Callable[[random.Random, str], View]]] = {
    "running, busy": (30, running_busy),
    "running, idle": (10, running_idle),
    "running, not measured": (4, running_unmeasured),
    "ended, succeeded": (12, ended_succeeded),
    "ended, failed": (6, ended_failed),
    "ended, stopped": (4, ended_stopped),
    "created": (3, created),
    "held": (3, held),
    "tree": (6, tree),
    "orphan": (2, orphan),
    "cluster root": (5, cluster_root),
    "cluster child": (15, cluster_child),
}


def _ago(rng: random.Random, least: int, most: int) -> datetime:
    """So many minutes ago; to the microsecond, as real times are."""
    return NOW - rng.uniform(least, most) * MINUTE


def _running(rng: random.Random, name: str) -> Subject:
    return _subject(rng, name, started=_ago(rng, 90, 900))


def _ended(rng: random.Random, name: str, outcome: Outcome) -> View:
    ended = _ago(rng, 60, 12_000)
    memory = Memory(first_start=ended - HOUR, state="ended", first_seen_ended=ended, ends_seen=1)
    return View(_subject(rng, name, state=State.ENDED, started=ended - HOUR, ended=ended, outcome=outcome), (), memory)


def _since_start(subject: Subject, warned: tuple[Warned, ...] = ()) -> Memory:
    started = subject.started if isinstance(subject.started, datetime) else None
    return Memory(first_start=started, started=started, state="running", warnings=warned)


def _subject(
    rng: random.Random, name: str, platform: str = "docker", kind: str = "container", **facts: object
) -> Subject:
    known: dict[str, object] = {
        "state": State.RUNNING,
        "owner": rng.choice(PEOPLE),
        "class_": rng.choice(CLASSES),
        "created": NOW - DAY,
        "started": NOW - 20 * HOUR,
        "devices": tuple(f"GPU-{n}" for n in range(rng.choice((1, 1, 1, 2, 4)))),
        "labels": {"image": "registry.lab/train:3", "app": "train"},
    }
    return Subject(seen=_seen(rng, platform, kind, name), **(known | facts))  # type: ignore[arg-type]


def _seen(rng: random.Random, platform: str, kind: str, name: str) -> Seen:
    place, namespace = ("prod", "research") if platform == "kubernetes" else (f"node-{rng.randrange(20)}", "")
    return Seen(Ref(platform, place, kind, name, f"uid-{rng.getrandbits(64):016x}", namespace), "run-1", "1", NOW)


def _signals(rng: random.Random, subject: Subject, *, busy: bool) -> tuple[Series, ...]:
    """30 to 60 one-minute buckets of every signal there is. In one of ten is a gap of five minutes."""
    minutes = rng.randrange(30, 61)
    start = NOW.replace(second=0, microsecond=0) - (minutes - 1) * MINUTE
    gap = rng.randrange(minutes) if rng.random() < 0.1 else minutes
    peaks = {Signal.GPU: 95.0, Signal.CPU: 180.0, Signal.NETWORK: 5e6, Signal.DISK: 2e6}

    def buckets(signal: Signal) -> tuple[float, ...]:
        low, high = (0.5, 1.0) if busy else (0.0, 0.0001)
        return tuple(
            NOT_MEASURED if gap <= n < gap + 5 else peaks[signal] * rng.uniform(low, high) for n in range(minutes)
        )

    devices = subject.devices if isinstance(subject.devices, tuple) else ()
    return (
        *(Series(Signal.GPU, device, start, buckets(Signal.GPU)) for device in devices),
        *(Series(signal, "", start, buckets(signal)) for signal in (Signal.CPU, Signal.NETWORK, Signal.DISK)),
        Series(Signal.TERMINAL, "", start, (), missing=NO_TERMINAL),
    )
