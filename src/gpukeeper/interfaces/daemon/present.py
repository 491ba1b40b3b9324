"""The view of this machine as of now: for the dashboard, and for the copy of the fleet."""

from __future__ import annotations

from gpukeeper import __version__
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.live import STEP, STEPS
from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.model.subject import Shape
from gpukeeper.views.live import MachineView, machine_view
from gpukeeper.wiring.session import Session


async def present_view(session: Session) -> MachineView:
    keeper, policy = session.keeper, session.book.policy
    await _recall(keeper)
    devices = [
        key
        for place in keeper.live.places.values()
        for key, fact in place.facts.items()
        if fact.view.subject.shape is Shape.DEVICE
    ]
    return machine_view(
        keeper.live,
        session.book,
        keeper.clock.now(),
        machine=keeper.host,
        version=__version__,
        policy=PolicyHead(session.loaded.source, policy.digest, policy.preset, policy.mode),
        paused=await keeper.ledger.paused(),
        gpus=await keeper.ledger.memories(devices),
    )


async def _recall(keeper: Keeper) -> None:
    """Use that was recorded before this daemon started, or before the workload was first seen."""
    keys = keeper.live.unknown_history()
    if keys:
        now = keeper.clock.now()
        found = await keeper.signals.series(keys, now - STEPS * STEP, now)
        for key, series in found.items():
            keeper.live.recall(key, series)
