"""Nodes whose pods pass, fail, hang, are evicted, vanish or lose their log, on a real control plane.

GPUKEEPER_TEST_NODES=512 runs it with 512 nodes, which takes four minutes (pytest --timeout 900).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from gpukeeper.acceptance.fleet.launcher import NodeStatus, Phase
from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher
from gpukeeper.model.unknown import Unknown
from tests.real.kube.api import Object
from tests.real.launch.beds import Bed, at_once

NODES = int(os.environ.get("GPUKEEPER_TEST_NODES", "64"))
FATES = ("passes", "fails", "hangs", "is evicted", "vanishes", "loses its log")
RARE = NODES // 16  # nodes of each fate but the first


def test_a_fleet_with_every_fate(bed: Callable[[int], Bed]) -> None:
    made = bed(NODES)
    fate = dict.fromkeys(made.nodes, FATES[0])
    for number, name in enumerate(made.nodes[: RARE * (len(FATES) - 1)]):
        fate[name] = FATES[1 + number % (len(FATES) - 1)]
    spec = made.spec(backoff=0)
    made.start(spec, **{"at-once": "64"})
    assert len(made.plane.api.names("jobs", made.namespace)) == NODES
    pods = made.plane.until(lambda: _placed(made), "every pod runs", deadline=300)
    at_once(lambda pod: _play(made, pod, fate[pod["spec"]["nodeName"]]), pods)
    states = made.plane.until(lambda: _settled(made, fate), "every fate has been reported", deadline=300)
    by_fate = {one: Counter((states[n].phase, states[n].code) for n in fate if fate[n] == one) for one in FATES}
    assert set(by_fate["passes"]) == {(Phase.ENDED, "")}
    assert set(by_fate["fails"]) == {(Phase.ENDED, "failed")}
    assert set(by_fate["hangs"]) == {(Phase.RUNNING, "")}
    assert set(by_fate["vanishes"]) == {(Phase.GONE, "vanished")}
    assert set(by_fate["is evicted"]) == {(Phase.ENDED, "evicted")}
    assert {states[n].exit_code for n in fate if fate[n] == "fails"} == {4}
    assert made.tell(_requests_for_a_status) <= 20
    lost = next(name for name, what in fate.items() if what == "loses its log")
    assert isinstance(made.tell(lambda launcher: launcher.output(spec, lost)), Unknown)
    told = next(name for name, what in fate.items() if what == "passes")
    assert (
        made.tell(lambda launcher: launcher.output(spec, told))
        == b"step 1 loss 2.31\nstep 2 loss 1.97\nstep 3 loss 1.64\n"
    )
    removal = made.tell(lambda launcher: launcher.remove("r1"))
    assert not removal.left
    assert len(removal.removed) == NODES - RARE
    assert not made.left()


async def _requests_for_a_status(launcher: KubernetesLauncher) -> int:
    """Pages of 500: with 512 nodes three kinds have two pages."""
    assert await launcher.run("r1") is not None
    return launcher.requests


def _placed(made: Bed) -> list[Object]:
    found = [one for one in made.pods() if one["spec"].get("nodeName") and one["status"]["phase"] == "Running"]
    return found if len(found) == NODES else []


def _play(made: Bed, pod: Object, fate: str) -> None:
    api, namespace, name = made.plane.api, made.namespace, pod["metadata"]["name"]
    if fate == "passes":
        made.finish(pod)
    elif fate == "fails":
        made.finish(pod, 4)
    elif fate == "is evicted":
        status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
        api.patch("pods", namespace, name, {"status": status}, subresource="status")
    elif fate == "vanishes":
        api.delete("jobs", namespace, pod["metadata"]["labels"]["job-name"], propagation="Background")
    elif fate == "loses its log":  # with its pod, as when a node is repaired
        made.finish(pod)
        made.plane.until(
            lambda: (api.get("pods", namespace, name) or {}).get("status", {}).get("phase") == "Succeeded", "it ended"
        )
        job = pod["metadata"]["labels"]["job-name"]
        made.plane.until(lambda: (api.get("jobs", namespace, job) or {})["status"].get("succeeded"), "its Job ended")
        api.delete("pods", namespace, name)


def _settled(made: Bed, fate: dict[str, str]) -> dict[str, NodeStatus]:
    found = made.states()
    waiting = [
        name
        for name, what in fate.items()
        if (found[name].phase is Phase.RUNNING) != (what == "hangs") or found[name].phase is Phase.WAITING
    ]
    gone = [name for name, what in fate.items() if what == "loses its log" and found[name].phase is not Phase.GONE]
    return {} if waiting or gone else found
