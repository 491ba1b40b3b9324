"""`gpukeeper restore`: bring back what gpukeeper stopped or removed."""

from __future__ import annotations

from gpukeeper.interfaces.terminal import options as o


def restore(workload: o.Workload, policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Bring back what gpukeeper stopped, or removed and captured. WORKLOAD: its path or uid, as the ledger has it."""
    from gpukeeper.interfaces.cli.ask import ask

    ask("restore", policy=policy, json=json, workload=workload)
