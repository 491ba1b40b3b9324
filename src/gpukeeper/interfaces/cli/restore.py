"""`gpukeeper restore`: restore what gpukeeper stopped or removed."""

from __future__ import annotations

from gpukeeper.interfaces.cli.submit import submit
from gpukeeper.interfaces.terminal import options as o


def restore(workload: o.Workload, policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Restore what gpukeeper stopped, or removed after capturing it. WORKLOAD: path or uid from the ledger."""
    submit("restore", policy=policy, json=json, workload=workload)
