"""Errors of a cluster, as sentences. Only the API server's own response proves anything."""

from __future__ import annotations

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError

UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, EXPIRED, INVALID, TOO_MANY = 401, 403, 404, 409, 410, 422, 429
# The message of the server when a JSON Patch no longer fits the object: the same for a failed `test` and for a missing
# path. An invalid value has causes and the name of the object instead.
_OF_ALL = "at the cluster scope"
_PATCH_DOES_NOT_FIT = "the server rejected our request due to an error in our request"


class ApiError(PlatformError):
    """The API server, or a proxy before it, answered with an error."""

    def __init__(
        self,
        status: int,
        reason: str,
        words: str,
        retry_after: float | None = None,
        continue_: str = "",
        *,
        name: str = "",
        causes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(f"the cluster answered {status}: {words}{_hint(status, reason, words)}")
        self.status, self.reason, self.words = status, reason, words
        self.retry_after, self.continue_ = retry_after, continue_
        self.name, self.causes = name, causes  # of the object the answer is about; why, one by one

    @property
    def is_not_found(self) -> bool:
        """The named object does not exist. A 404 of a proxy, or of a kind that is not installed, proves nothing."""
        return self.status == NOT_FOUND and self.reason == "NotFound" and bool(self.name)

    @property
    def is_conflict(self) -> bool:
        """The object changed: a precondition or the `test` of a JSON Patch failed."""
        if self.status == CONFLICT:
            return self.reason == "Conflict"
        return self.status == INVALID and not self.causes and _PATCH_DOES_NOT_FIT in self.words

    @property
    def is_denied(self) -> bool:
        return self.status in {UNAUTHORIZED, FORBIDDEN}

    @property
    def is_disruption_budget(self) -> bool:
        """A PodDisruptionBudget refused an eviction: this concerns the pod, not the request rate."""
        return self.status == TOO_MANY and "DisruptionBudget" in self.causes

    @property
    def expired(self) -> bool:
        """The list or version to continue from is too old."""
        return self.status == EXPIRED


class ClusterUnavailable(PlatformError):
    """The cluster did not answer, or not in time. The request may have been executed."""


class ResponseTooLarge(ClusterUnavailable):
    """An endless response must not fill the memory."""


class _Cause(msgspec.Struct):
    reason: str = ""


class _Details(msgspec.Struct, rename="camel"):
    name: str = ""
    causes: list[_Cause] | None = None
    retry_after_seconds: int | None = None


class _StatusMeta(msgspec.Struct):
    continue_: str = msgspec.field(default="", name="continue")


class StatusObject(msgspec.Struct):
    """The Status object of the API: an error, or the response to some deletes."""

    kind: str = ""
    reason: str = ""
    message: str = ""
    code: int = 0
    details: _Details | None = None
    metadata: _StatusMeta | None = None


def refusal(status: int, body: bytes | msgspec.Raw, retry_after: float | None = None) -> ApiError:
    """The error of a response of 300 or more. A body that is not a Status is quoted and has no reason."""
    try:
        record = reading.decode(body, type=StatusObject)
    except msgspec.DecodeError:
        record = StatusObject()
    if record.kind != "Status":
        words = " ".join(bytes(body)[:200].decode("utf-8", "replace").split())
        return ApiError(status, "", words or "no message", retry_after)
    details, meta = record.details or _Details(), record.metadata or _StatusMeta()
    if retry_after is None and details.retry_after_seconds:
        retry_after = float(details.retry_after_seconds)
    causes = tuple(one.reason for one in details.causes or ())
    words = record.message or record.reason or "no message"
    return ApiError(status, record.reason, words, retry_after, meta.continue_, name=details.name, causes=causes)


def cannot_connect(place: str, address: str, why: str) -> ClusterUnavailable:
    hint = ""
    message = why.lower()
    if "certificate" in message:
        hint = "; check the certificate-authority in the kubeconfig"
    elif "refused" in message or "timed out" in message or "no route" in message or "unreachable" in message:
        hint = "; check that it runs and is reachable from here: `kubectl version`"
    elif "name" in message and ("known" in message or "resolution" in message):
        hint = "; its host name cannot be resolved"
    return ClusterUnavailable(f"the cluster {place} at {address} cannot be reached: {why}{hint}")


def _hint(status: int, reason: str, words: str) -> str:
    if status == UNAUTHORIZED:
        return "; the credentials are invalid or expired: log in again, or fix the kubeconfig's user"
    if status == FORBIDDEN and reason == "Forbidden":
        only = (
            "; a scope that lists namespaces without patterns needs permissions in those only"
            if _OF_ALL in words
            else ""
        )
        return f"; `kubectl auth can-i --list` shows the permissions{only}"
    return ""
