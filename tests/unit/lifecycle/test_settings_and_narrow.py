"""Which settings apply to a subject, and what the narrowing flags choose."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.lifecycle.settings import NO_LIMITS, Narrow, Rulebook, class_of, has_label, idle_times, limits_for
from gpukeeper.model.policy import ClassSettings, Group, Match, Retention
from gpukeeper.model.subject import Outcome, Ref, Shape, State
from gpukeeper.model.unknown import Unknown
from tests.unit.lifecycle.examples import DAY, HOUR, MINUTE, NOW, POLICY, ended, subject

TRITON = {"app": "triton", "image": "registry.lab/triton:24"}
RUN = Ref("kubernetes", "prod", "trainjob", "run-7", "u7", "research")
LOST = Unknown("lookup failed")


def with_(**changes: Any) -> Any:
    return msgspec.structs.replace(POLICY, **changes)


@pytest.mark.parametrize(
    "match",
    [
        {"label": "app=triton"},
        {"label": "app"},
        {"label": "app=tri*"},
        {"image": "registry.lab/*"},
        {"name": "ev*"},
        {"owner": "ann"},
        {"platform": "docker", "kind": "container"},
    ],
)
def test_a_match_gives_the_class(match: dict[str, str]) -> None:
    assert class_of(with_(match=(Match(class_="serving", **match),)), subject(labels=TRITON)) == "serving"


@pytest.mark.parametrize(
    "match",
    [
        {"label": "app=vllm"},
        {"label": "team"},
        {"image": "docker.io/*"},
        {"name": "eva"},
        {"owner": "bob"},
        {"platform": "docker", "namespace": "research"},
        {"label": "app=triton", "owner": "bob"},
    ],
)
def test_every_given_pattern_must_fit(match: dict[str, str]) -> None:
    assert class_of(with_(match=(Match(class_="serving", **match),)), subject(labels=TRITON)) == "managed"


def test_the_first_match_counts() -> None:
    policy = with_(match=(Match(class_="api", name="eval"), Match(class_="serving", name="*")))
    assert class_of(policy, subject()) == "api"


def test_a_pattern_for_what_does_not_exist_does_not_fit() -> None:
    policy = with_(match=(Match(class_="serving", image="*"),))
    assert class_of(policy, subject()) == "managed"


def test_a_label_may_be_requested_by_key_value_or_pattern() -> None:
    one = subject(labels={"app": "triton"})
    assert has_label(one, "app")
    assert has_label(one, "app=t*")
    assert not has_label(one, "app=")
    assert not has_label(one, "team")


def test_the_most_generous_group_wins() -> None:
    groups = {
        "student": Group(members=("ann",), idle=45 * MINUTE, max_runtime=30 * HOUR),
        "faculty": Group(members=("ann", "bob"), idle=2 * HOUR, hold_after_stop=HOUR),
        "admin": Group(members=("root",), idle=9 * HOUR),
    }
    limits = limits_for(with_(groups=groups), "managed", "ann")
    assert (limits.idle, limits.max_runtime, limits.hold_after_stop) == (2 * HOUR, 30 * HOUR, HOUR)


def test_a_group_may_be_stricter_than_its_class_and_the_most_generous_of_several_holds() -> None:
    student = Group(members=("ann", "ben"), idle=20 * MINUTE, max_runtime=12 * HOUR, hold_after_stop=5 * MINUTE)
    groups = {"student": student, "night": Group(members=("ann",), max_runtime=18 * HOUR)}
    ben, ann = (limits_for(with_(groups=groups), "managed", owner) for owner in ("ben", "ann"))
    assert (ben.idle, ben.max_runtime, ben.hold_after_stop) == (20 * MINUTE, 12 * HOUR, 5 * MINUTE)
    assert (ann.idle, ann.max_runtime, ann.hold_after_stop) == (20 * MINUTE, 18 * HOUR, 5 * MINUTE)


def test_a_factor_is_of_the_classs_own_value() -> None:
    groups = {
        "slow": Group(members=("ann",), idle=2.0, max_runtime=0.5),
        "strict": Group(members=("ann",), idle=HOUR / 4),
    }
    own, limits = POLICY.classes["managed"], limits_for(with_(groups=groups), "managed", "ann")
    assert own.idle is not None
    assert own.max_runtime is not None
    assert (limits.idle, limits.max_runtime) == (own.idle * 2, own.max_runtime / 2)
    assert limits_for(with_(groups=groups), "api", "ann").idle is None
    assert max(idle_times(with_(groups=groups))) == own.idle * 2


def test_limits_of_a_group_may_be_those_of_named_classes() -> None:
    """C8.4: dev containers were stopped at the maximum runtime of their owner's group."""
    own = ClassSettings(idle=HOUR, max_runtime=168 * HOUR)
    student = Group(members=("ann",), idle=2.0, max_runtime=24 * HOUR, classes=("managed",))
    policy = with_(classes={"managed": own, "devcontainer": own}, groups={"student": student})
    assert limits_for(policy, "managed", "ann").max_runtime == 24 * HOUR
    assert limits_for(policy, "devcontainer", "ann") == own
    assert sorted(idle_times(policy)) == [HOUR, HOUR, 2 * HOUR]


def test_every_verified_owner_may_be_in_a_group() -> None:
    groups = {"student": Group(members=("*",), idle=45 * MINUTE), "staff": Group(members=("bob",), idle=2 * HOUR)}
    policy = with_(groups=groups)
    assert [limits_for(policy, "managed", one).idle for one in ("ann", "bob")] == [45 * MINUTE, 2 * HOUR]
    claims = Rulebook(policy).settings(subject(owner="ann", owner_verified=False)).limits
    assert claims == POLICY.classes["managed"]
    assert limits_for(policy, "managed", None) == POLICY.classes["managed"]


