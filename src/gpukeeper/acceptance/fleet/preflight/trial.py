"""What a trial pod printed and how it ended: does the image start on this node, with a GPU, and what is there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpukeeper.acceptance.fleet.preflight.finding import Finding, failed, named, passed, unchecked, warning
from gpukeeper.acceptance.fleet.preflight.network import Network, advice
from gpukeeper.model.unknown import Unknown

MARK = "gpukeeper-fact "
FACTS_MAX = 500  # lines; an image can print anything
IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
LAYERS = ("InfiniBand", "Ethernet")


class TrialFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One trial pod. `exit_code` None: its program did not end."""

    run: str
    namespace: str
    name: str
    image: str
    node: str = ""  # where it ran; empty: nowhere
    wanted: str = ""  # the node it was for; empty: any
    exit_code: int | None = None
    reason: str = ""  # ImagePullBackOff, Unschedulable, …
    message: str = ""
    output: str | Unknown = ""
    events: tuple[str, ...] = ()
    left: str = ""  # why it is still there


def printed(output: str) -> dict[str, list[str]]:
    """Lines that begin with the mark: a name and a value."""
    found: dict[str, list[str]] = defaultdict(list)
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    for line in lines[:FACTS_MAX]:
        name, _, value = line.removeprefix(MARK).strip().partition(" ")
        found[name].append(value.strip())
    return found


def judge_trial(trial: TrialFacts) -> Iterator[Finding]:
    where = trial.node or trial.wanted or "any node"
    if trial.left:
        yield _left(trial)
    if trial.exit_code is None:
        yield _not_started(trial, where)
        return
    if isinstance(trial.output, Unknown):
        yield unchecked("trial", f"{where}: the output of the trial pod: {trial.output.why}", [trial.name])
        return
    facts = printed(trial.output)
    if trial.exit_code != 0 or "end" not in facts:
        last = trial.output.strip().splitlines()[-1:] or ["no output"]
        words = f"{where}: the trial pod ended with exit code {trial.exit_code}: {last[0][:200]}"
        yield failed("trial", words, [trial.name], _shows(trial))
        return
    yield passed("trial", f"{where}: {trial.image} started and ended; the image can be pulled there", [where])
    yield from _gpu(facts, where)
    yield from _node(facts, where)
    yield from _network(facts, where)


def _left(trial: TrialFacts) -> Finding:
    delete = f"kubectl -n {trial.namespace} delete pod -l gpukeeper.io/run={trial.run}"
    return failed(
        "trial-left", f"trial pod {trial.namespace}/{trial.name} is still there: {trial.left}", [trial.name], [delete]
    )


def _not_started(trial: TrialFacts, where: str) -> Finding:
    """Its events come with it: the pod itself is removed."""
    events = f" Events: {named(trial.events, 3)}" if trial.events else ""
    words = f"{where}: the trial pod did not run: {trial.reason or 'unknown reason'}"
    words += f" ({trial.message})" if trial.message else ""
    if trial.reason in IMAGE_REASONS:
        return failed("trial", f"{words}.{events}", [trial.image], _pulls(trial))
    if trial.reason in ("Unschedulable", "Forbidden", "Invalid"):
        return failed("trial", f"{words}.{events}", [where], ["kubectl describe nodes"])
    return unchecked("trial", f"{words}.{events}", [where], _shows(trial))


def _pulls(trial: TrialFacts) -> list[str]:
    registry = trial.image.partition("/")[0] if "/" in trial.image else "REGISTRY"
    secret = (
        f"kubectl -n {trial.namespace} create secret docker-registry regcred --docker-server={registry} "
        "--docker-username=USER --docker-password=TOKEN"
    )
    return [secret, f"gpukeeper accept preflight --on kubernetes --trial --image {trial.image} --pull-secret regcred"]


def _shows(trial: TrialFacts) -> list[str]:
    return [f"kubectl -n {trial.namespace} get events --field-selector involvedObject.name={trial.name}"]


