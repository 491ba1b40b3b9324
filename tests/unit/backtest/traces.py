"""Hand-made runs: a number of minutes at a level, one after the other."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from gpukeeper.engine.schedule import opening
from gpukeeper.lifecycle.replay import Passes, ReplayedRun, covering, replay
from gpukeeper.lifecycle.replay_outcome import JudgedRun, Judging, Usage, judge
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.policy import ClassSettings, Policy, Warnings
from gpukeeper.model.series import BadRow, MadePasses, RecordedRun, RecordedSeries, Signal, TraceTime
from gpukeeper.model.subject import PlaceKey

T0 = datetime(2026, 3, 2, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
END = T0 + 10 * DAY
GAP = float("nan")
POLICY = Policy(
    classes={"batch": ClassSettings(idle=HOUR, start_grace=timedelta())}, warnings=Warnings(idle=(0.80, 0.95))
)
JUDGING = Judging(horizon=2 * DAY, restart=HOUR)


def minutes(*parts: tuple[timedelta, float]) -> array[float]:
    return array("f", [level for span, level in parts for _ in range(span // MINUTE)])


def run(*parts: tuple[timedelta, float], gpus: int = 1, ended: bool = True, **more: object) -> RecordedRun:
    """In the same way on every GPU. It ended with its last minute, or runs until the trace ends."""
    values = minutes(*parts)
    devices = tuple(f"GPU-{n}" for n in range(gpus))
    given: dict[str, object] = {"owner": "ann", "class_": "batch", **more}
    return RecordedRun(
        name="a",
        started=T0,
        ended=T0 + len(values) * MINUTE if ended else None,
        devices=devices,
        series=tuple(RecordedSeries(Signal.GPU, device, T0, values) for device in devices),
        **given,  # type: ignore[arg-type]
    )


class Listed:
    """A trace of these runs."""

    source, rows, bad_count = "hand-made", 0, 0
    bad: tuple[BadRow, ...] = ()

    def __init__(
        self,
        runs: Sequence[RecordedRun],
        signals: frozenset[Signal] = frozenset({Signal.GPU}),
        end: datetime = END,
        made: Mapping[PlaceKey, MadePasses] | None = None,
    ) -> None:
        self._runs, self.signals, self.begin, self.end, self.made = runs, signals, T0, end, made or {}

    def runs(self) -> Iterator[RecordedRun]:
        return iter(self._runs)


def replayed(
    one: RecordedRun, policy: Policy = POLICY, end: datetime = END, signals: Collection[Signal] = (Signal.GPU,)
) -> ReplayedRun:
    passes = Passes(policy.schedule.every, opening(policy.schedule))
    return replay(one, Rulebook(covering(policy, (one.platform,))), passes, TraceTime(T0, end), signals)


def judged(one: RecordedRun, policy: Policy = POLICY, end: datetime = END, judging: Judging = JUDGING) -> JudgedRun:
    return judge(Usage(one, judging, TraceTime(T0, end)), replayed(one, policy, end))
