"""From file to policy: values, merging, origins, digest, lookup."""

import grp
import inspect
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from ruamel.yaml import YAML

from gpukeeper.config import sections
from gpukeeper.config.layers import PRESETS, Layered
from gpukeeper.config.load import Loaded, load_builtin, load_file, load_policy, load_text
from gpukeeper.config.machine import members_of
from gpukeeper.config.sections import PLATFORMS, PolicyFile, as_written, settings_of
from gpukeeper.model import policy as model
from gpukeeper.model.errors import PolicyError
from gpukeeper.platforms.kubernetes.settings import KubernetesSettings
from gpukeeper.platforms.ray.settings import RaySettings

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "policies").glob("*.yaml"))
H, D = timedelta(hours=1), timedelta(days=1)


def load(text: str) -> Loaded:
    return load_text("scope: {docker: {}}\n" + text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_valid(path: Path) -> None:
    assert load_file(path).warnings == ()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= len(PRESETS)


@pytest.mark.parametrize(
    "setting",
    sorted({*settings_of(PolicyFile)} - {*settings_of(model.Settings), "exemptions", "exemptions_from"}),
)  # what file and policy share is passed on as a whole; exemptions have a file of their own
def test_every_setting_of_the_file_reaches_the_policy(setting: str) -> None:
    """One that is read and not passed on would silently have no effect."""
    assert f"file.{setting}" in inspect.getsource(sections), f"config/sections.py does not use {setting}"


def test_the_built_in_values_are_the_models() -> None:
    """Two places with defaults would drift apart."""
    loaded = load("").policy
    plain = msgspec.structs.replace(loaded, digest="", scope={}, classes={}, kept={})
    own = {"kubernetes": KubernetesSettings(), "ray": RaySettings()}
    assert plain == model.Policy(platforms=own)


def test_how_long_trees_are_kept_follows_from_the_sections() -> None:
    """C10.9: each category has its own switch; a full disk shortens only what is cheap to lose."""
    kept = load("ray: {sessions: 2d, logs: none}\nreports: {older_than: 30d}\n").policy.kept
    assert kept == {
        "unfinished": model.Kept(older_than=timedelta()),
        "dead-session": model.Kept(older_than=2 * D, under_pressure=H),
        "dead-logs": model.Kept(older_than=None, under_pressure=D),
        "report": model.Kept(older_than=30 * D),
    }


def test_temporary_directories_of_ray_nodes_are_judged_only_where_ray_is_covered() -> None:
    given = "ray: {roots: [/tmp, /scratch/tmp], names: [tmp*], keep: [tmp-keep*], above: 1GB, older_than: 2h}\n"
    assert load(given).policy.temporary == ()
    wanted = {"names": ("tmp*",), "keep": ("tmp-keep*",), "above": 10**9, "older_than": 2 * H, "platform": "ray"}
    assert load_text("scope: {ray: {}}\n" + given).policy.temporary == tuple(
        model.Temporary(root=root, **wanted) for root in ("/tmp", "/scratch/tmp")
    )


def test_a_policy_of_everything() -> None:
    policy = load(
        """\
mode: enforce
ttl: {own: false, foreign: [janitor/ttl]}
at_finish: All
budget: {per_pass: {count: 20, share: 10%}, per_hour: 50%}
breaker: {floor: 3}
orphans: false
loops: 4
holds: {total: 2d, within: 7d}
admins: [root, dana]
capture: {what: [logs], to: /srv/evidence}
schedule: {at: "0 2 * * *"}
ledger: {keep: 30d}
match: [{class: serving, label: app=triton}]
activity: {gpu: 7.5%, signals: [cpu]}
temporary: [{root: /scratch/, names: ["tmp*"]}]
exemptions: [{owner: ann, class: api, rules: [idle], until: 2026-09-01, reason: thesis}]
"""
    ).policy
    assert policy.mode is model.Mode.ENFORCE
    assert (policy.own_ttl, policy.foreign_ttl) == (False, ("janitor/ttl",))
    assert policy.at_finish is model.AtFinish.ALL
    assert policy.budget.per_pass == model.Amount(count=20, share=0.1)
    assert policy.budget.per_hour == model.Amount(share=0.5)
    assert policy.breaker.floor == 3
    assert (policy.orphans, policy.loops) == (False, 4)
    assert (policy.hold_total, policy.hold_within) == (2 * D, 7 * D)
    assert policy.admins == ("root", "dana")
    assert (policy.capture.what, policy.capture.to) == (("logs",), "/srv/evidence")
    assert policy.schedule.at == "0 2 * * *"
    assert policy.ledger.keep == 30 * D
    assert policy.match == (model.Match(class_="serving", label="app=triton"),)
    assert (policy.activity.gpu, policy.activity.signals) == (7.5, ("cpu",))
    assert policy.temporary == (model.Temporary(root="/scratch", names=("tmp*",)),)
    assert policy.exemptions == (
        model.Exemption(
            reason="thesis",
            owner="ann",
            class_="api",
            rules=("idle",),
            until=datetime(2026, 9, 1, 23, 59, 59, 999999, tzinfo=UTC),
        ),
    )


def test_retention_manual_keeps_until_a_user_removes_it() -> None:
    loaded = load("retention: manual\n")
    kept = loaded.policy.retention
    assert kept.succeeded is kept.failed is kept.stopped is None
    assert loaded.origin(("retention", "failed")) == "policy.yaml:2"


def test_none_and_never_are_no_limit() -> None:
    classes = load(
        "classes: {a: {idle: none}, b: {idle: Never, max_runtime: never, never_started: none}}\n"
    ).policy.classes
    assert classes["a"].idle is classes["b"].idle is classes["b"].max_runtime is classes["b"].never_started is None


def test_an_environment_inherits_what_it_does_not_say() -> None:
    loaded = load("preset: production\nenvironments:\n  staging: {succeeded: 1d}\n  audit: manual\n")
    staging, audit = loaded.policy.environments["staging"], loaded.policy.environments["audit"]
    assert (staging.succeeded, staging.failed) == (D, 30 * D)
    assert audit.succeeded is audit.failed is audit.stopped is None
    assert loaded.origin(("environments", "staging", "failed")) == "preset production"
    assert loaded.origin(("environments", "staging", "succeeded")) == "policy.yaml:4"


def test_mappings_are_merged_and_lists_replaced() -> None:
    policy = load("preset: shared-host\ngroups:\n  student: {members: [ben]}\nadmins: [dana]\n").policy
    assert policy.groups["student"].members == ("ben",)
    assert policy.groups["student"].max_runtime == 24 * H
    assert set(policy.groups) == {"student", "researcher", "faculty", "admin"}
    assert policy.admins == ("dana",)


def test_an_empty_mapping_changes_nothing() -> None:
    assert load("classes: {managed: {}}\nretention: {}\nbudget: {}\n").policy.digest == load("").policy.digest


def test_every_value_knows_where_it_came_from() -> None:
    loaded = load("preset: shared-host\nclasses:\n  managed:\n    idle: 45m\n  mine: {max_runtime: 2d}\n")
    assert loaded.origin(("classes", "managed", "idle")) == "policy.yaml:5"
    assert loaded.origin(("classes", "managed", "max_runtime")) == "built-in"
    assert loaded.origin(("classes", "mine", "max_runtime")) == "policy.yaml:6"
    assert loaded.origin(("classes", "mine", "grace")) == "built-in"
    assert loaded.origin(("groups", "student", "max_runtime")) == "preset shared-host"
    assert loaded.origin(("scope", "docker")) == "policy.yaml:1"


def test_a_list_or_value_that_is_replaced_leaves_no_origin_of_its_parts() -> None:
    layers = Layered()
    layers.put({"a": [1, 2], "b": {"c": 3}}, {("a",): "one", ("a", 0): "one", ("a", 1): "one", ("b", "c"): "one"})
    layers.put({"a": [4], "b": 5}, {("a",): "two", ("a", 0): "two", ("b",): "two"})
    assert layers.tree == {"a": [4], "b": 5}
    assert layers.origins == {("a",): "two", ("a", 0): "two", ("b",): "two"}


def test_the_digest_depends_on_values_only() -> None:
    one = load("mode: plan\nretention: {succeeded: 24h}\n").policy
    other = load("# a remark\nretention:\n  succeeded: 1d\n").policy
    assert one.digest == other.digest
    assert len(one.digest) == 12
    assert load("retention: {succeeded: 2d}\n").policy.digest != one.digest
    assert load("mode: enforce\n").policy.digest != one.digest


def test_the_digest_of_the_same_policy_stays_the_same() -> None:
    """Not for ever: a new setting changes it. But never by chance."""
    digests = {load_builtin(PLATFORMS).policy.digest for _ in range(3)}
    assert len(digests) == 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_effective_values_are_a_policy_file_with_the_same_meaning(path: Path, tmp_path: Path) -> None:
    loaded = load_file(path)
    written = tmp_path / "effective.yaml"
    effective = as_written(loaded.file)
    effective["notify"]["owners"] = [
        {one.kind: list(one.words)} for one in loaded.policy.notify.owners
    ]  # not secret here
    with written.open("w") as out:
        YAML(typ="safe", pure=True).dump(_without_none(effective), out)
    assert load_file(written).policy == loaded.policy


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def test_a_unix_group_is_expanded_when_the_policy_is_read() -> None:
    name = grp.getgrgid(0).gr_name
    group = load(f"groups: {{staff: {{unix_group: {name}, members: [ann]}}}}\n").policy.groups["staff"]
    assert group.unix_group == name
    assert group.members[0] == "ann"
    assert "root" in group.members
    assert members_of("no-such-group") is None


def test_covering_every_namespace_and_enforcing_is_allowed_with_a_warning() -> None:
    """C6.1"""
    text = 'mode: enforce\nscope: {kubernetes: {namespaces: ["*"]}}\n'
    (warning,) = load_text(text).warnings
    assert (
        warning == "scope.kubernetes covers all namespaces and the mode is enforce: it acts in all of them, unattended."
    )
    assert load_text(text.replace("enforce", "plan")).warnings == ()


def test_deleting_every_name_below_a_root_is_allowed_with_a_warning() -> None:
    loaded = load('temporary: [{root: /scratch/tmp, names: ["*"]}]\n')
    assert loaded.warnings == ("temporary: every tree below /scratch/tmp may be deleted, regardless of its name.",)


NIGHT = 'preset: ds01\nscope: {docker: {}}\nschedule: {at: "0 3 * * *"}\n'


@pytest.mark.parametrize("at", ["0 3 * * *", "0 3 * * 1-5", "*/10 3-5 * * 0"])
def test_a_schedule_in_which_warnings_stay_valid_has_no_warning(at: str) -> None:
    assert load_text(NIGHT.replace("0 3 * * *", at)).warnings == ()


@pytest.mark.parametrize("at", ["0 3 * * 0", "0 3 * * 1,2", "0 3 1 * *", "0 0 29 2 *"])
def test_a_schedule_in_which_every_warning_expires_before_the_next_pass_is_allowed_with_a_warning(at: str) -> None:
    (warning,) = load_text(NIGHT.replace("0 3 * * *", at)).warnings
    assert warning == (
        f'schedule.at: passes act only at "{at}". A stop after classes.unknown.idle (15m) needs 2 warnings, each valid'
        " for 1d2h35m. They expire before the next pass, so such work is warned at every pass and never stopped."
        " Use a schedule with 3 passes in a row that are at most 1d2h35m apart."
    )


def test_idle_work_that_is_stopped_needs_a_way_to_warn_its_owner() -> None:
    enforce = "preset: shared-host\nmode: enforce\nscope: {docker: {}}\n"
    (warning,) = load_text(enforce).warnings
    assert "a warning reaches only those with an open terminal" in warning
    assert "warnings.require_delivery: false" in warning
    mail = 'notify: {owners: [{apprise: /etc/gpukeeper/owners.url}], address: "{owner}@x.example"}\n'
    for reached in (
        enforce.replace("enforce", "plan"),
        enforce.replace("docker: {}", "kubernetes: {namespaces: [lab]}"),
        enforce + mail,
        enforce + "warnings: {require_delivery: false}\n",
    ):
        assert load_text(reached).warnings == ()


def test_passes_more_than_a_day_apart_are_allowed_with_a_warning() -> None:
    (warning,) = load_text(NIGHT.replace('at: "0 3 * * *"', "every: 2d")).warnings
    assert warning.startswith("schedule.every: passes are too far apart. A stop after classes.unknown.idle (15m) needs")


def test_a_weekly_schedule_is_fine_where_nothing_is_stopped() -> None:
    weekly = NIGHT.replace("0 3 * * *", "0 3 * * 0")
    cluster = weekly.replace("docker: {}", "kubernetes: {namespaces: [lab]}")
    assert load_text(weekly.replace("docker: {}", "host: {}, ray: {}")).warnings == ()
    reported = "classes: {managed: {idle: none}, compose: {idle: none}, docker: {idle: none}}\n"
    assert load_text(weekly.replace("ds01", "shared-host") + reported).warnings == (), "also limits of groups"
    assert load_text(cluster).warnings == ()
    jobs = "classes: {jobs: {idle: 2h}}\nmatch: [{class: jobs, kind: trainjob}]\n"
    assert "classes.jobs.idle (2h)" in load_text(cluster + jobs).warnings[0]
    assert load_text(cluster + jobs.replace("2h", "7d")).warnings == ()


def write(folder: Path, mode: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "policy.yaml"
    path.write_text(f"mode: {mode}\nscope: {{docker: {{}}}}\n")
    return path


def test_the_flag_goes_before_the_environment(tmp_path: Path) -> None:
    flag, variable = write(tmp_path / "a", "enforce"), write(tmp_path / "b", "plan")
    environ = {"GPUKEEPER_POLICY": str(variable)}
    assert load_policy(flag, environ=environ).source == str(flag)
    assert load_policy(None, environ=environ).source == str(variable)


def test_the_usual_file_is_the_sites_for_root_and_their_own_for_others(tmp_path: Path) -> None:
    site, own = write(tmp_path / "etc", "plan"), write(tmp_path / "config" / "gpukeeper", "plan")
    loaded = load_policy(None, environ={"XDG_CONFIG_HOME": str(tmp_path / "config")}, site_file=site)
    assert loaded.source == str(site if os.geteuid() == 0 else own)


def test_without_any_file_the_built_in_policy_holds(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    loaded = load_policy(None, ["host"], environ, tmp_path / "none.yaml")
    assert loaded.source == "built-in"
    assert loaded.policy == load_builtin(["host"]).policy


def test_no_policy_is_taken_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "enforce").rename(tmp_path / "gpukeeper.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_policy(None, ["host"], {"XDG_CONFIG_HOME": str(tmp_path)}, tmp_path / "none").source == "built-in"


def test_who_has_no_home_directory_gets_the_sites_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert load_policy(None, ["host"], {}, tmp_path / "none.yaml").source == "built-in"


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "policy.yaml"
    with pytest.raises(PolicyError) as caught:
        load_policy(None, environ={"GPUKEEPER_POLICY": str(missing)})
    assert caught.value.problems == (
        f"{missing}: could not be read: No such file or directory. Use another file with --policy.",
    )


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match="is not UTF-8 text"):
        load_file(path)


def test_the_policies_of_the_how_to_page_are_valid() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "write-a-policy.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]
    broken = [block for block in blocks if block.startswith("# broken.yaml")]
    assert (len(blocks), len(broken)) == (7, 1)
    for block in (one for one in blocks if one not in broken):
        text = block.replace("students", grp.getgrgid(0).gr_name)  # a group that every machine has
        load_text(text if "scope:" in text else f"scope: {{docker: {{}}}}\n{text}")


def test_a_directory_of_reports_is_named_from_the_root_on_and_has_no_default() -> None:
    """C10.9: `./results` would be another folder wherever the command is run (ADR 38)."""
    assert load_text("scope: {host: {}}\n").policy.reports.roots == ()
    with pytest.raises(PolicyError, match=r'"\./results" is not an absolute path'):
        load_text("scope: {host: {}}\nreports: {roots: [./results]}\n")
    assert load_text("scope: {host: {}}\nreports: {roots: [/srv/results]}\n").policy.reports.roots == ("/srv/results",)


def test_an_exemption_that_has_ended_is_reported_where_it_is_written() -> None:
    text = """\
exemptions:
- {owner: ann, reason: paper, until: 2026-09-01}
- {class: api, reason: demo, until: 2026-09-03T12:00Z}
- {workload: "docker/*/db", reason: always}
"""
    loaded = load(text)
    assert loaded.expired(datetime(2026, 9, 1, 12, tzinfo=UTC)) == ()
    first = loaded.expired(datetime(2026, 9, 2, 0, 0, 1, tzinfo=UTC))
    assert len(first) == 1
    assert first[0].startswith("policy.yaml:3: the exemption of ann (paper) ended ")
    assert "has no effect any more. Remove it, or set a later date." in first[0]
    assert len(loaded.expired(datetime(2026, 9, 3, 12, tzinfo=UTC))) == 2


def test_a_program_that_makes_no_passes_needs_no_scope() -> None:
    """The web server of a fleet. A scope that is written is checked all the same."""
    text = "admins: [root]\nfleet: {same_users: true}\n"
    assert load_text(text, needs_scope=False).policy.scope == {}
    with pytest.raises(PolicyError, match="scope is not set"):
        load_text(text)
    with pytest.raises(PolicyError, match="docker2"):
        load_text(f"{text}scope: {{docker2: {{}}}}\n", needs_scope=False)
