"""Rules of kube-janitor as a policy: what is translated, what is reported, and that nothing more is ever removed."""

from __future__ import annotations

from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.clients.kubernetes.wire import Meta
from gpukeeper.config.checks import RULE_NAMES
from gpukeeper.config.importing.janitor import (
    BY_PLURAL,
    NOT_OF_A_RULE,
    NOT_THEIRS,
    RECOGNIZED,
    JanitorOptions,
    import_rules,
)
from gpukeeper.config.importing.result import Imported
from gpukeeper.config.load import load_text
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, View
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import ClassSettings, Mode, Policy
from gpukeeper.model.subject import EMPTY, Marks, Ref
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME, KINDS
from gpukeeper.platforms.kubernetes.kinds.kind import INFRASTRUCTURE
from gpukeeper.platforms.kubernetes.marks import namespace_facts
from gpukeeper.platforms.kubernetes.settings import settings_of
from tests.effort import examples
from tests.unit.lifecycle.examples import DAY, HOUR, NOW, ended, subject

RULES = """\
rules:
  - id: temporary-pull-requests
    resources: [deployments, jobs]
    jmespath: "starts_with(metadata.name, 'pr-')"
    ttl: 4h
  - id: temp-namespace
    resources: ["*"]
    jmespath: "metadata.namespace == 'temp'"
    ttl: 3d
"""


def imported(text: str, **options: Any) -> Imported:
    return import_rules(text, "rules.yml", JanitorOptions(**options))


def policy_of(found: Imported) -> Policy:
    loaded = load_text(found.policy)
    assert loaded.policy.mode is Mode.PLAN
    assert loaded.warnings == ()
    return loaded.policy


def one_rule(condition: str = "@", ttl: str = "1d", resources: str = '["*"]', name: str = "a-rule") -> str:
    return f"  - id: {name}\n    resources: {resources}\n    jmespath: {condition!r}\n    ttl: {ttl}\n"


def whys(found: Imported) -> str:
    return "\n".join(f"{one.where}: {one.what}: {one.why}. {one.todo}" for one in found.not_translated)


class Finished(NamedTuple):
    kind: str
    namespace: str
    name: str
    labels: dict[str, str]
    ago: timedelta

    def removed_by(self, policy: Policy, marks: Marks | None = None) -> bool:
        namespaces = policy.scope["kubernetes"].namespaces
        if not any(fnmatchcase(self.namespace, one) for one in namespaces):
            return False
        facts = namespace_facts(Meta(name=self.namespace), settings_of(policy).environments, NOW)
        known = BY_NAME[self.kind]
        one = ended(
            self.ago,
            ref=Ref("kubernetes", "prod", self.kind, self.name, "u1", self.namespace),
            class_=known.class_ or "cluster",
            labels=self.labels,
            environment=facts.environment,
            owner=None,
            created=NOW - self.ago - HOUR,
            marks=marks or Marks(),
        )
        return decide(View(one, (), EMPTY), Rulebook(policy), NOW).action is Action.REMOVE


def test_a_rule_becomes_a_class_that_is_removed_after_its_ttl() -> None:
    policy = policy_of(imported("rules:\n" + one_rule("starts_with(metadata.name, 'pr-')", "4h", "[jobs]")))
    assert Finished("job", "lab", "pr-7", {}, 5 * HOUR).removed_by(policy)
    assert not Finished("job", "lab", "pr-7", {}, 3 * HOUR).removed_by(policy)
    assert not Finished("job", "lab", "train", {}, 9 * DAY).removed_by(policy)
    assert not Finished("trainjob", "lab", "pr-7", {}, 9 * DAY).removed_by(policy)
    assert not Finished("job", "kube-system", "pr-7", {}, 9 * DAY).removed_by(policy)


def test_a_rule_for_a_namespace_has_its_own_retention() -> None:
    found = imported(RULES)
    policy = policy_of(found)
    assert Finished("trainjob", "temp", "x", {}, 4 * DAY).removed_by(policy)
    assert not Finished("trainjob", "lab", "x", {}, 99 * DAY).removed_by(policy)
    assert Finished("job", "lab", "pr-1", {}, 5 * HOUR).removed_by(policy)
    assert not Finished("job", "temp", "pr-1", {}, DAY).removed_by(policy)  # one retention for a namespace
    assert "in namespace temp its finished work is kept for 3d" in whys(found)


