"""The kinds of Kubeflow: TrainJob of the Trainer, which makes a JobSet from a runtime, and those of the training
operator, Kubeflow's first: PyTorchJob and its relatives.

And what the init containers of a TrainJob will be, from its manifest and that of its runtime only: lists are merged
as Kubernetes merges them (containers and variables by name, mounts by path). What its plugins add is not in here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec

from gpukeeper.clients.kubernetes.wire import Pod, PodSpec, Root, Spec, when
from gpukeeper.model.decision import Refused
from gpukeeper.model.errors import UsageError
from gpukeeper.model.subject import Cause, Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import (
    BY_RETENTION,
    FIELD_TTL,
    QUOTED,
    RUN_POLICY_TTL,
    TTL,
    TTL_NAME,
    Controller,
    End,
    Ending,
    Finalizer,
    Json,
    Kind,
    Lever,
    NoRuntime,
    RootFacts,
    Runtime,
    RuntimeTtl,
    SuspendItself,
    SuspendPart,
    ago,
    pod_specs,
    seconds,
)
from gpukeeper.platforms.kubernetes.kinds.pod import POD

TRAINING_OPERATOR = Controller(
    "the training operator",
    ("training-operator",),
    "1ca428e5.training-operator.kubeflow.org",
    ("kubeflow", "kubeflow-system"),
    "training-operator",
)
CLEAN_RUNNING, CLEAN_ALL = "Running", "All"


class _V1(Kind, frozen=True, kw_only=True):
    replicas: str  # the field of Spec that has its replicas
    second_clean_pod_policy: bool = False  # spec.cleanPodPolicy counts, too

    def templates(self, spec: Spec) -> Iterator[PodSpec]:
        yield from pod_specs(*(one.template for one in (getattr(spec, self.replicas) or {}).values()))

    def clean_pods(self, spec: Spec, *, everything: bool) -> Json | Refused | None:
        """Its operator then removes them, and never the root (facts §5)."""
        now = spec.run_policy.clean_pod_policy if spec.run_policy else None
        policy = CLEAN_ALL if everything else CLEAN_RUNNING
        if now in (policy, CLEAN_ALL):
            return Refused(
                f"its cleanPodPolicy is already {now}, but its operator did not apply it; check that it runs"
            )
        return {"runPolicy": {"cleanPodPolicy": policy}}

    def misplaced(self, spec: Spec, in_crd: bool | Unknown) -> Iterator[str]:
        if spec.ttl_seconds_after_finished is not None:
            yield f"{FIELD_TTL} has no effect on a {self.kind}; use {RUN_POLICY_TTL}"
        if spec.clean_pod_policy is not None and not self.second_clean_pod_policy:
            yield f"spec.cleanPodPolicy has no effect on a {self.kind}; use spec.runPolicy.cleanPodPolicy"

    def ttl_belongs(self, spec: Spec) -> str | None:
        return RUN_POLICY_TTL if self.ttl_seconds(spec) is None else None


def _v1(kind: str, plural: str, replicas: str, *, second_clean_pod_policy: bool = False) -> Kind:
    return _V1(
        kind=kind,
        plural=plural,
        group="kubeflow.org",
        versions=("v1",),
        children=(POD,),
        part_label="training.kubeflow.org/job-name",
        controller=TRAINING_OPERATOR,
        manager="kubeflow.org/training-operator",
        succeeded=("Succeeded",),
        failed=("Failed",),
        lever=Lever.SUSPEND,
        in_run_policy=True,
        has_ttl=True,
        replicas=replicas,
        second_clean_pod_policy=second_clean_pod_policy,
    )


V1_KINDS = (
    _v1("PyTorchJob", "pytorchjobs", "pytorch_replica_specs"),
    _v1("TFJob", "tfjobs", "tf_replica_specs"),
    _v1("MPIJob", "mpijobs", "mpi_replica_specs", second_clean_pod_policy=True),
    _v1("XGBoostJob", "xgboostjobs", "xgb_replica_specs"),
    _v1("PaddleJob", "paddlejobs", "paddle_replica_specs"),
    _v1("JAXJob", "jaxjobs", "jax_replica_specs"),
)


TRAINER = Controller(
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
    controller=TRAINER,
    finalizers=(
        Finalizer(
            "trainer.kubeflow.org/resource-in-use",
            "Kubeflow Trainer up to v2.2",
            TRAINER,
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
            words = f"{one.words} has ended, but {TRAINER.name} has not updated the TrainJob"
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


RUNTIME, OWN = "runtime", "TrainJob"
NOT_OF_A_TRAINJOB = (TTL_NAME, "cleanupPolicy", "cleanPodPolicy", "jobRetentionPolicy")  # of other kinds, or of none
_INSTEAD = f"use the annotation {TTL} on the TrainJob, or retention in the policy"
_STEP_TTL = re.compile(rf"spec\.template\.spec\.replicatedJobs\[\d+\]\.template\.spec\.{TTL_NAME}")
T = TypeVar("T")


class EnvironmentVariable(msgspec.Struct, frozen=True):
    """One variable. `value` is a placeholder if it comes from a secret, a field or the like."""

    name: str
    value: str
    origin: str = RUNTIME


class VolumeMount(msgspec.Struct, frozen=True):
    path: str
    volume: str
    origin: str = RUNTIME


class InitContainer(msgspec.Struct, frozen=True):
    """One init container as it will run."""

    name: str
    image: str
    variables: tuple[EnvironmentVariable, ...] = ()
    mounts: tuple[VolumeMount, ...] = ()


class MergedJob(msgspec.Struct, frozen=True):
    name: str
    init: tuple[InitContainer, ...]


class MergedTrainJob(msgspec.Struct, frozen=True):
    """`problems`: what the Trainer would refuse or not find, and TTLs that do not remove the TrainJob."""

    workload: str
    runtime: str
    jobs: tuple[MergedJob, ...]
    problems: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        yield f"trainjob/{self.workload} on {self.runtime}, from these files only"
        for job in self.jobs:
            yield f"job {job.name}: {len(job.init)} init container{'' if len(job.init) == 1 else 's'}"
            for number, one in enumerate(job.init, start=1):
                yield f"  {number}. {one.name}  {one.image or 'no image'}"
                yield from (f"     {v.name}={v.value}  ({v.origin})" for v in one.variables)
                yield from (f"     {m.path} from volume {m.volume}  ({m.origin})" for m in one.mounts)
        yield from (f"problem: {one}" for one in self.problems)


def merged_manifest(documents: Sequence[dict[str, Any]], name: str) -> MergedTrainJob:
    """Of the TrainJob of that name among these objects."""
    named = name.rpartition("/")[2]
    train = next((one for one in documents if _is(one, "TrainJob") and _name(one) == named), None)
    if train is None:
        known = ", ".join(sorted(_name(one) for one in documents if _is(one, "TrainJob"))) or "none"
        raise UsageError(f"TrainJob {named} not found in these files; found: {known}")
    spec = _at(train, "spec")
    kind = _word(_at(spec, "runtimeRef").get("kind")) or "ClusterTrainingRuntime"
    wanted = _word(_at(spec, "runtimeRef").get("name"))
    runtime = next((one for one in documents if _is(one, kind) and _name(one) == wanted), None)
    if runtime is None:
        words = f"{kind} {wanted} not found in these files; add the output of `kubectl get {kind} {wanted} -o yaml`"
        return MergedTrainJob(named, f"{kind} {wanted}", (), (words, *_ttl_in_trainjob(spec)))
    templates = _list(_at(runtime, "spec", "template", "spec").get("replicatedJobs"))
    patches = list(_patches(spec))
    jobs = tuple(_job(one, [inits for job, inits in patches if job == _name_of(one)]) for one in templates)
    problems = (*_problems(spec, templates, patches), *_ttl_in_trainjob(spec), *_ttl_in_runtime(kind, runtime))
    return MergedTrainJob(named, f"{kind} {wanted}", jobs, problems)


def _job(template: dict[str, Any], patches: Sequence[list[dict[str, Any]]]) -> MergedJob:
    init = [_init(one, RUNTIME) for one in _inits(template)]
    for patch in patches:
        known = {one.name for one in init}
        own = [_init(one, OWN) for one in patch if _name_of(one) in known]
        init = _merge(init, own, lambda one: one.name, _over)
    return MergedJob(_name_of(template), tuple(init))


def _over(below: InitContainer, above: InitContainer) -> InitContainer:
    """A patch can add variables and mounts, or replace them; it cannot name another image."""
    return msgspec.structs.replace(
        below,
        variables=tuple(_merge(below.variables, above.variables, lambda one: one.name, lambda _, own: own)),
        mounts=tuple(_merge(below.mounts, above.mounts, lambda one: one.path, lambda _, own: own)),
    )


def _merge(below: Sequence[T], above: Sequence[T], key: Callable[[T], str], both: Callable[[T, T], T]) -> list[T]:
    """As a strategic merge patch orders: the patch keeps its own order, and what it does not name goes before the first
    of the patch that it stood before; so what is new comes early."""
    order = {key(one): number for number, one in enumerate(below)}
    known = {key(one): one for one in below}
    patch = [both(known[key(one)], one) if key(one) in known else one for one in above]
    named = {key(one) for one in above}
    rest = [one for one in below if key(one) not in named]
    found: list[T] = []
    while patch and rest:
        first = key(patch[0])
        found.append(rest.pop(0) if first in order and order[key(rest[0])] < order[first] else patch.pop(0))
    return [*found, *patch, *rest]


def _patches(spec: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """By job: what each patch of the TrainJob sets for its init containers, in the order of the manifest."""
    for one in _list(spec.get("podSpecOverrides")):
        yield from ((_name_of(job), _list(one.get("initContainers"))) for job in _list(one.get("targetJobs")))
    for one in _list(spec.get("podTemplateOverrides")):
        inits = _list(_at(one, "spec").get("initContainers"))
        yield from ((_name_of(job), inits) for job in _list(one.get("targetJobs")))
    for one in _list(spec.get("runtimePatches")):
        jobs = _list(_at(one, "trainingRuntimeSpec", "template", "spec").get("replicatedJobs"))
        yield from ((_name_of(job), _inits(job)) for job in jobs)


def _problems(
    spec: dict[str, Any], templates: Sequence[dict[str, Any]], patches: Sequence[tuple[str, list[dict[str, Any]]]]
) -> Iterator[str]:
    forms = [one for one in ("podSpecOverrides", "podTemplateOverrides", "runtimePatches") if spec.get(one)]
    if len(forms) > 1:
        yield f"{' and '.join(forms)}: each release of the Trainer supports one of them and ignores the others"
    known = {_name_of(one): {_name_of(init) for init in _inits(one)} for one in templates}
    for job, inits in patches:
        if job not in known:
            yield f"job {job} is not in the runtime; the Trainer rejects this"
        for init in inits:
            if job in known and _name_of(init) not in known[job]:
                yield f"init container {_name_of(init)} is not in job {job} of the runtime; the Trainer rejects this"


def _ttl_in_trainjob(spec: dict[str, Any]) -> Iterator[str]:
    """Wherever they are: no release up to v2.3 has one, in the TrainJob itself or in what it patches."""
    for path, value in _fields(spec, NOT_OF_A_TRAINJOB):
        yield f"{path}: {_shown(value)}: no TrainJob up to v2.3 has this field, so it removes nothing; {_INSTEAD}"
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None:
        yield (
            f"spec.activeDeadlineSeconds: {_shown(deadline)} is no TTL: it ends a TrainJob that runs longer and removes"
            " nothing. Kubeflow Trainer before v2.2 does not have it"
        )


def _ttl_in_runtime(kind: str, runtime: dict[str, Any]) -> Iterator[str]:
    for path, value in _fields(_at(runtime, "spec"), (TTL_NAME,)):
        where = f"{path} of the {kind}: {_shown(value)}"
        if path == f"spec.template.{FIELD_TTL}":
            yield (
                f"{where}: it removes the JobSet of each TrainJob, never the TrainJob; v2.1 then creates the JobSet"
                f" again, v2.2 and v2.3 if the TrainJob failed. Remove it, and {_INSTEAD}"
            )
        elif _STEP_TTL.fullmatch(path):
            yield f"{where}: it removes the Jobs of that step, also while other steps run. Remove it, and {_INSTEAD}"
        else:
            yield f"{where}: a {kind} has no such field, so it removes nothing; {_INSTEAD}"


def _fields(spec: dict[str, Any], names: Collection[str]) -> Iterator[tuple[str, object]]:
    """Path and value of each field with one of these names, in the order of the manifest."""
    left: list[tuple[str, object]] = [("spec", spec)]
    while left:
        path, one = left.pop()
        inner = (
            [(f"{path}.{key}", value) for key, value in one.items()]
            if isinstance(one, dict)
            else [(f"{path}[{number}]", value) for number, value in enumerate(one)]
            if isinstance(one, list)
            else []
        )
        left += reversed([pair for pair in inner if pair[0].rpartition(".")[2] not in names])
        yield from (pair for pair in inner if pair[0].rpartition(".")[2] in names)


def _shown(value: object) -> str:
    return _word(value)[:QUOTED] or "set"


def _init(record: dict[str, Any], origin: str) -> InitContainer:
    variables = tuple(
        EnvironmentVariable(_name_of(one), _word(one.get("value")) if "valueFrom" not in one else "(valueFrom)", origin)
        for one in _list(record.get("env"))
    )
    mounts = tuple(
        VolumeMount(_word(one.get("mountPath")), _name_of(one), origin) for one in _list(record.get("volumeMounts"))
    )
    return InitContainer(_name_of(record), _word(record.get("image")), variables, mounts)


def _inits(job: dict[str, Any]) -> list[dict[str, Any]]:
    return _list(_at(job, "template", "spec", "template", "spec").get("initContainers"))


def _at(one: dict[str, Any], *path: str) -> dict[str, Any]:
    for key in path:
        below = one.get(key)
        one = below if isinstance(below, dict) else {}
    return one


def _list(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _word(value: object) -> str:
    """A string, number or boolean as text, as the API server would print it; anything else: empty."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else ""


def _name_of(one: dict[str, Any]) -> str:
    return _word(one.get("name"))


def _name(one: dict[str, Any]) -> str:
    return _name_of(_at(one, "metadata"))


def _is(one: dict[str, Any], kind: str) -> bool:
    return one.get("kind") == kind
