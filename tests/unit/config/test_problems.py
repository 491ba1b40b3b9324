"""One mistake, one sentence with the right line and what to write instead."""

import sys

import pytest

from gpukeeper.config import document
from gpukeeper.config.load import load_text
from gpukeeper.model.errors import PolicyError

SCOPE = "scope: {docker: {}}\n"


def problems(text: str) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        load_text(text)
    return list(caught.value.problems)


SPAN = "Write it like 30m, 2h or 7d"
AS_CLASS = "as a factor of the class's value like 2x, or as class for the class's value"
NO_SCOPE = (
    "scope is not set, so the policy would cover nothing. Write for example scope: {docker: {}} or scope: "
    "{kubernetes: {namespaces: [research]}}."
)

MISTAKES = {
    "not a duration": (
        'classes: {managed: {idle: "2 hour"}}',
        f'classes.managed.idle: "2 hour" is not a duration. {SPAN}, or none for no limit.',
    ),
    "no unit": ("warnings: {lead: 10}", f"warnings.lead: 10 has no unit. {SPAN}."),
    "negative": ("schedule: {every: -5m}", f'schedule.every: "-5m" is negative. {SPAN}.'),
    "overflow": (
        "retention: {failed: 99999999999d}",
        'retention.failed: "99999999999d" is longer than 100 years.'
        f" {SPAN}, or manual to keep it until a person removes it.",
    ),
    "never is no retention": (
        "retention: {failed: never}",
        f'retention.failed: "never" is not a duration. {SPAN}, or manual to keep it until a person removes it.',
    ),
    "a group has no none": (
        "groups: {student: {idle: none}}",
        f'groups.student.idle: "none" is not a duration. {SPAN}, {AS_CLASS}.',
    ),
    "a factor of nothing": (
        "groups: {student: {idle: 0x}}",
        'groups.student.idle: "0x" is not between 0.01x and 1000x. Write it like 2x or 0.5x.',
    ),
    "a factor that leaves less than the lead of warnings": (
        "groups: {student: {idle: 0.03x}}",
        "groups.student.idle: groups.student.idle is 9m and warnings.lead is 10m,"
        " so the first warning would come after the stop. Write a longer limit or a shorter lead.",
    ),
    "a pass without pause": (
        "schedule: {every: 0}",
        "schedule.every: 0 is too short. Write it like 30s, 5m or 1h.",
    ),
    "unknown setting": ("mod: plan", 'unknown setting "mod". Did you mean "mode"?'),
    "unknown setting in a class": (
        "classes: {managed: {max_runtme: 1h}}",
        'unknown setting "max_runtme". Did you mean "max_runtime"?',
    ),
    "unknown setting in a class that is called like a setting": (
        "classes: {hold: {idl: 1h}}",
        'unknown setting "idl". Did you mean "idle"?',
    ),
    "a word from elsewhere": (
        "classes: {managed: {stop_grace: 1m}}",
        'unknown setting "stop_grace". Did you mean "grace"?',
    ),
    "unknown setting, nothing near": (
        "holds: {colour: red}",
        'unknown setting "colour". Valid settings: total, within, keep_alive.',
    ),
    "a platform that is not one": ("scope.x: 1", 'unknown setting "scope.x". Did you mean "scope"?'),
    "wrong word": ("mode: enfroce", 'mode: "enfroce" is not a valid value. Did you mean "enforce"?'),
    "wrong preset": ("preset: developmnt", 'preset: unknown preset "developmnt". Did you mean "development"?'),
    "text without quotes": ("admins: [1000]", 'admins[0]: 1000 is not text. Put it in quotes: "1000".'),
    "not a list": ("admins: root", 'admins: "root" is not a list. Write it in brackets, like [root].'),
    "not a mapping": (
        "retention: 7d",
        'retention: "7d" is not a mapping. Write its settings as {name: value}.',
    ),
    "YAML 1.1 truth": ("orphans: yes", 'orphans: "yes" is neither true nor false. Write true or false.'),
    "no value": ("holds:", "holds: has no value. Write one, or remove the line."),
    "no value in a list": ("admins: [root, ~]", "admins[1]: has no value. Write one, or remove the line."),
    "a name that is a number": (
        "classes: {1: {idle: 1h}}",
        'classes.1: a setting\'s name must be text. Put it in quotes: "1".',
    ),
    "a tag": (
        "preset: !secret x",
        "preset: the tag !secret is not supported. Write a plain value.",
    ),
    "idle below two ticks": (
        "classes: {managed: {idle: 50s}}\nwarnings: {lead: 30s}",
        "classes.managed.idle: an idle time of 50s is shorter than two measurements (activity.tick is 30s)."
        " Write at least 1m, or none for no idle rule.",
    ),
    "idle below settle": (
        "classes: {managed: {idle: 4m}}\nwarnings: {lead: 1m}",
        "classes.managed.idle: an idle time of 4m is shorter than activity.settle (5m), so it would never be reached."
        " Write at least 5m.",
    ),
    "idle when large below settle": (
        "classes: {devcontainer: {idle_when_large: 4m}}\nwarnings: {lead: 1m}",
        "classes.devcontainer.idle_when_large: an idle time of 4m is shorter than activity.settle (5m),"
        " so it would never be reached. Write at least 5m.",
    ),
    "idle when large shorter than the lead": (
        "classes: {devcontainer: {idle_when_large: 9m}}",
        "classes.devcontainer.idle_when_large: classes.devcontainer.idle_when_large is 9m and warnings.lead is 10m,"
        " so the first warning would come after the stop. Write a longer limit or a shorter lead.",
    ),
    "a tick that is too long for the built-in classes": (
        "activity: {tick: 3h}",
        "activity.tick: an idle time of 5h is shorter than two measurements (activity.tick is 3h)."
        " Write at least 6h, or none for no idle rule.",
    ),
    "a warning at the stop": (
        "warnings: {idle: [80%, 100%]}",
        "warnings.idle: a warning at 100% would be sent at the stop. Write shares below 100%, like [80%, 95%].",
    ),
    "warnings that fall": (
        "warnings: {runtime: [90%, 75%]}",
        "warnings.runtime: [90%, 75%] is not in ascending order. Write [75%, 90%].",
    ),
    "no warning": (
        "warnings: {idle: []}",
        "warnings.idle: an empty list means no warnings. Write at least one share, like [80%].",
    ),
    "a lead longer than a limit": (
        "warnings: {lead: 6h}",
        "warnings.lead: classes.managed.idle is 5h and warnings.lead is 6h, so the first warning would come after"
        " the stop. Write a longer limit or a shorter lead.",
    ),
    "a limit shorter than the lead": (
        "classes: {managed: {idle: 9m}}",
        "classes.managed.idle: classes.managed.idle is 9m and warnings.lead is 10m, so the first warning would come"
        " after the stop. Write a longer limit or a shorter lead.",
    ),
    "failures kept shorter": (
        "retention: {succeeded: 10d}",
        "retention.succeeded: succeeded work would be kept 10d and failed work only 7d."
        " Failed work must be kept at least as long: increase failed or decrease succeeded.",
    ),
    "successes kept for ever": (
        "retention: {succeeded: manual}",
        "retention.succeeded: succeeded work would be kept forever and failed work only 7d."
        " Failed work must be kept at least as long: increase failed or decrease succeeded.",
    ),
    "an environment with failures kept shorter": (
        "environments: {ci: {failed: 1h}}",
        "environments.ci.failed: succeeded work would be kept 1d and failed work only 1h."
        " Failed work must be kept at least as long: increase failed or decrease succeeded.",
    ),
    "more than max": (
        "retention: {failed: 60d}",
        "retention.failed: failed is 60d, more than the maximum (30d). Write at most 30d, or increase retention.max.",
    ),
    "demand that never ends": (
        "demand: {below: 80%}",
        "demand.below: below is 80% and above is 80%, but below must be smaller than above. Write them like 70% and "
        "80%.",
    ),
    "a budget of nothing": (
        "budget: {per_pass: 0}",
        "budget.per_pass: 0 would allow no steps. Write 1 or more; for a dry run, write mode: plan.",
    ),
    "a budget above everything": (
        "budget: {per_hour: 120%}",
        'budget.per_hour: "120%" is not above 0% and at most 100%. Write it like 80%.',
    ),
    "a budget that is no amount": (
        "budget: {per_pass: many}",
        'budget.per_pass: "many" is not an amount. Write it like 20, 10% or {count: 20, share: 10%}.',
    ),
    "a breaker that is always open": (
        "breaker: {running: 0%}",
        'breaker.running: "0%" is not above 0% and at most 100%. Write it like 80%.',
    ),
    "a breaker that never opens": (
        "breaker: {vanished: 150%}",
        'breaker.vanished: "150%" is not above 0% and at most 100%. Write it like 80%.',
    ),
    "a relative root": (
        "temporary: [{root: tmp, names: [a]}]",
        'temporary[0].root: "tmp" is not an absolute path. Begin it with /, and do not use "..".',
    ),
    "a root that climbs": (
        "temporary: [{root: /tmp/.., names: [a]}]",
        'temporary[0].root: "/tmp/.." is not an absolute path. Begin it with /, and do not use "..".',
    ),
    "the whole disk": (
        "temporary: [{root: /, names: [a]}]",
        'temporary[0].root: "/" is not allowed as a temporary directory. Use one such as /tmp or /scratch/tmp.',
    ),
    "the whole disk, disguised": (
        "temporary: [{root: //, names: [a]}]",
        'temporary[0].root: "//" is not allowed as a temporary directory. Use one such as /tmp or /scratch/tmp.',
    ),
    "a pattern with a folder": (
        "temporary: [{root: /tmp, names: [a/b]}]",
        'temporary[0].names[0]: "a/b" contains /. Write only the name; the directory belongs in root.',
    ),
    "an empty pattern": (
        'temporary: [{root: /tmp, names: [""]}]',
        'temporary[0].names[0]: "" is not a pattern for a name. Write it like tmp* or pip-*.',
    ),
    "no pattern": (
        "temporary: [{root: /tmp, names: []}]",
        'temporary[0].names: no name is given, so nothing would be deleted. Write names, like ["tmp*"].',
    ),
    "no names": (
        "temporary: [{root: /tmp}]",
        'temporary[0]: "names" is missing. Add it: names of trees directly below the root. Shell patterns.',
    ),
    "everything to be kept": (
        "temporary: [{root: /tmp, names: [tmp*], keep: [tmp*, x]}]",
        "temporary[0].keep: every name is also listed under keep, so nothing would be deleted. Remove names from keep.",
    ),
    "a keep pattern with a folder": (
        "temporary: [{root: /tmp, names: [tmp*], keep: [/tmp/a]}]",
        'temporary[0].keep[0]: "/tmp/a" contains /. Write only the name; the directory belongs in root.',
    ),
    "pressure that makes ages of images longer": (
        "images: {unused: 30m, under_pressure: 40m}",
        "images.under_pressure: under_pressure (40m) must not be longer than unused (30m). Write at most 30m.",
    ),
    "pressure that makes ages longer": (
        "temporary: [{root: /tmp, names: [tmp*], older_than: 30m, under_pressure: 40m}]",
        "temporary[0].under_pressure: under_pressure (40m) must not be longer than older_than (30m). Write at most "
        "30m.",
    ),
    "no name on Ray nodes": (
        "ray: {names: []}",
        'ray.names: no name is given, so nothing would be deleted. Write names, like ["tmp*"].',
    ),
    "everything to be kept on Ray nodes": (
        'ray: {keep: ["*"]}',
        "ray.keep: every name is also listed under keep, so nothing would be deleted. Remove names from keep.",
    ),
    "sessions that may be starting": (
        "ray: {sessions: 30m}",
        "ray.sessions: 30m is too short: a session that is just starting has directories but no processes yet. "
        "Write at least 1h, or none to only report dead sessions.",
    ),
    "logs that are younger than they are told apart": (
        "ray: {logs: 1m}",
        "ray.logs: 1m is too short: the age of logs has a resolution of one hour."
        " Write at least 1h, or none to only report them.",
    ),
    "a disk that is never empty enough": (
        "disk: {low: 80%}",
        "disk.low: low is 80% and high is 80%, but low must be smaller than high. Write them like 70% and 80%.",
    ),
    "reports that are temporary, too": (
        "reports: {roots: [/scratch/tmp]}\ntemporary: [{root: /scratch/tmp, names: [tmp*]}]",
        "reports.roots[0]: /scratch/tmp and temporary[0].root /scratch/tmp overlap, so reports would be deleted as "
        "temporary trees, or the reverse. Use a separate directory for reports.",
    ),
    "reports inside a temporary tree": (
        "reports: {roots: [/scratch/tmp-7/reports]}\ntemporary: [{root: /scratch, names: [tmp*]}]",
        "reports.roots[0]: /scratch/tmp-7/reports and temporary[0].root /scratch overlap, so reports would be "
        "deleted as temporary trees, or the reverse. Use a separate directory for reports.",
    ),
    "temporary trees inside a report": (
        "reports: {roots: [/data]}\ntemporary: [{root: /data/scratch, names: [tmp*]}]",
        "reports.roots[0]: /data and temporary[0].root /data/scratch overlap, so reports would be deleted as "
        "temporary trees, or the reverse. Use a separate directory for reports.",
    ),
    "a negative number of reports": (
        "reports: {keep_last: -1}",
        "reports.keep_last: -1 is less than 0. Write 0 or more.",
    ),
    "not a cron expression": (
        "schedule: {at: 02:00}",
        'schedule.at: "02:00" is not a cron expression (wrong number of fields). Write it like "0 2 * * *" (daily '
        "at 02:00).",
    ),
    "not a whole number": ("loops: 1.5", "loops: 1.5 is not a whole number. Write it like 20."),
    "too small a number": ("loops: 0", "loops: 0 is less than 1. Write 1 or more."),
    "not a signal": (
        "activity: {signals: [cpu, netwrk]}",
        'activity.signals[1]: "netwrk" is not a valid value. Did you mean "network"?',
    ),
    "GPU use beyond everything": (
        "activity: {gpu: 120%}",
        "activity.gpu: GPU utilization must be above 0% and at most 100%. Write it like 5%.",
    ),
    "no room for evidence": (
        "capture: {quota: 0}",
        "capture.quota: with a quota of 0 nothing could be removed, because evidence is saved first. Write it like "
        "20GiB.",
    ),
    "runtime of nothing": (
        "classes: {managed: {max_runtime: 0}}",
        "classes.managed.max_runtime: 0 would stop everything as soon as it starts."
        " Write it like 24h, or none for no limit.",
    ),
    "holds beyond their time": (
        "holds: {within: 12h}",
        "holds.within: a total of 1d within 12h is not possible. total must not be longer than within.",
    ),
    "a hold that is never granted": (
        "classes: {managed: {hold: 2d}}",
        "classes.managed.hold: a hold of 2d is longer than holds.total (1d)."
        " Write at most 1d, or increase holds.total.",
    ),
    "a setting that had no effect": (
        "groups: {student: {gpu_shares: 2}}",
        'unknown setting "gpu_shares". The setting had no effect and was removed. Delete the line.',
    ),
    "a setting that was removed": (
        "activity: {coverage: 80%}",
        'unknown setting "coverage". The setting was removed: a gap in the measurements always ends the idle time.'
        " Delete the line.",
    ),
    "no such Unix group": (
        "groups: {student: {unix_group: no-such-group}}",
        'groups.student.unix_group: this machine has no Unix group "no-such-group".'
        " Write one that `getent group` lists, or the names under members.",
    ),
    "no such class": (
        "match: [{class: srving, name: a}]",
        'match[0].class: unknown class "srving". Did you mean "serving"?',
    ),
    "a match for everything": (
        "match: [{class: serving}]",
        'match[0]: no pattern is given, so the entry would match everything. Write one, like name: "triton-*".',
    ),
    "a match without class": ("match: [{name: a}]", 'match[0]: "class" is missing. Add it: the class to assign.'),
    "no such platform": (
        "match: [{class: serving, platform: kubrnetes}]",
        'match[0].platform: unknown platform "kubrnetes". Did you mean "kubernetes"?',
    ),
    "a label without key": (
        "match: [{class: serving, label: =x}]",
        'match[0].label: "=x" has no key. Write it like app=triton, or app alone.',
    ),
    "an exemption for nobody": (
        "exemptions: [{reason: x}]",
        "exemptions[0]: owner, workload and class are missing. Write at least one of them.",
    ),
    "an exemption without reason": (
        "exemptions: [{owner: ann}]",
        'exemptions[0]: "reason" is missing. Add it: reason, for other admins.',
    ),
    "an exemption from no rule": (
        "exemptions: [{owner: ann, reason: x, rules: [idl]}]",
        'exemptions[0].rules: unknown rule "idl", or one that cannot be suspended. Did you mean "idle"?',
    ),
    "not a date": (
        "exemptions: [{owner: ann, reason: x, until: soon}]",
        'exemptions[0].until: "soon" is not a date.'
        " Write it like 2026-09-01 (that whole day, UTC) or 2026-09-01T18:00Z.",
    ),
    "a time without zone": (
        "exemptions: [{owner: ann, reason: x, until: 2026-09-01T18:00}]",
        'exemptions[0].until: "2026-09-01T18:00" has no time zone.'
        " Write it like 2026-09-01 (that whole day, UTC) or 2026-09-01T18:00Z.",
    ),
}


