"""Why a thing is still there, in sentences: the tree it is in, and every cause with what to do about it. Pure.

What could not be read is said as such: a diagnosis that guesses sends people after the wrong remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

import msgspec

from gpukeeper.model.diagnosis import Cause
from gpukeeper.model.durations import in_words
from gpukeeper.model.subject import Blocked, Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import marks as marked
from gpukeeper.platforms.kubernetes.controllers import (
    BUILT_IN,
    TRAINER,
    Alive,
    Gone,
    Report,
    of_kind,
    recreates_jobsets,
)
from gpukeeper.platforms.kubernetes.finalizers import FINALIZERS, NODE, blocked
from gpukeeper.platforms.kubernetes.finish import Ending, of_pod, of_root
from gpukeeper.platforms.kubernetes.gpus import MOST_GPUS, asked
from gpukeeper.platforms.kubernetes.kinds.job import JOB
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER, RAYJOB
from gpukeeper.platforms.kubernetes.kinds.training_operator import V1_KINDS
from gpukeeper.platforms.kubernetes.kinds.trainjob import TRAINJOB
from gpukeeper.platforms.kubernetes.owners import Climb, Descendants, Node
from gpukeeper.platforms.kubernetes.tally import Tally
from gpukeeper.platforms.kubernetes.wire import Condition, Pod, Root, Spec, when

ANNOUNCED = ("SuccessCriteriaMet", "FailureTarget")  # of a Job: its end is near, and not yet there
QUEUE = "kueue.x-k8s.io/queue-name"
SIBLINGS = 12  # children shown below one owner
BLOCKED_BELOW = 3
UNPLACED = 3  # pods without a node that are named
SNAPSHOTS = "2.3"  # the release of Kubeflow Trainer that keeps a copy of the runtime
LATER = timedelta(minutes=1)  # a JobSet made so long after its TrainJob is not its first
LONGEST = 240  # characters of somebody else's words


class RuntimeTtl(msgspec.Struct, frozen=True):
    """A TTL that stands in a TrainJob's runtime."""

    runtime: str
    seconds: int


