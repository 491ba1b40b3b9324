"""A replay that leaves out passes gives the very steps of one that evaluates every pass."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
import pytest

from gpukeeper.config.load import load_policy
from gpukeeper.engine.schedule import opening
from gpukeeper.lifecycle.replay import Passes, ReplayedRun, Variant, _Course, applied, covering, replay
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Decision, View
from gpukeeper.model.policy import Policy, Schedule
from gpukeeper.model.series import TraceTime
from gpukeeper.traces.synthetic import SyntheticTrace

BUILT_IN = load_policy(None).policy
UNLIMITED = msgspec.structs.replace(
    BUILT_IN, classes={name: msgspec.structs.replace(one, max_runtime=None) for name, one in BUILT_IN.classes.items()}
)
POLICIES = {
    "built-in": BUILT_IN,
    "5h": applied(UNLIMITED, Variant(timedelta(hours=5))),
    "45m, 20%": applied(UNLIMITED, Variant(timedelta(minutes=45), 20.0)),
    "seldom": msgspec.structs.replace(UNLIMITED, schedule=Schedule(every=timedelta(minutes=17))),
    "only cpu": msgspec.structs.replace(
        UNLIMITED, activity=msgspec.structs.replace(BUILT_IN.activity, signals=("cpu",))
    ),
    "only told": msgspec.structs.replace(
        UNLIMITED,
        classes={
            name: msgspec.structs.replace(one, idle=None, tell_when_large=True)
            for name, one in UNLIMITED.classes.items()
        },
    ),
}
HOURS = [SyntheticTrace(5, 20, 3).begin + timedelta(hours=hour) for hour in (5, 7, 20, 31, 32, 60)]


def replays(policy: Policy, trace: SyntheticTrace, scarce: Sequence[datetime]) -> list[ReplayedRun]:
    passes = Passes(policy.schedule.every, opening(policy.schedule), scarce=scarce)
    time = TraceTime(trace.begin, trace.end)
    return [
        replay(run, Rulebook(covering(policy, (run.platform,))), passes, time, trace.signals) for run in trace.runs()
    ]


@pytest.mark.parametrize("scarce", [(), HOURS], ids=["never scarce", "sometimes scarce"])
@pytest.mark.parametrize("name", POLICIES)
def test_no_step_is_missed(name: str, scarce: Sequence[datetime], monkeypatch: pytest.MonkeyPatch) -> None:
    policy, trace = POLICIES[name], SyntheticTrace(5, 20, 3)
    skipping = replays(policy, trace, scarce)

    def every_pass(self: _Course, view: View, decision: Decision, at: object) -> object:
        return self.passes.after(at)  # type: ignore[arg-type]

    monkeypatch.setattr(_Course, "_next", every_pass)
    complete = replays(policy, trace, scarce)
    assert [one.steps for one in skipping] == [one.steps for one in complete]
    assert any(one.steps for one in complete)
    assert sum(one.evaluated for one in skipping) < sum(one.evaluated for one in complete) / 2
