"""A hypothetical workload against a policy: the timeline is what the rules decide, and bad descriptions are refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpukeeper.config.load import load_text
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import Outcome, State
from gpukeeper.views.trial import TrialView, WorkloadWords, trial
from gpukeeper.wiring.hypothetical import hypothetical_workload, read_description

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
POLICY = """\
preset: ds01
mode: enforce
scope: {docker: {places: ["node-*"]}, kubernetes: {namespaces: ["team-*"]}}
classes:
  batch: {idle: 2h, max_runtime: 5d, after_idle: keep}
  jobs: {idle: 1h}
groups: {researcher: {members: [ann]}, faculty: {max_runtime: 4d}}
environments: {production: {failed: 30d}}
match:
  - {class: infrastructure, image: "exporter:*"}
  - {class: batch, name: "train-*"}
  - {class: jobs, namespace: "team-*", kind: trainjob}
"""


def tried(more: str = "", **facts: Any) -> TrialView:
    return tried_with(load_text(POLICY + more).policy, **facts)


def tried_with(given: Policy, **facts: Any) -> TrialView:
    words = {name: f"{one // MINUTE}m" if isinstance(one, timedelta) else one for name, one in facts.items()}
    assumed, policy = hypothetical_workload(read_description(WorkloadWords(**words)), given, NOW)
    return trial(policy, assumed, NOW)


def timeline(found: TrialView) -> list[tuple[timedelta, str, str]]:
    return [
        (one.at - NOW, f"{one.action} {one.stage}" if one.stage else str(one.action), one.rule)
        for one in found.timeline
    ]


def test_idle_work_is_warned_twice_stopped_and_removed() -> None:
    """30m of start grace, then 80 %, 95 % and all of the group's hour."""
    found = tried(owner="ann", label=["ds01.managed=true"])
    assert timeline(found) == [
        (78 * MINUTE, "warn 1", "idle"),
        (87 * MINUTE, "warn 2", "idle"),
        (90 * MINUTE, "stop", "idle"),
        (90 * MINUTE, "remove", "idle"),
    ]
    assert (found.class_, found.groups, found.end) == ("managed", ("researcher",), "The workload is then removed.")
    assert found.match is None


def test_the_built_in_times_keep_what_was_idle_for_a_day() -> None:
    shared = load_text("preset: shared-host\nmode: enforce\nscope: {docker: {}}\n").policy
    found = tried_with(shared, owner="ann", demand=True)
    assert timeline(found) == [
        (90 * MINUTE, "warn 1", "idle"),
        (5 * HOUR + 15 * MINUTE, "warn 2", "idle"),
        (5.5 * HOUR, "stop", "idle"),
        (DAY + 5.5 * HOUR, "remove", "retention"),
    ]
    assert "GPUs stay scarce; that changes no idle time (demand.idle_factor)." in found.assumes


@pytest.mark.parametrize(
    ("ran", "idle", "words"),
    [
        (30 * DAY, 3 * HOUR, "idle for 3h,"),
        (3 * HOUR, 3 * HOUR, "idle for 3h,"),
        (30 * DAY, 20 * DAY, "idle for at least 7d,"),
    ],
)
def test_the_reason_names_the_idle_time_that_was_described(ran: timedelta, idle: timedelta, words: str) -> None:
    """The rule itself searches for use only as far back as it needs to decide."""
    found = tried(owner="bob", running_for=ran, idle_for=idle)
    assert {step.reason.partition(" allowed")[0] for step in found.timeline if step.rule == "idle" and step.stage} == {
        words
    }


def test_what_passed_before_counts() -> None:
    found = tried(owner="bob", running_for=5 * HOUR, idle_for=20 * MINUTE)
    assert timeline(found)[0] == (4 * MINUTE, "warn 1", "idle")
    assert [step for step in timeline(found) if step[1] == "stop"] == [(14 * MINUTE, "stop", "idle")]


