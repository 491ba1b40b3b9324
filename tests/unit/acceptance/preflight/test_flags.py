"""What is typed for `gpukeeper accept preflight --on kubernetes` is what the rules are asked about."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpukeeper.acceptance.fleet.preflight.facts import Finding
from gpukeeper.clients.kubernetes.api import NODES
from gpukeeper.interfaces.cli.accept_preflight import PreflightOptions, _checked
from gpukeeper.model.errors import UsageError
from gpukeeper.wiring import preflight
from tests.unit.acceptance.preflight.clusters import the
from tests.unit.acceptance.preflight.test_gather import Cluster, a_node


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    found.add(NODES, a_node("gpu-1"))
    found.add(NODES, a_node("gpu-2"))
    monkeypatch.setattr(preflight, "cluster_api", lambda options, environ: found)
    return found


def checked(**typed: Any) -> tuple[Finding, ...]:
    return asyncio.run(_checked(PreflightOptions(on="kubernetes", **typed)))


def test_nodes_gpus_and_secrets_reach_the_rules() -> None:
    found = checked(nodes="gpu-1,gpu-9", gpus_per_node=9, image="lab/accept:1", pull_secret=["key"])
    assert the("node-missing", found).message == "gpu-9: no such node"
    assert the("gpus-in-use", found).message == "gpu-1: 9 GPUs requested with --gpus-per-node, 8 announced"
    assert "lab/accept:1" in the("image", found).message
    assert "imagePullSecret key" in the("pull-secret", found).message


def test_the_namespace_is_that_of_the_login_unless_one_is_named() -> None:
    assert "lab" in the("namespace", checked()).message
    assert "other" in the("namespace", checked(namespace="other")).message


def test_a_trial_needs_an_image() -> None:
    with pytest.raises(UsageError, match="--trial needs the image"):
        checked(trial=True)
    with pytest.raises(UsageError, match="--trial needs the image"):
        checked(trial_on="all")


def test_a_trial_on_all_runs_on_each_node() -> None:
    found = checked(image="lab/accept:1", trial_on="all", trial_within="1s")
    trials = [one.message for one in found if one.code == "trial"]
    assert [words.split(":")[1].strip() for words in trials] == ["gpu-1", "gpu-2"]
