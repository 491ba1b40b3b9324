"""What of a pass admins should know."""

from __future__ import annotations

import msgspec

from gpukeeper.engine.messages import breaker_closed, for_admins, overdue_message
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.model.event import Complaint, GpuChecked, Passed, Quarantined, Vanished
from gpukeeper.model.gpu import CheckResult
from gpukeeper.model.policy import Mode
from gpukeeper.model.ports import MessageKind
from gpukeeper.model.subject import Ref
from gpukeeper.platforms.simulated.world import BEGIN
from tests.unit.engine.harness import DAY, HERE, Harness, virtual

REF = Ref("docker", "node-3", "container", "eval", "u1")
PASSED = Passed(
    at=BEGIN, pass_id=1, platform="docker", place="node-3", seen=60, due=41, reclaimed=0, deferred=0, failed=0
)


def test_a_complaint_about_a_workload_names_it() -> None:
    message = for_admins(Complaint(at=BEGIN, ref=REF, what="its TTL cannot be read"))
    assert message is not None
    assert (message.kind, message.about) == (MessageKind.COMPLAINT, REF.path)
    assert message.text == f"{REF.path}: its TTL cannot be read"
    other = for_admins(Complaint(at=BEGIN, ref=REF, what="its hold cannot be read"))
    assert other is not None
    assert message.key != other.key


def test_a_pass_that_fails_is_a_failure() -> None:
    message = for_admins(Complaint(at=BEGIN, what="no pass finished on docker/node-3 for 15m"))
    assert message is not None
    assert (message.kind, message.text) == (MessageKind.FAILURE, "no pass finished on docker/node-3 for 15m")


def test_a_gpu_that_stays_dirty() -> None:
    message = for_admins(Quarantined(at=BEGIN, ref=Ref("host", "node-3", "gpu", "0", "GPU-1"), reason="2 GiB in use"))
    assert message is not None
    assert message.kind is MessageKind.GPU
    assert "is quarantined: 2 GiB in use" in message.text


def test_the_breaker_is_one_message_however_its_figures_change() -> None:
    first, second = (for_admins(msgspec.structs.replace(PASSED, breaker=words)) for words in ("41 of 60", "42 of 61"))
    assert first is not None
    assert second is not None
    assert (first.kind, first.key, first.about) == (MessageKind.BREAKER, second.key, "docker/node-3")
    assert "41 of 60" in first.text
    assert breaker_closed(msgspec.structs.replace(PASSED, breaker="41 of 60")) is None
    assert breaker_closed(PASSED) == first.key


def test_everything_else_is_none_of_it() -> None:
    checked = GpuChecked(at=BEGIN, result=CheckResult.CLEANED, reason="")
    assert [for_admins(line) for line in (PASSED, Vanished(at=BEGIN, ref=REF), checked)] == [None] * 3


@virtual
async def test_due_work_in_mode_plan_is_overdue(b: Harness) -> None:
    b.ended("done", 3 * DAY)
    b.running("train", 3 * DAY)  # to be warned only: not counted
    report = await reclaim(b.keeper, b.platform, b.book, act=False)
    assert len(report.survey.due) == 2
    message = overdue_message(report, Mode.PLAN)
    assert message is not None
    assert (message.kind, message.about) == (MessageKind.OVERDUE, f"{HERE.platform}/{HERE.place}")
    assert ": 1 due, not applied because the mode is plan." in message.text
    assert overdue_message(report, Mode.ENFORCE) is None
    report.stopped = "a bug"
    assert overdue_message(report, Mode.PLAN) is None


@virtual
async def test_a_fleet_with_nothing_due_is_no_message(b: Harness) -> None:
    assert overdue_message(await reclaim(b.keeper, b.platform, b.book, act=False), Mode.PLAN) is None