def test_what_stays_in_use_ends_at_its_maximum_runtime_and_is_kept_as_stopped_work_is() -> None:
    """A week of use is followed through, although each idle time is looked at again."""
    found = tried(owner="bob", name="train-7", busy=True)
    assert timeline(found) == [
        (0.75 * 5 * DAY, "warn 1", "max_runtime"),
        (0.9 * 5 * DAY, "warn 2", "max_runtime"),
        (5 * DAY, "stop", "max_runtime"),
        (6 * DAY, "remove", "retention"),
    ]
    assert (found.class_, found.match) == ("batch", 1)
    assert "The GPUs are in use all the time." in found.assumes


@pytest.mark.parametrize(
    ("facts", "when"),
    [
        ({"outcome": Outcome.SUCCEEDED}, DAY),
        ({"outcome": Outcome.FAILED, "ended_since": 2 * DAY}, 5 * DAY),
        ({"outcome": Outcome.FAILED, "environment": "production"}, 30 * DAY),
        ({"ttl": 3 * HOUR}, 3 * HOUR),
        ({"ttl": 90 * DAY}, 30 * DAY),
        ({"hold": 12 * HOUR, "ended_since": DAY}, 12 * HOUR),
        ({"outcome": Outcome.STOPPED}, DAY),
        ({"ended_since": 9 * DAY}, timedelta()),
    ],
)
def test_what_ended_is_removed_when_its_retention_is_over(facts: dict[str, Any], when: timedelta) -> None:
    (step,) = tried(owner="bob", state=State.ENDED, **facts).timeline
    assert (step.action.value, step.at - NOW) == ("remove", when)


def test_what_never_started_is_removed() -> None:
    assert timeline(tried(owner="bob", state=State.CREATED)) == [(30 * MINUTE, "remove", "never_started")]


def test_a_hold_puts_it_off_and_ends() -> None:
    held = tried(owner="bob", running_for=5 * HOUR, idle_for=HOUR, hold=3 * HOUR)
    assert held.now.rule == "hold"
    assert timeline(held)[0] == (3 * HOUR, "warn 1", "idle")


def test_scarce_gpus_make_it_sooner() -> None:
    facts: dict[str, Any] = {"owner": "bob", "running_for": 5 * HOUR}
    assert timeline(tried(**facts, demand=True))[0][0] < timeline(tried(**facts))[0][0]


def test_a_group_that_the_owner_is_not_in() -> None:
    found = tried(owner="bob", group="faculty", class_="managed", busy=True)
    assert found.groups == ("faculty",)
    assert (4 * DAY, "stop", "max_runtime") in timeline(found)


def test_a_class_that_is_named_comes_before_every_match() -> None:
    found = tried(owner="bob", name="train-7", class_="managed", running_for=HOUR)
    assert (found.class_, found.match) == ("managed", None)


def test_what_is_never_touched_reports_it() -> None:
    found = tried(owner="bob", image="exporter:4")
    assert (found.timeline, found.class_, found.match) == ((), "infrastructure", 0)
    assert found.end == "No action: class infrastructure is never touched."
    assert tried(owner="bob", gpus=0).end == "No action: it uses no GPU; its class is never touched."


def test_outside_the_scope_nothing_happens() -> None:
    assert tried(owner="bob").subject.ref.place == "node-1"
    assert tried(owner="bob", platform="docker/other").end == "No action: outside the policy's scope."


def test_the_platform_itself_gives_the_class() -> None:
    assert tried(owner="bob", label=("devcontainer.local_folder=x",)).class_ == "devcontainer"
    assert tried().class_ == "unknown"
    assert tried(platform="kubernetes", kind="daemonset", owner="bob").class_ == "infrastructure"
    assert tried(platform="kubernetes", kind="rayservice", owner="bob").class_ == "serving"