class NoRuntime(msgspec.Struct, frozen=True):
    """A TrainJob names a runtime that does not exist."""

    kind: str
    name: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that was learned of one object."""

    node: Node
    top: Node  # the root, as far as it could be climbed to; may be the node itself
    climb: Climb
    below: Descendants  # of the top
    reports: Mapping[str, Report]  # of controllers, by their name
    now: datetime
    runtime: RuntimeTtl | NoRuntime | Unknown | None = None
    ttl_field: bool | Unknown = marked.NOT_ASKED  # whether the served TrainJob has one
    events: tuple[str, ...] | Unknown = ()
    clashes: Mapping[str, tuple[str, ...] | Unknown] = {}  # by controller

    @property
    def is_top(self) -> bool:
        return self.node.meta.uid == self.top.meta.uid

    @property
    def trainer(self) -> str | None:
        report = self.reports.get(TRAINER.name)
        return None if report is None else report.version


# The tree


def tree(facts: Facts) -> Iterator[str]:
    """From the root down, then who looks after it."""
    if facts.climb.made_by is not None:
        yield f"made by {facts.climb.made_by.kind} {facts.climb.made_by.name}"
    if facts.climb.gone is not None:
        yield f"its owner {facts.climb.gone.kind} {facts.climb.gone.name} is gone"
    shown = {node.meta.uid for node in facts.climb.above} | {facts.node.meta.uid}
    yield from _branch(facts, facts.top, 0, shown)
    for report in facts.reports.values():
        if report.controller is not BUILT_IN or isinstance(report.standing, Alive):
            yield _controller_line(report)


def _branch(facts: Facts, node: Node, depth: int, wanted: set[str]) -> Iterator[str]:
    here = "  <- this one" if node.meta.uid == facts.node.meta.uid and not facts.is_top else ""
    yield f"{'  ' * depth}{node.words}  {', '.join(_told(node, facts))}{here}"
    children = sorted(facts.below.of(node.meta.uid), key=lambda one: (one.meta.uid not in wanted, one.meta.name))
    for child in children[:SIBLINGS]:
        yield from _branch(facts, child, depth + 1, wanted)
    if len(children) > SIBLINGS:
        yield f"{'  ' * (depth + 1)}and {len(children) - SIBLINGS} more"


def _told(node: Node, facts: Facts) -> Iterator[str]:
    meta, now = node.meta, facts.now
    yield _state(node, now)
    made = when(meta.creation_timestamp)
    yield f"created {ago(made, now)}" if isinstance(made, datetime) else "created at an unknown time"
    if isinstance(node.seen, Root) and (ttl := _ttl_words(node.kind, node.seen.spec, facts.ttl_field)):
        yield ttl
    asked_for = when(meta.deletion_timestamp)
    if asked_for is not None:
        yield f"being removed for {_for(asked_for, now)}" if isinstance(asked_for, datetime) else "being removed"
    if meta.finalizers:
        yield f"finalizers {' '.join(meta.finalizers)}"
    yield f"uid {meta.uid}"


def _state(node: Node, now: datetime) -> str:
    if isinstance(node.seen, Pod):
        gpus = asked(node.seen.spec)
        count = gpus.whole + gpus.slices
        holds = f", {_count(count, 'GPU')}" if count else ""
        if gpus.written:
            holds = f", {gpus.written} GPUs asked for, counted as {MOST_GPUS}: no node has more"
        where = f" on {node.seen.spec.node_name}" if node.seen.spec.node_name else ", no node yet"
        return f"{node.seen.status.phase or 'no phase'}{where}{holds}"
    ending = of_root(node.kind, node.seen, now)
    if isinstance(ending.over, Unknown):
        return f"state {ending.over}"
    if ending.over:
        at = f"{ago(ending.at, now)}" if isinstance(ending.at, datetime) else "at an unknown time"
        return f"{_outcome(ending)} {at}"
    if _suspended(node.kind, node.seen.spec):
        return "suspended"
    return "runs until it is stopped" if node.kind.runs else "not finished"


def _outcome(ending: Ending) -> str:
    return str(ending.outcome.value) if isinstance(ending.outcome, Outcome) else "ended"


def _ttl_words(kind: Kind, spec: Spec, ttl_field: bool | Unknown) -> str:
    if kind is TRAINJOB and ttl_field is False:
        return "this kind has no TTL"
    if kind in V1_KINDS:
        seconds = None if spec.run_policy is None else spec.run_policy.ttl_seconds_after_finished
    elif kind in {JOB, JOBSET, RAYJOB, TRAINJOB}:
        seconds = spec.ttl_seconds_after_finished
    else:
        return ""
    return "no TTL" if seconds is None else f"TTL {in_words(timedelta(seconds=seconds))}"


def _controller_line(report: Report) -> str:
    standing = report.standing
    state = standing.why if isinstance(standing, Unknown) else standing.words
    version = f" {report.version}" if report.version else ""
    image = f", image {report.image}" if report.image else ""
    said = "" if not isinstance(standing, Gone) else "gone: "
    name = report.controller.name
    return f"looked after by {name}{version}: {said}{state.removeprefix(f'{name} ')}{image}"


# The causes


def causes(facts: Facts) -> Iterator[Cause]:
    """What keeps it, the most telling first."""
    yield from _owners(facts)
    yield from _removals(facts)
    about = "" if facts.is_top else f"{facts.top.words}: "
    for cause in _of_top(facts):
        yield Cause(f"{about}{cause.words}", cause.remedy)
    yield from _controllers(facts)
    yield from _unread(facts)


def _owners(facts: Facts) -> Iterator[Cause]:
    climbed, node = facts.climb, facts.node
    if climbed.unknown is not None:
        grant = ", or grant gpukeeper `get` on it" if "may not be read" in climbed.unknown.why else ""
        remedy = f"gpukeeper leaves it alone. Remove what it belongs to{grant}"
        yield Cause(climbed.unknown.why, remedy)
    if climbed.gone is not None:
        owner = climbed.gone
        words = f"its owner {owner.kind} {owner.name} (uid {owner.uid}) is gone, and it was left behind"
        yield Cause(words, "The garbage collector removes it within minutes; if it does not, see that it runs")
    if not facts.is_top:
        where = f"{facts.top.meta.namespace}/{facts.top.words}"
        yield Cause(
            f"{node.words} is part of {facts.top.words}: {_if_removed(facts)}",
            f"Only the root is removed, and all of it with it: gpukeeper explain {where}",
        )


def _if_removed(facts: Facts) -> str:
    """What would become of it if it were removed alone."""
    node, top, ending = facts.node, facts.top, _ending(facts.top, facts.now)
    if node.kind is JOBSET and top.kind is TRAINJOB:
        return f"removed alone, {_recreation(facts, ending)}"
    if ending.over is not True:
        return "removed alone, its controller makes it anew, or the work fails"
    if node.kind is RAYCLUSTER:
        return "removed alone, its GPUs come back and the finished root stays"
    return "removed alone, its log is lost and the root stays"


def _recreation(facts: Facts, ending: Ending) -> str:
    """Of the JobSet of a TrainJob."""
    if ending.over is not True:
        return "the TrainJob makes it anew and training starts over"
    again = recreates_jobsets(facts.trainer)
    release = f"Kubeflow Trainer {facts.trainer}" if facts.trainer else "Kubeflow Trainer"
    if isinstance(again, Unknown):
        return f"it may be made anew with new pods ({again.why})"
    if again == "always" or (again is not None and ending.outcome is not Outcome.SUCCEEDED):
        return f"{release} makes it anew at once, with new pods, though the TrainJob has ended"
    return f"it stays gone on {release}, and the TrainJob stays"


def _removals(facts: Facts) -> Iterator[Cause]:
    """Its own removal, its root's, and the first few below that do not end."""
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
            since = f", for {_for(at, facts.now)}" if isinstance(at, datetime) else ""
            yield Cause(f"{name}its removal is under way{since}", "Wait: it ends by itself")


