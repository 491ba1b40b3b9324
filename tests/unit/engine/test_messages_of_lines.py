"""Which lines of the ledger become messages, to whom, and what they contain."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from gpukeeper.engine.messages import for_admins, stopped_message
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, GpuChecked, NodeTested
from gpukeeper.model.gpu import CheckResult, Grade
from gpukeeper.model.ports import Category, MessageKind
from gpukeeper.model.subject import Ref

NOW = datetime(2026, 5, 1, tzinfo=UTC)
TRAIN = Ref("docker", "node-1", "container", "my train", "c0ffee")
GPU = Ref("host", "node-1", "gpu", "GPU-1", "GPU-1")
STOP = Closed(
    at=NOW,
    ref=TRAIN,
    owner="ann",
    step="s1",
    action=Action.STOP,
    rule="idle",
    result=Result.RECLAIMED,
    reason="idle for 4h; verified",
)


def test_a_stop_becomes_a_message_with_the_way_back() -> None:
    message = stopped_message(STOP)
    assert message is not None
    assert message.kind.category is Category.STOPPED
    assert (message.owner, message.ref, message.key) == ("ann", TRAIN, "s1")
    assert "was stopped: idle for 4h" in message.text
    assert "Once it was deleted, it comes back without what was written inside it" in message.text
    assert f"gpukeeper restore '{TRAIN.path}'" in message.text  # a name with a space is one word


@pytest.mark.parametrize(
    "change",
    [
        {"rule": "request", "requested_by": "ann"},
        {"rule": "request"},
        {"result": Result.CHANGED},
        {"action": Action.REMOVE},
        {"ref": None},
    ],
    ids=["requested by its owner", "requested, of an earlier version", "not done", "ended work", "no workload"],
)
def test_other_outcomes_are_no_message(change: dict[str, object]) -> None:
    assert stopped_message(msgspec.structs.replace(STOP, **change)) is None


def test_an_owner_is_notified_of_a_stop_that_another_person_requested() -> None:
    change = {"rule": "request", "requested_by": "root", "reason": "requested by root; verified"}
    message = stopped_message(msgspec.structs.replace(STOP, **change))
    assert message is not None
    assert message.owner == "ann"
    assert "was stopped: requested by root" in message.text


@pytest.mark.parametrize(
    ("result", "sent"), [(CheckResult.DIRTY, True), (CheckResult.RESET_FAILED, True), (CheckResult.CLEANED, False)]
)
def test_a_dirty_gpu_is_reported_to_admins(result: CheckResult, sent: bool) -> None:
    message = for_admins(GpuChecked(at=NOW, ref=GPU, result=result, reason="900 MiB are in use"))
    assert (message is not None) is sent
    assert message is None or message.kind.category is Category.ALERT


@pytest.mark.parametrize(("verdict", "sent"), [(Grade.FAIL, True), (Grade.PASS, False), (Grade.INCONCLUSIVE, False)])
def test_a_failed_acceptance_run_is_reported_to_admins(verdict: Grade, sent: bool) -> None:
    line = NodeTested(at=NOW, ref=GPU, run="r1", verdict=verdict, reason="matmul is too slow", device="cuda")
    message = for_admins(line)
    assert (message is not None) is sent
    assert message is None or (message.kind, message.key) == (MessageKind.ACCEPTANCE, "r1")
