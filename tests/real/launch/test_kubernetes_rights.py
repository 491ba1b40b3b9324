"""The launcher with exactly the rights that preflight asks for, on a real API server: each form, from start to end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from gpukeeper.acceptance.fleet.launcher import Phase
from gpukeeper.acceptance.fleet.preflight.facts import ClusterRequest, Right
from gpukeeper.acceptance.fleet.preflight.kubernetes import needed
from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown
from tests.real.kube.control_plane import ControlPlane
from tests.real.launch.beds import Bed
from tests.real.launch.test_kubernetes_forms import CONTROLLERS

TRIAL = "for --trial"
SETS = ("daemonset", "statefulset")


def rules(rights: Iterable[Right]) -> list[dict[str, Any]]:
    """As in a Role: jobs.batch is the resource jobs of the group batch."""
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": [one.verb]}
        for one in rights
        for resource, _, group in (one.resource.partition("."),)
    ]


def granted(plane: ControlPlane, rights: Iterable[Right]) -> str:
    everywhere = [one for one in rights if not one.namespace]
    within = [one for one in rights if one.namespace]
    user = plane.new_user(rules(everywhere))
    for namespace in {one.namespace for one in within}:
        plane.grant(user, rules(within), namespace=namespace)
    return user


@pytest.mark.parametrize("form", CONTROLLERS)
def test_the_rights_that_preflight_asks_for_are_enough(
    plane: ControlPlane, bed: Callable[[int], Bed], form: str
) -> None:
    for one in CONTROLLERS[form]:
        plane.need(one)
    made = bed(2)
    asked = needed(ClusterRequest(namespace=made.namespace, form=form))
    user = granted(plane, [one for one in asked if one.why != TRIAL])
    spec = made.spec(form=form)

    async def started(launcher: KubernetesLauncher) -> None:
        await launcher.start(spec, await launcher.targets(spec))
        await launcher.start(spec, await launcher.targets(spec))  # again: the objects exist

    made.tell(started, user, busy="wait")
    wanted = Phase.ENDED if form in SETS else Phase.RUNNING

    async def phases(launcher: KubernetesLauncher) -> list[Phase]:
        summary = await launcher.run("r1")
        return [] if summary is None else [one.phase for one in summary.nodes]

    plane.until(lambda: made.tell(phases, user) == [wanted] * 2, f"both nodes are {wanted}")
    output = made.tell(lambda launcher: launcher.output(spec, made.nodes[0]), user)
    assert not isinstance(output, Unknown), output.why
    runs = made.tell(lambda launcher: launcher.runs(), user)
    assert not isinstance(runs, Unknown), runs.why
    assert [one.spec.run for one in runs] == ["r1"]
    removal = made.tell(lambda launcher: launcher.remove("r1"), user)
    assert removal.removed
    assert not removal.left
    plane.until(lambda: not made.left(form), "nothing is left")


def test_without_a_right_on_the_kinds_in_between_nothing_is_guessed(
    plane: ControlPlane, bed: Callable[[int], Bed]
) -> None:
    plane.need("jobset")
    made = bed(1)
    spec = made.spec(form="jobset")
    made.start(spec)
    asked = needed(ClusterRequest(namespace=made.namespace, form="jobset"))
    user = granted(plane, [one for one in asked if one.resource != "jobs.batch"])
    with pytest.raises(PlatformError, match=r"jobs.batch is forbidden|cannot list resource"):
        made.tell(lambda launcher: launcher.run("r1"), user)
    nobody = plane.new_user()
    assert isinstance(made.tell(lambda launcher: launcher.runs(), nobody), Unknown)
    made.tell(lambda launcher: launcher.remove("r1"))
