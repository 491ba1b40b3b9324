"""What users leave on the disks of the simulated fleet: they spill, crash, open, work beside it and fill it up."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Category, Shape, State
from gpukeeper.platforms.simulated.thing import DAY, SimulatedNode, Thing
from gpukeeper.platforms.simulated.world import SimulatedPlace, World

GIB = 1024**3
SESSION = "/tmp/ray/session_"  # noqa: S108
OLD = timedelta(days=300)
TEMPORARY = ("ray_tmp_", "pip-", "tmp", "tmp-keep-", "keep-")


class SimulatedFiles:
    """The part of the users' agenda that is about trees."""

    def __init__(self, world: World, minute: timedelta) -> None:
        self._world, self._minute = world, minute

    # What a user does to an existing tree; also used to change the world between two calls.

    @property
    def changes(self) -> list[Callable[[Thing], None]]:
        return [self.touch, self.open, self.read, self.move, self.work_beside, self.revive]

    def touch(self, thing: Thing) -> None:
        if thing.shape is Shape.TREE:
            thing.in_use = self._world.rng.random() < 0.5
            thing.change(self._now())
            self._world.note("person", thing, effect="files touched")

    def open(self, thing: Thing) -> None:
        """No time and no version shows it: only a read of open files does."""
        if thing.shape is Shape.TREE:
            thing.in_use = True
            self._world.note("person", thing, effect="files opened")
            self._world.after(self._span(20, 90), lambda: self._close(thing))

    def read(self, thing: Thing) -> None:
        """Again and again, and closed in between. The disk records the first read after a change, and one per day."""
        if thing.shape is Shape.TREE and thing.category is Category.TEMPORARY and not thing.gone:
            now = thing.last_used = self._now()
            if thing.read is None or now - thing.read >= DAY:
                thing.read = now
            self._world.note("person", thing, effect="files read")
            if self._world.rng.random() < 0.8:
                self._world.after(self._span(5, 40), lambda: self.read(thing))

    def move(self, thing: Thing) -> None:
        """From another directory to below a root: only its top shows it."""
        if thing.shape is Shape.TREE and thing.category is Category.TEMPORARY:
            thing.last_used = thing.moved = self._now()
            thing.touch()
            self._world.note("person", thing, effect="moved here")

    def work_beside(self, thing: Thing) -> None:
        if thing.node is not None and thing.node.name:
            self._begin_work(thing.node)
            self._world.note("person", thing, effect="work begins beside it")

    def revive(self, thing: Thing) -> None:
        """A dead session is alive again: the same directory, another incarnation."""
        if thing.category is Category.DEAD_SESSION and not thing.in_use:
            self._live(thing)

    # Stories, from arrival on.

    def spills(self, place: SimulatedPlace) -> None:
        tree = self._temporary(place, self._node(place))
        tree.in_use = self._world.rng.random() < 0.3
        if tree.in_use:
            self._world.after(self._span(60, 300), lambda: self._close(tree))
        elif self._world.rng.random() < 0.5:
            tree.changed = self._now() - OLD  # an old directory, moved here
            self.move(tree)
        else:
            self._world.after(self._span(5, 25), lambda: self.read(tree))

    def crashes(self, place: SimulatedPlace) -> None:
        """Much at once, and the logs of what crashed."""
        node = self._node(place)
        for _ in range(self._world.rng.randint(2, 5)):
            self._temporary(place, node)
        if node.name:
            self._add(place, node, "logs", f"{SESSION}1/logs", Category.DEAD_LOGS)

    def starts_session(self, place: SimulatedPlace) -> None:
        name = f"{SESSION}{self._world.rng.randrange(10**6):06d}"
        session = self._add(place, self._node(place), "session", name, Category.DEAD_SESSION)
        if self._world.rng.random() < 0.7:
            self._live(session)

    def works(self, place: SimulatedPlace) -> None:
        self._begin_work(self._node(place))
        if self._world.rng.random() < 0.5:
            self.fills(place)

    def fills(self, place: SimulatedPlace) -> None:
        """Files of others, that come and go."""
        node = self._node(place)
        node.others = self._world.rng.randint(60, 190) * GIB
        self._world.after(self._span(30, 200), lambda: setattr(node, "others", 0))

    def reports(self, place: SimulatedPlace) -> None:
        node = self._node(place)
        for _ in range(self._world.rng.randint(1, 3)):
            name = f"/data/reports/run-{self._world.rng.randrange(10**6):06d}"
            self._add(place, node, "report", name, Category.REPORT)

    # Pieces of stories.

    def _temporary(self, place: SimulatedPlace, node: SimulatedNode) -> Thing:
        rng = self._world.rng
        name = f"/tmp/{rng.choice(TEMPORARY)}{rng.randrange(16**6):06x}"  # noqa: S108
        return self._add(place, node, "tree", name, Category.TEMPORARY)

    def _add(self, place: SimulatedPlace, node: SimulatedNode, kind: str, name: str, category: Category) -> Thing:
        rng, world = self._world.rng, self._world
        ref = Ref(place.platform, place.place, kind, name, world.new_uid(), node.name)
        tree = Thing(ref, self._now(), Shape.TREE, rng.choice(place.people), "ray", state=State.ENDED)
        tree.category, tree.node = category, node
        tree.size = rng.randint(1, 40) * GIB
        tree.last_used = tree.changed = self._now()
        return world.add(tree)

    def _live(self, session: Thing) -> None:
        session.in_use, session.state = True, State.RUNNING
        session.touch()
        self._world.note("person", session, effect="the session lives")
        self._world.after(self._span(30, 150), lambda: self._die(session))

    def _die(self, session: Thing) -> None:
        self._close(session)
        session.state = State.ENDED
        if self._world.rng.random() < 0.3:
            self._world.after(self._span(20, 200), lambda: None if session.gone else self.revive(session))

    def _close(self, tree: Thing) -> None:
        if not tree.gone:
            tree.in_use = False
            tree.change(self._now())

    def _begin_work(self, node: SimulatedNode) -> None:
        node.busy = "a task runs on it"
        self._world.after(self._span(15, 120), lambda: setattr(node, "busy", None))

    def _node(self, place: SimulatedPlace) -> SimulatedNode:
        return self._world.rng.choice(self._world.nodes[place.key])

    def _span(self, low: int, high: int) -> timedelta:
        return self._world.rng.randint(low, high) * self._minute

    def _now(self) -> datetime:
        return self._world.clock.true_now()