def _gpu(facts: Mapping[str, list[str]], where: str) -> Iterator[Finding]:
    gpus = facts.get("gpu", [])
    if len(gpus) == 1:
        yield passed("trial-gpu", f"{where}: one GPU in the pod: {gpus[0]}", [where])
    elif gpus:
        words = f"{where}: one GPU was requested, {len(gpus)} are visible in the pod; GPUs are not isolated"
        env = "remove NVIDIA_VISIBLE_DEVICES from the image and from the runtime's defaults; the device plugin sets it"
        yield warning("trial-gpu", words, [where], [env])
    elif facts.get("nvidia-smi"):
        words = f"{where}: nvidia-smi finds no GPU in the pod: {facts['nvidia-smi'][0]}"
        yield failed("trial-gpu", words, [where], [f"kubectl describe node {where}"])
    else:
        words = f"{where}: no nvidia-smi and no GPU in the pod; the NVIDIA runtime did not add them"
        runtime = "sudo nvidia-ctk runtime configure --runtime=containerd --set-as-default"
        yield failed("trial-gpu", words, [where], [runtime, "sudo systemctl restart containerd"])


def _node(facts: Mapping[str, list[str]], where: str) -> Iterator[Finding]:
    names = ("cpus", "memory", "shm", "memlock", "user", "capabilities", "gpukeeper")
    known = [f"{name} {facts[name][0]}" for name in names if facts.get(name)]
    yield passed("trial-node", f"{where}: {', '.join(known)}", [where])
    locked = (facts.get("memlock") or [""])[0]
    if locked.isdecimal():
        words = f"{where}: locked memory is limited to {locked} KiB; RDMA needs unlimited"
        file = "/etc/systemd/system/containerd.service.d/memlock.conf"
        fix = f"printf '[Service]\\nLimitMEMLOCK=infinity\\n' | sudo tee {file}; sudo systemctl daemon-reload"
        yield warning("trial-node", words, [where], [fix, "sudo systemctl restart containerd kubelet"])
    if not facts.get("gpukeeper"):
        words = f"{where}: gpukeeper is not in the image; the run needs an image with it"
        yield failed("trial-node", words, [where], ["add to its Containerfile: RUN pip install ./gpukeeper"])


def _network(facts: Mapping[str, list[str]], where: str) -> Iterator[Finding]:
    interfaces = named(facts.get("interface", []), 8) or "none"
    ports = facts.get("port", [])
    words = f"{where}: interfaces {interfaces}; InfiniBand ports {named(ports, 16) or 'none'}"
    down = [port for port in ports if "ACTIVE" not in port]
    if down:
        show = "ibstat; sudo mlxlink -d DEVICE"
        yield warning("trial-network", f"{words}. Not active: {named(down)}", [where], [show])
    else:
        yield passed("trial-network", words, [where])


def layers(trials: Iterable[TrialFacts]) -> frozenset[str]:
    """Link layers of all ports."""
    outputs = [trial.output for trial in trials if isinstance(trial.output, str)]
    ports = [port for output in outputs for port in printed(output).get("port", [])]
    return frozenset(layer for layer in LAYERS for port in ports if layer in port)


def network_advice(trials: Iterable[TrialFacts]) -> tuple[Finding, ...]:
    """InfiniBand or RoCE: only the ports show it."""
    found = layers(trials)
    if not found:
        return ()
    return (advice(Network.INFINIBAND if "InfiniBand" in found else Network.ROCE),)


def drivers(trials: Iterable[TrialFacts]) -> Iterator[Finding]:
    """Where labels do not show the versions, the trial does."""
    versions: dict[str, list[str]] = defaultdict(list)
    for trial in trials:
        for version in printed(trial.output).get("driver", []) if isinstance(trial.output, str) else ():
            versions[version].append(trial.node)
    if len(versions) > 1:
        words = "; ".join(f"{version} on {named(nodes)}" for version, nodes in sorted(versions.items()))
        yield warning("drivers", f"driver versions differ: {words}", (), ["nvidia-smi --version"])
