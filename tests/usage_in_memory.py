"""A store of hours of GPUs without a file and a thread, for simulations and properties."""

from __future__ import annotations

from gpukeeper.ledger.database import open_in_memory
from gpukeeper.ledger.usage import USAGE, UsageReader, record
from gpukeeper.model.series import UsageFold


class InMemoryUsage:
    def __init__(self) -> None:
        self._connection = open_in_memory(USAGE)

    async def record(self, found: UsageFold) -> None:
        record(self._connection, found)

    def reader(self) -> UsageReader:
        return UsageReader(self._connection)
