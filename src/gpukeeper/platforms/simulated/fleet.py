"""The fleet of the demo: three Docker hosts, a cluster and two Ray nodes, with their users."""

from __future__ import annotations

from datetime import timedelta

from gpukeeper.platforms.simulated.clock import VirtualClock, VirtualLoop
from gpukeeper.platforms.simulated.users import SimulatedUsers
from gpukeeper.platforms.simulated.world import SimulatedPlace, World

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
