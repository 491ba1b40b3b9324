"""The report of a span of time: how GPUs were used, what came back, and what was held without use.

What came back is GPU-hours and bytes of every verified step, by day, owner, rule and platform; and which steps were
undone within a day (regret). From lines of the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, timedelta, tzinfo

import msgspec

from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Event, Noticed, Restored
from gpukeeper.model.policy import Prices
from gpukeeper.model.series import moment_of
from gpukeeper.model.subject import State
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.usage import (
    NAMES,
    OTHERS,
    UNKNOWN,
    GpuHours,
    HeatRow,
    Money,
    UsageCell,
    UsageRow,
    UsageSums,
    WasteRow,
    cost,
    for_reader,
    price_of,
    rows,
    total,
    waste,
)

SOON = timedelta(days=1)  # undone within this time: it was still needed
_ENDS = (Action.STOP, Action.REMOVE, Action.TRIM)
_FAILED = (Result.REFUSED, Result.STILL_THERE, Result.NOT_CAPTURED, Result.UNKNOWN)


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of steps. `unmeasured`: figures that are in no sum. `unpriced`: GPU-hours without a price."""

    steps: int = 0
    gpus: int = 0
    gpu_hours: float = 0.0
    bytes: int = 0
    unmeasured: int = 0
    money: float = 0.0
    unpriced: float = 0.0

    def __add__(self, other: Savings) -> Savings:
        both = ((getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return Savings(**dict(zip(self.__struct_fields__, (a + b for a, b in both), strict=True)))


class SavingsCell(msgspec.Struct, frozen=True, kw_only=True):
    day: date
    owner: str
    rule: str
    platform: str
    cause: str
    savings: Savings = Savings()


class SavingsRow(msgspec.Struct, frozen=True):
    name: str
    savings: Savings


class Regret(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was undone. `how`: restored or restarted."""

    at: datetime
    path: str
    owner: str
    rule: str
    how: str
    after: timedelta


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that ended no work although they should. `objects`: how many different ones; `open`: those of them that no
    later step ended in this time."""

    owner: str
    rule: str
    result: str
    attempts: int
    objects: int
    open: int


class SavingsView(msgspec.Struct, frozen=True, kw_only=True):
    """`ended`: steps that stopped or removed work; `regrets`: those of them that were undone within a day. `causes`:
    of the steps: gpukeeper by a rule, or the person that requested them. `failed`: steps that ended no work."""

    total: Savings
    days: tuple[SavingsRow, ...]
    owners: tuple[SavingsRow, ...]
    rules: tuple[SavingsRow, ...]
    platforms: tuple[SavingsRow, ...]
    ended: int
    regretted: int
    regrets: tuple[Regret, ...]
    causes: tuple[SavingsRow, ...] = ()
    failed: int = 0
    failures: tuple[Failure, ...] = ()


class SavingsSums:
    """Reads lines in the order of the journal, until a day after the end: what is undone then counts."""

    def __init__(
        self, since: datetime, until: datetime, zone: tzinfo, prices: Prices, models: Mapping[str, set[str]]
    ) -> None:
        self._since, self._until, self._zone = since, until, zone
        self._prices, self._models = prices, models
        self._cells: dict[SavingsCell, Savings] = {}
        self._steps: set[str] = set()
        self._ended: dict[str, Closed] = {}  # by key: the last step that ended it and was not undone
        self.ended = 0
        self._by_owner: dict[str, int] = {}
        self.regrets: list[Regret] = []
        self._failed: dict[tuple[str, str, str], list[str]] = {}  # owner, rule, result: a key for each attempt
        self._reclaimed: set[str] = set()  # keys

    def add(self, line: Event) -> None:
        match line:
            case Closed():
                self._closed(line)
            case Restored() if line.result == "restored":
                self._undone(line, "restored")
            case Noticed() if line.state is State.RUNNING:
                self._undone(line, "restarted")

    def _closed(self, line: Closed) -> None:
        if not self._since <= line.at < self._until:
            return
        if line.result in _FAILED and line.action in _ENDS and line.ref is not None:
            self._failed.setdefault((line.owner or UNKNOWN, line.rule, line.result.value), []).append(line.ref.key)
        # A step that a crash made us look at again may have two outcomes; it gave back once.
        if line.result is not Result.RECLAIMED or line.step in self._steps:
            return
        self._steps.add(line.step)
        platform = line.ref.platform if line.ref else ""
        cell = SavingsCell(
            day=line.at.astimezone(self._zone).date(),
            owner=line.owner or UNKNOWN,
            rule=line.rule,
            platform=platform,
            cause=line.by if line.requested_by is msgspec.UNSET else line.requested_by,
        )
        self._cells[cell] = self._cells.get(cell, Savings()) + self._savings(line)
        if line.ref is not None and line.action in _ENDS:
            self.ended += 1
            self._by_owner[line.owner or UNKNOWN] = self._by_owner.get(line.owner or UNKNOWN, 0) + 1
            self._ended[line.ref.key] = line
            self._reclaimed.add(line.ref.key)

    def _savings(self, line: Closed) -> Savings:
        values = (line.gpus_back, line.gpu_hours, line.bytes_back)
        gpus, hours, size = (0 if isinstance(value, Unknown) else value for value in values)
        price = self._price(line.ref.place if line.ref else "")
        return Savings(
            steps=1,
            gpus=int(gpus),
            gpu_hours=float(hours),
            bytes=int(size),
            unmeasured=sum(isinstance(value, Unknown) for value in values),
            money=0.0 if price is None else hours * price,
            unpriced=float(hours) if price is None and self._prices.per_gpu_hour else 0.0,
        )

    def _price(self, place: str) -> float | None:
        """An outcome does not name the model: only where all GPUs of the place cost the same is it known."""
        found = {price_of(model, self._prices) for model in self._models.get(place, ())}
        return found.pop() if len(found) == 1 else None

    def _undone(self, line: Restored | Noticed, how: str) -> None:
        if line.ref is None:
            return
        ended = self._ended.get(line.ref.key)
        if ended is None or line.at < ended.at:
            return
        del self._ended[line.ref.key]
        if line.at - ended.at <= SOON:
            self.regrets.append(
                Regret(
                    at=ended.at,
                    path=line.ref.path,
                    owner=ended.owner or UNKNOWN,
                    rule=ended.rule,
                    how=how,
                    after=line.at - ended.at,
                )
            )

    def view(self, person: str | None = None) -> SavingsView:
        """`person`: whose own figures are shown beside the totals; None: everybody's."""
        cells = self._cells if person is None else _for_reader(self._cells, person)
        mine = tuple(one for one in self.regrets if person in (None, one.owner))
        return self._view(cells, (self.ended, len(self.regrets)), mine, person)

    def of_owner(self, owner: str) -> SavingsView:
        """Only this owner's."""
        cells = {cell: savings for cell, savings in self._cells.items() if cell.owner == owner}
        mine = tuple(one for one in self.regrets if one.owner == owner)
        found = self._view(cells, (self._by_owner.get(owner, 0), len(mine)), mine, owner)
        return msgspec.structs.replace(found, failed=sum(one.attempts for one in found.failures))

    def _view(
        self,
        cells: Mapping[SavingsCell, Savings],
        counts: tuple[int, int],
        regrets: tuple[Regret, ...],
        whose: str | None,
    ) -> SavingsView:
        """`counts`: steps that ended work, and those that were undone."""
        return SavingsView(
            total=_sum(cells.values()),
            days=_rows(cells, lambda one: one.day.isoformat(), by_name=True),
            owners=_rows(cells, lambda one: one.owner),
            rules=_rows(cells, lambda one: one.rule),
            platforms=_rows(cells, lambda one: one.platform),
            causes=_rows(cells, lambda one: one.cause),
            ended=counts[0],
            regretted=counts[1],
            regrets=regrets,
            failed=sum(map(len, self._failed.values())),
            failures=tuple(self._failure(*one) for one in sorted(self._failed) if whose in (None, one[0])),
        )

    def _failure(self, owner: str, rule: str, result: str) -> Failure:
        keys = self._failed[owner, rule, result]
        left = set(keys) - self._reclaimed
        return Failure(
            owner=owner, rule=rule, result=result, attempts=len(keys), objects=len(set(keys)), open=len(left)
        )


def _for_reader(cells: Mapping[SavingsCell, Savings], person: str) -> dict[SavingsCell, Savings]:
    """Of others only how much it was on a day."""
    found: dict[SavingsCell, Savings] = {}
    for cell, savings in cells.items():
        shown = cell
        if cell.owner != person:
            shown = SavingsCell(day=cell.day, owner=OTHERS, rule=OTHERS, platform=OTHERS, cause=OTHERS)
        found[shown] = found.get(shown, Savings()) + savings
    return found


def _sum(savings: Iterable[Savings]) -> Savings:
    found = Savings()
    for one in savings:
        found += one
    return found


def _rows(
    cells: Mapping[SavingsCell, Savings], name: Callable[[SavingsCell], str], *, by_name: bool = False
) -> tuple[SavingsRow, ...]:
    sums: dict[str, Savings] = {}
    for cell, savings in cells.items():
        sums[name(cell)] = sums.get(name(cell), Savings()) + savings
    found = [SavingsRow(called, savings) for called, savings in sums.items()]
    if by_name:
        return tuple(sorted(found, key=lambda row: row.name))
    return tuple(sorted(found, key=lambda row: (-row.savings.gpu_hours, -row.savings.bytes, row.name)))


BY = (*NAMES, "rule")
NOT_RECORDED = (
    "No use of GPUs is recorded for this time: it is recorded while the daemon runs (gpukeeper serve or operator)."
)


class ReportQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`zone`: name of a time zone; empty: that of this machine. `owner`: only this one's work. `person`: who may see
    only their own figures and the totals; None: everything is shown."""

    since: datetime
    until: datetime
    zone: str = ""
    owner: str | None = None
    person: str | None = None


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times in `zone`. `unweighed`: hours of slices of unknown size, which are in no sum."""

    since: datetime
    until: datetime
    zone: str
    owner: str | None
    person: str | None
    total: GpuHours
    money: Money | None
    currency: str
    owners: tuple[UsageRow, ...]
    classes: tuple[UsageRow, ...]
    groups: tuple[UsageRow, ...]
    models: tuple[UsageRow, ...]
    days: tuple[UsageRow, ...]
    waste: tuple[WasteRow, ...]
    heat: tuple[HeatRow, ...]
    savings: SavingsView
    unweighed: float = 0.0
    notes: tuple[str, ...] = ()
    cells: tuple[UsageCell, ...] = ()

    def by(self, name: str) -> tuple[UsageRow, ...]:
        tables = {"owner": self.owners, "class": self.classes, "group": self.groups, "model": self.models}
        return tables.get(name, self.days)


def usage_report(
    query: ReportQuery,
    zone: tzinfo,
    sums: UsageSums,
    savings: SavingsSums,
    prices: Prices,
    *,
    recorded_from: int | None,
    notes: Iterable[str] = (),
) -> UsageReport:
    cells = sums.cells()
    if query.owner is not None:
        cells = tuple(one for one in cells if one.held and one.owner == query.owner)
    elif query.person is not None:
        cells = for_reader(cells, query.person)
    back = savings.view(query.person) if query.owner is None else savings.of_owner(query.owner)
    return UsageReport(
        since=query.since.astimezone(zone),
        until=query.until.astimezone(zone),
        zone=query.zone or query.since.astimezone(zone).tzname() or "",
        owner=query.owner,
        person=query.person,
        total=total(cells),
        money=cost(cells, prices),
        currency=prices.currency,
        owners=rows(cells, NAMES["owner"], prices),
        classes=rows(cells, NAMES["class"], prices),
        groups=rows(cells, NAMES["group"], prices),
        models=rows(cells, NAMES["model"], prices),
        days=tuple(sorted(rows(cells, NAMES["day"], prices), key=lambda row: row.name)),
        waste=_own(waste(cells, prices), query.person),
        heat=sums.heat() if query.owner is None else (),
        savings=back,
        unweighed=sums.unweighed,
        notes=(*_coverage(query, recorded_from), *notes),
        cells=cells,
    )


def not_covered(query: ReportQuery, ledger_from: datetime | None) -> list[str]:
    """`ledger_from`: the oldest line of the ledger. What was done before is not known."""
    if ledger_from is None:
        return ["The ledger is empty: what was given back in this time is not known."]
    if ledger_from > query.since:
        begin = f"{ledger_from:%Y-%m-%d %H:%M} UTC"
        return [f"The ledger begins at {begin}; what was given back before is not in this report."]
    return []


def _own(found: tuple[WasteRow, ...], person: str | None) -> tuple[WasteRow, ...]:
    return found if person is None else tuple(one for one in found if one.owner == person)


def _coverage(query: ReportQuery, recorded_from: int | None) -> list[str]:
    """`recorded_from`: the first hour of which anything is recorded."""
    if recorded_from is None or moment_of(recorded_from * 60) >= query.until:
        return [NOT_RECORDED]
    begin = moment_of(recorded_from * 60)
    if begin > query.since:
        return [f"The use of GPUs is recorded since {begin:%Y-%m-%d %H:%M} UTC; what was before is not in this report."]
    return []
