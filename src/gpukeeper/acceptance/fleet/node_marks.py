"""Nodes as they are, and one change of a node, as values: shared by marks of runs and by quarantines. Pure.

A node that is out takes no new work, for whatever reason. How many may be out is counted over the GPU nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from gpukeeper.model.policy import MarkSettings

PREFIX = "gpukeeper.io/"
LABEL, RUN, AT = f"{PREFIX}acceptance", f"{PREFIX}acceptance-run", f"{PREFIX}acceptance-at"
DETAILS = f"{PREFIX}acceptance-result"  # annotation
TAINT = f"{PREFIX}acceptance-failed"
QUARANTINE = f"{PREFIX}quarantine"  # label, and the key of the taint
QUARANTINE_DETAILS = f"{PREFIX}quarantine-details"  # annotation
TAINTS = (TAINT, QUARANTINE)
MESSAGE_MAX = 1024  # bytes of a condition


class NodeCondition(msgspec.Struct, frozen=True, kw_only=True):
    """`status` empty: the node does not have it."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""


class NodeMarks(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it is. `taints`: ours, by key with their value. `out`: why it takes no new work; empty: it does."""

    node: str
    uid: str
    version: str
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    taints: Mapping[str, str] = {}
    conditions: tuple[NodeCondition, ...] = ()
    gpu: bool = True
    out: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """None as a value removes it. `taints`: by key; only those named here are changed. `deferred`: why a taint is not
    added. `undone`: what is left of it if the limit turns out to be exceeded. `whole`: without its taint nothing else
    is written. `note`: what a reader should know."""

    node: str
    uid: str
    version: str
    labels: Mapping[str, str | None] = {}
    annotations: Mapping[str, str | None] = {}
    taints: Mapping[str, str | None] = {}
    condition: NodeCondition
    deferred: str = ""
    note: str = ""
    undone: Change | None = None
    whole: bool = False

    @property
    def takes_out(self) -> bool:
        return any(value is not None for value in self.taints.values())


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    why: str


class MarkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`out` of `nodes` GPU nodes are out now."""

    changes: tuple[Change, ...] = ()
    kept: tuple[Kept, ...] = ()
    out: int = 0
    allowed: int = 0
    nodes: int = 0
    breaker: str = ""


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """GPU nodes: `out` of `nodes` are out, `allowed` may be. `why`: what takes them out, the most frequent first."""

    nodes: int
    out: int
    allowed: int
    why: str = ""

    @property
    def words(self) -> str:
        because = f" ({self.why})" if self.why else ""
        return f"{self.out} of {self.nodes} GPU nodes are out{because}; at most {self.allowed} may be"


def counted(nodes: Sequence[NodeMarks], named: Collection[str], settings: MarkSettings) -> Counted:
    """`named`: nodes that count even if they announce no GPU: a broken one may not."""
    gpu_nodes = [one for one in nodes if one.gpu or one.node in named]
    reasons = [one.out for one in gpu_nodes if one.out]
    by_count = sorted(set(reasons), key=lambda one: (-reasons.count(one), one))
    return Counted(
        nodes=len(gpu_nodes),
        out=len(reasons),
        allowed=settings.max_out.of(len(gpu_nodes)),
        why=", ".join(f"{reasons.count(one)} {one}" for one in by_count[:3]),
    )


def done(change: Change, node: NodeMarks) -> str:
    """What is not as the change wants it; empty: everything is."""
    if any(node.labels.get(key) != value for key, value in change.labels.items()):
        return "its labels"
    if any(node.annotations.get(key) != value for key, value in change.annotations.items()):
        return "its annotations"
    if any(node.taints.get(key) != value for key, value in change.taints.items()):
        return "its taints"
    return "" if condition_of(node, change.condition.type) == change.condition else "its condition"


def condition_of(node: NodeMarks, type_: str) -> NodeCondition:
    return next((one for one in node.conditions if one.type == type_), NodeCondition(type=type_))


def cut(text: str) -> str:
    return text.encode()[:MESSAGE_MAX].decode(errors="ignore")


def label_value(text: str) -> str:
    """At most 63 characters, as the API server wants it."""
    allowed = "".join(one if one.isascii() and (one.isalnum() or one in "-_.") else "-" for one in text)
    return allowed[:63].strip("-_.")
