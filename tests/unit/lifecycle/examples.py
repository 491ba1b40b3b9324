"""Plain values to decide about: a container on node-3, and the views and policies around it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, View
from gpukeeper.model.policy import ClassSettings, Demand, Mode, PlaceScope, Policy, Temporary, Warnings
from gpukeeper.model.series import Series, Signal
from gpukeeper.model.subject import EMPTY, Memory, Outcome, Ref, Seen, State, Subject, Warned

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
EVAL = Ref("docker", "node-3", "container", "eval", "c0ffee")
POLICY = Policy(
    mode=Mode.ENFORCE,
    scope={"docker": PlaceScope(), "kubernetes": PlaceScope(namespaces=("research",)), "host": PlaceScope()},
    classes={
        "managed": ClassSettings(idle=30 * MINUTE, max_runtime=DAY),
        "api": ClassSettings(max_runtime=DAY),
        "infrastructure": ClassSettings(untouchable=True),
    },
    temporary=(Temporary(root="/tmp", names=("tmp*",)),),
    warnings=Warnings(idle=(0.80, 0.95)),
    demand=Demand(idle_factor=0.5),
)
BOOK = Rulebook(POLICY)


def subject(**facts: Any) -> Subject:
    """A container of ann's that has been running for 3h, unless `facts` say otherwise."""
    ref = facts.pop("ref", EVAL)
    seen = Seen(ref, facts.pop("incarnation", "run-1"), "1", NOW)
    known: dict[str, Any] = {
        "state": State.RUNNING,
        "owner": "ann",
        "class_": "managed",
        "created": NOW - 3 * HOUR,
        "started": NOW - 3 * HOUR,
        "devices": ("GPU-0",),
    }
    return Subject(seen=seen, **(known | facts))


def ended(ago: timedelta = 2 * DAY, **facts: Any) -> Subject:
    known = {"state": State.ENDED, "outcome": Outcome.SUCCEEDED, "ended": NOW - ago, "started": NOW - ago - HOUR}
    return subject(**(known | facts))


def quiet(minutes: int = 90, devices: tuple[str, ...] = ("GPU-0",)) -> tuple[Series, ...]:
    """No use by any sign."""
    start, zeros = NOW - (minutes - 1) * MINUTE, (0.0,) * minutes
    others = (Signal.CPU, Signal.NETWORK, Signal.DISK, Signal.TERMINAL)
    return (
        *(Series(Signal.GPU, device, start, zeros) for device in devices),
        *(Series(signal, "", start, zeros) for signal in others),
    )


def warned(rule: str = "idle", limit: timedelta = 30 * MINUTE, delivered: bool = True) -> tuple[Warned, ...]:
    """Two warnings with their lead over."""
    return tuple(
        Warned(rule, stage, NOW - ago, delivered, "run-1", limit) for stage, ago in ((1, 40 * MINUTE), (2, 30 * MINUTE))
    )


def idle_view(**facts: Any) -> View:
    """Due to be stopped for idleness."""
    return View(subject(**facts), quiet(), Memory(warnings=warned()))


def ended_view(**facts: Any) -> View:
    """Due to be removed by retention."""
    return View(ended(**facts), (), EMPTY)


def decision(number: int = 1, action: Action = Action.REMOVE, **more: Any) -> Decision:
    ref = Ref("docker", "node-3", "container", f"job-{number}", f"u{number:03d}")
    known: dict[str, Any] = {"rule": "retention", "reason": "over", "due": NOW - number * MINUTE}
    return Decision(seen=Seen(ref, "run-1", "1", NOW), action=action, **(known | more))
