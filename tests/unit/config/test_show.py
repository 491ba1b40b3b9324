"""Every effective value with its origin, and what applies to one owner."""

from pathlib import Path

import pytest

from gpukeeper.config.load import Loaded, load_file, load_text
from gpukeeper.config.show import SECTIONS, Row, for_owner, part_for_owner, part_of, rows
from gpukeeper.model.errors import UsageError

POLICY = """\
preset: shared-host
scope: {docker: {}}
groups:
  student: {members: [ann, ben]}
  researcher:
    members: [ann]
    idle: 90m
  admin: {members: [dana]}
classes:
  managed: {idle: 40m}
exemptions:
  - {owner: ann, rules: [idle], until: 2026-09-01, reason: thesis}
  - {owner: ben, reason: mistake, refused: true}
  - {class: api, reason: always on}
budget: {per_pass: {count: 5, share: 10%}}
demand: {idle_factor: 50%}
"""


def loaded() -> Loaded:
    return load_text(POLICY)


def value_of(found: list[Row], setting: str) -> tuple[str, str]:
    (row,) = [row for row in found if row.setting == setting]
    return row.text, row.origin


def test_every_value_is_shown_with_its_origin() -> None:
    found = rows(loaded())
    assert value_of(found, "preset") == ("shared-host", "policy.yaml:1")
    assert value_of(found, "scope.docker.places") == ("*", "built-in")
    assert value_of(found, "retention.succeeded") == ("1d", "preset shared-host")
    assert value_of(found, "retention.max") == ("30d", "built-in")
    assert value_of(found, "classes.managed.idle") == ("40m", "policy.yaml:10")
    assert value_of(found, "classes.devcontainer.idle") == ("none", "built-in")
    assert value_of(found, "groups.researcher.idle") == ("1h30m", "policy.yaml:7")
    assert value_of(found, "groups.student.members") == ("ann, ben", "policy.yaml:4")
    assert value_of(found, "warnings.idle") == ("20%, 95%", "built-in")
    assert value_of(found, "budget.per_pass") == ("count 5, share 10%", "policy.yaml:15")
    assert value_of(found, "orphans") == ("true", "built-in")
    assert value_of(found, "match") == ("(none)", "built-in")
    assert value_of(found, "exemptions[0]") == (
        "owner ann: idle until 2026-09-01 23:59 UTC (thesis)",
        "policy.yaml:12",
    )
    assert value_of(found, "exemptions[1]") == ("owner ben: refused (mistake)", "policy.yaml:13")


def test_an_owner_sees_the_most_generous_group_and_where_it_is_written() -> None:
    """C8.10: idle, runtime, holds, exemption and demand values of one owner."""
    view = for_owner(loaded(), "ann")
    assert view.groups == ["student", "researcher"]
    managed = view.classes["managed"]
    assert value_of(managed, "idle") == ("1h30m", "group researcher, policy.yaml:7")
    assert value_of(managed, "idle_in_demand") == ("45m", "policy.yaml:16")
    assert value_of(managed, "max_runtime") == ("2d", "group researcher, preset shared-host")
    assert value_of(managed, "hold") == ("1d", "built-in")
    assert [row.text for row in view.exemptions] == [
        "owner ann: idle until 2026-09-01 23:59 UTC (thesis)",
        "class api: every rule (always on)",
    ]
    assert value_of(view.demand, "demand.above") == ("80%", "built-in")
    assert value_of(view.holds, "holds.total") == ("1d", "built-in")


def test_a_group_that_is_stricter_than_the_class_and_one_with_a_factor_are_named() -> None:
    assert value_of(for_owner(loaded(), "ben").classes["docker"], "max_runtime") == (
        "1d",
        "group student, preset shared-host",
    )
    doubled = load_text(POLICY.replace("admin: {members: [dana]}", "admin: {members: [dana], idle: 2x}"))
    assert value_of(for_owner(doubled, "dana").classes["managed"], "idle") == (
        "1h20m",
        "group admin (2x of 40m), policy.yaml:8",
    )
    assert value_of(rows(doubled), "groups.admin.idle") == ("2x", "policy.yaml:8")


