"""The list of kinds, and a kind that says nothing about itself."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpukeeper.model.decision import Refused
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME, KINDS, known_owner, makes_runs
from gpukeeper.platforms.kubernetes.kinds.kind import NOT_ENDED, Kind
from gpukeeper.platforms.kubernetes.marks import TranslationSettings, read
from gpukeeper.platforms.kubernetes.writes import cannot_remove, cannot_stop
from tests.unit.platforms.kubernetes.examples import NOW, condition, pod, root

BARE = Kind(kind="Job", plural="jobs", group="example.com", versions=("v1",), called="examplejob")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_list_has_children_before_the_kinds_that_make_them(kind: Kind) -> None:
    assert all(KINDS.index(child) < KINDS.index(kind) for child in kind.below)


def test_no_two_kinds_have_one_name_and_each_is_found_as_an_owner() -> None:
    assert len(BY_NAME) == len(KINDS)
    for kind in KINDS:
        assert known_owner(f"{kind.group}/v1" if kind.group else "v1", kind.kind) is kind
    assert known_owner("example.com/v1", "Job") is None
    assert makes_runs("batch/v1", "CronJob")


def test_a_kind_that_says_nothing_is_offered_no_verb_that_needs_its_word() -> None:
    thing = root(status={"conditions": [condition("Complete", None)]})
    assert BARE.ending(thing, NOW) == NOT_ENDED
    assert isinstance(cannot_stop(BARE, thing), Refused)
    assert isinstance(BARE.trim(thing, [pod()]), Refused)
    assert isinstance(BARE.suspend_manifest({}, {}), Refused)
    assert BARE.clean_pods(thing.spec, everything=True) is None
    assert cannot_remove(BARE, thing) is None  # it can be removed; without an end it is never due
    assert BARE.ttl(root(spec={"ttlSecondsAfterFinished": 60}).spec, in_crd=True) is None
    assert BARE.parts_query([thing]) is None


def test_a_kind_of_a_name_that_another_group_has_is_distinguished() -> None:
    assert BARE.name == "examplejob"
    marks, _ = read(BARE, root().metadata, None, NOT_ENDED, NOW, TranslationSettings())
    assert "annotate --overwrite jobs.example.com " in marks.hold_with


@pytest.mark.parametrize(
    ("names", "minutes"),
    [
        (("job", "jobset", "trainjob"), 1),
        (("pytorchjob", "tfjob", "mpijob", "xgboostjob", "paddlejob", "jaxjob"), 2),
        (("rayjob", "raycluster", "rayservice", "deployment", "statefulset", "daemonset", "replicaset", "pod"), None),
    ],
)
def test_a_ttl_is_read_where_the_kind_has_it(names: tuple[str, ...], minutes: int | None) -> None:
    spec = root(spec={"ttlSecondsAfterFinished": 60, "runPolicy": {"ttlSecondsAfterFinished": 120}}).spec
    for name in names:
        assert BY_NAME[name].ttl(spec, in_crd=True) == (None if minutes is None else timedelta(minutes=minutes))
