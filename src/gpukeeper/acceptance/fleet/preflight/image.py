"""The image and shared memory. That an image can be pulled is proven by a trial only."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from gpukeeper.acceptance.fleet.preflight.cluster import ClusterFacts, ClusterRequest, SecretFacts, targets
from gpukeeper.acceptance.fleet.preflight.finding import Finding, counted, failed, named, passed, unchecked, warning
from gpukeeper.acceptance.fleet.preflight.quantity import gibibytes, quantity
from gpukeeper.model.unknown import Unknown

PULL_TYPES = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")
TRIAL = "gpukeeper accept preflight --on kubernetes --trial --image"


def image(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    name = request.image
    if not name:
        yield unchecked("image", "no image was given", (), [f"{TRIAL} REGISTRY/gpukeeper-accept:VERSION"])
        return
    if is_floating(name):
        words = f"{name}: no fixed tag or digest, so nodes can run different versions"
        yield warning("image", words, [name], [f"{TRIAL} {name.removesuffix(':latest')}:VERSION"])
    chosen = targets(facts, request)
    have = [node.name for node in chosen if spelled(name) & set(node.images)]
    if have and len(have) == len(chosen):
        yield passed("image", f"{name} is on {counted(len(have), 'GPU node')} already", have)
    else:
        words = (
            f"{name} is on {len(have)} of {counted(len(chosen), 'GPU node')}; only a trial proves that it can be pulled"
        )
        yield unchecked("image", words, [name], [f"{TRIAL} {name}"])


def spelled(image: str) -> set[str]:
    """As a node may list it: with the default registry and tag."""
    last = image.rpartition("/")[2]
    tagged = image if ":" in last or "@" in image else f"{image}:latest"
    first = image.partition("/")[0]
    if "/" not in image:
        return {image, tagged, f"docker.io/library/{tagged}"}
    return (
        {image, tagged}
        if "." in first or ":" in first or first == "localhost"
        else {image, tagged, f"docker.io/{tagged}"}
    )


def is_floating(image: str) -> bool:
    if "@" in image:
        return False
    tag = image.rpartition("/")[2].partition(":")[2]
    return tag in ("", "latest")


def pull_secrets(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    for secret in facts.secrets:
        yield _judged(secret, request)


def _judged(secret: SecretFacts, request: ClusterRequest) -> Finding:
    where, name = request.namespace, secret.name
    registry = request.image.partition("/")[0] if "/" in request.image else "REGISTRY"
    create = (
        f"kubectl -n {where} create secret docker-registry {name} --docker-server={registry} "
        "--docker-username=USER --docker-password=TOKEN"
    )
    if isinstance(secret.kind, Unknown):
        return unchecked("pull-secret", secret.kind, [name], [f"kubectl -n {where} get secret {name}"])
    if secret.kind is None:
        words = f"imagePullSecret {name} does not exist in namespace {where}; the image cannot be pulled with it"
        return failed("pull-secret", words, [name], [create])
    if secret.kind not in PULL_TYPES:
        words = f"Secret {where}/{name} has type {secret.kind}; an imagePullSecret needs {PULL_TYPES[0]}"
        return failed("pull-secret", words, [name], [f"kubectl -n {where} delete secret {name}", create])
    return passed("pull-secret", f"imagePullSecret {where}/{name} exists and has the right type", [name])


def shm(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    """The shared memory of the pods counts as their memory."""
    size = quantity(request.shm)
    if size is None:
        words = f"{request.shm} is not a size such as 16Gi"
        yield failed("shm", words, (), ["gpukeeper accept preflight --on kubernetes --shm 16Gi"])
        return
    small = []
    for node in targets(facts, request):
        memory = quantity(node.allocatable.get("memory")) or Decimal(0)
        if memory < size * 2:
            small.append(f"{node.name} ({gibibytes(memory)})")
    if small:
        words = f"shared memory of {gibibytes(size)} is more than half of the allocatable memory of {named(small)}"
        yield warning("shm", words, small, ["gpukeeper accept --on kubernetes --shm 8Gi"])
    else:
        yield passed("shm", f"shared memory of {gibibytes(size)} fits into the memory of the GPU nodes")
