"""Which jobs several nodes run as one."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet import group_jobs
from gpukeeper.acceptance.fleet.group_jobs import GroupSettings, counts, jobs, settings_of
from gpukeeper.model.errors import UsageError


def test_numbers_of_nodes_double_until_all_of_them() -> None:
    assert counts(1) == ()
    assert counts(2) == (2,)
    assert counts(3) == (2, 3)
    assert counts(8) == (2, 4, 8)
    assert counts(512) == (2, 4, 8, 16, 32, 64, 128, 256, 512)


def test_collectives_over_growing_numbers_come_first_then_training_over_all() -> None:
    """C1.2, C2.2: both kinds over all nodes."""
    found = jobs(range(5), GroupSettings(), RunRequest())
    assert [(one.probe, len(one.members)) for one in found] == [
        ("collectives", 2),
        ("collectives", 4),
        ("collectives", 5),
        ("ddp", 5),
        ("throughput", 5),
    ]
    assert [one.number for one in found] == [1, 2, 3, 4, 5]
    assert found[0].params["ops"] == ["all_reduce"]
    assert found[2].params["ops"] == ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
    assert found[2].params["sizes"] == [2**30]


def test_a_cpu_gets_small_sizes_and_the_users_settings_count() -> None:
    wish = RunRequest(device="cpu", params={"ddp": {"epochs": 3}, "group": {"probes": ["ddp"], "deadline_s": 20}})
    found = jobs((0, 1), settings_of(wish), wish)
    assert [one.probe for one in found] == ["ddp"]
    assert found[0].params["epochs"] == 3
    assert found[0].params["samples"] == 1024
    assert found[0].deadline_s == 20


def test_one_node_is_no_group() -> None:
    assert jobs((0,), GroupSettings(), RunRequest()) == ()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"probes": ["nonsense"]}, 'unknown probe "nonsense"'),
        ({"probes": []}, "probes is empty"),
        ({"deadline_s": 0}, "deadline_s must be 1 or more"),
        ({"growing": "perhaps"}, "--set group"),
    ],
)
def test_settings_that_cannot_work_are_refused(params: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settings_of(RunRequest(params={"group": params}))


def test_every_setting_is_a_parameter_of_the_check() -> None:
    assert set(group_jobs.CHECK.servings[0].params) == set(GroupSettings.__struct_fields__)