def test_a_class_without_idle_rule_stays_without_and_infrastructure_is_untouchable() -> None:
    view = for_owner(loaded(), "ann")
    assert value_of(view.classes["devcontainer"], "idle") == ("none", "built-in")
    assert [row.setting for row in view.classes["infrastructure"]] == ["untouchable"]


def test_an_owner_without_group_has_the_limits_of_the_class() -> None:
    view = for_owner(loaded(), "eve")
    assert view.groups == []
    assert value_of(view.classes["managed"], "idle") == ("40m", "policy.yaml:10")


def test_an_admin_keeps_the_gpu_longer_after_a_stop() -> None:
    """C8.9: admin, GPU hold 1h"""
    managed = for_owner(loaded(), "dana").classes["managed"]
    assert value_of(managed, "hold_after_stop") == ("1h", "group admin, preset shared-host")


def test_exemptions_that_cannot_be_read_are_shown_as_such(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("scope: {docker: {}}\nexemptions_from: none.yaml\n")
    broken = load_file(path)
    (row,) = for_owner(broken, "ann").exemptions
    assert row.text.startswith("unknown: ")
    assert row.origin == f"{path}:2"
    assert rows(broken)[-1] == row


def test_a_broken_exemption_is_shown_with_its_mistake(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("scope: {docker: {}}\nexemptions_from: e.yaml\n")
    (tmp_path / "e.yaml").write_text("- {owner: ann, until: soon}\n")
    row = rows(load_file(path))[-1]
    assert row.text.startswith("owner ann: every rule, unknown: ")
    assert row.text.endswith("(no reason given)")


@pytest.mark.parametrize(
    ("section", "first", "count"),
    [
        ("retention", "retention.succeeded", 4),
        ("classes.managed", "classes.managed.idle", 13),
        ("classes.managed.idle", "classes.managed.idle", 1),
        ("budget", "budget.per_pass", 3),
        ("exemptions", "exemptions[0]", 3),
        ("exemptions[1]", "exemptions[1]", 1),
        ("loops", "loops", 1),
        ("match", "match", 1),
    ],
)
def test_a_section_is_its_rows_alone(section: str, first: str, count: int) -> None:
    every = rows(loaded())
    found = part_of(every, section)
    assert (found[0].setting, len(found)) == (first, count)
    assert all(row in every for row in found)


def test_a_section_is_a_whole_name() -> None:
    """Not the beginning of another one: `ray` has nothing of a class that is called rayon, `exemptions` no file."""
    assert [row.setting for row in part_of(rows(load_text(POLICY + "exemptions_from: more.yaml\n")), "exemptions_from")]
    assert not [row for row in part_of(rows(loaded()), "exemptions") if row.setting.startswith("exemptions_from")]


def test_every_section_of_a_policy_can_be_shown() -> None:
    every = rows(loaded())
    shown = [row for section in SECTIONS for row in part_of(every, section)]
    assert sorted(row.setting for row in shown) == sorted(row.setting for row in every)
    assert part_of(every, "exemptions_from") == []


@pytest.mark.parametrize(
    ("wrong", "near"), [("retentoin", "retention"), ("classes.managd", "classes.managed"), ("classesx", "classes")]
)
def test_an_unknown_section_is_answered_with_the_nearest_and_with_all(wrong: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        part_of(rows(loaded()), wrong)
    assert str(caught.value).startswith(f'unknown section "{wrong}". Did you mean "{near}"?')
    assert "Sections: preset, mode, scope, retention," in str(caught.value)


def test_a_section_of_one_owner() -> None:
    view = for_owner(loaded(), "ann")
    managed = part_for_owner(view, "classes.managed")
    assert managed.classes == {"managed": view.classes["managed"]}
    assert (managed.exemptions, managed.demand, managed.holds) == ([], [], [])
    idle = part_for_owner(view, "classes.managed.idle")
    assert [row.setting for row in idle.classes["managed"]] == ["idle"]
    assert part_for_owner(view, "classes").classes == view.classes
    assert part_for_owner(view, "demand").demand == view.demand
    assert part_for_owner(view, "exemptions").exemptions == view.exemptions


def test_what_does_not_depend_on_the_owner_is_no_section_there() -> None:
    with pytest.raises(UsageError, match=r"Sections: classes, exemptions, demand, holds, classes\.managed"):
        part_for_owner(for_owner(loaded(), "ann"), "retention")
