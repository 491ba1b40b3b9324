"""Every check, cheap and informative ones first. A new check is one line here."""

from __future__ import annotations

from gpukeeper.acceptance.check import Check
from gpukeeper.acceptance.checks import (
    collectives,
    copies,
    ddp,
    environment,
    exact,
    gemm,
    health,
    links,
    memory_bandwidth,
    memory_pattern,
    nccl_tests,
    stress,
    throughput,
    topology,
    training,
)

CHECKS: tuple[Check, ...] = (
    environment.CHECK,
    health.CHECK,
    gemm.CHECK,
    memory_bandwidth.CHECK,
    copies.CHECK,
    exact.CHECK,
    training.CHECK,
    memory_pattern.CHECK,
    topology.CHECK,
    links.CHECK,
    collectives.CHECK,
    collectives.NVLINK,
    collectives.NETWORK,
    ddp.CHECK,
    throughput.CHECK,
    nccl_tests.CHECK,
    stress.CHECK,
)


def find(name: str) -> Check | None:
    return next((check for check in CHECKS if check.name == name), None)
