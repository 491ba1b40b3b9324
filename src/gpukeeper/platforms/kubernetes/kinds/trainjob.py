"""A TrainJob of Kubeflow Trainer, which makes a JobSet from a runtime."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from gpukeeper.model.decision import Refused
from gpukeeper.model.diagnosis import Cause
from gpukeeper.model.durations import in_words
from gpukeeper.model.subject import Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.controller import Controller, Finalizer
from gpukeeper.platforms.kubernetes.kinds.ending import Ending
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import (
    End,
    Kind,
    Lever,
    NoRuntime,
    RootFacts,
    Runtime,
    RuntimeTtl,
    SuspendItself,
    SuspendPart,
)
from gpukeeper.platforms.kubernetes.kinds.ttl import BY_RETENTION, FIELD_TTL, TTL, seconds
from gpukeeper.platforms.kubernetes.phrases import ago
from gpukeeper.platforms.kubernetes.wire import Pod, Root, Spec, when

CONTROLLER = Controller(
    "Kubeflow Trainer",
    ("kubeflow-trainer-controller-manager",),
    "trainer.kubeflow.org",
    ("kubeflow-system", "kubeflow"),
    "trainer",
)
SNAPSHOTS = "2.3"  # the release of Kubeflow Trainer that keeps a copy of the runtime
LATER = timedelta(minutes=1)  # a JobSet made so long after its TrainJob is not its first
NAMESPACED = "TrainingRuntime"


class _TrainJob(Kind, frozen=True):
    def parts_query(self, makers: Sequence[Root | Pod]) -> dict[str, str] | None:
        """Its JobSet has the same name in every release."""
        return {"fieldSelector": f"metadata.name={makers[0].metadata.name}"} if len(makers) == 1 else None

    def trim(self, root: Root, living: Sequence[Pod]) -> Sequence[End] | Refused:
        """First the TrainJob, or v2.1 resumes the JobSet at once; then the JobSet, because v2.3 does not propagate the
        suspension of a finished TrainJob. Both verified with real controllers."""
        return SuspendItself(), SuspendPart(JOBSET, root.metadata.name)

    def ttl(self, spec: Spec, in_crd: bool | Unknown) -> timedelta | Unknown | None:
        """Applies if the CRD has the field. If that is unknown, it is not left to the platform, and the TrainJob is
        kept."""
        value = self.ttl_seconds(spec)
        if value is None or in_crd is False:
            return None
        return in_crd if isinstance(in_crd, Unknown) else seconds(FIELD_TTL, value)

    def ttl_words(self, spec: Spec, in_crd: bool | Unknown) -> str:
        return "this kind has no TTL" if in_crd is False else Kind.ttl_words(self, spec, in_crd)

    def misplaced(self, spec: Spec, in_crd: bool | Unknown) -> Iterator[str]:
        if self.ttl_seconds(spec) is not None and in_crd is False:
            yield (
                f"{FIELD_TTL} has no effect on a TrainJob of this cluster: its CRD has no such field;"
                f" use the annotation {TTL}"
            )

    def ttl_belongs(self, spec: Spec) -> str | None:
        return f"the annotation {TTL}"

    def runtime(self, root: Root) -> Runtime | None:
        named = root.spec.runtime_ref
        if named.kind == NAMESPACED:
            return Runtime(named.kind, named.name, "trainingruntimes", namespaced=True)
        return Runtime(named.kind, named.name, "clustertrainingruntimes", namespaced=False)

    def without(self, part: Kind, facts: RootFacts, ending: Ending) -> str:
        return _recreation(facts, ending) if part is JOBSET else Kind.without(self, part, facts, ending)

    def causes_of_ttl(
        self, spec: Spec, ending: Ending, in_crd: bool | Unknown, found: timedelta | Unknown | None
    ) -> Sequence[Cause] | None:
        if in_crd is True:
            return None
        none = f"a TrainJob has no TTL in this cluster (its CRD has no {FIELD_TTL})"
        if isinstance(in_crd, Unknown):
            none = f"a TrainJob has no TTL in any release that gpukeeper knows ({in_crd.why})"
        own = f" (its own {TTL} is {in_words(found)})" if isinstance(found, timedelta) else ""
        return (Cause(f"{none}: only gpukeeper or a user removes it{own}", BY_RETENTION),)

    def more_causes(self, facts: RootFacts, ending: Ending) -> Iterator[Cause]:
        top = facts.root
        if ending.over is True and top.meta.deletion_timestamp is None:
            yield from _wrong_level(facts, ending)
        if ending.over is False and not (isinstance(top.seen, Root) and self.is_suspended(top.seen.spec)):
            yield from _not_begun_or_not_taken_over(facts)
        yield from _made_anew(facts, ending)


TRAINJOB = _TrainJob(
    kind="TrainJob",
    plural="trainjobs",
    group="trainer.kubeflow.org",
    versions=("v1alpha1",),
    children=(JOBSET,),
    controller=CONTROLLER,
    finalizers=(
        Finalizer(
            "trainer.kubeflow.org/resource-in-use",
            "Kubeflow Trainer up to v2.2",
            CONTROLLER,
            "a TrainJob still refers to the runtime",
            "Remove the TrainJobs that refer to it",
        ),
    ),
    manager="trainer.kubeflow.org/trainjob-controller",
    succeeded=("Complete",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    has_ttl=True,
    ttl_in_crd=True,
    ttl_unless=", unless its runtime names one for it",
)


def recreates_jobsets(version: str | None) -> str | Unknown | None:
    """When this release of Kubeflow Trainer recreates a deleted JobSet of a finished TrainJob; None: never."""
    found = re.match(r"v?(\d+)\.(\d+)", version or "")
    if found is None:
        return Unknown("the release of Kubeflow Trainer is unknown; v2.1 to v2.3 recreate it")
    match int(found[1]), int(found[2]):
        case (2, 1):
            return "always"
        case (2, 2) | (2, 3):
            return "if it failed"
    return None


def _recreation(facts: RootFacts, ending: Ending) -> str:
    """Of the JobSet of a TrainJob."""
    if ending.over is not True:
        return "the TrainJob recreates it and training starts over"
    again = recreates_jobsets(facts.release)
    release = f"Kubeflow Trainer {facts.release}" if facts.release else "Kubeflow Trainer"
    if isinstance(again, Unknown):
        return f"it may be recreated with new pods ({again.why})"
    if again == "always" or (again is not None and ending.outcome is not Outcome.SUCCEEDED):
        return f"{release} recreates it at once, with new pods, although the TrainJob has ended"
    return f"{release} does not recreate it, and the TrainJob stays"


def _wrong_level(facts: RootFacts, ending: Ending) -> Iterator[Cause]:
    """A TTL for the JobSet is none for the TrainJob."""
    jobsets = [one.seen for one in facts.children if one.kind is JOBSET]
    seconds = next(
        (s for one in jobsets if (s := getattr(one.spec, "ttl_seconds_after_finished", None)) is not None), None
    )
    where = "its JobSet"
    if isinstance(facts.runtime, RuntimeTtl):
        seconds, where = facts.runtime.seconds, f"its runtime ({facts.runtime.runtime})"
    if seconds is None:
        return
    words = (
        f"ttlSecondsAfterFinished: {seconds} is set in {where}: it removes only the JobSet, never the TrainJob;"
        f" once the JobSet is removed, {_recreation(facts, ending)}"
    )
    yield Cause(words, _against_the_ttl(facts, ending, where, seconds))


def _against_the_ttl(facts: RootFacts, ending: Ending, where: str, seconds: int) -> str:
    """If its controller recreates it, that happens before a TTL of the TrainJob expires."""
    if ending.outcome is Outcome.SUCCEEDED and recreates_jobsets(facts.release) != "always":
        return f"Remove it from {where}, and set the annotation {TTL}: {seconds}s on the TrainJob"
    return f"{_remove_it(facts)}. A TTL on the TrainJob would take effect too late"


def _remove_it(facts: RootFacts) -> str:
    """What ends the loop. Trainer v2.3 recreates the JobSet from its own copy of the runtime."""
    meta = facts.root.meta
    now = f"gpukeeper workload remove {meta.namespace}/{facts.root.words}"
    remedy = f"Remove the TrainJob: {now}, or kubectl -n {meta.namespace} delete trainjob {meta.name}"
    if (facts.release or SNAPSHOTS).removeprefix("v").startswith(SNAPSHOTS):
        copy = f"this one is recreated from the ConfigMap {meta.name}-runtime-snapshot"
        return f"{remedy}. Removing ttlSecondsAfterFinished from its runtime helps only the next TrainJob: {copy}"
    return f"{remedy}, and remove ttlSecondsAfterFinished from its runtime"


def _not_begun_or_not_taken_over(facts: RootFacts) -> Iterator[Cause]:
    top = facts.root
    if isinstance(facts.runtime, NoRuntime):
        yield _no_runtime(facts.runtime, top.meta.namespace)
    for one in facts.children:
        if one.kind is JOBSET and isinstance(one.seen, Root) and JOBSET.ending(one.seen, facts.now).over is True:
            words = f"{one.words} has ended, but {CONTROLLER.name} has not updated the TrainJob"
            yield Cause(words, "Check that its controller runs")
            return


def _no_runtime(missing: NoRuntime, namespace: str) -> Cause:
    where = f" in namespace {namespace}" if missing.namespaced else ""
    words = f"its runtime, {missing.kind} {missing.name}, does not exist{where}, so it cannot start"
    return Cause(words, f"Create a {missing.kind} named {missing.name}{where}, or remove the TrainJob")


def _made_anew(facts: RootFacts, ending: Ending) -> Iterator[Cause]:
    """A JobSet that is much younger than its TrainJob is not the first."""
    top = facts.root
    begun = when(top.meta.creation_timestamp)
    for child in facts.children:
        made = when(child.meta.creation_timestamp)
        if child.kind is not JOBSET or not isinstance(made, datetime) or not isinstance(begun, datetime):
            continue
        release = facts.release or "v2.1 to v2.3"
        if ending.over is True and isinstance(ending.at, datetime) and made > ending.at:
            words = (
                f"{child.words} was created {ago(made, facts.now)}, {in_words(made - ending.at)} after the TrainJob"
                f" ended: Kubeflow Trainer ({release}) recreated it when the previous one was removed, and its pods"
                " hold GPUs again"
            )
            yield Cause(words, f"{_remove_it(facts)}; its JobSet alone would be recreated")
        elif ending.over is False and made - begun > LATER:
            words = (
                f"{child.words} is {in_words(made - begun)} younger than the TrainJob: it was recreated, so the"
                f" TrainJob runs again after its end (Kubeflow Trainer {release} removes its end condition)"
            )
            yield Cause(words, _remove_it(facts))