def test_a_condition_that_cannot_be_translated_keeps_what_it_may_cover_also_from_later_rules() -> None:
    text = "rules:\n" + one_rule("!metadata.labels.keep", "30d", "[jobs]", "first") + one_rule("@", "1h", name="later")
    found = imported(text)
    policy = policy_of(found)
    assert not Finished("job", "lab", "x", {}, 9 * DAY).removed_by(policy)
    assert Finished("trainjob", "lab", "x", {}, 9 * DAY).removed_by(policy)
    assert "rules.yml:2: rule first: jmespath: !metadata.labels.keep" in whys(found)


def test_for_ever_protects_from_later_rules() -> None:
    text = "rules:\n" + one_rule("metadata.labels.keep", "forever", name="first") + one_rule("@", "1h", name="later")
    policy = policy_of(imported(text))
    assert not Finished("job", "lab", "x", {"keep": "yes"}, 9 * DAY).removed_by(policy)
    assert Finished("job", "lab", "x", {"keep": ""}, 9 * DAY).removed_by(policy)


def test_an_annotation_is_followed_and_not_limited() -> None:
    policy = policy_of(imported("rules:\n" + one_rule("@", "1h")))
    assert policy.foreign_ttl == ("janitor/ttl", "janitor/expires")
    assert not Finished("job", "lab", "x", {}, 90 * DAY).removed_by(policy, Marks(ttl=100 * DAY))
    for_ever = Marks(hold_until=NOW + 9999 * DAY)
    assert not Finished("job", "lab", "x", {}, 9999 * DAY).removed_by(policy, for_ever)


def test_running_work_is_limited_only_on_request() -> None:
    found = imported(RULES)
    assert all(one.max_runtime is None for name, one in policy_of(found).classes.items() if "janitor" in name)
    assert "kube-janitor also deletes objects that still run" in whys(found)
    limited = imported(RULES, running=True)
    classes = policy_of(limited).classes
    assert classes["janitor-temp-namespace"].max_runtime == classes["janitor-temp-namespace"].never_started == 3 * DAY
    assert classes["janitor-kept"].max_runtime is None
    assert "still run" not in whys(limited)


def test_a_runtime_that_is_too_short_for_a_warning_is_reported() -> None:
    found = imported("rules:\n" + one_rule(ttl="10m"), running=True)
    assert policy_of(found).classes["janitor-a-rule"].max_runtime is None
    assert "10m is too short to warn the owner" in whys(found)


def test_flags_narrow_the_policy() -> None:
    policy = policy_of(
        imported(
            "rules:\n" + one_rule("@", "1h"),
            include_namespaces=("lab", "temp"),
            exclude_namespaces=("temp",),
            include_resources=("jobs", "pods"),
            exclude_resources=("pods",),
        )
    )
    assert Finished("job", "lab", "x", {}, DAY).removed_by(policy)
    assert not Finished("job", "temp", "x", {}, DAY).removed_by(policy)
    assert not Finished("job", "other", "x", {}, DAY).removed_by(policy)
    assert not Finished("pod", "lab", "x", {}, DAY).removed_by(policy)
    assert not Finished("trainjob", "lab", "x", {}, DAY).removed_by(policy)


def test_what_gpukeeper_never_acts_on_is_reported() -> None:
    found = imported(
        "rules:\n" + one_rule(resources="[namespaces, daemonsets, jobs]"), include_resources=("configmaps",)
    )
    told = whys(found)
    assert "rule a-rule: namespaces: gpukeeper acts on workloads only" in told
    assert "rule a-rule: daemonsets: gpukeeper never acts on DaemonSets" in told
    assert "--include-resources: configmaps" in told
    assert not Finished("job", "lab", "x", {}, 99 * DAY).removed_by(policy_of(found))


