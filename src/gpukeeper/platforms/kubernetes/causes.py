"""Why an object still exists: every cause with its remedy as sentences, and its owner tree line by line, from
everything that was read about it. Pure. What could not be read is reported as such: a guess would lead to the wrong
remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

import msgspec

from gpukeeper.clients.kubernetes.wire import Pod, Root, StatusCondition, when
from gpukeeper.model.subject import Blocked, Cause, Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.platforms.kubernetes import marks as marked
from gpukeeper.platforms.kubernetes.finalizers import FINALIZERS, NODE, Alive, ControllerReport, Down, blocked
from gpukeeper.platforms.kubernetes.gpus import MOST_GPUS, PodTotals, requested
from gpukeeper.platforms.kubernetes.kinds.kind import (
    BUILT_IN,
    BY_RETENTION,
    NOT_CHECKED,
    QUEUE,
    Ending,
    Kind,
    NoRuntime,
    RootFacts,
    RuntimeTtl,
    TreeNode,
    ago,
    counted,
    cut,
    lasting,
)
from gpukeeper.platforms.kubernetes.kinds.pod import not_running, of_pod
from gpukeeper.platforms.kubernetes.owners import Climb, Descendants


class DiagnosisFacts(msgspec.Struct, frozen=True, kw_only=True):
    node: TreeNode
    top: TreeNode  # the root, as far as it could be climbed to; may be the node itself
    climb: Climb
    below: Descendants  # of the top
    reports: Mapping[str, ControllerReport]  # of controllers, by their name
    now: datetime
    runtime: RuntimeTtl | NoRuntime | Unknown | None = None
    ttl_field: bool | Unknown = NOT_CHECKED  # whether the served version of a kind has one, where releases differ
    events: tuple[str, ...] | Unknown = ()
    clashes: Mapping[str, tuple[str, ...] | Unknown] = {}  # by controller

    @property
    def is_top(self) -> bool:
        return self.node.meta.uid == self.top.meta.uid

    @property
    def of_top(self) -> RootFacts:
        """What its kind needs to explain why the top still exists."""
        report = self.reports.get(self.top.kind.controller.name)
        return RootFacts(
            root=self.top,
            children=self.below.of(self.top.meta.uid),
            runtime=self.runtime,
            release=None if report is None else report.version,
            now=self.now,
        )


ANNOUNCED = ("SuccessCriteriaMet", "FailureTarget")  # of a Job: its end is near, and not yet there
BLOCKED_BELOW = 3
UNPLACED = 3  # pods without a node that are named


def causes(facts: DiagnosisFacts) -> Iterator[Cause]:
    """What keeps it, most informative first."""
    yield from _owners(facts)
    yield from _removals(facts)
    about = "" if facts.is_top else f"{facts.top.words}: "
    for cause in _of_top(facts):
        yield Cause(f"{about}{cause.words}", cause.remedy)
    yield from _controllers(facts)
    yield from _unread(facts)


def _owners(facts: DiagnosisFacts) -> Iterator[Cause]:
    climbed, node = facts.climb, facts.node
    if climbed.unknown is not None:
        grant = ", or grant gpukeeper `get` on it" if "may not be read" in climbed.unknown.why else ""
        remedy = f"gpukeeper keeps it. Remove its owner{grant}"
        yield Cause(climbed.unknown.why, remedy)
    if climbed.gone is not None:
        owner = climbed.gone
        words = f"its owner {owner.kind} {owner.name} (uid {owner.uid}) no longer exists; it was left behind"
        yield Cause(
            words, "The garbage collector removes it within minutes; if not, check that kube-controller-manager runs"
        )
    if not facts.is_top:
        where = f"{facts.top.meta.namespace}/{facts.top.words}"
        alone = facts.top.kind.without(node.kind, facts.of_top, _ending(facts.top, facts.now))
        yield Cause(
            f"{node.words} is part of {facts.top.words}: if it is removed alone, {alone}",
            f"gpukeeper removes only the root, with everything below it: gpukeeper explain {where}",
        )


def _removals(facts: DiagnosisFacts) -> Iterator[Cause]:
    """Its own removal, its root's, and the first few below it that do not complete."""
    nodes = {one.meta.uid: one for one in (facts.node, facts.top, *facts.below.every())}
    said = 0
    for uid, node in nodes.items():
        if node.meta.deletion_timestamp is None:
            continue
        main = uid in {facts.node.meta.uid, facts.top.meta.uid}
        found = _blocked(facts, node)
        name = "" if uid == facts.node.meta.uid else f"{node.words}: "
        if found is not None and (main or said < BLOCKED_BELOW):
            said += 0 if main else 1
            yield Cause(f"{name}{_blocked_words(found, facts.now)}", _blocked_remedy(found))
        elif main:
            at = when(node.meta.deletion_timestamp)
            since = f", for {lasting(at, facts.now)}" if isinstance(at, datetime) else ""
            yield Cause(f"{name}its removal is in progress{since}", "Wait until it completes")


