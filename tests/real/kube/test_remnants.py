"""Headless Services that acceptance runs left behind, on a real API server: reported, never removed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.real.kube import objects
from tests.real.kube.api import Api, Object
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness
from tests.real.kube.runs import annotated, labelled, passes
from tests.real.kube.test_cli import DONE, USAGE, Shell, shell
from tests.real.kube.test_rights import ALL

__all__ = ["shell"]
pytestmark = pytest.mark.usefixtures("kwok_node")


def service(name: str, *, app: str = "gpu-accept-ddp", address: str | None = "None") -> Object:
    """As the old runner made it: for the pods with the label `run` of that name."""
    spec = {"selector": {"run": name}, "ports": [{"port": 29500}], "publishNotReadyAddresses": True}
    spec |= {} if address is None else {"clusterIP": address}
    return {"kind": "Service", "metadata": {"name": name, "labels": {"app": app, "owner": "ann"}}, "spec": spec}


def reported(harness: Harness) -> dict[str, str]:
    return {name: one.findings[0] for name, one in harness.subjects().items() if name.startswith("service/")}


def test_a_headless_service_of_an_old_run_is_reported_and_kept(plane: ControlPlane, api: Api, namespace: str) -> None:
    """C6.5"""
    for one in (
        service("old"),
        service("older", app="gpu-acceptance-test"),
        service("used"),
        service("web", app="web"),
        service("balanced", address=None),
    ):
        api.create(one, namespace)
    api.create(labelled(objects.pod("rank-0", gpus=0), {"run": "used"}), namespace)
    harness = Harness(plane.keeper_kubeconfig(), namespace, owner_labels=["owner"])
    assert reported(harness) == {}, "its run may be about to begin"
    harness.later(hours=25)
    found = reported(harness)
    assert found.keys() == {"service/old", "service/older"}
    assert "(app=gpu-accept-ddp), created 1d1h" in found["service/old"]
    assert "owner ann: no pod of the run is left" in found["service/old"]
    assert found["service/old"].endswith(f"kubectl -n {namespace} delete service old")

    passes(harness)
    assert {"old", "older", "used", "web", "balanced"} <= api.names("services", namespace), "only reported"
    written = [line for line in harness.ledger.lines if getattr(getattr(line, "ref", None), "kind", "") == "service"]
    assert written == [], "nothing of it is recorded, so nothing is missing when it goes"
    api.delete("services", namespace, "old")
    api.wait_gone("services", namespace, "old")
    assert reported(harness).keys() == {"service/older"}

    blind = Harness(plane.kubeconfig(plane.new_user(ALL, namespace=namespace)), namespace)
    blind.later(hours=25)
    assert reported(blind) == {}, "no right on Services"
    blind.decisions()  # and nothing counts as unseen for that


def test_observe_and_explain_name_it_and_nobody_can_ask_for_its_removal(shell: Shell, api: Api, namespace: str) -> None:
    ended = (datetime.now(UTC) - timedelta(seconds=30)).isoformat()
    api.create(annotated(service("old"), {"gpukeeper.io/run-ended": ended}), namespace)
    command = f"kubectl -n {namespace} delete service old"
    for words in (("observe",), ("explain", "service/old")):
        said = shell.run(*words)
        assert said.code == DONE, said.err
        assert command in said.out + said.err
    refused = shell.run("workload", "remove", "service/old", "--yes")
    assert refused.code == USAGE
    assert "is only reported, nothing was done" in refused.err
    assert shell.run("plan").code == DONE
    assert api.get("services", namespace, "old") is not None
