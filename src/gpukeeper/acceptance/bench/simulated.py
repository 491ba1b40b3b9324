"""A machine with GPUs that exist only here: every probe answers with the figures of a real one, faults included.

For the detector's own test and for ours. Its time is virtual (see simulated_gpus.py); `now` is the engine's clock. The
judge cannot tell it from a real machine, and the report states that it was none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from gpukeeper.acceptance.bench.simulated_gpus import ENVIRONMENT, NOISE, SPREAD, SimulatedFaults, SimulatedGpus
from gpukeeper.acceptance.bench.simulated_probes import SimulatedProbes, late
from gpukeeper.acceptance.record import Machine, ProbeReply, ProbeRequest
from gpukeeper.model.gpu import Health, Reading
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown


class SimulatedWorkbench:
    """The engine's port, and its clock. `faults`: those of SimulatedFaults, by name."""

    def __init__(
        self,
        gpus: int = 8,
        *,
        seed: int = 0,
        model: str = "NVIDIA H200",
        spread: float = SPREAD,
        noise: float = NOISE,
        **faults: Any,
    ) -> None:
        planted = SimulatedFaults.plant(**faults)
        self._gpus = SimulatedGpus(gpus, seed=seed, model=model, spread=spread, noise=noise, faults=planted)
        self._probes = SimulatedProbes(self._gpus)

    @property
    def clock(self) -> Clock:
        """Time passes on it while probes run, and never otherwise."""
        return self

    def now(self) -> datetime:
        return self._gpus.now()

    async def machine(self) -> Machine:
        uuids = [gpu.uuid for gpu in self._gpus.gpus]
        return Machine(
            node=f"simulated-{self._gpus.seed}",
            gpus=self._gpus.gpus,
            on_bus=self._gpus.count,
            environment=dict(ENVIRONMENT),
            topology={one: {two: "nvlink" for two in uuids if two != one} for one in uuids},
        )

    async def health(self) -> Mapping[str, Health] | Unknown:
        return self._gpus.health()

    async def readings(self) -> Sequence[Reading]:
        return self._gpus.take_readings()

    async def each(self, jobs: Mapping[str, ProbeRequest]) -> Mapping[str, ProbeReply]:
        answers = {uuid: self._probes.reply(self._gpus.index[uuid], job) for uuid, job in jobs.items()}
        self._gpus.pass_time(
            max((one.seconds for one in answers.values()), default=0.0), [self._gpus.index[one] for one in jobs]
        )
        return answers

    async def together(self, gpus: Sequence[str], job: ProbeRequest) -> Mapping[str, ProbeReply]:
        indexes = [self._gpus.index[uuid] for uuid in gpus]
        stuck = [rank for rank, index in enumerate(indexes) if self._gpus.faults.hang.get(index) == job.probe]
        if stuck:
            answers: dict[str, ProbeReply] = {
                str(rank): late(job, "timeout" if rank in stuck else "rendezvous") for rank in range(len(indexes))
            }
        else:
            answers = {str(rank): self._probes.reply_of_rank(rank, indexes, job) for rank in range(len(indexes))}
        self._gpus.pass_time(max(one.seconds for one in answers.values()), indexes)
        return answers

    async def close(self) -> None:
        """Nothing runs."""