@pytest.mark.parametrize(("text", "told"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_told_with_what_to_write_instead(text: str, told: str) -> None:
    """C8.8 (`"24h"` once parsed to unlimited), C8.9 (absent is not zero), C5.1 (failures are kept longer)."""
    assert problems(SCOPE + text + "\n") == [f"policy.yaml:2: {told}"]


def test_an_empty_file_shows_what_to_write() -> None:
    assert problems("") == [f"policy.yaml:1: the file is empty: {NO_SCOPE}"]
    assert problems("# nothing yet\n") == [f"policy.yaml:1: the file is empty: {NO_SCOPE}"]


def test_podman_is_covered_as_docker() -> None:
    assert 'policy.yaml:1: unknown setting "podman". Did you mean "docker"?' in problems("scope: {podman: {}}\n")


def test_a_required_setting_with_a_wrong_value_is_not_reported_as_missing_too() -> None:
    assert problems("scope: {kubernetes: {namespaces: research}}\n") == [
        'policy.yaml:1: scope.kubernetes.namespaces: "research" is not a list. Write it in brackets, like [research].'
    ]


@pytest.mark.parametrize("text", ["mode: plan\n", "scope: {}\n"])
def test_a_policy_that_covers_nothing_is_refused(text: str) -> None:
    assert problems(text) == [f"policy.yaml:1: {NO_SCOPE}"]


def test_all_namespaces_must_be_written() -> None:
    """C6.1"""
    assert problems("scope:\n  kubernetes: {}\n") == [
        'policy.yaml:2: scope.kubernetes: "namespaces" is missing. Add it: namespaces: [research, "team-*"], '
        'or ["*"] for all.'
    ]


def test_an_empty_list_of_namespaces_is_refused() -> None:
    assert problems("scope:\n  kubernetes: {namespaces: []}\n") == [
        'policy.yaml:2: scope.kubernetes.namespaces: an empty list covers nothing. List names, or write ["*"] for all.'
    ]


def test_an_unknown_platform_is_refused() -> None:
    assert problems("scope:\n  docker: {}\n  kubrnetes: {}\n") == [
        'policy.yaml:3: unknown setting "kubrnetes". Did you mean "kubernetes"?'
    ]


def test_a_setting_given_twice_is_refused_and_its_first_line_named() -> None:
    assert problems("mode: plan\nscope: {docker: {}}\nmode: enforce\n") == [
        "policy.yaml:3: mode: set twice, first in line 1. Remove one of them."
    ]


def test_what_is_not_yaml_is_told_with_its_line() -> None:
    (told,) = problems("mode: plan\nscope: {docker: {}\n")
    assert told.startswith("policy.yaml:3: this is not valid YAML: ")
    assert told.endswith(". Fix this first, then check again.")


@pytest.mark.parametrize("text", ["- a\n", "just words\n"])
def test_what_is_not_a_mapping_is_refused(text: str) -> None:
    (told,) = problems(text)
    assert told.startswith("policy.yaml:1: this is not ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "classes:\n\tmanaged: {idle: 30m}",
            "3: a tab was found. YAML indentation must not contain tabs: replace the tab",
        ),
        ("---\nmode: plan", "2: a second document begins. The file must contain one document: remove the line ---"),
        ("groups: &a [*a]", "2: this is an alias (*name) of an anchor (&name). Aliases are not supported"),
        ("mode: dry-run", "plan is a dry run; enforce acts unattended."),
        ("managed: {idle: 30m}", 'unknown setting "managed". Classes belong under classes. Write classes: {managed: '),
        ("mylab: {idle: 30m}", 'unknown setting "mylab". Classes belong under classes. Write classes: {mylab: '),
        ("docker: true", 'unknown setting "docker". Platforms belong under scope. Write scope: {docker: {}}.'),
        ("succeeded: 2d", 'unknown setting "succeeded". It belongs under retention or environments.NAME.'),
        ("kubernetes: {namespaces: [a]}", 'unknown setting "namespaces". It belongs under scope.kubernetes.'),
    ],
)
def test_usual_mistakes_are_answered_with_what_was_meant(text: str, told: str) -> None:
    (said,) = problems(SCOPE + text + "\n")
    assert told in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("scope: {docker: true}", "scope.docker: true is not a mapping. To cover it, write scope: {docker: {}}."),
        ("scope: [docker]", "scope: a list is not a mapping. Write it like scope: {docker: {}}."),
        (
            "scope: {kubernetes: true}",
            "scope.kubernetes: true is not a mapping."
            " To cover it, write scope: {kubernetes: {namespaces: [research]}}.",
        ),
    ],
)
def test_a_scope_that_is_no_mapping_is_answered_with_one(text: str, told: str) -> None:
    assert problems(text + "\n") == [f"policy.yaml:1: {told}"]