def _blocked(facts: DiagnosisFacts, node: TreeNode) -> Blocked | None:
    is_node = node.meta.uid == facts.node.meta.uid
    return blocked(
        node.meta,
        node.kind,
        facts.below,
        {name: report.controller_state for name, report in facts.reports.items()},
        facts.now,
        pod=node.seen if isinstance(node.seen, Pod) else None,
        owner_gone=facts.climb.owner_gone if is_node else False,
    )


def _blocked_words(found: Blocked, now: datetime) -> str:
    what = found.by if found.by == NODE else f"the finalizer {found.by}"
    words = f"its removal was requested {ago(found.since, now)} and does not complete; {what} blocks it: {found.why}"
    if isinstance(found.proven, Unknown):
        return f"{words}. Whether it will ever complete is unknown: {found.proven.why}"
    return f"{words}. Waiting does not help" if found.proven else words


def _blocked_remedy(found: Blocked) -> str:
    known = FINALIZERS.get(found.by)
    usual = known.remedy if known is not None else ""
    if found.by == NODE:
        usual = "Check that its node is ready; a node that no longer exists must be removed from the cluster"
    if found.proven is not True:
        return usual or "Find the controller that sets this finalizer, and check that it runs"
    take = f"list it in the policy (kubernetes.release: [{found.by}]): gpukeeper then removes it from this object only"
    return f"{usual}. Or {take}" if known is not None and known.without else f"{take[0].upper()}{take[1:]}"


def _of_top(facts: DiagnosisFacts) -> Iterator[Cause]:
    top, now = facts.top, facts.now
    ending = _ending(top, now)
    if isinstance(top.seen, Root):
        yield from _elsewhere(top.kind, top.seen)
    if isinstance(ending.over, Unknown):
        yield Cause(f"whether it has ended is unknown: {ending.over.why}", "gpukeeper keeps it until this is known")
    elif ending.over:
        yield from _ended(facts, ending)
    else:
        yield from _not_ended(facts)
    yield from top.kind.more_causes(facts.of_top, ending)


def _elsewhere(kind: Kind, root: Root) -> Iterator[Cause]:
    by = marked.managed_elsewhere(kind, root.metadata, root.spec)
    labels = root.metadata.labels or {}
    if by is not None:
        yield Cause(f"it is managed by {by}", f"gpukeeper does not act on it; {_advice_elsewhere(by)}")
    if QUEUE in labels:
        words = f"it is queued by Kueue ({QUEUE}={labels[QUEUE]}); only Kueue suspends and resumes it"
        yield Cause(words, "To release its quota, remove it, or set spec.active: false in its Workload")
    yield from kind.causes_elsewhere(root)


def _advice_elsewhere(by: str) -> str:
    if "managedBy" in by:
        return "ask the admin of that controller"
    if "MultiKueue" in by:
        return "remove it on the cluster that sent it"
    return "remove it from Git, or set kubernetes.gitops: true in the policy"


