"""What a Ray cluster reports of itself, and what would prevent a run on its nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from gpukeeper.acceptance.fleet.preflight.finding import Finding, counted, failed, named, passed, unchecked, warning
from gpukeeper.model.unknown import Unknown

OLDEST = (2, 40)  # which was tried


class RayNodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`excluded`: why the launcher would leave it out; a sentence. `held`: GPUs that work holds now."""

    node: str
    node_id: str
    alive: bool = True
    message: str = ""  # of a dead one
    gpus: float = 0.0
    held: float = 0.0
    excluded: str = ""


class RayFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`own`: the version of Ray on this machine; empty: it has none. `chosen`: the nodes that the run would use."""

    address: str
    version: str
    own: str = ""
    dead: tuple[RayNodeFacts, ...] | Unknown = ()
    chosen: tuple[RayNodeFacts, ...] | Unknown = ()
    held: Unknown | None = None  # why it is not known what holds GPUs
    jobs: int | Unknown = 0


def judge_ray(facts: RayFacts, gpus_per_node: int | None) -> tuple[Finding, ...]:
    return (
        passed("ray-cluster", f"{facts.address} is reachable: Ray {facts.version}"),
        *_versions(facts),
        *_jobs(facts),
        *_dead(facts),
        *_nodes(facts, gpus_per_node),
    )


def _versions(facts: RayFacts) -> Iterator[Finding]:
    found = re.match(r"(\d{1,4})\.(\d{1,4})", facts.version)
    if found is None:
        yield unchecked("ray-version", f'"{facts.version}" is not a version of Ray', (), ["ray --version"])
    elif (int(found[1]), int(found[2])) < OLDEST:
        words = f"Ray {facts.version} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest release that was tried"
        yield warning("ray-version", words, (), ['pip install -U "ray[default]"'])
    elif facts.own not in ("", facts.version):
        words = f"Ray {facts.version} there, {facts.own} here. A run does not use it here; the ray commands below do"
        yield warning("ray-version", words, (), [f'pip install "ray[default]=={facts.version}"'])
    else:
        here = "the same here" if facts.own else "a run needs no Ray here"
        yield passed("ray-version", f"Ray {facts.version}; {here}")


def _jobs(facts: RayFacts) -> Iterator[Finding]:
    if isinstance(facts.jobs, Unknown):
        yield unchecked("ray-jobs", f"the Jobs API: {facts.jobs.why}", (), [f"ray job list --address {facts.address}"])
    else:
        words = f"the Jobs API lists {counted(facts.jobs, 'job')}. Only a run proves that it accepts one"
        yield passed("ray-jobs", words)


def _dead(facts: RayFacts) -> Iterator[Finding]:
    listing = f"ray list nodes --address {facts.address}"
    if isinstance(facts.dead, Unknown):
        yield unchecked("ray-dead", facts.dead, (), [listing])
    elif facts.dead:
        names = [one.node for one in facts.dead]
        why = f". The first: {facts.dead[0].message}" if facts.dead[0].message else ""
        start = "ray start --address HEAD:6379"
        yield warning("ray-dead", f"{named(names)}: dead, so not tested{why}", names, [listing, start])


def _nodes(facts: RayFacts, gpus_per_node: int | None) -> Iterator[Finding]:
    if isinstance(facts.chosen, Unknown):
        yield unchecked("ray-nodes", facts.chosen, (), [f"ray list nodes --address {facts.address}"])
        return
    if not facts.chosen:
        yield failed("ray-nodes", "no node that is alive announces a GPU", (), ["ray start --num-gpus N on each node"])
        return
    good = [one for one in facts.chosen if not one.excluded]
    for one in facts.chosen:
        if one.excluded:
            again = f"ray stop && ray start --address HEAD:6379 --num-gpus {gpus_per_node or 'N'}"
            yield failed("ray-gpus", f"{one.node}: {one.excluded}", [one.node], [again])
    if not good:
        return
    yield passed("ray-nodes", f"{counted(len(good), 'node')} alive", [one.node for one in good])
    yield from _gpus(good, gpus_per_node)
    yield from _held(facts, good, gpus_per_node)


def _gpus(good: Sequence[RayNodeFacts], gpus_per_node: int | None) -> Iterator[Finding]:
    names = [one.node for one in good]
    counts = sorted({one.gpus for one in good})
    if gpus_per_node is not None and (more := [one for one in good if one.gpus > gpus_per_node]):
        words = f"{named(one.node for one in more)}: more than {gpus_per_node} GPUs are announced; Ray chooses which"
        fix = f"repeat with --gpus-per-node {max(one.gpus for one in more):g}"
        yield warning("ray-gpus", words, [one.node for one in more], [fix])
    elif len(counts) > 1:
        words = "; ".join(f"{count:g} on {named(one.node for one in good if one.gpus == count)}" for count in counts)
        yield warning("ray-gpus", f"the number of GPUs differs: {words}", names, ["repeat with --gpus-per-node N"])
    else:
        yield passed("ray-gpus", f"{counts[0]:g} GPUs on each of {counted(len(good), 'node')}", names)


def _held(facts: RayFacts, good: Sequence[RayNodeFacts], gpus_per_node: int | None) -> Iterator[Finding]:
    show = [f"ray list actors --address {facts.address} --filter state=ALIVE", f"ray status --address {facts.address}"]
    if facts.held is not None:
        yield unchecked("ray-free", f"what holds GPUs: {facts.held.why}", (), show)
        return
    busy = [one for one in good if one.gpus - one.held < (one.gpus if gpus_per_node is None else gpus_per_node)]
    if busy:
        words = ", ".join(f"{one.held:g} of {one.gpus:g} on {one.node}" for one in busy[:5])
        text = f"GPUs are taken now: {words}. The run would wait for them (option wait, 5m)"
        yield warning("ray-free", text, [one.node for one in busy], show)
    else:
        yield passed("ray-free", f"the GPUs of {counted(len(good), 'node')} are free")
