"""The result of a write, from the response of the API server. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gpukeeper.model.decision import Accepted, Changed, Refused
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.kind import Kind

ActResult: TypeAlias = Accepted | Changed | Refused | Unknown

WORDS_OF_ADMISSION = ("admission webhook", "ValidatingAdmissionPolicy")


def result_of_error(error: ApiError, right: str, namespace: str) -> Changed | Refused | Unknown:
    """The meaning of an error of the API server. `right`: verb and resource, as in a role."""
    if error.is_not_found:
        return Changed("it is already gone")
    if error.is_conflict:
        return Changed("it changed since it was read")
    if any(words in error.words for words in WORDS_OF_ADMISSION):
        return Refused(f"an admission policy of the cluster refuses it: {error.words}")
    match error.status:
        case 401:
            return Refused(f"the cluster does not accept the credentials of gpukeeper: {error.words}")
        case 403:
            return Refused(
                f"gpukeeper may not {right} in namespace {namespace}; add this permission to its role ({error.words})"
            )
        case 429 if error.is_disruption_budget:
            return Refused(f"a PodDisruptionBudget does not allow the eviction now: {error.words}")
        case 429:
            return Refused(f"the API server is overloaded and did nothing; try again later ({error.words})")
        case 500 if "PodDisruptionBudget" in error.words:
            return Refused(f"more than one PodDisruptionBudget covers it, so it cannot be evicted: {error.words}")
        case 400 | 422:
            return Refused(f"This is a bug in gpukeeper: the API server rejected the request as invalid: {error.words}")
        case 404 | 410:
            return Unknown(f"the response does not prove that the object is gone: {error}")
        case status if status < 500:
            return Refused(error.words)
    return Unknown(str(error))


def resource(kind: Kind, sub: str = "") -> str:
    """As a role names it."""
    return kind.plural + (f"/{sub}" if sub else "") + (f".{kind.group}" if kind.group else "")


def combined(answers: Sequence[ActResult]) -> ActResult:
    """Of several results: a refusal or an unknown result first, then an accepted one."""
    for kind_of in (Refused, Unknown, Accepted):
        for answer in answers:
            if isinstance(answer, kind_of):
                return answer
    return answers[0]