def _ended(facts: DiagnosisFacts, ending: Ending) -> Iterator[Cause]:
    totals = _totals(facts)
    if not isinstance(ending.at, datetime):
        why = ending.at.why if isinstance(ending.at, Unknown) else "no time is recorded"
        words = f"it has ended, but its end time is unknown ({why}), so the TTL of its controller never expires"
        yield Cause(words, "gpukeeper counts from the time at which it first saw it ended")
    if totals.living:
        gpus = f", with {counted(len(totals.devices), 'GPU')}" if totals.devices else ""
        words = f"it has finished, but {counted(totals.living, 'pod')} below it did not end{gpus}"
        now = f"gpukeeper workload remove {facts.top.meta.namespace}/{facts.top.words}"
        yield Cause(words, f"The rule live_children ends them, depending on at_finish; or remove it now: {now}")
    if facts.top.meta.deletion_timestamp is None:
        yield from _ttl(facts, ending)


def _ttl(facts: DiagnosisFacts, ending: Ending) -> Iterator[Cause]:
    """Which controller removes it after its end, and when."""
    top, seen, now = facts.top, facts.top.seen, facts.now
    if isinstance(seen, Pod):
        yield Cause("a pod without a controller has no TTL: only gpukeeper or a user removes it", BY_RETENTION)
        return
    settings = marked.TranslationSettings(ttl_field=facts.ttl_field)
    said, notes = marked.read(top.kind, top.meta, seen.spec, ending, now, settings)
    yield from (Cause(note, "Fix it; until then it is ignored, or counts as a hold") for note in notes)
    special = top.kind.causes_of_ttl(seen.spec, ending, facts.ttl_field, said.ttl)
    if special is not None:
        yield from special
    elif not said.ttl_elsewhere and not top.kind.runs and said.ttl is None:
        unless = top.kind.ttl_unless
        words = f"it has no TTL ({top.kind.ttl_field}), so its controller never removes it{unless}"
        yield Cause(words, f"Set one; or {BY_RETENTION}")
    elif said.ttl_elsewhere and isinstance(said.ttl, timedelta) and isinstance(ending.at, datetime):
        yield from _ttl_of_controller(facts, said.ttl, ending.at)


def _ttl_of_controller(facts: DiagnosisFacts, ttl: timedelta, ended: datetime) -> Iterator[Cause]:
    over = ended + ttl
    who = facts.top.kind.controller.name
    if facts.now < over:
        yield Cause(f"its TTL of {in_words(ttl)} expires in {in_words(over - facts.now)}; then {who} removes it")
    else:
        late = in_words(facts.now - over)
        words = f"its TTL of {in_words(ttl)} expired {late} ago, but {who} has not removed it"
        yield Cause(words, f"Check that {who} runs, and its log; gpukeeper removes it a minute after the TTL")


def _not_ended(facts: DiagnosisFacts) -> Iterator[Cause]:
    """Why it has not ended."""
    top = facts.top
    if top.kind.runs:
        yield Cause(
            f"a {top.kind.kind} never ends by itself", "The idle and runtime rules apply to it; or stop it yourself"
        )
        return
    if isinstance(top.seen, Pod):
        yield Cause(f"it has not ended: its phase is {top.seen.status.phase or 'not set yet'}")
        yield from _not_placed(facts)
        yield from _not_running(facts)
        return
    if top.kind.is_suspended(top.seen.spec):
        yield Cause("it is suspended, so it neither runs nor ends", "Resume it, or remove it if it is not needed")
        return
    yield Cause(f"it has not ended: {top.kind.no_end(top.seen)}; {_waits_for(facts)}")
    yield from _not_placed(facts)
    yield from _not_running(facts)
    for one in top.seen.status.conditions or ():
        if one.type in ANNOUNCED and one.status == "True":
            at = when(one.last_transition_time)
            since = f" {ago(at, facts.now)}" if isinstance(at, datetime) else ""
            words = f"{one.type} was set{since} ({one.reason}); it ends only when all its pods have ended"
            yield Cause(words, "Check which of its pods does not end")


def _not_placed(facts: DiagnosisFacts) -> Iterator[Cause]:
    """The message of the scheduler (as in `FailedScheduling`), for the first pods."""
    pods = [facts.top.seen] if isinstance(facts.top.seen, Pod) else list(facts.below.pods())
    said = [(pod, one) for pod in pods for one in pod.status.conditions or () if _is_refused(one)]
    for pod, one in said[:UNPLACED]:
        words = f"pod {pod.metadata.name} cannot be scheduled: {cut(one.message) or one.reason}"
        yield Cause(words, "Request what a node has, add a suitable node, or remove it")
    if len(said) > UNPLACED:
        yield Cause(f"and {len(said) - UNPLACED} more pods cannot be scheduled")


