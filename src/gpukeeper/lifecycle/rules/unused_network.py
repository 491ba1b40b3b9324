"""Networks that no workload refers to, running or stopped. They contain nothing, but a workload that needs one
does not start without it."""

from __future__ import annotations

from datetime import datetime

from gpukeeper.lifecycle.rule import Rule, Turn
from gpukeeper.lifecycle.rules.unused_volume import unused
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Answer, Verdict, View
from gpukeeper.model.subject import Shape

NAME = "unused_network"

_NOT_ONE = Answer(NAME, Verdict.SILENT, "not a network")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    if view.subject.shape is not Shape.NETWORK:
        return _NOT_ONE
    return unused(NAME, view, settings.policy.networks.unused, now)


RULE = Rule(
    name=NAME,
    summary="A network that no workload refers to for networks.unused is removed; without that setting it is reported.",
    shapes=(Shape.NETWORK,),
    acts=True,
    turn=Turn.STORAGE,
    evaluate=evaluate,
)
