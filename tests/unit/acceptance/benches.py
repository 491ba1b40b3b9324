"""Simulated GPUs whose driver answers what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.run import RunConfig, accept
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.model.gpu import Health, Reading
from gpukeeper.model.unknown import Unknown


class BenchWith(SimulatedWorkbench):
    """`states`: of GPU 0. `while_loaded`: its readings under load. `unseen`: in the place of others' processes.
    `foreign_from`: the look from which on others are there."""

    def __init__(
        self,
        *,
        states: Mapping[str, Any] | None = None,
        while_loaded: Mapping[str, Any] | None = None,
        unseen: Unknown | None = None,
        foreign_from: int = 0,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self._states, self._loaded, self._unseen = states or {}, while_loaded or {}, unseen
        self._from, self._looks = foreign_from, 0

    async def health(self) -> Mapping[str, Health] | Unknown:
        found = await super().health()
        assert not isinstance(found, Unknown)
        self._looks += 1
        first = self._gpus.gpus[0].uuid
        more: dict[str, Any] = {"states": {**found[first].states, **self._states}}
        if self._unseen is not None:
            more["foreign"] = self._unseen
        elif self._looks < self._from:
            more["foreign"] = ()
        return {**found, first: msgspec.structs.replace(found[first], **more)}

    async def readings(self) -> Sequence[Reading]:
        first = self._gpus.gpus[0].uuid
        return [
            msgspec.structs.replace(one, **self._loaded) if one.uuid == first and one.utilisation else one
            for one in await super().readings()
        ]


def run_on(bench: BenchWith, within_s: float = 60.0) -> Report:
    """As on real GPUs."""
    wish = RunRequest(device="cuda", within_s=within_s, expected=bench._gpus.count)
    order = RunConfig(
        run="run", version="0", wish=wish, checks=CHECKS, limits=reference.limits, history=lambda gpus: {}
    )
    return asyncio.run(accept(bench, order, bench.clock))
