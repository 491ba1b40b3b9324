"""Short times, to try a policy: for named workloads alone, and everything else is kept. Pure.

Divided are times after the end and before the start, runtime and the lead of warnings. Idle times stay as they are: use
is measured by the minute.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import msgspec

from gpukeeper.lifecycle.settings import Rulebook, Settings
from gpukeeper.model.policy import ClassSettings, Group, Policy, Retention, Warnings
from gpukeeper.model.subject import Shape, Subject

KEPT = "not named with --compress, so it is kept"


class CompressedBook(Rulebook):
    """`names`: full paths. A leftover has no name that would include it."""

    def __init__(self, policy: Policy, divisor: int, names: Collection[str]) -> None:
        assert divisor > 1, "a policy is only ever made shorter"
        super().__init__(policy)
        self.divisor, self.names = divisor, frozenset(names)
        self._short = Rulebook(divided(policy, divisor))

    def settings(self, subject: Subject) -> Settings:
        if subject.shape is Shape.WORKLOAD and subject.ref.path in self.names:
            return msgspec.structs.replace(self._short.settings(subject), divisor=self.divisor)
        return msgspec.structs.replace(super().settings(subject), kept=KEPT)


def divided(policy: Policy, by: int) -> Policy:
    return msgspec.structs.replace(
        policy,
        retention=_retention(policy.retention, by),
        environments={name: _retention(one, by) for name, one in policy.environments.items()},
        classes={name: _limits(one, by) for name, one in policy.classes.items()},
        groups={name: _group(one, by) for name, one in policy.groups.items()},
        warnings=_warnings(policy.warnings, by),
    )


def _retention(given: Retention, by: int) -> Retention:
    return Retention(
        succeeded=_span(given.succeeded, by),
        failed=_span(given.failed, by),
        stopped=_span(given.stopped, by),
        max=given.max / by,
    )


def _limits(given: ClassSettings, by: int) -> ClassSettings:
    return msgspec.structs.replace(
        given,
        max_runtime=_span(given.max_runtime, by),
        never_started=_span(given.never_started, by),
        hold_after_stop=given.hold_after_stop / by,
    )


def _group(given: Group, by: int) -> Group:
    """A number is a factor of the class's value, which is divided already."""
    spans = {name: getattr(given, name) for name in ("max_runtime", "hold_after_stop")}
    return msgspec.structs.replace(
        given, **{name: one / by for name, one in spans.items() if isinstance(one, timedelta)}
    )


def _warnings(given: Warnings, by: int) -> Warnings:
    return msgspec.structs.replace(given, lead=given.lead / by, undelivered=given.undelivered / by)


def _span(given: timedelta | None, by: int) -> timedelta | None:
    return None if given is None else given / by