def _not_running(facts: DiagnosisFacts) -> Iterator[Cause]:
    """What the kubelet reports about pods that have a node, for the first ones."""
    pods = [facts.top.seen] if isinstance(facts.top.seen, Pod) else list(facts.below.pods())
    said = [(pod, found.why) for pod in pods if (found := not_running(pod)) is not None and found.why is not None]
    for pod, why in said[:UNPLACED]:
        gpus = requested(pod.spec)
        count = gpus.whole + gpus.slices
        holds = f", and holds {counted(count, 'GPU')}" if count else ""
        words = f"pod {pod.metadata.name} on {pod.spec.node_name} has not started{holds}: {why}"
        yield Cause(
            words, "Correct what it names, for example the image, or remove it; the rule never_started can do that"
        )
    if len(said) > UNPLACED:
        yield Cause(f"and {len(said) - UNPLACED} more pods have not started")


def _is_refused(one: StatusCondition) -> bool:
    return one.type == "PodScheduled" and one.status == "False" and one.reason == "Unschedulable"


def _waits_for(facts: DiagnosisFacts) -> str:
    totals = _totals(facts)
    if totals.lost is not None:
        return f"the node of pod {totals.lost} does not respond"
    if totals.pending:
        return f"{totals.pending} of {counted(totals.living, 'pod')} not scheduled yet"
    if totals.waiting:
        return f"{totals.waiting} of {counted(totals.living, 'pod')} not started yet"
    if totals.living:
        return f"{counted(totals.living, 'pod')} not ended yet"
    if totals.dead:
        return f"all of its pods ({totals.dead}) have ended, so its controller should update its status soon"
    return "it has no pods: its controller has to create them" if facts.below.complete else "its pods are unknown"


def _controllers(facts: DiagnosisFacts) -> Iterator[Cause]:
    """Only problems; the outline lists all controllers."""
    for report in facts.reports.values():
        name, controller_state = report.controller.name, report.controller_state
        if isinstance(controller_state, Down):
            yield Cause(
                f"{name} does not run: {controller_state.words}",
                "Start it again: without it, nothing below it is removed",
            )
        elif isinstance(controller_state, Unknown) and report.controller is not BUILT_IN:
            yield Cause(controller_state.why, _advice_on(report))
        lines = facts.clashes.get(name, ())
        if isinstance(lines, Unknown):
            if report.installed:
                yield Cause(lines.why)
        else:
            for line in lines:
                yield Cause(
                    f"{name} logs: {cut(line)}",
                    "A single conflict is harmless, the controller retries; a repeated one is a cause",
                )


def _advice_on(report: ControllerReport) -> str:
    """No command that the user may not run."""
    if any("forbidden" in one.lower() for one in report.unseen):
        return f"Ask an admin of the cluster whether {report.controller.name} runs; you may not read its namespace"
    return "Check that it runs: kubectl get deployments,leases --all-namespaces"


def _unread(facts: DiagnosisFacts) -> Iterator[Cause]:
    for problem in facts.below.unseen:
        yield Cause(
            f"what is below it could not be listed completely: {problem}",
            "Until then, gpukeeper treats nothing as absent",
        )
    if isinstance(facts.runtime, Unknown):
        yield Cause(facts.runtime.why, "A TTL in its runtime would remove only its JobSet")
    if isinstance(facts.events, Unknown):
        yield Cause(facts.events.why)
    else:
        yield from (Cause(words) for words in facts.events)


# Helpers


def _ending(node: TreeNode, now: datetime) -> Ending:
    return of_pod(node.seen, now) if isinstance(node.seen, Pod) else node.kind.ending(node.seen, now)


def _totals(facts: DiagnosisFacts) -> PodTotals:
    totals = PodTotals()
    for pod in facts.below.pods():
        totals.add_pod(pod, requested(pod.spec))
    return totals


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