def _blocked(facts: Facts, node: Node) -> Blocked | None:
    is_node = node.meta.uid == facts.node.meta.uid
    return blocked(
        node.meta,
        node.kind,
        facts.below,
        {name: report.standing for name, report in facts.reports.items()},
        facts.now,
        pod=node.seen if isinstance(node.seen, Pod) else None,
        owner_gone=facts.climb.owner_gone if is_node else False,
    )


def _blocked_words(found: Blocked, now: datetime) -> str:
    what = found.by if found.by == NODE else f"the finalizer {found.by}"
    words = f"its removal was asked for {ago(found.since, now)} and does not end; {what} keeps it: {found.why}"
    if isinstance(found.proven, Unknown):
        return f"{words}. Whether it will ever end is not known: {found.proven.why}"
    return f"{words}. Waiting does not help" if found.proven else words


def _blocked_remedy(found: Blocked) -> str:
    known = FINALIZERS.get(found.by)
    usual = known.remedy if known is not None else ""
    if found.by == NODE:
        usual = "See whether its node is ready; a node that is gone for good must be removed from the cluster"
    if found.proven is not True:
        return usual or "Find out who puts this finalizer on, and see that it runs"
    take = (
        f"name it in the policy (kubernetes.release: [{found.by}]) and gpukeeper takes just that off just this object"
    )
    return f"{usual}. Or {take}" if known is not None and known.without else f"{take[0].upper()}{take[1:]}"


def _of_top(facts: Facts) -> Iterator[Cause]:
    top, now = facts.top, facts.now
    ending = _ending(top, now)
    if isinstance(top.seen, Root):
        yield from _elsewhere(top.kind, top.seen)
    if isinstance(ending.over, Unknown):
        yield Cause(f"whether it has ended is not known: {ending.over.why}", "gpukeeper keeps it until that is clear")
    elif ending.over:
        yield from _ended(facts, ending)
    else:
        yield from _going_on(facts)
    if top.kind is TRAINJOB:
        yield from _made_anew(facts, ending)


