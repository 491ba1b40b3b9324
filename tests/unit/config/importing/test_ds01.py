"""The limits file of DS01 as a policy: never shorter than the original, and nothing dropped without a word."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.config.importing.ds01 import TYPES, import_limits
from gpukeeper.config.load import load_text
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
    assert set(policy.scope) == {"docker"}
    classes = policy.classes
    assert (classes["managed"].idle, classes["managed"].max_runtime) == (HOUR, 2 * DAY)  # those of researchers
    assert (classes["devcontainer"].idle, classes["devcontainer"].max_runtime) == (HOUR / 2, 7 * DAY)
    assert (classes["unknown"].max_runtime, classes["api"].max_runtime) == (None, None)
    assert classes["managed"].stop_grace == timedelta(seconds=90)
    assert {one.after_idle for one in classes.values()} == {AfterIdle.REMOVE}
    assert (policy.demand.above, policy.demand.idle_factor) == (0.8, 0.7)
    assert policy.retention.stopped == DAY  # theirs is shorter, and not meant for all containers
    assert missed == {
        *("groups.student", "groups.researcher", "defaults", "default_group", "access_control"),
        "defaults.container_hold_after_stop",
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
    assert missed == set()


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