def test_a_class_without_idle_time_stays_without() -> None:
    """C8.9: null idle became 15 min through a fallback."""
    groups = {"student": Group(members=("ann",), idle=30 * MINUTE)}
    assert limits_for(with_(groups=groups), "api", "ann").idle is None


def test_groups_do_not_change_who_is_not_in_them() -> None:
    groups = {"faculty": Group(members=("bob",), idle=2 * HOUR)}
    for owner in ("ann", None):
        assert limits_for(with_(groups=groups), "managed", owner) == POLICY.classes["managed"]


def test_a_class_the_policy_does_not_name_has_no_limits() -> None:
    assert limits_for(POLICY, "exotic", "ann") == NO_LIMITS == ClassSettings(never_started=None)


def test_an_unknown_class_has_unknown_limits() -> None:
    settings = Rulebook(POLICY).settings(subject(class_=LOST))
    assert isinstance(settings.limits, Unknown)
    assert settings.class_name == "unknown"


def test_an_unknown_owner_matters_only_where_owners_differ() -> None:
    assert Rulebook(POLICY).settings(subject(owner=LOST)).limits == POLICY.classes["managed"]
    groups = {"faculty": Group(members=("bob",), idle=2 * HOUR)}
    assert isinstance(Rulebook(with_(groups=groups)).settings(subject(owner=LOST)).limits, Unknown)


def test_environments_have_their_own_retention() -> None:
    book = Rulebook(with_(environments={"ci": Retention(succeeded=timedelta())}))
    of = {env: book.settings(subject(environment=env)).retention for env in ("ci", "staging", None, LOST)}
    assert of["ci"] == Retention(succeeded=timedelta())
    assert of["staging"] == of[None] == POLICY.retention
    assert isinstance(of[LOST], Unknown)
    assert Rulebook(POLICY).settings(subject(environment=LOST)).retention == POLICY.retention


def test_answers_are_remembered_for_the_same_class_owner_and_environment() -> None:
    book = Rulebook(POLICY)
    assert book.settings(subject()) is book.settings(ended())
    assert book.settings(subject()) is not book.settings(subject(owner="bob"))


@pytest.mark.parametrize(
    "narrow",
    [
        {},
        {"platform": "kubernetes"},
        {"platform": "kubernetes/prod"},
        {"platform": "kube*/*"},
        {"namespace": "res*"},
        {"kind": "trainjob"},
        {"kind": "TrainJob"},
        {"owner": "ann"},
        {"outcome": "succeeded"},
        {"label": "app=triton"},
        {"name": "run-*"},
        {"name": "trainjob/run-7"},
        {"older_than": 2 * DAY},
    ],
)
def test_a_narrowing_that_fits(narrow: dict[str, Any]) -> None:
    assert Narrow(**narrow).fits(ended(ref=RUN, labels=TRITON), NOW)


@pytest.mark.parametrize(
    "narrow",
    [
        {"platform": "docker"},
        {"platform": "kubernetes/pro"},
        {"namespace": "private"},
        {"kind": "job"},
        {"owner": "bob"},
        {"outcome": "failed"},
        {"label": "app=vllm"},
        {"name": "run"},
        {"older_than": 2 * DAY + MINUTE},
    ],
)
def test_a_narrowing_that_does_not_fit(narrow: dict[str, Any]) -> None:
    assert not Narrow(**narrow).fits(ended(ref=RUN, labels=TRITON), NOW)


def test_an_unknown_fact_fits_no_narrowing_on_it() -> None:
    assert not Narrow(owner="*").fits(ended(owner=LOST), NOW)
    assert not Narrow(owner="*").fits(ended(owner=None), NOW)
    assert not Narrow(outcome="*").fits(ended(outcome=LOST), NOW)


def test_age_counts_from_the_end_else_the_start_else_the_creation() -> None:
    older = Narrow(older_than=2 * HOUR)
    assert older.fits(subject(), NOW)
    assert older.fits(subject(started=None, state=State.CREATED), NOW)
    assert not older.fits(ended(ago=HOUR, started=NOW - DAY), NOW)
    assert not older.fits(subject(started=LOST, created=LOST), NOW)


def test_an_unknown_end_is_not_older_than_anything() -> None:
    """`--older-than 1d` asks for what ended a day ago; when this one ended is not known."""
    assert not Narrow(older_than=2 * HOUR).fits(ended(ended=LOST, outcome=Outcome.SUCCEEDED), NOW)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ("registry.lab/train", True),
        ("registry.lab/train:2.1", True),
        ("registry.lab/train:2.*", True),
        ("registry.lab/train:latest", False),
        ("registry.lab/train:2.10", False),
        ("registry.lab/tra", False),
        ("train", False),
        ("*/train", True),
        ("sha256:0123456789abcdef", True),
        ("0123456789ab", True),
        ("0123456789", False),
        ("ffffffffffff", False),
        ("", False),
    ],
)
def test_work_is_found_by_the_image_it_was_made_from(wanted: str, fits: bool) -> None:
    """C6.4: a name without a tag means every tag; an engine's own filter would mean `latest`."""
    labels = {"image": "registry.lab/train:2.1", "image_id": "sha256:0123456789abcdef" + "0" * 48}
    assert Narrow(image=wanted).fits(ended(ref=RUN, labels=labels), NOW) is fits
    assert not Narrow(image=wanted).fits(ended(ref=RUN, labels={}), NOW), "not known fits nothing"
    image = ended(ref=RUN, labels=labels, shape=Shape.IMAGE)
    assert not Narrow(image=wanted).fits(image, NOW), "the image itself is not work made from it"