def _elsewhere(kind: Kind, root: Root) -> Iterator[Cause]:
    by = marked.managed_elsewhere(kind, root.metadata, root.spec)
    labels = root.metadata.labels or {}
    if by is not None:
        yield Cause(f"it is managed by {by}", f"gpukeeper leaves it alone; {_where_to_ask(by)}")
    if QUEUE in labels:
        words = f"it is queued by Kueue ({QUEUE}={labels[QUEUE]}), which alone suspends and resumes it"
        yield Cause(words, "To give its quota back, remove it, or set spec.active: false of its Workload")
    if kind is RAYJOB and root.spec.cluster_selector:
        chosen = ", ".join(f"{key}={value}" for key, value in root.spec.cluster_selector.items())
        words = f"it runs on a RayCluster that it does not own (clusterSelector {chosen})"
        yield Cause(words, "That RayCluster is never removed on its account; it has its own rules")


def _where_to_ask(by: str) -> str:
    if "managedBy" in by:
        return "ask who runs that controller"
    if "MultiKueue" in by:
        return "remove it on the cluster that sent it"
    return "remove it from Git, or let the policy say kubernetes.gitops: true"


def _ended(facts: Facts, ending: Ending) -> Iterator[Cause]:
    tally = _tally(facts)
    if not isinstance(ending.at, datetime):
        why = ending.at.why if isinstance(ending.at, Unknown) else "nobody wrote it down"
        words = f"it has ended, and when is not known ({why}), so that a TTL of its controller never counts"
        yield Cause(words, "gpukeeper counts from when it first saw it ended")
    if facts.top.kind is not POD and tally.living:
        gpus = f", with {_count(len(tally.devices), 'GPU')}" if tally.devices else ""
        words = f"it has finished with {_count(tally.living, 'pod')} below it still there{gpus}"
        now = f"gpukeeper workload remove {facts.top.meta.namespace}/{facts.top.words}"
        yield Cause(words, f"The rule live_children takes them, if at_finish says so; or remove it now: {now}")
    if facts.top.meta.deletion_timestamp is None:
        yield from _ttl(facts, ending)


def _ttl(facts: Facts, ending: Ending) -> Iterator[Cause]:
    """Who removes what has ended."""
    top, seen, now = facts.top, facts.top.seen, facts.now
    ours = f"gpukeeper removes it by the policy's retention; for this one alone: annotation {marked.TTL}: 1h"
    if isinstance(seen, Pod):
        yield Cause("a pod of its own has no TTL: nobody but gpukeeper or you removes it", ours)
        return
    said, notes = marked.read(top.kind, top.meta, seen.spec, ending, now, ttl_field=facts.ttl_field)
    yield from (Cause(note, "Correct it; until then it does nothing, or holds") for note in notes)
    if top.kind is TRAINJOB and facts.ttl_field is not True:
        own = f" (its own {marked.TTL} is {in_words(said.ttl)})" if isinstance(said.ttl, timedelta) else ""
        yield Cause(f"{_no_ttl_field(facts.ttl_field)}: nobody but gpukeeper or you removes it{own}", ours)
    elif top.kind is RAYJOB:
        yield from _ray_ttl(seen.spec, ending)
    elif not said.ttl_elsewhere and not top.kind.runs and said.ttl is None:
        field = marked.RUN_POLICY_TTL if top.kind in V1_KINDS else marked.FIELD_TTL
        unless = ", unless its runtime names one for it" if top.kind is TRAINJOB else ""
        words = f"it names no TTL ({field}), so that its controller keeps it for ever{unless}"
        yield Cause(words, f"Set it; or {ours}")
    elif said.ttl_elsewhere and isinstance(said.ttl, timedelta) and isinstance(ending.at, datetime):
        yield from _ttl_of_controller(facts, said.ttl, ending.at)
    if top.kind is TRAINJOB:
        yield from _wrong_level(facts, ending)


