"""The owner tree of an object, line by line, and the controllers of its kinds. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from gpukeeper.model.subject import Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.controller_state import Alive, ControllerReport, Down
from gpukeeper.platforms.kubernetes.diagnosis_facts import DiagnosisFacts
from gpukeeper.platforms.kubernetes.gpus import MOST_GPUS, requested
from gpukeeper.platforms.kubernetes.kinds.controller import BUILT_IN
from gpukeeper.platforms.kubernetes.kinds.ending import Ending
from gpukeeper.platforms.kubernetes.kinds.kind import TreeNode
from gpukeeper.platforms.kubernetes.phrases import ago, counted, lasting
from gpukeeper.platforms.kubernetes.wire import Pod, Root, when

SIBLINGS = 12  # children shown below one owner


def outline(facts: DiagnosisFacts) -> Iterator[str]:
    """From the root down, then the controllers."""
    if facts.climb.made_by is not None:
        yield f"created by {facts.climb.made_by.kind} {facts.climb.made_by.name}"
    if facts.climb.gone is not None:
        yield f"its owner {facts.climb.gone.kind} {facts.climb.gone.name} no longer exists"
    shown = {node.meta.uid for node in facts.climb.above} | {facts.node.meta.uid}
    yield from _branch(facts, facts.top, 0, shown)
    for report in facts.reports.values():
        if report.controller is not BUILT_IN or isinstance(report.controller_state, Alive):
            yield _controller_line(report)


def _branch(facts: DiagnosisFacts, node: TreeNode, depth: int, wanted: set[str]) -> Iterator[str]:
    here = "  <- this one" if node.meta.uid == facts.node.meta.uid and not facts.is_top else ""
    yield f"{'  ' * depth}{node.words}  {', '.join(_details(node, facts))}{here}"
    children = sorted(facts.below.of(node.meta.uid), key=lambda one: (one.meta.uid not in wanted, one.meta.name))
    for child in children[:SIBLINGS]:
        yield from _branch(facts, child, depth + 1, wanted)
    if len(children) > SIBLINGS:
        yield f"{'  ' * (depth + 1)}and {len(children) - SIBLINGS} more"


def _details(node: TreeNode, facts: DiagnosisFacts) -> Iterator[str]:
    meta, now = node.meta, facts.now
    yield _state(node, now)
    made = when(meta.creation_timestamp)
    yield f"created {ago(made, now)}" if isinstance(made, datetime) else "created at an unknown time"
    if isinstance(node.seen, Root) and (ttl := node.kind.ttl_words(node.seen.spec, facts.ttl_field)):
        yield ttl
    asked_for = when(meta.deletion_timestamp)
    if asked_for is not None:
        yield f"being removed for {lasting(asked_for, now)}" if isinstance(asked_for, datetime) else "being removed"
    if meta.finalizers:
        yield f"finalizers {' '.join(meta.finalizers)}"
    yield f"uid {meta.uid}"


def _state(node: TreeNode, now: datetime) -> str:
    if isinstance(node.seen, Pod):
        gpus = requested(node.seen.spec)
        count = gpus.whole + gpus.slices
        holds = f", {counted(count, 'GPU')}" if count else ""
        if gpus.written:
            holds = f", {gpus.written} GPUs requested, counted as {MOST_GPUS}: no node has more"
        where = f" on {node.seen.spec.node_name}" if node.seen.spec.node_name else ", no node yet"
        return f"{node.seen.status.phase or 'no phase'}{where}{holds}"
    ending = node.kind.ending(node.seen, now)
    if isinstance(ending.over, Unknown):
        return f"state {ending.over}"
    if ending.over:
        at = f"{ago(ending.at, now)}" if isinstance(ending.at, datetime) else "at an unknown time"
        return f"{_outcome(ending)} {at}"
    if node.kind.is_suspended(node.seen.spec):
        return "suspended"
    return "runs until it is stopped" if node.kind.runs else "not finished"


def _outcome(ending: Ending) -> str:
    return str(ending.outcome.value) if isinstance(ending.outcome, Outcome) else "ended"


def _controller_line(report: ControllerReport) -> str:
    controller_state = report.controller_state
    state = controller_state.why if isinstance(controller_state, Unknown) else controller_state.words
    version = f" {report.version}" if report.version else ""
    image = f", image {report.image}" if report.image else ""
    said = "" if not isinstance(controller_state, Down) else "not running: "
    name = report.controller.name
    return f"controller {name}{version}: {said}{state.removeprefix(f'{name} ')}{image}"
