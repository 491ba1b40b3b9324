"""What is on record about a backtest of a policy on this machine."""

from __future__ import annotations

import asyncio

from gpukeeper.config.digest import deciding_digest
from gpukeeper.interfaces.terminal.local_ledger import opened_for_reading
from gpukeeper.ledger.backtest_record import backtest_record
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.policy import Policy
from gpukeeper.views.backtest_guard import backtest_warning


def not_backtested(policy: Policy) -> list[str]:
    """One warning, or none. A ledger that cannot be read is reported by the commands that need it."""
    try:
        with opened_for_reading() as ledger:
            record = asyncio.run(backtest_record(ledger, deciding_digest(policy)))
    except KeeperError:
        return []
    words = backtest_warning(policy, record)
    return [] if words is None else [words]