def _no_ttl_field(ttl_field: bool | Unknown) -> str:
    if isinstance(ttl_field, Unknown):
        return f"a TrainJob has no TTL in any release that gpukeeper knows ({ttl_field.why})"
    return f"a TrainJob has no TTL in this cluster (its CRD has no {marked.FIELD_TTL})"


def _ttl_of_controller(facts: Facts, ttl: timedelta, ended: datetime) -> Iterator[Cause]:
    over = ended + ttl
    who = of_kind(facts.top.kind.name).name
    if facts.now < over:
        yield Cause(f"its TTL of {in_words(ttl)} ends in {in_words(over - facts.now)}; then {who} removes it")
    else:
        late = in_words(facts.now - over)
        words = f"its TTL of {in_words(ttl)} was over {late} ago, and {who} has not removed it"
        yield Cause(words, f"See that {who} runs and what it logs; gpukeeper removes it a minute after the TTL")


def _wrong_level(facts: Facts, ending: Ending) -> Iterator[Cause]:
    """A TTL for the JobSet is none for the TrainJob."""
    jobsets = [one.seen for one in facts.below.of(facts.top.meta.uid) if one.kind is JOBSET]
    seconds = next(
        (s for one in jobsets if (s := getattr(one.spec, "ttl_seconds_after_finished", None)) is not None), None
    )
    where = "its JobSet"
    if isinstance(facts.runtime, RuntimeTtl):
        seconds, where = facts.runtime.seconds, f"its runtime ({facts.runtime.runtime})"
    if seconds is None:
        return
    words = (
        f"ttlSecondsAfterFinished: {seconds} stands in {where}: it removes the JobSet only, never the TrainJob;"
        f" once the JobSet is removed, {_recreation(facts, ending)}"
    )
    yield Cause(words, _against_the_ttl(facts, ending, where, seconds))


def _against_the_ttl(facts: Facts, ending: Ending, where: str, seconds: int) -> str:
    """Where its controller makes it anew, that comes before any TTL of the TrainJob is over."""
    if ending.outcome is Outcome.SUCCEEDED and recreates_jobsets(facts.trainer) != "always":
        return f"Take it out of {where}, and give the TrainJob the annotation {marked.TTL}: {seconds}s"
    return f"{_remove_it(facts)}. A TTL on the TrainJob comes too late"


def _remove_it(facts: Facts) -> str:
    """What ends the loop. Trainer v2.3 makes the JobSet anew from its own copy of the runtime."""
    meta = facts.top.meta
    now = f"gpukeeper workload remove {meta.namespace}/{facts.top.words}"
    remedy = f"Remove the TrainJob: {now}, or kubectl -n {meta.namespace} delete trainjob {meta.name}"
    if (facts.trainer or SNAPSHOTS).removeprefix("v").startswith(SNAPSHOTS):
        copy = f"this one is made anew from the ConfigMap {meta.name}-runtime-snapshot"
        return f"{remedy}. Taking ttlSecondsAfterFinished out of its runtime helps the next TrainJob only: {copy}"
    return f"{remedy}, and take ttlSecondsAfterFinished out of its runtime"


def _ray_ttl(spec: Spec, ending: Ending) -> Iterator[Cause]:
    waits = marked.ray_words(spec, ending)
    if waits is not None:
        yield Cause(waits, "Wait, unless KubeRay is down")
    elif not spec.cluster_selector:
        yield Cause(
            "KubeRay keeps the RayCluster of a finished RayJob, GPUs included, unless shutdownAfterJobFinishes is true",
            "Set shutdownAfterJobFinishes and ttlSecondsAfterFinished; gpukeeper's rules take what is left",
        )
    yield Cause(
        "a RayJob's ttlSecondsAfterFinished removes its RayCluster only; the RayJob itself stays",
        f"gpukeeper removes it by the policy's retention; for this one alone: annotation {marked.TTL}: 1h",
    )


