"""What an acceptance run needs of the machine under test, as a Protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gpukeeper.acceptance.record import Machine, ProbeReply, ProbeRequest
from gpukeeper.model.gpu import Health, Reading
from gpukeeper.model.unknown import Unknown


class Workbench(Protocol):
    """The machine under test: reads its state and runs probes on it. The caller that opened it closes it."""

    async def machine(self) -> Machine:
        """The machine before the first check. What could not be read is Unknown."""
        ...

    async def health(self) -> Mapping[str, Health] | Unknown:
        """Every GPU now, by uuid; Xids since the workbench was opened."""
        ...

    async def readings(self) -> Sequence[Reading]:
        """Readings since the last call, two per second; `at` counts from when the workbench was opened."""
        ...

    async def each(self, jobs: Mapping[str, ProbeRequest]) -> Mapping[str, ProbeReply]:
        """A probe on each of these GPUs, by uuid, on all at the same time. A reply for each, whatever happens."""
        ...

    async def together(self, gpus: Sequence[str], job: ProbeRequest) -> Mapping[str, ProbeReply]:
        """One probe over these GPUs, one rank per GPU. A reply for every rank, by its number."""
        ...

    async def close(self) -> None: ...