@pytest.mark.parametrize("text", ["[" * 2000, "a: " + "{" * 2000, "[a, " * 2000, "[" * 2000 + "]" * 2000, "- " * 2000])
def test_deep_nesting_is_refused_before_it_is_read(text: str) -> None:
    """Looking for the end of 2,000 brackets took half a million calls; the depth is known after fifty."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        found = document.read(text)
    finally:
        sys.setprofile(None)
    assert "nested too deeply" in found.problems[0].sentence
    assert calls < 50_000


def test_a_mistake_in_one_entry_hides_none_of_its_neighbours() -> None:
    text = """\
match:
- {class: nope, name: a}
- {class: docker, nope: b}
- {name: c}
- 5
- {class: docker, label: "=x"}
exemptions:
- {reason: a, owner: 5}
- {reason: b, class: nope}
temporary:
- {root: tmp, names: [a]}
- {root: /scratch/tmp, names: []}
"""
    lines = [one.partition(": ")[0].removeprefix("policy.yaml:") for one in problems(SCOPE + text)]
    assert lines == ["3", "4", "5", "6", "7", "9", "10", "12", "13"]


def test_every_problem_is_told_in_one_run_in_the_order_of_the_file() -> None:
    text = """\
mode: enfroce
scope:
  docker: {}
  kubernetes: {}
