"""Users of the simulated fleet: they start, forget, restart, hold, crash and remove work, each with their own random
generator.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Marks, Outcome, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.files import SimulatedFiles
from gpukeeper.platforms.simulated.thing import Thing
from gpukeeper.platforms.simulated.world import SimulatedPlace, World

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
