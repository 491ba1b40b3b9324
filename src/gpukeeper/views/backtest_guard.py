"""A policy that acts and was never backtested, or that would be regretted too often: a warning, no more."""

from __future__ import annotations

from gpukeeper.ledger.backtest_record import BacktestRecord
from gpukeeper.lifecycle.settings import idle_times
from gpukeeper.model.policy import Mode, Policy

_HOW = "gpukeeper backtest ledger --record"


def backtest_warning(policy: Policy, record: BacktestRecord | None) -> str | None:
    """None: nothing to warn about. Only a policy that stops idle work can be regretted; in mode plan it would be."""
    if not any(idle_times(policy)):
        return None
    if record is None:
        if policy.mode is Mode.PLAN:
            return None
        return (
            "mode is enforce, and what this policy would have done to recorded work is not on record here. "
            f"To see it: {_HOW}"
        )
    limit = policy.backtest.regret_max
    if not record.known or record.regrets / record.known <= limit:
        return None
    share = record.regrets / record.known
    return (
        f"{record.regrets} of {record.known} stops by this policy ({share:.0%}) would have been regretted between "
        f"{record.begin:%Y-%m-%d} and {record.end:%Y-%m-%d} ({record.source}); backtest.regret_max is {limit:.0%}. "
        "Idle times with less regret: gpukeeper advise ledger"
    )