def _going_on(facts: Facts) -> Iterator[Cause]:
    """No end is written: then why?"""
    top = facts.top
    if top.kind.runs:
        yield Cause(f"a {top.kind.kind} never ends by itself", "Its idle and runtime rules decide; or stop it yourself")
        return
    if isinstance(top.seen, Pod):
        yield Cause(f"it has not ended: its phase is {top.seen.status.phase or 'not written yet'}")
        yield from _not_placed(facts)
        return
    if _suspended(top.kind, top.seen.spec):
        yield Cause("it is suspended, so that it neither runs nor ends", "Resume it, or remove it if nobody needs it")
        return
    yield Cause(f"it has not ended: {_no_end(top.kind, top.seen)}; {_waits_for(facts)}")
    yield from _not_placed(facts)
    if isinstance(facts.runtime, NoRuntime):
        yield _no_runtime(facts.runtime, top.meta.namespace)
    for one in top.seen.status.conditions or ():
        if one.type in ANNOUNCED and one.status == "True":
            at = when(one.last_transition_time)
            since = f" {ago(at, facts.now)}" if isinstance(at, datetime) else ""
            words = (
                f"{one.type} was announced{since} ({one.reason}); that is no end yet, it ends when all its pods have"
            )
            yield Cause(words, "See which of its pods does not end")
    done = next((one for one in facts.below.of(top.meta.uid) if one.kind is JOBSET and _over(one, facts.now)), None)
    if done is not None:
        words = f"{done.words} has ended, and {of_kind(top.kind.name).name} has not taken that over"
        yield Cause(words, "See that its controller runs")


def _not_placed(facts: Facts) -> Iterator[Cause]:
    """In the scheduler's own words, which `FailedScheduling` repeats; the first pods are enough."""
    pods = [facts.top.seen] if isinstance(facts.top.seen, Pod) else list(facts.below.pods())
    said = [(pod, one) for pod in pods for one in pod.status.conditions or () if _is_refused(one)]
    for pod, one in said[:UNPLACED]:
        words = f"pod {pod.metadata.name} cannot be scheduled: {cut(one.message) or one.reason}"
        yield Cause(words, "Ask for what a node has, add such a node, or remove it")
    if len(said) > UNPLACED:
        yield Cause(f"and {len(said) - UNPLACED} more pods cannot be scheduled")


def _is_refused(one: Condition) -> bool:
    return one.type == "PodScheduled" and one.status == "False" and one.reason == "Unschedulable"


def _no_runtime(missing: NoRuntime, namespace: str) -> Cause:
    where = f" in namespace {namespace}" if missing.kind == "TrainingRuntime" else ""
    words = f"its runtime, {missing.kind} {missing.name}, does not exist{where}, so that it cannot begin"
    return Cause(words, f"Create a {missing.kind} called {missing.name}{where}, or remove the TrainJob")


def _no_end(kind: Kind, root: Root) -> str:
    if kind is RAYJOB:
        status = root.status
        job = status.job_status or "not begun"
        return f"its deployment status is {status.job_deployment_status or 'empty'} (job {job})"
    true = [one.type for one in root.status.conditions or () if one.status == "True"]
    none = f"no condition {' or '.join((*kind.succeeded, *kind.failed))} is True"
    return f"{none}, only {', '.join(true)}" if true else none


def _waits_for(facts: Facts) -> str:
    tally = _tally(facts)
    if tally.lost is not None:
        return f"the node of pod {tally.lost} does not answer"
    if tally.pending:
        return f"{tally.pending} of {_count(tally.living, 'pod')} without a node yet"
    if tally.living:
        return f"{_count(tally.living, 'pod')} of it not ended yet"
    if tally.dead:
        return f"all of its pods ({tally.dead}) have ended, so that its controller should say so soon"
    return "it has no pods, so that its controller has to begin" if facts.below.complete else "its pods are not known"


