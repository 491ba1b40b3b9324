"""What an object says about its own life: ours first, others' where the policy names them, nothing garbled unsaid."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.clients.kubernetes.wire import Meta
from gpukeeper.model.subject import Marks, Outcome, Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.builtin import DEPLOYMENT, JOB
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import NOT_CHECKED, NOT_ENDED, Ending, Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB, V1_KINDS
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER, RAYJOB
from gpukeeper.platforms.kubernetes.marks import (
    FAR,
    AnnouncedWarnings,
    NamespaceFacts,
    TranslationSettings,
    excluded,
    managed_elsewhere,
    moment,
    namespace_facts,
    pod_hold,
    read,
    span,
    unreadable_namespace,
)
from tests.unit.platforms.kubernetes.examples import NOW, ago, meta, pod, root

PYTORCH, MPI = V1_KINDS[0], V1_KINDS[2]
HOUR = timedelta(hours=1)
OVER = Ending(True, Outcome.SUCCEEDED, NOW - 2 * HOUR)  # created six hours ago
EVERY_TTL = ("janitor/ttl", "janitor/expires", "k8s-ttl-controller.twin.sh/ttl", "cleanup.kyverno.io/ttl")


def marks(
    kind: Kind = JOB,
    ending: Ending = OVER,
    *,
    spec: dict[str, Any] | None = None,
    foreign: tuple[str, ...] = (),
    pods_hold: str | None = None,
    gitops: bool = False,
    ttl_field: bool | Unknown = NOT_CHECKED,
    **metadata: Any,
) -> tuple[Marks, tuple[str, ...]]:
    """Without the command that holds it, which every object has."""
    told = root(spec=spec, **metadata)
    settings = TranslationSettings(foreign_ttl=foreign, gitops=gitops, ttl_field=ttl_field)
    found, notes = read(kind, told.metadata, told.spec, ending, NOW, settings, pods_hold)
    return msgspec.structs.replace(found, hold_with=""), notes


# Its own TTL


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30m", timedelta(minutes=30)),
        ("2d", timedelta(days=2)),
        ("1h30m", timedelta(hours=1, minutes=30)),
        ("0s", timedelta()),
        ("0", timedelta()),
        ("1.5h", timedelta(minutes=90)),
        ("1w", timedelta(weeks=1)),
        (" 45s ", timedelta(seconds=45)),
    ],
)
@pytest.mark.parametrize("kind", [JOB, TRAINJOB, RAYJOB, PYTORCH, DEPLOYMENT, POD])
def test_a_ttl_in_our_words(kind: Kind, text: str, expected: timedelta) -> None:
    found, findings = marks(kind, annotations={"gpukeeper.io/ttl": text})
    assert (found.ttl, found.ttl_elsewhere, findings) == (expected, False, ())


@pytest.mark.parametrize("text", ["10ay", "", "-5m", "5", "1h 30m", "forever", "5M", "999999999w", "²d", "30m!"])
def test_a_ttl_that_cannot_be_read_is_unknown_and_reported(text: str) -> None:
    found, findings = marks(annotations={"gpukeeper.io/ttl": text})
    assert isinstance(found.ttl, Unknown)
    assert found.ttl.why in findings
    assert f"gpukeeper.io/ttl={text!r}" in found.ttl.why


@given(st.text(max_size=12))
def test_no_text_breaks_the_reading_of_a_length_or_a_time(text: str) -> None:
    length, time = span("ttl", text), moment("until", text)
    assert isinstance(length, Unknown) or timedelta() <= length <= timedelta(days=36500)
    assert isinstance(time, Unknown) or time.tzinfo is UTC


@pytest.mark.parametrize(
    ("kind", "spec", "ttl", "elsewhere"),
    [
        (JOB, {"ttlSecondsAfterFinished": 600}, timedelta(minutes=10), True),
        (JOB, {"ttlSecondsAfterFinished": 0}, timedelta(), True),
        (JOB, {}, None, False),
        (JOBSET, {"ttlSecondsAfterFinished": 3600}, HOUR, True),
        (PYTORCH, {"runPolicy": {"ttlSecondsAfterFinished": 60}}, timedelta(minutes=1), True),
        (PYTORCH, {"runPolicy": {"cleanPodPolicy": "None"}}, None, False),
        (RAYJOB, {"ttlSecondsAfterFinished": 60}, None, False),  # it removes the cluster only
        (DEPLOYMENT, {"ttlSecondsAfterFinished": 60}, None, False),
    ],
)
def test_the_field_of_each_kind(kind: Kind, spec: dict[str, Any], ttl: timedelta | None, elsewhere: bool) -> None:
    found, findings = marks(kind, spec=spec)
    assert (found.ttl, found.ttl_elsewhere, findings) == (ttl, elsewhere, ())


def test_the_field_of_a_trainjob_counts_where_its_crd_has_it() -> None:
    field = {"ttlSecondsAfterFinished": 60}
    has, _ = marks(TRAINJOB, spec=field, ttl_field=True)
    assert (has.ttl, has.ttl_elsewhere) == (timedelta(minutes=1), True)
    lacks, notes = marks(TRAINJOB, spec=field, ttl_field=False)
    assert (lacks.ttl, lacks.ttl_elsewhere) == (None, False)
    assert "has no effect on a TrainJob of this cluster" in notes[0]
    unknown, notes = marks(TRAINJOB, spec=field)
    assert isinstance(unknown.ttl, Unknown), "kept: neither left to the platform nor removed by retention"
    assert unknown.ttl_elsewhere is False
    assert notes == (unknown.ttl.why,)
    ours, _ = marks(TRAINJOB, spec=field, annotations={"gpukeeper.io/ttl": "1h"})
    assert (ours.ttl, ours.ttl_elsewhere) == (HOUR, False)
    assert marks(TRAINJOB, spec={})[0].ttl is None


APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
WRONG = '{"spec": {"ttlSecondsAfterFinished": %s}}'


@pytest.mark.parametrize("kind", V1_KINDS)
def test_a_ttl_that_the_server_dropped_is_found_in_what_was_applied(kind: Kind) -> None:
    found, notes = marks(kind, annotations={APPLIED: WRONG % "600"})
    assert found.ttl is None, "it is reported, it does not count"
    assert notes == (
        f"spec.ttlSecondsAfterFinished: 600 was applied, but the {kind.kind} has no such field: no effect; use"
        " spec.runPolicy.ttlSecondsAfterFinished",
    )


def test_a_ttl_applied_to_a_trainjob_that_has_none_is_found_too() -> None:
    (note,) = marks(TRAINJOB, annotations={APPLIED: WRONG % "600"})[1]
    assert note.endswith("use the annotation gpukeeper.io/ttl")
    assert marks(JOB, annotations={APPLIED: WRONG % "600"})[1] == (), "a Job has the field: somebody took it off again"


@pytest.mark.parametrize(
    ("spec", "annotations"),
    [
        ({"runPolicy": {"ttlSecondsAfterFinished": 60}}, {APPLIED: WRONG % "600"}),  # corrected since
        ({}, {APPLIED: WRONG % "600", "gpukeeper.io/ttl": "1h"}),
        ({}, {APPLIED: '{"spec": {"runPolicy": {"ttlSecondsAfterFinished": 600}}}'}),
        ({}, {APPLIED: WRONG % "null"}),
        ({}, {APPLIED: "ttlSecondsAfterFinished"}),
        ({}, {APPLIED: '{"spec": "ttlSecondsAfterFinished"}'}),
        ({}, {APPLIED: '["ttlSecondsAfterFinished"]'}),
        ({}, {APPLIED: WRONG % ("[" * 100_000)}),
        ({}, {APPLIED: WRONG % (" " * 256 * 1024 + "600")}),
    ],
)
def test_what_was_applied_is_read_with_care(spec: dict[str, Any], annotations: dict[str, str]) -> None:
    assert marks(PYTORCH, spec=spec, annotations=annotations)[1] == ()


def test_what_was_applied_may_be_of_any_type_and_is_cut() -> None:
    (note,) = marks(PYTORCH, annotations={APPLIED: WRONG % f'"{"x" * 1000}"'})[1]
    assert f": {'x' * 40} was applied" in note


@pytest.mark.parametrize("seconds", [-1, 2**40])
def test_a_field_beyond_reason_is_unknown(seconds: int) -> None:
    found, findings = marks(spec={"ttlSecondsAfterFinished": seconds})
    assert isinstance(found.ttl, Unknown)
    assert findings == (found.ttl.why,)


def test_our_annotation_comes_before_the_field_and_the_field_before_other_tools() -> None:
    field = {"ttlSecondsAfterFinished": 60}
    both = {"gpukeeper.io/ttl": "5m", "janitor/ttl": "3d"}
    assert marks(spec=field, annotations=both, foreign=EVERY_TTL)[0].ttl == timedelta(minutes=5)
    assert marks(spec=field, annotations={"janitor/ttl": "3d"}, foreign=EVERY_TTL)[0].ttl == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        (
            JOBSET,
            {"replicatedJobs": [{"name": "node", "template": {"spec": {"ttlSecondsAfterFinished": 60}}}]},
            "replicated job node",
        ),
        (PYTORCH, {"ttlSecondsAfterFinished": 60}, "spec.runPolicy.ttlSecondsAfterFinished"),
        (PYTORCH, {"cleanPodPolicy": "All"}, "spec.runPolicy.cleanPodPolicy"),
    ],
)
def test_a_setting_at_the_wrong_level_is_found(kind: Kind, spec: dict[str, Any], words: str) -> None:
    found, findings = marks(kind, spec=spec)
    assert found.ttl is None
    assert len(findings) == 1
    assert words in findings[0]


def test_an_mpijob_has_a_second_policy_of_its_own() -> None:
    assert marks(MPI, spec={"cleanPodPolicy": "All"})[1] == ()


# TTLs of other tools


@pytest.mark.parametrize(
    ("metadata", "ttl"),
    [
        # From the creation, six hours ago; the end was two hours ago: what is left of it counts from the end.
        ({"annotations": {"janitor/ttl": "7h"}}, 3 * HOUR),
        ({"annotations": {"janitor/ttl": "1h"}}, timedelta()),
        ({"annotations": {"janitor/expires": "2026-11-15T13:00:00Z"}}, 3 * HOUR),
        ({"annotations": {"janitor/expires": "2026-11-16"}}, 14 * HOUR),
        ({"annotations": {"janitor/expires": "2026-11-15T11:00"}}, HOUR),
        ({"annotations": {"k8s-ttl-controller.twin.sh/ttl": "5h"}}, HOUR),
        (
            {
                "annotations": {
                    "k8s-ttl-controller.twin.sh/ttl": "5h",
                    "k8s-ttl-controller.twin.sh/refreshed-at": ago(hours=1),
                }
            },
            6 * HOUR,
        ),
        ({"labels": {"cleanup.kyverno.io/ttl": "4h"}}, 4 * HOUR),  # from the end, which is the later
        ({"labels": {"cleanup.kyverno.io/ttl": "2026-11-15T130000Z"}}, 3 * HOUR),
        ({"labels": {"cleanup.kyverno.io/ttl": "2026-11-16"}}, 14 * HOUR),
        ({"annotations": {"janitor/ttl": "7h", "janitor/expires": "2026-11-16"}}, 14 * HOUR),  # the later
        ({"labels": {"janitor/ttl": "7h"}, "annotations": {"cleanup.kyverno.io/ttl": "4h"}}, None),  # wrong places
    ],
)
def test_markers_of_other_tools_count_where_the_policy_names_them(
    metadata: dict[str, Any], ttl: timedelta | None
) -> None:
    found, notes = marks(foreign=EVERY_TTL, **metadata)
    assert (msgspec.structs.replace(found, ttl_by=""), notes) == (Marks(ttl=ttl), ())
    assert marks(**metadata) == (Marks(), ())


@pytest.mark.parametrize(
    ("metadata", "spec", "ttl_by", "hold_by"),
    [
        ({"annotations": {"janitor/ttl": "10s"}}, {}, "janitor/ttl=10s", ""),
        ({"annotations": {"janitor/ttl": "forever"}}, {}, "", "a TTL without an end"),
        ({"annotations": {"gpukeeper.io/ttl": "2h", "janitor/ttl": "10s"}}, {}, "gpukeeper.io/ttl=2h", ""),
        ({"labels": {"gpukeeper.io/ttl": "2h"}}, {}, "", ""),
        ({}, {"ttlSecondsAfterFinished": 60}, "spec.ttlSecondsAfterFinished", ""),
        ({"labels": {"cleanup.kyverno.io/ttl": "4h"}}, {}, "cleanup.kyverno.io/ttl=4h", ""),
        (
            {"annotations": {"gpukeeper.io/hold-until": "2026-12-01"}},
            {},
            "",
            "gpukeeper.io/hold-until=2026-12-01",
        ),
    ],
)
def test_the_mark_that_counts_is_named(
    metadata: dict[str, Any], spec: dict[str, Any], ttl_by: str, hold_by: str
) -> None:
    found, _ = marks(spec=spec, foreign=EVERY_TTL, **metadata)
    assert (found.ttl_by, found.hold_by) == (ttl_by, hold_by)


def test_of_two_holds_the_longer_one_is_named() -> None:
    given = {"gpukeeper.io/hold-until": "2026-12-01", "downscaler/exclude-until": "2027-01-01"}
    assert marks(ending=NOT_ENDED, annotations=given)[0].hold_by == "downscaler/exclude-until=2027-01-01"
    assert marks(ending=NOT_ENDED, pods_hold="pod a has x=y", annotations=given)[0].hold_by == "pod a has x=y"


@pytest.mark.parametrize(
    "metadata",
    [
        {"annotations": {"janitor/ttl": "10ay"}},
        {"annotations": {"janitor/ttl": "1h30m"}},  # that tool takes one unit
        {"annotations": {"janitor/expires": "tomorrow"}},
        {"annotations": {"k8s-ttl-controller.twin.sh/ttl": "-5m"}},
        {
            "annotations": {
                "k8s-ttl-controller.twin.sh/ttl": "5m",
                "k8s-ttl-controller.twin.sh/refreshed-at": "just now",
            }
        },
        {"labels": {"cleanup.kyverno.io/ttl": "10ay"}},
        {"annotations": {"janitor/ttl": "1h"}, "creationTimestamp": None},
        {"annotations": {"janitor/ttl": "1h", "janitor/expires": "soon"}},  # one good, one not
    ],
)
def test_a_garbled_marker_of_another_tool_is_unknown_and_reported(metadata: dict[str, Any]) -> None:
    found, findings = marks(foreign=EVERY_TTL, **metadata)
    assert isinstance(found.ttl, Unknown)
    assert findings == (found.ttl.why,)
    assert found.hold_until is None  # other rules stay in force


def test_a_garbled_marker_leaves_the_field_of_the_kind_in_force() -> None:
    found, findings = marks(
        spec={"ttlSecondsAfterFinished": 60}, annotations={"janitor/ttl": "10ay"}, foreign=EVERY_TTL
    )
    assert found.ttl == timedelta(minutes=1)
    assert len(findings) == 1
    assert "10ay" in findings[0]


@pytest.mark.parametrize("end", [None, Unknown("garbled")])
def test_where_the_end_is_unknown_an_expiry_is_never_early(end: Unknown | None) -> None:
    """The rules count from when it was first seen ended, which is after its creation."""
    found, _ = marks(JOB, Ending(True, Outcome.FAILED, end), annotations={"janitor/ttl": "7h"}, foreign=EVERY_TTL)
    assert found.ttl == 7 * HOUR


def test_without_an_end_and_a_creation_an_expiry_keeps() -> None:
    never = Ending(True, Outcome.FAILED, None)
    expires = {"janitor/expires": "2026-11-01"}
    found, _ = marks(JOB, never, creationTimestamp=None, annotations=expires, foreign=EVERY_TTL)
    assert isinstance(found.ttl, Unknown)


def test_a_lease_that_leaves_the_calendar_keeps() -> None:
    lease = {
        "k8s-ttl-controller.twin.sh/ttl": "52w",
        "k8s-ttl-controller.twin.sh/refreshed-at": "9999-06-01T00:00:00Z",
    }
    assert isinstance(marks(annotations=lease, foreign=EVERY_TTL)[0].ttl, Unknown)


def test_forever_holds() -> None:
    found, findings = marks(annotations={"janitor/ttl": "forever"}, foreign=("janitor/ttl",))
    assert (found.ttl, found.hold_until, findings) == (None, FAR, ())


# Holds


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("2026-12-01T18:00:00Z", datetime(2026, 12, 1, 18, tzinfo=UTC)),
        ("2026-12-01T18:00:00+02:00", datetime(2026, 12, 1, 16, tzinfo=UTC)),
        ("2026-12-01", datetime(2026, 12, 1, tzinfo=UTC)),
    ],
)
@pytest.mark.parametrize("ending", [OVER, NOT_ENDED])
def test_our_hold_holds_in_every_state(text: str, until: datetime, ending: Ending) -> None:
    assert marks(JOB, ending, annotations={"gpukeeper.io/hold-until": text})[0].hold_until == until


def test_a_hold_that_cannot_be_read_keeps_and_is_reported() -> None:
    found, findings = marks(annotations={"gpukeeper.io/hold-until": "friday"})
    assert isinstance(found.hold_until, Unknown)
    assert findings == (found.hold_until.why,)


@pytest.mark.parametrize(
    ("metadata", "until"),
    [
        ({"annotations": {"downscaler/exclude": "true"}}, FAR),
        ({"annotations": {"downscaler/exclude": "True"}}, FAR),
        ({"annotations": {"downscaler/exclude": "false"}}, None),
        ({"annotations": {"downscaler/exclude-until": "2026-11-20"}}, datetime(2026, 11, 20, tzinfo=UTC)),
        ({"pods_hold": "pod w-0 has karpenter.sh/do-not-disrupt=true"}, FAR),
    ],
)
def test_holds_of_other_tools_hold_running_work_only(metadata: dict[str, Any], until: datetime | None) -> None:
    assert marks(DEPLOYMENT, NOT_ENDED, **metadata)[0].hold_until == until
    assert marks(JOB, OVER, **metadata)[0].hold_until is None


@pytest.mark.parametrize(
    "annotations", [{"downscaler/exclude": "yes please"}, {"downscaler/exclude-until": "next week"}]
)
def test_a_garbled_hold_of_another_tool_holds_and_is_reported(annotations: dict[str, str]) -> None:
    found, findings = marks(DEPLOYMENT, NOT_ENDED, annotations=annotations)
    assert isinstance(found.hold_until, Unknown)
    assert findings == (found.hold_until.why,)


@pytest.mark.parametrize(
    ("annotations", "holds"),
    [
        ({"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}, True),
        ({"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}, False),
        ({"karpenter.sh/do-not-disrupt": "true"}, True),
        ({"karpenter.sh/do-not-disrupt": "false"}, False),
        (None, False),
    ],
)
def test_holds_on_pods(annotations: dict[str, str] | None, holds: bool) -> None:
    words = pod_hold(pod(name="w-0", annotations=annotations).metadata)
    assert (words is not None and words.startswith("pod w-0 has ")) is holds


@pytest.mark.parametrize(
    ("metadata", "asks"),
    [
        ({"labels": {"gpukeeper.io/exempt": "true"}}, "gpukeeper.io/exempt=true"),
        ({"annotations": {"gpukeeper.io/exempt": "shared demo"}}, "gpukeeper.io/exempt=shared demo"),
        ({"annotations": {"gpukeeper.io/exempt": "False"}}, None),
        ({"labels": {"gpukeeper.io/infrastructure": "true"}}, "gpukeeper.io/infrastructure=true"),
        ({}, None),
    ],
)
def test_who_asks_to_be_left_alone(metadata: dict[str, Any], asks: str | None) -> None:
    assert marks(**metadata)[0].asks_exemption == asks


# Another actor


@pytest.mark.parametrize(
    ("kind", "spec", "elsewhere"),
    [
        (JOB, {"managedBy": "kubernetes.io/job-controller"}, False),
        (JOB, {"managedBy": "kueue.x-k8s.io/multikueue"}, True),
        (JOBSET, {"managedBy": "jobset.sigs.k8s.io/jobset-controller"}, False),
        (JOBSET, {"managedBy": "kubernetes.io/job-controller"}, True),  # another kind's controller
        (TRAINJOB, {"managedBy": "trainer.kubeflow.org/trainjob-controller"}, False),
        (TRAINJOB, {"managedBy": "kueue.x-k8s.io/multikueue"}, True),
        (PYTORCH, {"runPolicy": {"managedBy": "kubeflow.org/training-operator"}}, False),
        (PYTORCH, {"runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}}, True),
        (RAYJOB, {"managedBy": "kueue.x-k8s.io/multikueue"}, True),
        (RAYCLUSTER, {"managedBy": "ray.io/kuberay-operator"}, False),
        (JOB, {"managedBy": ""}, True),  # not what any controller calls itself
        (JOB, {}, False),
        (PYTORCH, {}, False),
    ],
)
def test_managed_by(kind: Kind, spec: dict[str, Any], elsewhere: bool) -> None:
    assert (marks(kind, spec=spec)[0].managed_elsewhere is not None) is elsewhere


def test_a_copy_of_another_cluster_is_left_alone() -> None:
    found, _ = marks(labels={"kueue.x-k8s.io/multikueue-origin": "multikueue"}, gitops=True)
    assert found.managed_elsewhere == "MultiKueue of another cluster (multikueue)"


@pytest.mark.parametrize(
    "metadata",
    [
        {"annotations": {"argocd.argoproj.io/tracking-id": "train:batch/Job:team-a/run-7"}},
        {"labels": {"argocd.argoproj.io/instance": "train"}},
        {"labels": {"kustomize.toolkit.fluxcd.io/name": "apps"}},
        {"labels": {"helm.toolkit.fluxcd.io/name": "ray"}},
    ],
)
def test_what_a_gitops_tool_put_there_is_its(metadata: dict[str, Any]) -> None:
    assert "would recreate it" in (marks(**metadata)[0].managed_elsewhere or "")
    assert marks(**metadata, gitops=True)[0].managed_elsewhere is None


def test_a_bare_pod_has_no_manager() -> None:
    assert managed_elsewhere(POD, pod().metadata, None) is None


# KubeRay tidies up by itself


def rule(policy: str, ttl: Any = None, **condition: Any) -> dict[str, Any]:
    return {"policy": policy, "condition": {**condition, **({} if ttl is None else {"ttlSeconds": ttl})}}


@pytest.mark.parametrize(
    ("spec", "waits"),
    [
        ({}, None),
        ({"shutdownAfterJobFinishes": False, "ttlSecondsAfterFinished": 600}, None),
        ({"shutdownAfterJobFinishes": True}, timedelta()),
        ({"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": 600}, timedelta(minutes=10)),
        (
            {
                "deletionStrategy": {
                    "deletionRules": [
                        rule("DeleteWorkers", 100, jobStatus="SUCCEEDED"),
                        rule("DeleteSelf", 7200, jobStatus="SUCCEEDED"),
                        rule("DeleteCluster", 90000, jobStatus="FAILED"),  # of another outcome
                        rule("DeleteNone", 99999, jobStatus="SUCCEEDED"),
                    ]
                }
            },
            2 * HOUR,
        ),
        ({"deletionStrategy": {"deletionRules": [rule("DeleteCluster", jobDeploymentStatus="Failed")]}}, None),
        ({"deletionStrategy": {"onSuccess": {"policy": "DeleteNone"}}}, None),
    ],
)
def test_kuberay_is_not_overtaken(spec: dict[str, Any], waits: timedelta | None) -> None:
    found, findings = marks(RAYJOB, OVER, spec=spec)
    assert found.hold_until == (None if waits is None else NOW - 2 * HOUR + waits + timedelta(seconds=60))
    assert findings == ()
    assert marks(RAYJOB, NOT_ENDED, spec=spec)[0].hold_until is None


def test_the_other_outcome_has_its_own_rules() -> None:
    strategy = {
        "deletionRules": [rule("DeleteCluster", 5, jobStatus="SUCCEEDED"), rule("DeleteSelf", 9, jobStatus="FAILED")]
    }
    failed = Ending(True, Outcome.FAILED, NOW)
    found, _ = marks(RAYJOB, failed, spec={"deletionStrategy": strategy})
    assert found.hold_until == NOW + timedelta(seconds=69)
    stopped, _ = marks(RAYJOB, Ending(True, Outcome.STOPPED, NOW), spec={"deletionStrategy": strategy})
    assert stopped.hold_until == NOW + timedelta(seconds=69)  # whichever comes last


@pytest.mark.parametrize(
    "strategy",
    [
        {"deletionRules": "all"},
        {"deletionRules": ["all"]},
        {"deletionRules": [{"policy": "DeleteSelf"}]},
        {"deletionRules": [rule("DeleteSelf", "soon", jobStatus="SUCCEEDED")]},
        {"deletionRules": [rule("DeleteSelf", -1, jobStatus="SUCCEEDED")]},
    ],
)
def test_rules_that_cannot_be_read_keep(strategy: dict[str, Any]) -> None:
    found, findings = marks(RAYJOB, OVER, spec={"deletionStrategy": strategy})
    assert isinstance(found.hold_until, Unknown)
    assert findings == (found.hold_until.why,)


def test_without_an_end_kuberay_counts_from_nothing() -> None:
    shut = {"shutdownAfterJobFinishes": True}
    assert marks(RAYJOB, Ending(True, Outcome.FAILED, None), spec=shut)[0].hold_until is None
    garbled = marks(RAYJOB, Ending(True, Outcome.FAILED, Unknown("no time")), spec=shut)[0].hold_until
    assert isinstance(garbled, Unknown)


# Namespaces


def namespace(**metadata: Any) -> Meta:
    return msgspec.json.decode(msgspec.json.encode(meta(name="team-a", **metadata)), type=Meta)


@pytest.mark.parametrize(
    ("metadata", "facts"),
    [
        ({}, NamespaceFacts("research")),
        ({"labels": {"gpukeeper.io/environment": "production"}}, NamespaceFacts("production")),
        ({"name": "other"}, NamespaceFacts(None)),
        (
            {"labels": {"app.kubernetes.io/part-of": "kubeflow-profile"}, "annotations": {"owner": "ann@example.org"}},
            NamespaceFacts(
                "research", "ann@example.org", "namespace team-a is the Kubeflow profile of ann@example.org"
            ),
        ),
        ({"annotations": {"owner": "ann@example.org"}}, NamespaceFacts("research")),  # no profile
        (
            {"annotations": {"downscaler/exclude": "true"}},
            NamespaceFacts("research", held="namespace team-a has downscaler/exclude"),
        ),
        (
            {"annotations": {"downscaler/exclude-until": "2026-11-20"}},
            NamespaceFacts("research", held="namespace team-a has downscaler/exclude-until=2026-11-20"),
        ),
        ({"annotations": {"downscaler/exclude-until": "2026-11-01"}}, NamespaceFacts("research")),
    ],
)
def test_what_a_namespace_says(metadata: dict[str, Any], facts: NamespaceFacts) -> None:
    told = namespace(**metadata) if "name" not in metadata else msgspec.structs.replace(namespace(), **metadata)
    assert namespace_facts(told, {"team-*": "research", "*-a": "other"}, NOW) == facts


def test_a_garbled_exclusion_of_a_namespace_holds() -> None:
    assert "'maybe'" in (excluded({"downscaler/exclude": "maybe"}, NOW) or "")


def test_a_namespace_that_could_not_be_read_is_unknown() -> None:
    facts = unreadable_namespace("team-a", "403")
    assert isinstance(facts.environment, Unknown)
    assert isinstance(facts.owner, Unknown)


def test_a_hold_that_cannot_be_read_does_not_replace_one_that_can() -> None:
    later = NOW + timedelta(hours=5)
    both = {"gpukeeper.io/hold-until": "tomorrow", "downscaler/exclude-until": later.isoformat()}
    running = NOT_ENDED
    found, notes = read(JOB, root(annotations=both).metadata, None, running, NOW, TranslationSettings())
    assert found.hold_until == later
    assert any("tomorrow" in one for one in notes), "and it is still complained about"
    over = {"gpukeeper.io/hold-until": "tomorrow", "downscaler/exclude-until": (NOW - timedelta(hours=1)).isoformat()}
    found, _ = read(JOB, root(annotations=over).metadata, None, running, NOW, TranslationSettings())
    assert isinstance(found.hold_until, Unknown)
    assert found.unhold == "kubectl -n team-a annotate jobs run-7 gpukeeper.io/hold-until-"
    assert found.hold_with == "kubectl -n team-a annotate --overwrite jobs run-7 gpukeeper.io/hold-until="


# What gpukeeper announced


SAID = Warned("idle", 1, NOW, False, "1", timedelta(minutes=30), NOW + timedelta(minutes=20))


def said(uid: str) -> str:
    return msgspec.json.encode(AnnouncedWarnings(uid, (SAID,))).decode()


def test_what_was_announced_on_the_object_is_read_by_another_instance() -> None:
    found, notes = marks(annotations={"gpukeeper.io/warned": said("u-1")}, uid="u-1")
    assert (found.warned, notes) == ((SAID,), ())


def test_a_copied_manifest_was_not_warned() -> None:
    found, notes = marks(annotations={"gpukeeper.io/warned": said("u-1")}, uid="u-2")
    assert (found.warned, notes) == ((), ())


@pytest.mark.parametrize("text", ["", "yes", "[]", '{"uid": 7}', '{"uid": "u-1", "warned": [{"rule": "idle"}]}'])
def test_an_announcement_that_cannot_be_read_does_not_count_and_is_reported(text: str) -> None:
    found, notes = marks(annotations={"gpukeeper.io/warned": text}, uid="u-1")
    assert found.warned == ()
    assert any("gpukeeper.io/warned cannot be read" in one for one in notes)
