"""What `explain` advises about work that loops, cannot be placed or cannot begin, tried on real controllers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gpukeeper.model.subject import Cause, Diagnosis
from tests.real.kube import objects
from tests.real.kube.api import Api, Object
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness
from tests.real.kube.runs import CHAIN, FAILS, is_true, left, stays_so
from tests.real.kube.test_diagnose import TRAINER, TRAINER_IMAGE, Asked, one_of, stand_in

__all__ = ["stand_in"]
pytestmark = pytest.mark.usefixtures("kwok_node")
RUN, SNAPSHOT = "run", "run-runtime-snapshot"


def failed_at(api: Api, namespace: str) -> str | None:
    """When it last failed; None: it has not, or that is forgotten."""
    seen = api.get("trainjobs", namespace, RUN)
    conditions = (seen or {}).get("status", {}).get("conditions") or []
    return next(
        (one["lastTransitionTime"] for one in conditions if one["type"] == "Failed" and is_true(seen, "Failed")), None
    )


def looping(plane: ControlPlane, namespace: str) -> Object:
    """A TrainJob of v2.3.0 that fails after a second, whose JobSet is removed eight seconds later, and so on."""
    ends = {**FAILS, "test/finish-after": "1s"}
    plane.api.create(objects.training_runtime("torch", ttl=8, annotations=ends), namespace)
    made: Object = plane.api.create(objects.train_job(RUN, "torch"), namespace)
    return made


def test_the_loop_of_v23_ends_by_removing_the_trainjob_and_not_by_its_runtime(
    trainer_v23: ControlPlane, api: Api, namespace: str, stand_in: Any
) -> None:
    made = looping(trainer_v23, namespace)
    stand_in(TRAINER, TRAINER_IMAGE.format("v2.3.0"))
    asked = Asked(trainer_v23)

    def level() -> Cause | None:
        found = asked.about(made, datetime.now(UTC))
        return next((one for one in found.causes if "ttlSecondsAfterFinished: 8 is set in" in one.words), None)

    cause = trainer_v23.until(level, "it is looked at while it has failed")
    assert cause is not None
    assert "recreates it" in cause.words
    assert f"kubectl -n {namespace} delete trainjob {RUN}" in cause.remedy
    assert SNAPSHOT in cause.remedy
    assert "A TTL on the TrainJob would take effect too late" in cause.remedy

    api.wait_for("configmaps", namespace, SNAPSHOT, lambda one: one is not None)
    runtime = api.get("trainingruntimes", namespace, "torch")
    assert runtime is not None
    api.patch(
        "trainingruntimes", namespace, "torch", {"spec": {"template": {"spec": {"ttlSecondsAfterFinished": None}}}}
    )
    first = api.get("jobsets", namespace, RUN)
    uid = None if first is None else first["metadata"]["uid"]
    anew = api.wait_for("jobsets", namespace, RUN, lambda one: one and one["metadata"]["uid"] != uid)
    assert anew["spec"]["ttlSecondsAfterFinished"] == 8, "correcting the runtime does not help this one"

    api.delete("trainjobs", namespace, RUN, propagation="Background")
    trainer_v23.until(lambda: not left(api, namespace, *CHAIN), "all is gone")
    stays_so(lambda: not left(api, namespace, *CHAIN), "it came back")


def test_every_end_of_a_loop_is_counted_and_no_date_is_promised(trainer_v23: ControlPlane, namespace: str) -> None:
    looping(trainer_v23, namespace)
    harness = Harness(trainer_v23.keeper_kubeconfig(), namespace, loops=100)
    seen: set[str] = set()

    def one_more(turns: int) -> int:
        """Passes that only ever see it when it has failed."""
        at = failed_at(trainer_v23.api, namespace)
        if at is not None and at not in seen:
            harness.again()
            seen.update({at} if failed_at(trainer_v23.api, namespace) == at else ())
        return len(seen) >= turns

    trainer_v23.until(lambda: one_more(2), "it failed twice", deadline=120)
    ref = harness.subjects()[f"trainjob/{RUN}"].ref
    memory = harness.run(harness.ledger.memories([ref.key]))[ref.key]
    assert memory.ends_seen >= 2

    def waiting() -> Any:
        one = harness.decisions()[f"trainjob/{RUN}"]
        return one if one.rule == "retention" else None

    decision = trainer_v23.until(waiting, "it is looked at while it has failed")
    assert decision.due is None, "its end counts anew each time"
    assert "times and was restarted, so this time may never come" in decision.reason
    trainer_v23.api.delete("trainjobs", namespace, RUN, propagation="Background")


def test_what_cannot_be_scheduled_gives_the_reason_and_how_many_gpus_were_requested(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    made = api.create(objects.job(RUN, gpus=999), namespace)
    asked = Asked(plane)

    def told() -> Diagnosis | None:
        found = asked.about(made, datetime.now(UTC))
        return found if any("cannot be scheduled" in one.words for one in found.causes) else None

    found = plane.until(told, "the scheduler gave up on it")
    assert found is not None
    cause = one_of(found, "cannot be scheduled")
    assert "nvidia.com/gpu" in cause.words, "the scheduler's own words"
    assert any("999 GPUs requested, counted as 256: no node has more" in line for line in found.tree), found.tree


def test_a_runtime_that_is_missing_is_named_with_what_to_create(
    trainer_v23: ControlPlane, api: Api, namespace: str
) -> None:
    made = api.create(objects.train_job(RUN, "absent"), namespace)
    found = Asked(trainer_v23).about(made, datetime.now(UTC))
    cause = one_of(found, "TrainingRuntime absent, does not exist")
    assert cause.remedy.startswith(f"Create a TrainingRuntime named absent in namespace {namespace}")