def test_on_a_cluster_a_stop_suspends_and_retention_counts_from_then() -> None:
    found = tried(platform="kubernetes", kind="TrainJob", owner="bob", running_for=5 * HOUR, idle_for=30 * MINUTE)
    assert found.subject.ref.path == "kubernetes/example/team-1/trainjob/example"
    assert timeline(found)[2:] == [(30 * MINUTE, "stop", "idle"), (DAY + 30 * MINUTE, "remove", "idle")]


def test_a_pod_of_its_own_is_gone_when_it_is_stopped() -> None:
    found = tried(platform="kubernetes", kind="pod", class_="jobs", owner="bob", running_for=5 * HOUR)
    assert timeline(found)[-1][1:] == ("stop", "idle")
    assert found.end == "Stopping removes the workload."


def test_what_is_only_reported_is_in_the_timeline() -> None:
    found = tried(platform="kubernetes", kind="job", owner="bob", running_for=5 * HOUR)
    assert timeline(found) == [(30 * MINUTE, "keep", "idle")]
    assert found.end == "No further actions."


def test_windows_move_every_step_to_the_times_at_which_passes_act() -> None:
    found = tried("schedule: {at: '*/10 3-5 * * *'}\n", owner="bob", running_for=5 * HOUR)
    local = [one.at.astimezone() for one in found.timeline]
    assert [at.strftime("%H:%M") for at in local] == ["03:00", "03:10", "03:20", "03:30"]
    assert [words for _, words, _ in timeline(found)] == ["warn 1", "warn 2", "stop", "remove"]
    assert any("schedule.at" in words for words in found.assumes)


def test_with_one_acting_pass_a_night_the_third_one_stops() -> None:
    """As the engine does it: tests/unit/engine/test_rare_passes.py."""
    found = tried("schedule: {at: '0 3 * * *'}\n", name="train-1", owner="bob", running_for=5 * HOUR)
    first = found.timeline[0].at
    assert [one.at - first for one in found.timeline] == [0 * DAY, 1 * DAY, 2 * DAY, 3 * DAY]
    assert [step[1:] for step in timeline(found)][:3] == [("warn 1", "idle"), ("warn 2", "idle"), ("stop", "idle")]


def test_what_it_assumes_is_reported() -> None:
    said = " ".join(tried(owner="bob").assumes)
    for words in ("stays idle", "warning is delivered", "budget (50 a pass, 600 an hour)", "pass runs every 5m"):
        assert words in said
    assert "mode is plan" not in said
    planned = tried_with(load_text(POLICY.replace("enforce", "plan")).policy, owner="bob")
    assert any("The mode is plan" in words for words in planned.assumes)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"platform": "ray"}, "only docker and kubernetes have workloads"),
        ({"class_": "bacth"}, 'no class "bacth". Did you mean "batch"?'),
        ({"group": "researchr", "owner": "bob"}, 'Did you mean "researcher"?'),
        ({"environment": "prod", "owner": "bob"}, 'no environment "prod"'),
        ({"platform": "kubernetes", "kind": "trainjobs"}, 'Did you mean "trainjob"?'),
        ({"kind": "job"}, "on docker every workload is a container"),
        ({"namespace": "lab"}, "docker has no namespaces"),
        ({"state": State.ENDED, "idle_for": HOUR}, "describe running work; this one is ended"),
        ({"state": State.RUNNING, "ended_since": HOUR}, "describe ended work; this one is running"),
        ({"running_for": HOUR, "idle_for": 2 * HOUR}, "cannot be idle for 2h and run for 1h only"),
        ({"running_for": HOUR, "idle_for": HOUR, "busy": True}, "busy and idle_for"),
        ({"hold": HOUR}, "hold needs owner"),
        ({"group": "faculty"}, "group needs owner"),
        ({"hold": 9 * DAY, "owner": "bob"}, "hold: a hold may last 1d at most"),
    ],
)
def test_a_description_that_cannot_be_is_refused(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        tried(**facts)
    assert words in str(caught.value)
