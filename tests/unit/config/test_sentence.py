"""C5.1: one sentence per policy, for the runbook."""

from pathlib import Path

import pytest

from gpukeeper.config.load import load_file, load_text
from gpukeeper.config.show import sentence

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "policies").glob("*.yaml"))


def test_a_small_lab() -> None:
    policy = load_text('scope:\n  docker: {}\n  kubernetes: {namespaces: [research, "team-*"]}\n').policy
    assert sentence(policy) == (
        "Dry run (mode plan): on docker everywhere and kubernetes in namespaces research and team-*;"
        " finished work is removed 1d after it succeeded, 7d after it failed and 1d after it was stopped;"
        " idle work is stopped after 5h (managed, compose, docker), and then kept like other stopped work;"
        " idle work is only reported after 5h (serving, unknown, bare, cluster, ray);"
        " running work is only reported after 7d (devcontainer), 3d (compose), 2d (docker)"
        " or 1d (managed, api, unknown);"
        " infrastructure and without-gpu are never touched;"
        " at most 50 steps per pass and 600 per hour;"
        " no step if more than 20% of the running work is due at once."
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mode: enforce", "Acts unattended (mode enforce): "),
        ("retention: manual", "finished work is removed only by a person;"),
        ("retention: {failed: manual}", "1d after it succeeded, never if it failed and"),
        ("preset: ci", "is removed as soon as its evidence is captured if it succeeded, 1d after it failed"),
        ("preset: ci", "; running children are ended when their root finishes;"),
        (
            "environments: {ci: {succeeded: 0}}",
            "; in environment ci as soon as its evidence is captured if it succeeded,",
        ),
        ("groups: {student: {members: [ben]}}", "; members of student have their own limits;"),
        (
            "temporary: [{root: /tmp, names: [a*, b*]}]",
            "; temporary trees a* and b* below /tmp are deleted after 1h without use if"
            " their total is above 5GB;"
            " shorter ages apply to a disk above 80% until it is below 70%;",
        ),
        (
            "temporary: [{root: /tmp, names: [a*], keep: [a-keep*, a1]}]\ndisk: {high: 90%, low: 60%}",
            "; temporary trees a*, except a-keep* and a1, below /tmp are deleted after 1h without use if"
            " their total is above 5GB;"
            " shorter ages apply to a disk above 90% until it is below 60%;",
        ),
        ("temporary: [{root: /tmp, names: [a*]}]", " per hour; in addition at most 1000 trees per hour; no step if"),
        (
            "reports: {roots: [/data/reports]}\nbudget: {trees: 50}",
            "; reports below /data/reports are deleted after 7d without use, saved first, except the newest 3;"
            " at most 50 steps per pass and 600 per hour; in addition at most 50 trees per hour;",
        ),
        (
            "reports: {roots: [/data/a, /data/b], keep_last: 0, keep: [base*], archive: false, older_than: 2d}",
            "; reports below /data/a and /data/b are deleted after 2d without use, except base*;",
        ),
        (
            "reports: {roots: [/data/a], older_than: none}",
            "; reports below /data/a are only reported;",
        ),
        (
            "classes: {devcontainer: {idle_when_large: 4h}}",
            "; idle work that holds more than a slice is stopped after 4h (devcontainer), and then removed;",
        ),
        (
            "preset: ds01\nclasses: {unknown: {after_idle: keep}}\ndemand: {above: 90%, idle_factor: 25%}",
            "or 15m (unknown), and then removed, except unknown;",
        ),
        (
            "demand: {above: 90%, idle_factor: 25%}",
            "; while more than 90% of the GPUs are in use, idle times are 25% of this;",
        ),
        (
            "preset: ds01",
            " idle work is stopped after 30m (managed, compose, docker) or 15m (unknown), and then removed;"
            " idle work is only reported after 30m (serving, bare, cluster, ray);"
            " while more than 80% of the GPUs are in use, idle times are 50% of this;"
            " running work is stopped after 7d (devcontainer), 3d (compose), 2d (docker)"
            " or 1d (managed, api, unknown);",
        ),
        (
            "classes: {docker: {on_max_runtime: stop}}",
            "; running work is stopped after 2d (docker); running work is only reported after 7d (devcontainer), 3d",
        ),
        (
            "images: {unused: 30d, under_pressure: 1d, above: 200GiB}",
            "; images are removed after 30d without use, after 1d while the disk is too full or the least recently "
            "used first while unused ones are larger than 200GiB;",
        ),
        ("images: {unused: 1d}", "; images are removed after 1d without use;"),
        (
            "images: {unused: 1d, keep: [base/*, cuda*]}\nbuild_cache: {unused: 7d}",
            "; images are removed after 1d without use, except base/* and cuda*; build cache is removed after 7d "
            "without use;",
        ),
        (
            "volumes: {anonymous_unused: 7d}\nnetworks: {unused: 2d}",
            "; volumes without a name are removed after 7d without use; networks are removed after 2d without use;",
        ),
        ("exemptions: [{owner: ann, reason: x}]", "; 1 exemption suspends rules;"),
        ("exemptions_from: missing.yaml", "; everything is kept, because the exemptions could not be read;"),
        ("budget: {per_pass: 10%}", "; at most 10% steps per pass and"),
        ("budget: {per_pass: {count: 5, share: 10%}}", "; at most 5 or 10%, whichever is smaller, steps per pass"),
    ],
)
def test_what_a_setting_adds(text: str, said: str) -> None:
    assert said in sentence(load_text(f"scope: {{docker: {{}}}}\n{text}\n").policy)


def test_ray_nodes_are_told_of_only_where_ray_is_covered() -> None:
    given = "ray: {names: [tmp*], above: 1GB, sessions: 2d, logs: none}\n"
    assert "Ray" not in sentence(load_text("scope: {docker: {}}\n" + given).policy)
    assert (
        "; temporary trees tmp* below /tmp of each idle Ray node are deleted after 1h without use if"
        " their total is above 1GB;"
        " dead Ray sessions are deleted after 2d without use;"
        " logs of ended processes of live Ray sessions are only reported;"
        " shorter ages apply to a disk above 80% until it is below 70%;"
    ) in sentence(load_text("scope: {ray: {}}\n" + given).policy)


def test_named_places_are_reported() -> None:
    policy = load_text('scope: {kubernetes: {places: [prod-a], namespaces: ["*"]}, ray: {places: [lab]}}\n').policy
    assert ": on kubernetes at prod-a in every namespace and ray at lab;" in sentence(policy)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_one_sentence(path: Path) -> None:
    words = sentence(load_file(path).policy)
    assert words.endswith(".")
    assert "\n" not in words