retention:
  succeeded: 2 hour
  failed: 60d
idle_aftr: 2h
classes:
  managed:
    idle: 30
    max_runtme: 1h
  mine: {idle: 1m}
match:
  - {class: nothing-like-it, name: x}
budget: {per_pass: 0}
warnings: {idle: [95%, 80%]}
mode: plan
"""
    told = problems(text)
    assert [line.split(":")[1] for line in told] == [
        "1",
        "4",
        "6",
        "7",
        "8",
        "11",
        "12",
        "13",
        "13",
        "15",
        "16",
        "17",
        "18",
    ]
    with pytest.raises(PolicyError, match=r"13 problems\. Nothing was changed\. All settings: gpukeeper policy schema"):
        load_text(text)


def test_a_mistake_does_not_cause_another_to_be_reported() -> None:
    """`succeeded` cannot be read, so nobody can say that it is longer than `failed`."""
    assert len(problems(SCOPE + "retention: {succeeded: 2 days, failed: 1h}\n")) == 1


def test_a_mistake_that_an_environment_inherits_is_told_once() -> None:
    assert len(problems(SCOPE + "retention: {succeeded: soon}\nenvironments: {ci: {failed: 2d}}\n")) == 1


def test_reports_are_no_temporary_tree_of_a_node_that_is_covered() -> None:
    reports = "reports: {roots: [/tmp/tmp_results]}\n"
    assert any("ray.roots[0] /tmp overlap" in told for told in problems("scope: {ray: {}}\n" + reports))
    assert not any("overlap" in told for told in problems("scope: {host: {}}\ndisk: {low: 80%}\n" + reports))
