"""This machine itself as a platform: its GPUs, processes that hold them outside containers, temporary trees.

Looks only: `guards` is empty, so nothing here is ever stopped or deleted. Relies on /proc and, for GPUs, on the
NVIDIA driver. Without root it sees less, and says so.
"""

from __future__ import annotations

import fnmatch
from collections.abc import AsyncIterator, Mapping, Sequence

from gpukeeper.devices import nvml
from gpukeeper.disk.measure import Limits
from gpukeeper.engine.ports import Clock
from gpukeeper.model.decision import (
    Accepted,
    Action,
    Changed,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
)
from gpukeeper.model.diagnosis import Diagnosis
from gpukeeper.model.identity import Ref
from gpukeeper.model.policy import PlaceScope, Temporary
from gpukeeper.model.subject import Gone, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import errors, translate
from gpukeeper.platforms.host.connect import Patience
from gpukeeper.platforms.host.gpus import Gpus, Inventory
from gpukeeper.platforms.host.trees import Trees

NOTHING_OFFERED: Mapping[Action, Guard] = {}


class HostPlatform:
    def __init__(
        self,
        place: str,
        temporary: Sequence[Temporary],
        clock: Clock,
        *,
        inventory: Inventory = nvml.inventory,
        proc: str = "/proc",
        limits: Limits | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._place, self._clock = place, clock
        patience = patience or Patience()
        self._gpus = Gpus(self._at, inventory, proc, patience)
        self._trees = Trees(self._at, tuple(temporary), proc, limits or Limits(), patience)

    @property
    def name(self) -> str:
        return translate.PLATFORM

    @property
    def place(self) -> str:
        return self._place

    @property
    def precise(self) -> bool:
        return False

    @property
    def local(self) -> bool:
        return True

    @property
    def tidies(self) -> bool:
        return False

    @property
    def guards(self) -> Mapping[Action, Guard]:
        return NOTHING_OFFERED

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        if not any(fnmatch.fnmatchcase(self._place, pattern) for pattern in scope.places):
            return
        for page in (self._gpus.observe(), self._trees.observe()):
            async for subjects, unseen in page:
                yield Snapshot(self.name, self._place, self._clock.now(), subjects, unseen)

    async def wake(self) -> AsyncIterator[Ref | None]:
        """The machine gives no hints; the next pass looks."""
        hints: tuple[Ref | None, ...] = ()
        for hint in hints:
            yield hint

    async def look(self, ref: Ref) -> Subject | Gone | Unknown:
        if ref.kind in {translate.GPU, translate.SLICE}:
            return await self._gpus.look(ref)
        if ref.kind == translate.PROCESS:
            return await self._gpus.look_at_holder(ref)
        if ref.kind == translate.TREE:
            return await self._trees.look(ref)
        return Unknown(f"this machine has nothing of the kind {ref.kind!r}")

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        if subject.shape is Shape.TREE:
            return NothingToCapture("temporary files have no logs, manifest or events of their own")
        return Unknown(f"this version captures nothing of a {subject.ref.kind} on the machine itself")

    async def act(self, step: Step, fresh: Subject) -> Accepted | Changed | Refused | Unknown:
        return errors.LOOKS_ONLY

    async def tell(self, subject: Subject, message: str) -> bool:
        return False  # whoever works on the machine itself sits at a terminal of the machine

    async def parts(self, words: str) -> Sequence[Ref]:
        return ()

    async def diagnose(self, ref: Ref) -> Diagnosis | Unknown:
        """It is what it is made of; the rules say the rest."""
        return Diagnosis()

    async def take_back(self, ref: Ref, evidence: Evidence) -> None:
        """A stop here is one command: nothing is changed on the way."""

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        return errors.LOOKS_ONLY

    def _at(self) -> translate.At:
        return translate.At(self._place, self._clock.now())
