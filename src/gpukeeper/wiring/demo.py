"""The simulated fleet: the demo's week, and a live fleet to watch. Its modules are imported when it is started: every
other command starts without them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING

from gpukeeper.config.load import load_text
from gpukeeper.engine.reclaim import PassReport

if TYPE_CHECKING:
    from gpukeeper.platforms.simulated.demo import LiveFleet, Week

FLEET_SEED = 7


def play(seed: int, length: timedelta, on_report: Callable[[PassReport], None] = lambda report: None) -> Week:
    """The demo: a week of the simulated fleet, under short limits, so that much is done in it."""
    from gpukeeper.platforms.simulated.demo import play_week

    return play_week(seed, length, load_text(WEEK_POLICY, "demo policy").policy, on_report)


def simulated_fleet() -> AbstractContextManager[LiveFleet]:
    """The fleet of the demo, to be watched."""
    from gpukeeper.platforms.simulated.demo import live_fleet

    return live_fleet(FLEET_SEED, load_text(DEMO_POLICY, "demo policy").policy)


DEMO_POLICY = """
preset: ds01
mode: enforce
scope: {docker: {}, kubernetes: {namespaces: ["*"]}, ray: {}}
at_finish: Running
temporary: [{root: /tmp, names: ["ray_tmp_*", "pip-*", "tmp*"], above: 5GB, older_than: 1h}]
activity: {tick: 1m}
warnings: {require_delivery: true}
schedule: {every: 15m}
"""
# Half of the measurements and passes: a week in some seconds. What becomes due has a pass at that time, as always.
WEEK_POLICY = DEMO_POLICY.replace("tick: 1m", "tick: 2m").replace("every: 15m", "every: 30m")