def test_a_rule_that_covers_no_workload_removes_nothing() -> None:
    policy = policy_of(imported("rules:\n" + one_rule(resources="[configmaps]", ttl="1h")))
    assert not Finished("job", "lab", "x", {}, 99 * DAY).removed_by(policy)
    assert "janitor-a-rule" not in policy.classes


def test_gpukeeper_itself_and_daemons_are_left_alone() -> None:
    policy = policy_of(imported("rules:\n" + one_rule("@", "1h")))
    ours = {"app.kubernetes.io/name": "gpukeeper"}
    assert not Finished("job", "lab", "x", ours, 99 * DAY).removed_by(policy)
    assert not Finished("daemonset", "lab", "x", {}, 99 * DAY).removed_by(policy)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "rules.yml:1: this is not a rules file"),
        ("rules: {}", "rules.yml:1: this is not a rules file"),
        ("rules:\n- [", "rules.yml:"),
        ("rules: []\nmore: 1\n", 'rules.yml:2: unknown setting "more"'),
        ("rules:\n  - 7\n", "rules.yml:2: rule 1: this is not a mapping"),
        ("rules:\n  - id: a\n", "rules.yml:2: rule 1: resources is missing."),
        ("rules:\n" + one_rule() + "    tll: 1d\n", 'rules.yml:6: rule 1: unknown setting "tll". Did you mean "ttl"?'),
        ("rules:\n" + one_rule(ttl="1h30m"), 'rules.yml:5: rule 1: "1h30m" is not a TTL.'),
        ("rules:\n" + one_rule(ttl="60"), "rules.yml:5: rule 1: 60 is not a TTL."),
        ("rules:\n" + one_rule(ttl=""), "rules.yml:5: rule 1: ttl is missing."),
        ("rules:\n" + one_rule(name="UPPER"), 'rules.yml:2: rule 1: "UPPER" is not an id'),
        ("rules:\n" + one_rule(resources="jobs"), "rules.yml:3: rule 1: resources must be a list"),
        ("rules:\n" + one_rule() + one_rule(), 'rules.yml:6: the id "a-rule" is used twice, first in line 2.'),
    ],
)
def test_a_bad_file_is_refused_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        imported(text)
    assert expected in str(refused.value)
    assert "Nothing was written." in str(refused.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(UsageError, match=r"(?s)rules.yml:2.*rules.yml:9.*2 problems\."):
        imported("rules:\n" + one_rule(name="UPPER") + one_rule(ttl="soon", name="b"))


def test_an_exclusion_that_cannot_be_translated_is_refused() -> None:
    with pytest.raises(UsageError, match="exclude-namespaces"):
        imported(RULES, exclude_namespaces=("team-.*",))
    with pytest.raises(UsageError, match="names no namespace"):
        imported(RULES, include_namespaces=("team-.*",))
    assert "team-.*" in whys(imported(RULES, include_namespaces=("team-.*", "lab")))


def test_each_value_has_its_origin_beside_it() -> None:
    """The heads of sections have none."""
    lines = [line for line in imported(RULES).policy.splitlines() if not line.endswith(":")]
    assert all("# " in line for line in lines)
    assert any("# rule temp-namespace, line 6" in line for line in lines)


def test_rules_that_are_suspended_exist_and_the_classes_of_workloads_are_exempt() -> None:
    assert set(NOT_THEIRS) | set(NOT_OF_A_RULE) <= set(RULE_NAMES)
    assert {kind.class_ or "cluster" for kind in KINDS} - {INFRASTRUCTURE} == set(RECOGNIZED)


# A janitor of our own, to compare with

NAMESPACES = ("lab", "temp", "kube-system")
PLURALS = (*list(BY_PLURAL)[:4], "trainjobs")
CONDITIONS = {
    "@": lambda _: True,
    "metadata.namespace == 'temp'": lambda one: one.namespace == "temp",
    "starts_with(metadata.name, 'pr-')": lambda one: one.name.startswith("pr-"),
    "metadata.labels.team": lambda one: bool(one.labels.get("team")),
    "!metadata.labels.team": lambda one: not one.labels.get("team"),
    "metadata.labels.team == 'a' && metadata.namespace == 'lab'": lambda one: (
        one.labels.get("team") == "a" and one.namespace == "lab"
    ),
    "spec.paused": lambda one: one.name == "paused",  # whatever: it is not translated
}
TTLS = {"1h": HOUR, "1d": DAY, "3d": 3 * DAY, "forever": None, "0s": timedelta()}


class Rule(NamedTuple):
    resources: list[str]
    condition: str
    ttl: str


FILES = st.lists(
    st.builds(
        Rule,
        st.lists(st.sampled_from([*PLURALS, "*", "configmaps"]), min_size=1, max_size=3, unique=True),
        st.sampled_from(list(CONDITIONS)),
        st.sampled_from(list(TTLS)),
    ),
    max_size=4,
)
FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "include_namespaces": st.sampled_from([("all",), ("lab",), ("lab", "temp")]),
        "exclude_namespaces": st.sampled_from([("kube-system",), ("temp", "kube-system")]),
        "include_resources": st.sampled_from([("all",), ("jobs", "trainjobs")]),
        "exclude_resources": st.sampled_from([("events",), ("jobs",)]),
        "running": st.booleans(),
    },
)
OBJECTS = st.builds(
    Finished,
    st.sampled_from([BY_PLURAL[plural] for plural in PLURALS]),
    st.sampled_from(NAMESPACES),
    st.sampled_from(["pr-1", "train", "paused"]),
    st.sampled_from([{}, {"team": "a"}, {"team": ""}]),
    st.sampled_from([timedelta(minutes=30), 2 * HOUR, 2 * DAY, 9 * DAY]),
)


