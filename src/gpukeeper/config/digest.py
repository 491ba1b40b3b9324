"""What identifies a policy: its values."""

from __future__ import annotations

import hashlib
import json

import msgspec

from gpukeeper.model.policy import BacktestSettings, Mode, Policy


def digest_of(policy: Policy) -> str:
    """Identifies the policy that decided: the same for the same values, whatever file or order they came from."""
    plain = msgspec.to_builtins(msgspec.structs.replace(policy, digest=""))
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def deciding_digest(policy: Policy) -> str:
    """Of the same policy in any mode: a backtest in mode plan counts when it is switched on."""
    return digest_of(msgspec.structs.replace(policy, mode=Mode.PLAN, backtest=BacktestSettings()))
