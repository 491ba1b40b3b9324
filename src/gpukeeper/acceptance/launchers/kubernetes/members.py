"""Which objects belong to a run. Pure.

Labels only find candidates: anyone who may create an object can write them. Of the namespace of the run, these count:
objects that nothing controls and that carry the description of the run; and what they control, by uid (TrainJob →
JobSet → Job → pod). The namespace is the boundary: those who may create objects in it are trusted with its runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpukeeper.acceptance.fleet.spec import RunSpec, Target
from gpukeeper.acceptance.launchers.kubernetes import catalog, marks
from gpukeeper.acceptance.launchers.kubernetes.api import PODS, Resource
from gpukeeper.acceptance.launchers.kubernetes.wire import Meta, Pod, Root, at


class Found(msgspec.Struct, frozen=True):
    resource: Resource
    root: Root

    @property
    def meta(self) -> Meta:
        return self.root.metadata

    @property
    def words(self) -> str:
        return f"{self.resource.kind.lower()}/{self.meta.name}"


class Members(msgspec.Struct, frozen=True):
    """`uids`: of `own` and of all that they control. `foreign`: has the label of the run, and no description of it."""

    own: tuple[Found, ...]
    uids: frozenset[str]
    foreign: tuple[Found, ...] = ()

    @property
    def roots(self) -> list[Root]:
        return [one.root for one in self.own if one.resource in catalog.ROOTS]

    def has(self, pod: Pod) -> bool:
        return pod.metadata.controller in self.uids

    def description(self) -> tuple[RunSpec, tuple[Target, ...]]:
        """The one of the oldest object, with the names of all nodes if another one has them. The date is not earlier
        than the one that the server gave the object: an old date in a description makes no run end early."""
        ordered = sorted(self.own, key=lambda one: one.meta.creation_timestamp or "")
        described = [(spec, one) for one in ordered if (spec := marks.spec_of(one.meta.annotations)) is not None]
        first, oldest = described[0]
        same = [(spec, one) for spec, one in described if _without_nodes(spec) == _without_nodes(first)]
        spec = max((spec for spec, _ in same), key=lambda one: len(one.nodes))
        created = at(oldest.meta.creation_timestamp)
        targets = max((marks.targets_of(one.meta.annotations) for _, one in same), key=len)
        late = created is not None and created > spec.created
        return (msgspec.structs.replace(spec, created=created) if late else spec), targets


NONE = Members(own=(), uids=frozenset())


def by_run(found: Iterable[Found]) -> dict[str, Members]:
    """Runs of which at least one object carries the description; and those of which only labels were found."""
    candidates: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        candidates[marks.run_of(one.meta.labels)].append(one)
    return {run: _members(run, of_run) for run, of_run in sorted(candidates.items()) if run}


def without_controller(pods: Iterable[Pod]) -> list[Found]:
    """Their controller was removed without them, or somebody else created them: which of the two is unknown."""
    return [Found(PODS, Root(metadata=one.metadata)) for one in pods if not one.metadata.controller]


def is_described(meta: Meta, run: str) -> bool:
    """Whether this is an object that a launcher created for this run."""
    spec = marks.spec_of(meta.annotations)
    return not meta.controller and marks.run_of(meta.labels) == run and spec is not None and spec.run == run


def _members(run: str, found: Sequence[Found]) -> Members:
    own = tuple(one for one in found if is_described(one.meta, run))
    foreign = tuple(one for one in found if not one.meta.controller and one not in own)
    return Members(own=own, uids=_controlled([one.meta for one in own], [one.meta for one in found]), foreign=foreign)


def _controlled(own: Sequence[Meta], found: Sequence[Meta]) -> frozenset[str]:
    below: Mapping[str, list[str]] = defaultdict(list)
    for one in found:
        below[one.controller].append(one.uid)
    known: set[str] = set()
    waiting = [one.uid for one in own]
    while waiting:
        uid = waiting.pop()
        if uid and uid not in known:
            known.add(uid)
            waiting += below.get(uid, ())
    return frozenset(known)


def _without_nodes(spec: RunSpec) -> RunSpec:
    return msgspec.structs.replace(spec, nodes=())
