"""Lines to write into ledgers: one of every type, and a strategy for any sequence of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from hypothesis import strategies as st

from gpukeeper.model.decision import Action, Result, Verdict
from gpukeeper.model.event import (
    BaselineSeen,
    Captured,
    Checkpoint,
    Closed,
    Complaint,
    Decided,
    Event,
    GpuChecked,
    Held,
    Intended,
    NodeMarked,
    Noticed,
    Notified,
    Passed,
    Paused,
    PolicyChange,
    PolicyChanged,
    Quarantined,
    Released,
    ResetTried,
    Restored,
    Resumed,
    Returned,
    Vanished,
    WarningSent,
)
from gpukeeper.model.gpu import CheckResult
from gpukeeper.model.subject import Hold, Memory, Outcome, Ref, State
from gpukeeper.model.unknown import Unknown

T = TypeVar("T")
NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
EVAL = Ref("docker", "node-3", "container", "eval", "c0ffee")
TRAIN = Ref("kubernetes", "prod/a", "trainjob", "run-7", "uid-7", "research")
GPU = Ref("host", "node-3", "gpu", "GPU-1", "GPU-1")
NODE = Ref("kubernetes", "prod/a", "node", "n3", "uid-n3")
# A key does not say where place ends and uid begins; the stores must not mix these two up.
SPLIT = Ref("kubernetes", "prod", "pod", "x", "a/uid-7")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def noticed(ref: Ref = EVAL, at: datetime = NOW, **more: Any) -> Noticed:
    given = {"incarnation": "1", "state": State.RUNNING, "started": at} | more
    return Noticed(at=at, ref=ref, owner="ann", **given)


def intended(step: str = "s1", ref: Ref = EVAL, at: datetime = NOW, **more: Any) -> Intended:
    given = {"pass_id": 1, "action": Action.STOP, "rule": "idle", "reason": "idle for 31m", "incarnation": "1"} | more
    return Intended(at=at, ref=ref, owner="ann", step=step, **given)


def closed(step: str = "s1", ref: Ref = EVAL, at: datetime = NOW, **more: Any) -> Closed:
    given = {"action": Action.STOP, "rule": "idle", "result": Result.RECLAIMED, "reason": "gone", "incarnation": "1"}
    return Closed(at=at, ref=ref, **({"owner": "ann", "step": step} | given | more))


def passed(pass_id: int = 1, at: datetime = NOW, **more: Any) -> Passed:
    given = {"seen": 3, "due": 1, "reclaimed": 1, "deferred": 0, "failed": 0} | more
    return Passed(at=at, pass_id=pass_id, platform="docker", place="node-3", **given)


def warned(ref: Ref = EVAL, at: datetime = NOW, delivered: bool = True) -> WarningSent:
    return WarningSent(
        at=at,
        ref=ref,
        owner="ann",
        rule="idle",
        stage=1,
        incarnation="1",
        limit=timedelta(minutes=30),
        delivered=delivered,
        channel="terminal",
        message="idle; it will be stopped in 10m",
    )


def held(ref: Ref = EVAL, at: datetime = NOW, until: timedelta = timedelta(hours=4)) -> Held:
    return Held(at=at, ref=ref, owner="ann", by="ann", hold=Hold("ann", at, at + until, "paper deadline"))


def gpu_checked(at: datetime = NOW, result: CheckResult = CheckResult.DIRTY) -> GpuChecked:
    return GpuChecked(at=at, ref=GPU, result=result, reason="900 MiB are in use by nobody", workload=EVAL.path)


EVERY_TYPE: tuple[Event, ...] = (
    noticed(),
    Vanished(at=NOW, ref=TRAIN),
    Decided(at=NOW, ref=EVAL, action=Action.STOP, rule="idle", verdict=Verdict.DUE, reason="idle for 31m", due=NOW),
    warned(),
    held(),
    Released(at=NOW, ref=EVAL, by="ann"),
    intended(),
    Captured(at=NOW, ref=EVAL, step="s1", evidence="20260310/eval-s1"),
    closed(gpus_back=4, gpu_hours=2.5, bytes_back=Unknown("not measured")),
    passed(),
    Paused(at=NOW, by="root", reason="maintenance"),
    Resumed(at=NOW, by="root"),
    Complaint(at=NOW, ref=EVAL, what="its TTL is garbled"),
    Restored(at=NOW, ref=EVAL, evidence="20260310/eval-s1", result="restored"),
    Notified(at=NOW, ref=EVAL, owner="ann", kind="stopped", key="s1", message="it was stopped", delivered=True),
    BaselineSeen(at=NOW, ref=GPU, memory_used_mib=615),
    gpu_checked(),
    ResetTried(at=NOW, ref=GPU, reason="900 MiB are in use by nobody"),
    Quarantined(at=NOW, ref=GPU, reason="900 MiB are in use by nobody"),
    NodeMarked(at=NOW, ref=NODE, by="ann", step="s1", action="quarantine", result="begun", reason="fans are loud"),
    Returned(at=NOW, ref=GPU, by="root"),
    PolicyChanged(at=NOW, digest="b", before="a", source="/p", changes=(PolicyChange("mode", "plan", "enforce"),)),
    Checkpoint(at=NOW, memories={EVAL.key: Memory(incarnation="9")}, present=(EVAL,), passes=4),
)

_refs = st.sampled_from((EVAL, TRAIN, SPLIT))
_steps = st.sampled_from(("s1", "s2", "s3"))
_times = st.integers(-3600, 3600).map(lambda s: NOW + timedelta(seconds=s, microseconds=s % 7))
_maybe = st.one_of(st.none(), _times)


def _line(make: Any, **parts: Any) -> st.SearchStrategy[Any]:
    return st.builds(make, at=_times, **parts)


def _noticed_lines() -> st.SearchStrategy[Any]:
    return _line(
        noticed,
        ref=_refs,
        incarnation=st.sampled_from(("", "1", "2")),
        state=st.one_of(st.sampled_from(State), st.just(Unknown("did not answer"))),
        started=_maybe,
        ended=_maybe,
        previous_end=_maybe,
        outcome=st.one_of(st.none(), st.sampled_from(Outcome)),
    )


def _outcomes() -> st.SearchStrategy[Any]:
    return _line(closed, step=_steps, ref=_refs, action=st.sampled_from(Action), result=st.sampled_from(Result))


def _checkpoints() -> st.SearchStrategy[Any]:
    return _line(
        Checkpoint,
        memories=st.dictionaries(_refs.map(lambda r: r.key), st.just(Memory(incarnation="8", ran=timedelta(hours=3)))),
        paused=st.booleans(),
        pause_reason=st.sampled_from(("", "maintenance")),
        present=st.lists(_refs, max_size=3).map(tuple),
        decided=st.dictionaries(_refs.map(lambda r: r.key), st.just("keep idle wait")),
        open=st.lists(_line(intended, step=_steps, ref=_refs), max_size=3).map(tuple),
        passes=st.integers(0, 9),
    )


any_lines = st.lists(
    st.one_of(
        _noticed_lines(),
        _outcomes(),
        _line(Vanished, ref=_refs),
        _line(
            Decided,
            ref=_refs,
            action=st.sampled_from(Action),
            rule=st.just("idle"),
            verdict=st.sampled_from(Verdict),
            reason=st.text(max_size=5),
        ),
        _line(warned, ref=_refs, delivered=st.booleans()),
        _line(held, ref=_refs),
        _line(Released, ref=_refs),
        _line(intended, step=_steps, ref=_refs),
        _line(passed, pass_id=st.integers(1, 9)),
        _line(Paused, reason=st.sampled_from(("", "maintenance"))),
        _line(Resumed),
        _line(gpu_checked, result=st.sampled_from(CheckResult)),
        _line(
            Notified, kind=st.just("stopped"), key=st.just("s1"), message=st.text(max_size=5), delivered=st.booleans()
        ),
        _line(BaselineSeen, ref=st.just(GPU), memory_used_mib=st.integers(0, 999)),
        _line(ResetTried, ref=st.just(GPU), reason=st.just("dirty")),
        _line(Quarantined, ref=st.just(GPU), reason=st.text(max_size=5)),
        _line(Returned, ref=st.just(GPU)),
        _line(PolicyChanged, digest=st.just("b"), before=st.just("a"), source=st.just("/p")),
        _checkpoints(),
    ),
    max_size=25,
)
