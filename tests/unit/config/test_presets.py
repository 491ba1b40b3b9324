"""The defaults that the replaced systems' users know, as tables."""

from datetime import timedelta

import pytest

from gpukeeper.config.load import load_builtin, load_text
from gpukeeper.model.policy import WITHOUT_GPU, AfterIdle, AtFinish, Mode, OnLimit, Policy, Retention

M, H, D = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def preset(name: str) -> Policy:
    return load_text(f"preset: {name}\nscope: {{docker: {{}}}}\n").policy


@pytest.mark.parametrize(
    ("name", "succeeded", "failed"),
    [
        ("development", D, 7 * D),
        ("ci", timedelta(), D),
        ("production", 7 * D, 30 * D),
        ("shared-host", D, 7 * D),
        ("ds01", D, 7 * D),
    ],
)
def test_retention_of_the_presets(name: str, succeeded: timedelta, failed: timedelta) -> None:
    """C5.1, and C5.2: the platform-wide TTL is 24h in every preset."""
    assert preset(name).retention == Retention(succeeded=succeeded, failed=failed, stopped=24 * H, max=30 * D)


def test_development_is_the_default_preset() -> None:
    assert load_text("scope: {docker: {}}\n").policy == preset("development")


def test_a_workloads_own_ttl_counts_and_foreign_markers_do_not() -> None:
    """C5.2"""
    policy = preset("production")
    assert policy.own_ttl
    assert policy.foreign_ttl == ()


def test_what_is_ended_at_the_finish() -> None:
    """C5.3: ci Running, production None, upstream's words."""
    assert {name: preset(name).at_finish for name in ("development", "ci", "production")} == {
        "development": AtFinish.NONE,
        "ci": AtFinish.RUNNING,
        "production": AtFinish.NONE,
    }


STOP, REPORT = OnLimit.STOP, OnLimit.REPORT
CLASSES = {  # idle time and what becomes of idle work, maximum runtime and what becomes of work above it
    "managed": (5 * H, STOP, 24 * H, REPORT),
    "devcontainer": (None, STOP, 168 * H, REPORT),
    "compose": (5 * H, STOP, 72 * H, REPORT),
    "docker": (5 * H, STOP, 48 * H, REPORT),
    "api": (None, STOP, 24 * H, REPORT),
    "serving": (5 * H, REPORT, None, STOP),
    "unknown": (5 * H, REPORT, 24 * H, REPORT),
    "infrastructure": (None, STOP, None, STOP),
    "without-gpu": (None, STOP, None, STOP),
    "bare": (5 * H, REPORT, None, STOP),
    "cluster": (5 * H, REPORT, None, STOP),
    "ray": (5 * H, REPORT, None, STOP),
}
DS01 = {
    "managed": (30 * M, STOP, 24 * H, STOP),
    "devcontainer": (None, STOP, 168 * H, STOP),
    "compose": (30 * M, STOP, 72 * H, STOP),
    "docker": (30 * M, STOP, 48 * H, STOP),
    "api": (None, STOP, 24 * H, STOP),
    "serving": (30 * M, REPORT, None, STOP),
    "unknown": (15 * M, STOP, 24 * H, STOP),
    "infrastructure": (None, STOP, None, STOP),
    "without-gpu": (None, STOP, None, STOP),
    "bare": (30 * M, REPORT, None, STOP),
    "cluster": (30 * M, REPORT, None, STOP),
    "ray": (30 * M, REPORT, None, STOP),
}


def limits_of(policy: Policy) -> dict[str, tuple[timedelta | None, OnLimit, timedelta | None, OnLimit]]:
    return {name: (one.idle, one.on_idle, one.max_runtime, one.on_max_runtime) for name, one in policy.classes.items()}


@pytest.mark.parametrize("name", ["development", "ci", "production", "shared-host"])
def test_the_class_table_is_the_same_in_every_preset(name: str) -> None:
    """C8.2 (no GPU, no rule), C8.4 (dev containers: no idle rule)"""
    classes = preset(name).classes
    assert limits_of(preset(name)) == CLASSES
    assert {name for name, one in classes.items() if one.after_idle is AfterIdle.KEEP} == {
        *("managed", "compose", "docker", "unknown"),
    }
    assert [name for name, one in classes.items() if one.untouchable] == ["infrastructure", "without-gpu"]
    assert WITHOUT_GPU in classes
    assert {one.idle_when_large for one in classes.values()} == {None}


