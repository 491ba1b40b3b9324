"""The fleet of the demo: three Docker hosts, a cluster and two Ray nodes, with their users."""

from __future__ import annotations

from datetime import timedelta

from gpukeeper.platforms.simulated.clock import VirtualClock, VirtualLoop
from gpukeeper.platforms.simulated.people import People
from gpukeeper.platforms.simulated.world import Place, World

PEOPLE = ("ann", "bob", "eve", "kim", "raj")


def places() -> tuple[Place, ...]:
    def gpus(count: int) -> tuple[str, ...]:
        return tuple(f"GPU-{n}" for n in range(count))

    return (
        Place("docker", "node-1", gpus(4), PEOPLE),
        Place("docker", "node-2", gpus(4), PEOPLE),
        Place("docker", "node-3", gpus(8), PEOPLE),
        Place("kubernetes", "prod", gpus(32), PEOPLE, ("research", "team-vision", "default")),
        Place("ray", "ray-1", gpus(2), PEOPLE, nodes=("head", "worker-1")),
        Place("ray", "ray-2", gpus(2), PEOPLE, nodes=("worker-2",)),
    )


def demo_world(seed: int, loop: VirtualLoop, pace: timedelta = timedelta(hours=2)) -> World:
    world = World(seed, VirtualClock(loop), places())
    People(world, pace).settle_in()
    return world
