"""The limits file of DS01 as a policy: never shorter than the original, and nothing dropped without a word."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.config.importing.ds01 import TYPES, Companions, import_limits
from gpukeeper.config.importing.result import Imported
from gpukeeper.config.load import load_text
from gpukeeper.lifecycle.settings import limits_for
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import AfterIdle, Mode, Policy
from tests.unit.config.importing.texts import as_yaml

FILE: dict[str, Any] = {
    "defaults": {"memory": "32g", "max_runtime": "24h", "idle_timeout": "0.5h", "container_hold_after_stop": "0.5h"},
    "default_group": "student",
    "groups": {"student": {"allow_full_gpu": True}, "researcher": {"max_runtime": "48h", "idle_timeout": "1h"}},
    "policies": {"high_demand_threshold": 0.8, "high_demand_idle_reduction": 0.3, "sigterm_grace_seconds": 90},
    "container_types": {
        "devcontainer": {"idle_timeout": "30m", "max_runtime": "168h"},
        "unknown": {"max_runtime": None},
    },
    "monitoring": {"infrastructure_containers": ["ds01-prometheus"]},
    "access_control": {"admin_users": ["eve"]},
}
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def imported(tree: dict[str, Any]) -> tuple[Policy, set[str]]:
    found = import_limits(as_yaml(tree), "limits.yaml")
    return load_text(found.policy, "policy").policy, {one.what for one in found.not_translated}


def test_limits_become_those_of_classes_and_nothing_acts() -> None:
    policy, missed = imported(FILE)
    assert (policy.preset, policy.mode) == ("ds01", Mode.PLAN)
    assert set(policy.scope) == {"host", "docker"}
    assert policy.owner_labels == ("ds01.user", "aime.mlc.USER")
    classes = policy.classes
    assert (classes["managed"].idle, classes["managed"].max_runtime) == (HOUR, 2 * DAY)  # those of researchers
    assert (classes["devcontainer"].idle, classes["devcontainer"].max_runtime) == (None, 7 * DAY)
    assert (classes["unknown"].max_runtime, classes["api"].max_runtime) == (None, None)
    assert classes["managed"].stop_grace == timedelta(seconds=90)
    assert {one.after_idle for one in classes.values()} == {AfterIdle.REMOVE}
    assert (policy.demand.above, policy.demand.idle_factor) == (0.8, 0.7)
    assert policy.retention.stopped == DAY  # theirs is shorter, and not meant for all containers
    assert missed == {
        *("groups.researcher", "defaults", "access_control", "defaults.container_hold_after_stop"),
        *("container_types", "container_types.devcontainer", "container_types.unknown", "limits.yaml"),
    }


def test_what_the_file_does_not_limit_has_no_limit() -> None:
    policy, _ = imported({"defaults": {}})
    for class_ in ("managed", *(one for names in TYPES.values() for one in names)):
        found = policy.classes[class_]
        assert (found.idle, found.max_runtime, found.never_started) == (None, None, None), class_
        assert found.after_idle is AfterIdle.KEEP


def test_a_longer_hold_after_the_stop_lengthens_retention() -> None:
    policy, _ = imported({"defaults": {"container_hold_after_stop": "60d"}})
    assert {policy.retention.succeeded, policy.retention.failed, policy.retention.stopped} == {60 * DAY}
    policy, missed = imported({"defaults": {"container_hold_after_stop": None}})
    assert {policy.retention.succeeded, policy.retention.failed, policy.retention.stopped} == {None}
    assert "defaults.container_hold_after_stop" not in missed


def test_older_files_have_hours_as_numbers() -> None:
    policy, _ = imported({"defaults": {"idle_timeout_h": 48, "max_runtime_h": 1.5}})
    assert (policy.classes["managed"].idle, policy.classes["managed"].max_runtime) == (2 * DAY, 1.5 * HOUR)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"rules": []}, "not a limits file of DS01"),
        ({"defaults": {"idle_timeout": "soon"}}, 'defaults.idle_timeout: "soon" is not a duration'),
        ({"defaults": {"idle_timeout": 0}}, "is not a duration"),
        ({"defaults": {"max_runtime": True}}, "is not a duration"),
        ({"defaults": {"max_runtime": -1}}, "is not a duration"),
        ({"defaults": [1]}, "defaults must be a mapping"),
        ({"defaults": {}, "groups": {"a": 3}}, "a must be a mapping"),
        ({"defaults": {}, "policies": {"high_demand_threshold": 80}}, "is not a share"),
        ({"defaults": {}, "monitoring": {"infrastructure_containers": ["*"]}}, "is not the beginning"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_line(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match="Nothing was written") as refused:
        import_limits(as_yaml(tree), "limits.yaml")
    assert words in str(refused.value)
    assert str(refused.value).startswith("limits.yaml:")


spans = (
    st.none() | st.integers(1, 9000).map(lambda one: f"{one}m") | st.floats(0.01, 500).map(lambda one: round(one, 2))
)
limits = st.fixed_dictionaries({}, optional={"idle_timeout": spans, "max_runtime": spans})


def seconds(value: object) -> float:
    if value is None:
        return float("inf")
    return float(value[:-1]) * 60 if isinstance(value, str) else float(value) * 3600  # type: ignore[arg-type]


@given(limits, st.dictionaries(st.sampled_from("abc"), limits), st.dictionaries(st.sampled_from([*TYPES]), limits))
def test_no_limit_is_shorter_than_in_the_original(
    defaults: dict[str, Any], groups: dict[str, Any], types: dict[str, Any]
) -> None:
    policy, _ = imported({"defaults": defaults, "groups": groups, "container_types": types})
    for theirs, ours in (("idle_timeout", "idle"), ("max_runtime", "max_runtime")):
        allowed = [one[theirs] for one in (defaults, *groups.values()) if theirs in one]
        rows = [("managed", allowed), *((name, [types[name][theirs]]) for name in types if theirs in types[name])]
        for class_, values in rows:
            limit = getattr(policy.classes[class_], ours)
            assert limit is None or limit.total_seconds() >= max(map(seconds, values), default=float("inf")) - 1


def with_files(tree: dict[str, Any], **beside: Any) -> tuple[Policy, Imported]:
    found = import_limits(as_yaml(tree), "limits.yaml", Companions(**beside))
    return load_text(found.policy, "policy").policy, found


def test_keys_name_their_unit() -> None:
    policies = {
        "grace_period_m": 45,
        "created_container_timeout_m": 40,
        "sigterm_grace_s": 90,
        "keepalive_max_duration_h": 48,
    }
    policy, _ = with_files({"defaults": {"idle_timeout_h": 0.5}, "policies": policies})
    managed = policy.classes["managed"]
    assert (managed.start_grace, managed.never_started) == (0.75 * HOUR, 40 * HOUR / 60)
    assert (managed.stop_grace, managed.hold, policy.hold_total) == (timedelta(seconds=90), 2 * DAY, 2 * DAY)
    assert policy.classes["serving"].never_started == 40 * HOUR / 60


def test_a_lower_threshold_of_anyone_is_taken_and_a_higher_one_is_not() -> None:
    """What is below it counts as idle: a higher one would stop more."""
    given = {"policies": {"gpu_idle_threshold": 5}, "groups": {"a": {"policies": {"gpu_idle_threshold": 3}}}}
    overrides = "ann: {policies: {cpu_idle_threshold: 9}}"
    policy, found = with_files({"defaults": {}, **given}, overrides=overrides)
    assert (policy.activity.gpu, policy.activity.cpu) == (3.0, 2.0)
    assert {"policies.gpu_idle_threshold", "ann.policies.cpu_idle_threshold"} <= {
        one.what for one in found.not_translated
    }


def test_a_group_without_a_limit_lifts_it_for_its_members_and_for_nobody_else() -> None:
    groups = {"student": {}, "lab": {"idle_timeout_h": None}}
    policy, _ = with_files({"defaults": {"idle_timeout_h": 1}, "groups": groups}, members={"student": "", "lab": "ann"})
    assert policy.classes["managed"].idle == HOUR
    assert isinstance(policy.exemptions, tuple)
    assert [(one.owner, one.class_, one.rules) for one in policy.exemptions if one.owner] == [
        ("ann", "managed", ("idle",))
    ]


def test_whose_members_are_not_known_are_not_limited_by_the_default_group() -> None:
    """Without the file of researchers they would be students."""
    groups = {"student": {}, "researcher": {"idle_timeout_h": 2}}
    tree = {"defaults": {"idle_timeout_h": 1}, "groups": groups}
    policy, found = with_files(tree, members={"student": "stu"})
    assert policy.groups["student"].members == ("stu",)
    assert policy.groups["researcher"].members == ()
    assert policy.classes["managed"].idle == 2 * HOUR
    assert "groups.researcher" in {one.what for one in found.not_translated}
    policy, _ = with_files(tree, members={"student": "stu", "researcher": "res"})
    assert (policy.groups["student"].members, policy.groups["researcher"].members) == (("*",), ("res",))


def test_a_limit_that_the_default_group_does_not_have_nobody_gets() -> None:
    groups = {"student": {"idle_timeout_h": None}, "lab": {"idle_timeout_h": 1}}
    policy, found = with_files({"defaults": {}, "groups": groups}, members={"student": "", "lab": "ann"})
    assert policy.classes["managed"].idle is None
    assert any("managed containers have no idle_timeout" in one.why for one in found.not_translated)


def test_an_override_is_of_the_defaults_and_not_of_the_group() -> None:
    tree = {"defaults": {"idle_timeout_h": 1, "max_runtime_h": 24}, "groups": {"lab": {"idle_timeout_h": 5}}}
    policy, _ = with_files(tree, members={"lab": "ann"}, overrides="ann: {max_runtime_h: 30}")
    assert limits_for(policy, "managed", "ann").idle == HOUR
    assert limits_for(policy, "managed", "ann").max_runtime == 30 * HOUR
    assert limits_for(policy, "docker", "ann") == policy.classes["docker"]
    assert "lab" not in policy.groups


def test_files_that_are_not_there_are_listed() -> None:
    _, found = with_files({"defaults": {}})
    assert {one.why for one in found.not_translated if one.what == "limits.yaml"} == {
        "there is no user-overrides.yaml beside it",
        "there is no lifecycle-exemptions.yaml beside it",
    }


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"members": {"lab": "ann\nb o b\n"}}, 'groups.lab: member "b o b" is not a user name'),
        ({"overrides": "ann: 3\n"}, "user-overrides.yaml:1: ann: ann must be a mapping"),
        ({"overrides": "ann: {idle_timeout_h: soon}\n"}, 'user-overrides.yaml:1: ann.idle_timeout_h: "soon" is not'),
        ({"overrides": "a: [\n"}, "user-overrides.yaml:"),
        ({"exemptions": "exemptions: [{exempt_from: [idle_timeout_h]}]"}, "it has no user name"),
        ({"exemptions": "exemptions: [{username: ann, exempt_from: [sleep]}]"}, '"sleep" is not idle_timeout_h'),
        (
            {"exemptions": "exemptions: [{username: ann, exempt_from: [idle_timeout_h], expires_on: soon}]"},
            "is not a date",
        ),
    ],
)
def test_a_file_beside_it_that_cannot_be_read_is_refused_with_its_line(beside: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match="Nothing was written") as refused:
        with_files({"defaults": {}, "groups": {"lab": {}}}, **beside)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("written", "until"),
    [
        ("2026-06-30T12:00:00", datetime(2026, 6, 30, 12, tzinfo=UTC)),
        ("2026-06-30T12:00:00+02:00", datetime(2026, 6, 30, 10, tzinfo=UTC)),
        ("2026-06-30", datetime(2026, 6, 30, 23, 59, 59, 999999, tzinfo=UTC)),
    ],
)
def test_the_end_of_an_exemption(written: str, until: datetime) -> None:
    """DS01 ignores an exemption whose time has no zone, and stops the exempt."""
    text = f"exemptions: [{{username: ann, exempt_from: [idle_timeout], expires_on: '{written}'}}]"
    policy, _ = with_files({"defaults": {}}, exemptions=text)
    assert isinstance(policy.exemptions, tuple)
    assert (policy.exemptions[0].owner, policy.exemptions[0].rules, policy.exemptions[0].until) == (
        "ann",
        ("idle",),
        until,
    )
