"""What an acceptance run needs of the machine under test, as a Protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gpukeeper.acceptance.record import Machine, ProbeReply, ProbeRequest
from gpukeeper.model.gpu import Health, Reading
from gpukeeper.model.unknown import Unknown


class Workbench(Protocol):
    """The machine whose GPUs are tested: looks at it, and runs probes on it. Closed by whoever opened it."""

    async def machine(self) -> Machine:
        """What is here, before the first check. What could not be learned is Unknown inside it."""
        ...

    async def health(self) -> Mapping[str, Health] | Unknown:
        """Every GPU now, by uuid; Xids since the workbench was opened."""
        ...

    async def readings(self) -> Sequence[Reading]:
        """Taken since the last question, twice a second; `at` counts from when the workbench was opened."""
        ...

    async def each(self, jobs: Mapping[str, ProbeRequest]) -> Mapping[str, ProbeReply]:
        """A probe on each of these GPUs, by uuid, on all at once. An answer for every one, whatever happens."""
        ...

    async def together(self, gpus: Sequence[str], job: ProbeRequest) -> Mapping[str, ProbeReply]:
        """One probe over these GPUs, a rank for each. An answer for every rank, by its number."""
        ...

    async def close(self) -> None: ...