def written(rules: list[Rule]) -> str:
    listed = [one_rule(rule.condition, rule.ttl, str(rule.resources), f"r{i}") for i, rule in enumerate(rules)]
    return "rules:\n" + "".join(listed) if rules else "rules: []\n"


def janitor_deletes(one: Finished, rules: list[Rule], flags: dict[str, Any]) -> bool:
    given = JanitorOptions(**flags)
    plural = BY_NAME[one.kind].plural
    names, kinds = given.include_namespaces, given.include_resources
    if one.namespace in given.exclude_namespaces or plural in given.exclude_resources:
        return False
    if not ({"all", one.namespace} & set(names) and {"all", plural} & set(kinds)):
        return False
    for rule in rules:
        if {"*", plural} & set(rule.resources) and CONDITIONS[rule.condition](one):
            ttl = TTLS[rule.ttl]
            return ttl is not None and one.ago + HOUR > ttl  # it was created an hour before its end
    return False


@examples(0.5)
@given(rules=FILES, flags=FLAGS, things=st.lists(OBJECTS, min_size=1, max_size=12))
def test_an_import_is_valid_and_never_removes_what_kube_janitor_keeps(
    rules: list[Rule], flags: dict[str, Any], things: list[Finished]
) -> None:
    policy = policy_of(imported(written(rules), **flags))
    for one in things:
        if one.removed_by(policy):
            assert janitor_deletes(one, rules, flags), one


@examples(0.3)
@given(rules=FILES, flags=FLAGS, thing=OBJECTS)
def test_running_work_is_never_stopped_before_kube_janitor_would_delete_it(
    rules: list[Rule], flags: dict[str, Any], thing: Finished
) -> None:
    policy = policy_of(imported(written(rules), **flags))
    ref = Ref("kubernetes", "prod", thing.kind, thing.name, "u1", thing.namespace)
    class_ = BY_NAME[thing.kind].class_ or "cluster"
    limits = Rulebook(policy).settings(subject(ref=ref, class_=class_, labels=thing.labels)).limits
    assert isinstance(limits, ClassSettings)
    if not any(fnmatchcase(thing.namespace, one) for one in policy.scope["kubernetes"].namespaces):
        return  # nothing is done in a namespace that the policy does not cover, whatever the limits are
    for limit in (limits.max_runtime, limits.never_started):
        if limit is not None:
            assert flags.get("running")
            assert janitor_deletes(thing._replace(ago=limit), rules, flags)
