"""What the init containers of a TrainJob will be, from its manifest and that of its runtime only, without a cluster.

The Trainer applies the TrainJob's settings over the runtime: in v2.0 `podSpecOverrides`, in v2.1
`podTemplateOverrides`, since v2.2 `runtimePatches`. Lists are merged as Kubernetes merges them (strategic merge):
containers and variables by name, mounts by path. What its plugins add by themselves (Flux) is not in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from gpukeeper.model.errors import UsageError

RUNTIME, OWN = "runtime", "TrainJob"
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
    """`problems`: what the Trainer would refuse or not find."""

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


def merge(documents: Sequence[dict[str, Any]], name: str) -> MergedTrainJob:
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
        return MergedTrainJob(named, f"{kind} {wanted}", (), (words,))
    templates = _list(_at(runtime, "spec", "template", "spec").get("replicatedJobs"))
    patches = list(_patches(spec))
    jobs = tuple(_job(one, [inits for job, inits in patches if job == _name_of(one)]) for one in templates)
    return MergedTrainJob(named, f"{kind} {wanted}", jobs, tuple(_problems(spec, templates, patches)))


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
