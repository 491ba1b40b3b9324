"""A trace in two parts: advice is found on the earlier one and judged on the later one, which it never saw."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from gpukeeper.lifecycle.forecast import MINUTE
from gpukeeper.model.trace import RecordedRun, RecordedSeries


def earlier(run: RecordedRun, split: datetime) -> RecordedRun | None:
    """What was known of it at `split`. None: it had not started."""
    if run.started >= split:
        return None
    if run.ended is not None and run.ended <= split:
        return run
    return msgspec.structs.replace(run, ended=None, series=tuple(_until(one, split) for one in run.series))


def later(run: RecordedRun, split: datetime) -> RecordedRun | None:
    """What it did from `split` on. Its idle time begins there at the earliest. None: it had ended."""
    if run.started >= split:
        return run
    if run.ended is not None and run.ended <= split:
        return None
    return msgspec.structs.replace(
        run,
        started=split,
        first_start=run.first_start or run.started,
        series=tuple(_since(one, split) for one in run.series),
    )


def middle(begin: datetime, end: datetime, share: float) -> datetime:
    """A whole minute."""
    return (begin + (end - begin) * share).replace(second=0, microsecond=0)


def _until(one: RecordedSeries, split: datetime) -> RecordedSeries:
    return msgspec.structs.replace(one, minutes=one.minutes[: _minutes(split - one.start)])


def _since(one: RecordedSeries, split: datetime) -> RecordedSeries:
    gone = _minutes(split - one.start)
    return msgspec.structs.replace(one, start=one.start + gone * MINUTE, minutes=one.minutes[gone:])


def _minutes(span: timedelta) -> int:
    return max(0, span // MINUTE)
