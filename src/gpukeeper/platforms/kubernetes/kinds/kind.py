"""What a kind is: where it is served, what it is made of, when it is over, how it is stopped and removed."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Lever(StrEnum):
    """How work of a kind is stopped so that it can be brought back."""

    NONE = "none"
    SUSPEND = "suspend"  # spec.suspend
    RUN_POLICY = "run policy"  # spec.runPolicy.suspend
    SCALE = "scale"  # the scale subresource, to 0


class Propagation(StrEnum):
    """Always named: a bare DELETE of a Job leaves its pods behind. In the foreground the root vanishes last, and each
    waits for the garbage collector, which asks twenty times a second by default: not for Jobs, of which there are
    thousands, and whose pods have ended."""

    FOREGROUND = "Foreground"
    BACKGROUND = "Background"


class Kind(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    kind: str  # as the API writes it
    plural: str
    group: str = ""  # empty: the core group
    versions: tuple[str, ...]  # that we can read, the best first
    succeeded: tuple[str, ...] = ()  # conditions that say it is over, when their status is True
    failed: tuple[str, ...] = ()
    lever: Lever = Lever.NONE
    propagation: Propagation = Propagation.BACKGROUND
    children: tuple[Kind, ...] = ()  # the kinds it makes
    controller: str = ""  # its own controller's name in `managedBy`; any other value there: hands off
    runs: bool = False  # never over by itself: a service, a set

    @property
    def name(self) -> str:
        """How people write it, and `Ref.kind`."""
        return self.kind.lower()

    @property
    def below(self) -> tuple[Kind, ...]:
        """All kinds below it."""
        found: list[Kind] = []
        waiting = list(self.children)
        while waiting:
            kind = waiting.pop()
            if kind not in found:
                found.append(kind)
                waiting += kind.children
        return tuple(found)

    def path(self, version: str, namespace: str | None = None, name: str = "", sub: str = "") -> str:
        """Its place in the API. None: in every namespace."""
        root = f"/apis/{self.group}/{version}" if self.group else f"/api/{version}"
        where = "" if namespace is None else f"/namespaces/{namespace}"
        return root + where + f"/{self.plural}" + (f"/{name}" if name else "") + (f"/{sub}" if sub else "")