def _made_anew(facts: Facts, ending: Ending) -> Iterator[Cause]:
    """A JobSet that is much younger than its TrainJob is not the first."""
    top = facts.top
    begun = when(top.meta.creation_timestamp)
    for child in facts.below.of(top.meta.uid):
        made = when(child.meta.creation_timestamp)
        if child.kind is not JOBSET or not isinstance(made, datetime) or not isinstance(begun, datetime):
            continue
        release = facts.trainer or "v2.1 to v2.3"
        if ending.over is True and isinstance(ending.at, datetime) and made > ending.at:
            words = (
                f"{child.words} was made {ago(made, facts.now)}, {in_words(made - ending.at)} after the TrainJob"
                f" ended: Kubeflow Trainer ({release}) made it anew when the one before was removed, and its pods take"
                " GPUs again"
            )
            yield Cause(words, f"{_remove_it(facts)}; its JobSet alone would be made anew")
        elif ending.over is False and made - begun > LATER:
            words = (
                f"{child.words} is {in_words(made - begun)} younger than the TrainJob: it was made anew, so that the"
                f" TrainJob runs again after it ended (Kubeflow Trainer {release} drops the end it had written)"
            )
            yield Cause(words, _remove_it(facts))


def _controllers(facts: Facts) -> Iterator[Cause]:
    """Only what is not as it should be; the tree names them all."""
    for report in facts.reports.values():
        name, standing = report.controller.name, report.standing
        if isinstance(standing, Gone):
            yield Cause(f"{name} is gone: {standing.words}", "Start it again: without it nothing below it is tidied up")
        elif isinstance(standing, Unknown) and report.controller is not BUILT_IN:
            yield Cause(standing.why, _ask_about(report))
        lines = facts.clashes.get(name, ())
        if isinstance(lines, Unknown):
            if report.installed:
                yield Cause(lines.why)
        else:
            for line in lines:
                yield Cause(
                    f"{name} logs: {cut(line)}",
                    "One conflict is no cause, it tries again; the same over and over is one",
                )


def _ask_about(report: Report) -> str:
    """Who may not see other namespaces is not sent there."""
    if any("forbidden" in one.lower() for one in report.unseen):
        return f"Ask who runs the cluster whether {report.controller.name} runs; you may not see where it does"
    return "See that it runs: kubectl get deployments,leases --all-namespaces"


def _unread(facts: Facts) -> Iterator[Cause]:
    for problem in facts.below.unseen:
        yield Cause(
            f"what is below it is not fully known: {problem}", "Until it is, gpukeeper takes nothing for absent"
        )
    if isinstance(facts.runtime, Unknown):
        yield Cause(facts.runtime.why, "A TTL in its runtime would remove its JobSet only")
    if isinstance(facts.events, Unknown):
        yield Cause(facts.events.why)
    else:
        yield from (Cause(words) for words in facts.events)


# Small questions


def _ending(node: Node, now: datetime) -> Ending:
    return of_pod(node.seen, now) if isinstance(node.seen, Pod) else of_root(node.kind, node.seen, now)


def _over(node: Node, now: datetime) -> bool:
    return _ending(node, now).over is True


def _suspended(kind: Kind, spec: Spec) -> bool:
    if kind in V1_KINDS:
        return spec.run_policy is not None and bool(spec.run_policy.suspend)
    return bool(spec.suspend)


def _tally(facts: Facts) -> Tally:
    tally = Tally()
    for pod in facts.below.pods():
        tally.add_pod(pod, asked(pod.spec))
    return tally


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _for(at: datetime, now: datetime) -> str:
    return in_words(max(now - at, timedelta()))


def ago(at: datetime, now: datetime) -> str:
    return f"{_for(at, now)} ago"


def cut(words: str) -> str:
    plain = " ".join(words.split())
    return plain if len(plain) <= LONGEST else plain[: LONGEST - 1] + "…"
