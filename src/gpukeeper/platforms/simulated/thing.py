"""An object of the simulated world in its true state, and (pure) as the adapter reports it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpukeeper.model.identity import Ref, Seen
from gpukeeper.model.subject import Category, Disk, Marks, Outcome, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

DAY = timedelta(hours=24)


@dataclass
class SimulatedNode:
    """What trees are on: a disk, and work beside them."""

    name: str
    capacity: int
    others: int = 0  # bytes of files that are not ours to manage
    busy: str | None = None
    trees: list[Thing] = field(default_factory=list)

    @property
    def disk(self) -> Disk:
        held = self.others + sum(tree.size for tree in self.trees if not tree.gone)
        return Disk("/tmp", min(1.0, held / self.capacity))  # noqa: S108


@dataclass
class Thing:
    ref: Ref
    created: datetime
    shape: Shape = Shape.WORKLOAD
    owner: str | None = None
    class_: str = "docker"
    environment: str | None = None
    state: State = State.CREATED
    started: datetime | None = None
    ended: datetime | None = None
    previous_end: datetime | None = None
    outcome: Outcome | None = None
    devices: tuple[str, ...] = ()
    root: Ref | None = None
    needed: str | None = None  # by an owner that does not control it
    children: int = 0  # that run
    ends_for_good: bool = False
    size: int = 0
    last_used: datetime | None = None  # of a tree, the truth
    changed: datetime | None = None  # of a tree: its last recorded change
    moved: datetime | None = None  # below its root, as its top records it
    read: datetime | None = None  # the last recorded read; others within a day of it are not recorded
    in_use: bool = False
    category: Category = Category.TEMPORARY
    node: SimulatedNode | None = None  # of a tree
    proof: str | None = None
    marks: Marks = field(default_factory=Marks)
    labels: dict[str, str] = field(default_factory=dict)
    image: Ref | None = None
    attached: tuple[Ref, ...] = ()
    busy_until: datetime | None = None  # GPUs are busy until then, while it runs
    removing: bool = False
    gone: bool = False
    run: int = 0  # counts starts
    version: int = 0

    def touch(self) -> None:
        self.version += 1

    def change(self, now: datetime) -> None:
        """Of a tree: it was written to."""
        self.last_used, self.changed, self.read = now, now, None
        self.touch()

    def start(self, now: datetime, busy_for: timedelta) -> None:
        self.previous_end = self.ended
        self.state, self.started, self.ended, self.outcome = State.RUNNING, now, None, None
        self.busy_until = now + busy_for
        self.run += 1
        self.touch()

    def end(self, now: datetime, outcome: Outcome) -> None:
        self.state, self.ended, self.outcome = State.ENDED, now, outcome
        self.touch()

    def use(self, now: datetime) -> float:
        """GPU use in percent."""
        working = self.state is State.RUNNING and self.busy_until is not None and now < self.busy_until
        return 80.0 if working else 0.0

    @property
    def busy(self) -> str | None:
        """Of what users may still need. What has provably ended is needed by none."""
        return self.node.busy if self.node is not None and self.category is Category.TEMPORARY else None

    @property
    def incarnation(self) -> str:
        return f"run-{self.run}" if self.shape is not Shape.TREE else f"v{self.version}"


UNKNOWABLE = (
    "state",
    "outcome",
    "devices",
    "live_children",
    "in_use",
    "owner",
    "class_",
    "started",
    "size",
    "proof",
    "root",
    "needed",
    "busy",
    "last_used",
)


def recorded_last_use(thing: Thing) -> datetime | None:
    """Until when a tree may have been used, according to its disk (relatime)."""
    if thing.changed is None or thing.category is not Category.TEMPORARY:
        return thing.last_used
    hidden = None if thing.read is None else thing.read + DAY
    return max(one for one in (thing.changed, thing.moved, hidden) if one is not None)


def subject_of(thing: Thing, now: datetime, vague: str | None = None) -> Subject:
    """As the adapter sees it. `vague` names the one fact that could not be read."""
    facts: dict[str, object] = {
        "state": State.REMOVING if thing.removing else thing.state,
        "owner": thing.owner,
        "class_": thing.class_,
        "environment": thing.environment,
        "created": thing.created,
        "started": thing.started,
        "ended": thing.ended,
        "previous_end": thing.previous_end,
        "outcome": thing.outcome,
        "devices": thing.devices,
        "root": thing.root.path if thing.root is not None else None,
        "needed": thing.needed,
        "live_children": thing.children,
        "size": thing.size,
        "last_used": recorded_last_use(thing),
        "in_use": thing.in_use,
        "busy": thing.busy,
        "proof": thing.proof,
    }
    if vague is not None:
        facts[vague] = Unknown("the platform did not report it")
    return Subject(
        seen=Seen(thing.ref, thing.incarnation, str(thing.version), now),
        shape=thing.shape,
        category=thing.category,
        disk=thing.node.disk if thing.node is not None else None,
        ends_for_good=thing.ends_for_good,
        marks=thing.marks,
        labels=thing.labels,
        image=thing.image,
        attached=thing.attached,
        **facts,  # type: ignore[arg-type]
    )
