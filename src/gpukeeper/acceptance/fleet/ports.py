"""What a run over many nodes needs of an engine, as a Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpukeeper.acceptance.fleet.spec import RunSpec, Target
from gpukeeper.acceptance.fleet.status import Removal, RunSummary
from gpukeeper.model.unknown import Unknown


class Launcher(Protocol):
    """Starts runs on the nodes of one engine, and finds them again by their run id, from any machine.

    An engine that does not reply raises PlatformError (model/errors.py); one node that does not reply is in the status
    of that node.
    """

    engine: str

    async def targets(self, spec: RunSpec) -> tuple[Target, ...]:
        """The nodes that `spec` selects. A name that does not exist is a UsageError; a node that cannot be tested is
        in the result, with the reason."""
        ...

    def render(self, spec: RunSpec, targets: Sequence[Target]) -> str:
        """What `start` would create: manifests, or commands."""
        ...

    async def start(self, spec: RunSpec, targets: Sequence[Target]) -> None:
        """Idempotent by run id: called again after a crash it creates only what is missing."""
        ...

    async def runs(self) -> tuple[RunSummary, ...] | Unknown: ...

    async def run(self, run: str) -> RunSummary | None:
        """None: the engine has nothing of that run."""
        ...

    async def output(self, spec: RunSpec, node: str) -> bytes | Unknown:
        """All that the node's program has written so far and that the engine still has."""
        ...

    async def remove(self, run: str) -> Removal:
        """Remove every object of the run, running or not, each by its uid. Again is allowed."""
        ...

    async def close(self) -> None: ...