def test_the_preset_of_the_university_server_has_its_old_values() -> None:
    """C8.4 (dev containers: 168h), C8.6, C8.8 (idle 30m), C8.9, C9.1, C9.3, C14.2"""
    policy = preset("ds01")
    assert limits_of(policy) == DS01
    assert {one.after_idle for one in policy.classes.values()} == {AfterIdle.REMOVE}
    assert {n: (g.idle, g.max_runtime, g.hold_after_stop) for n, g in policy.groups.items()} == {
        "student": (30 * M, 24 * H, None),
        "researcher": (H, 48 * H, None),
        "faculty": (2 * H, 72 * H, None),
        "admin": (None, None, H),
    }
    assert {g.classes for n, g in policy.groups.items() if n != "admin"} == {("managed",)}
    assert (policy.warnings.idle, policy.warnings.require_delivery) == ((0.80, 0.95), False)
    assert (policy.demand.above, policy.demand.idle_factor, policy.breaker.floor) == (0.8, 0.5, 3)


def test_the_times_around_start_and_stop() -> None:
    """C8.3 (30m after start), C9.2 (60s), C9.4 (15m), C9.5 (30m), C8.5 (holds of 24h)"""
    for name, one in preset("shared-host").classes.items():
        assert one.start_grace == 30 * M
        assert one.stop_grace == timedelta(seconds=60)
        assert one.hold_after_stop == 15 * M
        assert one.never_started == (None if one.untouchable or name in ("bare", "cluster") else 30 * M), name
        assert one.hold == 24 * H


def test_the_group_table() -> None:
    """C8.9: who belongs to a group is the site's to say."""
    groups = preset("shared-host").groups
    assert {n: (g.idle, g.max_runtime, g.hold_after_stop) for n, g in groups.items()} == {
        "student": (None, 24 * H, None),
        "researcher": (None, 48 * H, None),
        "faculty": (None, 72 * H, None),
        "admin": (None, None, H),
    }
    assert all(group.members == () for group in groups.values())
    assert not any(
        group.limits(name) for name in ("devcontainer", "api") for group in groups.values() if group.max_runtime
    )


def test_the_signs_of_activity() -> None:
    """C8.1 (GPU 5 %, 30 s ticks), C8.8 (CPU 2.0 %, network 1 MiB per window)"""
    activity = preset("shared-host").activity
    assert (activity.gpu, activity.cpu, activity.network) == (5.0, 2.0, 1024 * 1024)
    assert activity.tick == timedelta(seconds=30)


def test_high_demand_changes_no_idle_time_unless_a_site_says_so() -> None:
    demand = preset("shared-host").demand
    assert (demand.above, demand.idle_factor) == (0.8, 1.0)


def test_warnings() -> None:
    """C14.2: runtime at 75 % and 90 %, 10m lead at least; idle after one hour of five, and before the stop."""
    warnings = preset("shared-host").warnings
    assert (warnings.idle, warnings.runtime, warnings.lead) == ((0.20, 0.95), (0.75, 0.90), 10 * M)


def test_without_a_file_everything_found_is_read_and_nothing_changed() -> None:
    """C10.3: the named trees below the named root, older than 1h; C10.1: above 5,000 MB."""
    policy = load_builtin(["host", "kubernetes"]).policy
    assert (policy.preset, policy.mode) == ("shared-host", Mode.PLAN)
    assert {name: (s.places, s.namespaces) for name, s in policy.scope.items()} == {
        "host": (("*",), ("*",)),
        "kubernetes": (("*",), ("*",)),
    }
    (entry,) = policy.temporary
    assert (entry.root, entry.names) == ("/tmp", ("ray_tmp_*", "pip-*", "tmp*"))
    assert (entry.above, entry.older_than) == (5_000_000_000, H)


def test_images_and_build_cache_are_only_reported_unless_the_site_says_otherwise() -> None:
    """C6.4: each by its own setting; patterns of names are never removed."""
    policy = preset("shared-host")
    assert (policy.images.unused, policy.images.keep, policy.build_cache.unused) == (None, (), None)
    assert (policy.images.under_pressure, policy.images.above) == (None, None)
    assert (policy.volumes.anonymous_unused, policy.networks.unused) == (None, None)
    given = "images: {unused: 24h, keep: ['base/*']}\nbuild_cache: {unused: 7d}\n"
    policy = load_text("scope: {docker: {}}\n" + given).policy
    assert (policy.images.unused, policy.images.keep, policy.build_cache.unused) == (D, ("base/*",), 7 * D)
