"""The fleet of the demo and its users: they start, forget, restart, hold, crash and remove work and leave files on the
disks, each with their own random generator.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from gpukeeper.model.subject import Category, Marks, Outcome, Ref, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.world import (
    DAY,
    SimulatedNode,
    SimulatedPlace,
    Thing,
    VirtualClock,
    VirtualLoop,
    World,
)

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


ONE_IN = 7  # roots of a cluster that have an owner that does not control them
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
ADJECTIVES = ("train", "eval", "tune", "notebook", "sweep", "render", "embed", "distil")


class SimulatedUsers:
    """Fills a world's agenda. `pace`: mean time between two arrivals at a place; `hurry`: factor by which everything is
    faster.
    """

    def __init__(self, world: World, pace: timedelta, hurry: float = 1.0) -> None:
        self._world = world
        self._pace = pace
        self._minute = MINUTE / hurry
        self._files = SimulatedFiles(world, self._minute)
        world.changes = [self.restart, self.use_again, self.remove, self.replace, self.end, *self._files.changes]

    def settle_in(self) -> None:
        for place in self._world.places:
            for gpu in place.gpus:
                self._device(place, gpu)
            self._arrive_later(place)

    # What a user does to an existing object; also used to change the world between two calls.

    def restart(self, thing: Thing) -> None:
        if thing.shape is Shape.WORKLOAD and thing.root is None and not thing.ends_for_good:
            now = self._now()
            if thing.state is State.RUNNING:
                thing.end(now, Outcome.STOPPED)
            thing.start(now, self._span(5, 90))
            self._world.note("person", thing, effect="restarted")

    def use_again(self, thing: Thing) -> None:
        if thing.state is State.RUNNING and thing.shape is Shape.WORKLOAD:
            thing.busy_until = self._now() + self._span(5, 60)
            self._world.note("person", thing, effect="used again")

    def remove(self, thing: Thing) -> None:
        if thing.root is None:
            self._world.remove(thing)

    def replace(self, thing: Thing) -> None:
        """The same name, another object: a decision by name would hit the wrong one."""
        if thing.shape is not Shape.WORKLOAD or thing.root is not None:
            return
        self._world.remove(thing)
        ref = Ref(
            thing.ref.platform,
            thing.ref.place,
            thing.ref.kind,
            thing.ref.name,
            self._world.new_uid(),
            thing.ref.namespace,
        )
        again = Thing(ref, self._now(), owner=thing.owner, class_=thing.class_, devices=thing.devices)
        again.start(self._now(), self._span(10, 120))
        self._world.add(again)

    def end(self, thing: Thing) -> None:
        if thing.state is State.RUNNING and thing.root is None and thing.shape is not Shape.TREE:
            thing.end(self._now(), Outcome.STOPPED)
            self._world.note("person", thing, effect="stopped by its owner")

    # Stories, from arrival on.

    def _arrive_later(self, place: SimulatedPlace) -> None:
        self._world.after(
            timedelta(seconds=self._world.rng.expovariate(1 / self.pace(place).total_seconds())),
            lambda: self._arrive(place),
        )

    def pace(self, place: SimulatedPlace) -> timedelta:
        return self._pace

    def _arrive(self, place: SimulatedPlace) -> None:
        stories = {
            "docker": self._docker_stories,
            "kubernetes": self._cluster_stories,
            "ray": self._ray_stories,
            "host": self._host_stories,
        }
        self._world.rng.choice(stories[place.platform]())(place)
        self._arrive_later(place)

    def _docker_stories(self) -> list[Callable[[SimulatedPlace], None]]:
        return [
            self._works,
            self._works,
            self._forgets,
            self._forgets,
            self._works_too_long,
            self._never_starts,
            self._stops,
        ]

    def _cluster_stories(self) -> list[Callable[[SimulatedPlace], None]]:
        return [self._trains, self._trains, self._leaves_workers, self._loops, self._names_ttl]

    def _ray_stories(self) -> list[Callable[[SimulatedPlace], None]]:
        files = self._files
        return [files.spills, files.crashes, files.starts_session, files.works, self._leaves_process]

    def _host_stories(self) -> list[Callable[[SimulatedPlace], None]]:
        return [self._files.spills, self._files.crashes, self._files.reports, self._files.fills]

    def _works(self, place: SimulatedPlace) -> None:
        thing = self._container(place)
        busy = self._span(20, 180)
        thing.start(self._now(), busy)
        self._world.after(busy, lambda: self._finish(thing))

    def _forgets(self, place: SimulatedPlace) -> None:
        thing = self._container(place)
        thing.start(self._now(), self._span(10, 60))

    def _works_too_long(self, place: SimulatedPlace) -> None:
        thing = self._container(place)
        thing.start(self._now(), 400 * HOUR)

    def _never_starts(self, place: SimulatedPlace) -> None:
        self._container(place)

    def _stops(self, place: SimulatedPlace) -> None:
        thing = self._container(place)
        thing.start(self._now(), self._span(20, 60))
        self._world.after(self._span(20, 60), lambda: self.end(thing))

    def _trains(self, place: SimulatedPlace) -> None:
        root = self._root(place, "trainjob")
        busy = self._span(20, 120)
        root.start(self._now(), busy)
        self._child(root, busy)
        self._world.after(busy, lambda: self._finish(root))

    def _leaves_workers(self, place: SimulatedPlace) -> None:
        root = self._root(place, "pytorchjob")
        busy = self._span(20, 60)
        root.start(self._now(), busy)
        self._child(root, 400 * HOUR)
        self._world.after(busy, lambda: self._finish_but_children(root))

    def _loops(self, place: SimulatedPlace) -> None:
        root = self._root(place, "trainjob")
        self._run_in_loop(root)

    def _run_in_loop(self, root: Thing) -> None:
        if root.gone:
            return
        root.start(self._now(), 10 * self._minute)
        root.run = 1  # the same incarnation: only its end, seen before, shows it
        self._world.after(15 * self._minute, lambda: None if root.gone else root.end(self._now(), Outcome.FAILED))
        self._world.after(30 * self._minute, lambda: self._run_in_loop(root))

    def _names_ttl(self, place: SimulatedPlace) -> None:
        root = self._root(place, "job")
        ttl = self._world.rng.choice((10 * MINUTE, HOUR, 5 * HOUR, Unknown('"soon" is not a duration')))
        root.marks = Marks(ttl=ttl)
        root.start(self._now(), 10 * self._minute)
        self._world.after(20 * self._minute, lambda: self._finish(root))

    def _leaves_process(self, place: SimulatedPlace) -> None:
        rng = self._world.rng
        ref = Ref(place.platform, place.place, "process", f"worker-{rng.randrange(10**4)}", self._world.new_uid())
        orphan = Thing(ref, self._now(), Shape.ORPHAN, rng.choice(place.people), "ray", state=State.RUNNING)
        orphan.started = self._now()
        orphan.devices = self.some_gpus(place)
        orphan.proof = rng.choice(("its cgroup is that of the ended container", None))
        self._world.add(orphan)

    # Pieces of stories.

    def _finish(self, thing: Thing) -> None:
        if thing.gone or thing.state is not State.RUNNING:
            return
        outcome = Outcome.FAILED if self._world.rng.random() < 0.3 else Outcome.SUCCEEDED
        thing.end(self._now(), outcome)
        for child in self._world.children_of(thing):
            child.end(self._now(), outcome)
        thing.children = 0
        self._world.note("person", thing, effect=f"ended: {outcome}")

    def _finish_but_children(self, root: Thing) -> None:
        if not root.gone:
            root.end(self._now(), Outcome.SUCCEEDED)
            self._world.note("person", root, effect="ended, children run on")

    def _container(self, place: SimulatedPlace) -> Thing:
        rng = self._world.rng
        owner = rng.choice((*place.people, None))
        class_ = "unknown" if owner is None else rng.choice(("managed", "docker", "compose", "devcontainer"))
        name = f"{rng.choice(ADJECTIVES)}-{owner or 'x'}-{rng.randrange(100)}"
        ref = Ref(place.platform, place.place, "container", name, self._world.new_uid())
        thing = Thing(ref, self._now(), owner=owner, class_=class_, devices=self.some_gpus(place))
        return self._world.add(thing)

    def _root(self, place: SimulatedPlace, kind: str) -> Thing:
        rng = self._world.rng
        owner = rng.choice(place.people)
        name = f"{rng.choice(ADJECTIVES)}-{rng.randrange(1000)}"
        ref = Ref(place.platform, place.place, kind, name, self._world.new_uid(), rng.choice(place.namespaces))
        thing = Thing(ref, self._now(), owner=owner, class_="cluster", devices=self.some_gpus(place))
        thing.ends_for_good = True
        thing.labels = {"team": owner}
        if int(thing.ref.uid[1:]) % ONE_IN == 0:
            thing.needed = "its owner Workflow nightly (argoproj.io/v1alpha1) exists"
        return self._world.add(thing)

    def _child(self, root: Thing, busy: timedelta) -> None:
        ref = Ref(
            root.ref.platform, root.ref.place, "pod", root.ref.name + "-0", self._world.new_uid(), root.ref.namespace
        )
        child = Thing(ref, self._now(), owner=root.owner, class_="cluster", devices=root.devices, root=root.ref)
        child.start(self._now(), busy)
        root.children = 1
        self._world.add(child)

    def _device(self, place: SimulatedPlace, gpu: str) -> None:
        ref = Ref(place.platform, place.place, "gpu", gpu, gpu)
        unused = {"memory_used_mib": "0"}
        self._world.add(Thing(ref, self._now(), Shape.DEVICE, state=State.RUNNING, devices=(gpu,), labels=unused))

    def some_gpus(self, place: SimulatedPlace) -> tuple[str, ...]:
        """Whether others use them or not: claims that contradict each other are to be found."""
        count = self._world.rng.choice((1, 1, 1, 2, min(4, len(place.gpus))))
        return tuple(self._world.rng.sample(place.gpus, k=min(count, len(place.gpus))))

    def _span(self, low: int, high: int) -> timedelta:
        return self._world.rng.randint(low, high) * self._minute

    def _now(self) -> datetime:
        return self._world.clock.true_now()


PEOPLE = ("ann", "bob", "eve", "kim", "raj")


def places() -> tuple[SimulatedPlace, ...]:
    def gpus(count: int) -> tuple[str, ...]:
        return tuple(f"GPU-{n}" for n in range(count))

    return (
        SimulatedPlace("docker", "node-1", gpus(4), PEOPLE),
        SimulatedPlace("docker", "node-2", gpus(4), PEOPLE),
        SimulatedPlace("docker", "node-3", gpus(8), PEOPLE),
        SimulatedPlace("kubernetes", "prod", gpus(32), PEOPLE, ("research", "team-vision", "default")),
        SimulatedPlace("ray", "ray-1", gpus(2), PEOPLE, nodes=("head", "worker-1")),
        SimulatedPlace("ray", "ray-2", gpus(2), PEOPLE, nodes=("worker-2",)),
    )


def demo_world(seed: int, loop: VirtualLoop, pace: timedelta = timedelta(hours=2)) -> World:
    world = World(seed, VirtualClock(loop), places())
    SimulatedUsers(world, pace).settle_in()
    return world
