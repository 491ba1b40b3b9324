"""One object, what is above it and what is below it, as they were read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.kind import TreeNode
from gpukeeper.platforms.kubernetes.wire import Owner, Pod


class Climb(msgspec.Struct, frozen=True):
    """What is above one object."""

    above: tuple[TreeNode, ...] = ()  # the nearest first
    gone: Owner | None = None  # the topmost seen names this owner, and it is proven gone
    made_by: Owner | None = None  # a generator made the topmost: the run is the root, its generator never
    unknown: Unknown | None = None  # an owner that we do not know or could not read; who the root is, is unknown

    @property
    def root(self) -> TreeNode | Unknown | None:
        """None: it is a root itself."""
        if self.unknown is not None:
            return self.unknown
        return self.above[-1] if self.above else None

    @property
    def owner_gone(self) -> bool | Unknown:
        """The nearest owner alone: of a Job that is there, the JobSet may be gone."""
        if self.above:
            return False
        return self.unknown if self.unknown is not None else self.gone is not None


class Descendants(msgspec.Struct, frozen=True):
    """Everything below one object, by the uid of its owner."""

    below: Mapping[str, tuple[TreeNode, ...]] = {}
    unseen: tuple[str, ...] = ()  # sentences: what could not be listed
    narrowed: bool = False  # selected by labels, which users can change

    @property
    def complete(self) -> bool:
        """What is not in it is not there."""
        return not self.unseen and not self.narrowed

    def of(self, uid: str) -> tuple[TreeNode, ...]:
        return self.below.get(uid, ())

    def every(self) -> Iterator[TreeNode]:
        for nodes in self.below.values():
            yield from nodes

    def pods(self) -> Iterator[Pod]:
        for node in self.every():
            if isinstance(node.seen, Pod):
                yield node.seen
