"""What a daemon reports about itself: the policy in effect, and its health."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timedelta

from gpukeeper.blocking import in_thread
from gpukeeper.config.sentence import sentence
from gpukeeper.config.show import rows
from gpukeeper.ledger.archive import status
from gpukeeper.ledger.journal import SqliteLedger
from gpukeeper.ledger.policy_record import PolicyRecord
from gpukeeper.lifecycle.budget import TREES
from gpukeeper.model.event import Event
from gpukeeper.views.health import BudgetHealth, HealthView, LedgerHealth
from gpukeeper.views.history import line_row
from gpukeeper.views.policy import LastPolicyChange, PolicySetting, PolicyView
from gpukeeper.wiring.session import Session

ERRORS = 5  # of the last day
DISK = timedelta(seconds=5)
FOR_ADMINS = ("notify", "fleet", "web.proxy", "web.tls")  # commands, addresses and paths


def policy_view(
    session: Session, record: PolicyRecord | None, *, named: bool, admin: bool, now: datetime
) -> PolicyView:
    """`named`: the reader is logged in; everybody else reads the sentence only."""
    loaded = session.loaded
    settings = (
        PolicySetting(one.setting, one.value, one.origin)
        for one in (rows(loaded) if named else ())
        if admin or not one.setting.startswith(FOR_ADMINS)
    )
    return PolicyView(
        source=loaded.source,
        digest=loaded.policy.digest,
        mode=loaded.policy.mode,
        sentence=sentence(loaded.policy),
        warnings=(*loaded.warnings, *loaded.expired(now)),
        settings=tuple(settings),
        recorded_since=record.since if named and record is not None else None,
        change=_last_change(record, admin=admin) if named and record is not None else None,
    )


def _last_change(record: PolicyRecord, *, admin: bool) -> LastPolicyChange | None:
    line = record.last
    if line is None:
        return None
    shown = tuple(one for one in line.changes if admin or not one.setting.startswith(FOR_ADMINS))
    return LastPolicyChange(
        at=line.at,
        before=line.before,
        digest=line.digest,
        changes=shown,
        hidden=len(line.changes) - len(shown),
    )


async def health_view(session: Session, ledger: SqliteLedger, *, admin: bool, now: datetime) -> HealthView:
    """Errors name the work of others, so that only admins get them."""
    budget = session.book.policy.budget
    hour, day = now - timedelta(hours=1), now - timedelta(days=1)
    acted = await ledger.acts_since(hour, TREES, but=True)
    errors: Sequence[tuple[int, Event]] = await ledger.lines(last=ERRORS, errors_only=True, since=day) if admin else ()
    return HealthView(
        now=now,
        ledger=await _ledger(ledger),
        budget=BudgetHealth(
            per_pass_count=budget.per_pass.count,
            per_pass_share=budget.per_pass.share,
            per_hour_count=budget.per_hour.count,
            per_hour_share=budget.per_hour.share,
            acted_last_hour=acted,
        ),
        paused=await session.keeper.ledger.paused(),
        failures=tuple(
            (f"{place[0]}/{place[1]}", why if admin else "the last pass stopped midway")
            for place, why in session.keeper.last_passes.failures.items()
        ),
        owner_channels=tuple(one.name for one in session.messages.owners),
        admin_channels=tuple(one.name for one in session.messages.admins),
        last_errors=tuple(f"{row.where}: {row.words}" for row in (line_row(*one) for one in errors)),
        copy=session.copy_state() if admin else None,
    )


async def _ledger(ledger: SqliteLedger) -> LedgerHealth:
    found = await status(ledger)
    disk = await in_thread(lambda: os.statvfs(ledger.path.parent), DISK)
    return LedgerHealth(
        lines=found.lines,
        oldest=found.oldest,
        newest=found.newest,
        size=found.size,
        archives=len(found.archives),
        damaged_archives=sum(one.damage is not None for one in found.archives),
        reserve=found.reserve,
        disk_free=disk.f_bavail * disk.f_frsize,
        disk_total=disk.f_blocks * disk.f_frsize,
    )
