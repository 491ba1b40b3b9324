"""The narrowing flags of plan, apply and observe. They choose among what the policy covers and never widen it."""

from __future__ import annotations

from datetime import datetime, timedelta
from fnmatch import fnmatchcase

import msgspec

from gpukeeper.lifecycle.settings import has_label
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Shape, Subject

SHORT_ID = 12  # letters of an id that are enough to mean one image


class Narrow(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing given means everything. A fact that is not known fits no narrowing on it."""

    platform: str | None = None  # its name, or name/place
    namespace: str | None = None
    label: str | None = None
    kind: str | None = None
    owner: str | None = None
    nobodys: bool = False  # with an owner: also what has no owner
    class_: str | None = None
    outcome: str | None = None
    older_than: timedelta | None = None
    name: str | None = None
    image: str | None = None
    paths: frozenset[str] | None = None  # full paths, without patterns

    def fits(self, subject: Subject, now: datetime) -> bool:
        if not self.fits_ref(subject.ref, subject.owner):
            return False
        if self.outcome is not None and not _like(subject.outcome, self.outcome):
            return False
        if self.label is not None and not has_label(subject, self.label):
            return False
        if self.image is not None and not is_made_from(subject, self.image):
            return False
        return self.older_than is None or _age(subject, now) >= self.older_than

    def fits_ref(self, ref: Ref, owner: object) -> bool:
        """As far as that is known without its other facts."""
        if self.paths is not None and ref.path not in self.paths:
            return False
        named = (
            (self.namespace, ref.namespace),
            (self.kind and self.kind.lower(), ref.kind.lower()),
            (None if self.nobodys and owner is None else self.owner, owner),
        )
        if not all(wanted is None or _like(value, wanted) for wanted, value in named):
            return False
        if self.platform is not None and not _like(f"{ref.platform}/{ref.place}", self.platform, prefix=True):
            return False
        return self.name is None or fnmatchcase(ref.name, self.name) or ref.ends_with(self.name)

    def fits_class(self, class_: str) -> bool:
        """The one whose limits apply, so that the policy's match list counts."""
        return self.class_ is None or _like(class_, self.class_)


def is_made_from(subject: Subject, wanted: str) -> bool:
    """By the name it was made from, or by the id of its image. A name without a tag means every tag and digest of it;
    an engine's own filter would mean `latest`."""
    if subject.shape is not Shape.WORKLOAD:
        return False
    name, id_ = subject.labels.get("image", ""), subject.labels.get("image_id", "").removeprefix("sha256:")
    hex_ = wanted.removeprefix("sha256:")
    if len(hex_) >= SHORT_ID and id_.startswith(hex_):
        return True
    tagged = ":" in wanted.rpartition("/")[2] or "@" in wanted
    patterns = (wanted,) if tagged else (wanted, f"{wanted}:*", f"{wanted}@*")
    return bool(name) and any(fnmatchcase(name, pattern) for pattern in patterns)


def _like(value: object, wanted: str, *, prefix: bool = False) -> bool:
    if not isinstance(value, str):
        return False
    return fnmatchcase(value, wanted) or (prefix and value.startswith(wanted.rstrip("/") + "/"))


def _age(subject: Subject, now: datetime) -> timedelta:
    """Since its end, else its start, else its creation; what has no known time is not older than anything."""
    times = (subject.ended, subject.last_used, subject.started, subject.created)
    at = next((one for one in times if one is not None), None)
    return now - at if isinstance(at, datetime) else timedelta(-1)
