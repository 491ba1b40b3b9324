"""What a check before a run found, its verdict, and the command that fixes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gpukeeper.model.grade import Grade, worst
from gpukeeper.model.unknown import Unknown

NAMES_MAX = 5  # in a sentence; all of them are in `about`
EXIT = {Grade.PASS: 0, Grade.WARN: 0, Grade.FAIL: 4, Grade.INCONCLUSIVE: 5}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is stable; docs/reference/preflight.md has every one. INCONCLUSIVE: could not be checked."""

    code: str
    group: str
    verdict: Grade
    message: str
    about: tuple[str, ...] = ()  # nodes, workloads, …
    fix: tuple[str, ...] = ()  # commands, or lines to add; what to run first comes first


def passed(code: str, message: str, about: Iterable[str] = ()) -> Finding:
    return _finding(code, Grade.PASS, message, about, ())


def warning(code: str, message: str, about: Iterable[str] = (), fix: Sequence[str] = ()) -> Finding:
    return _finding(code, Grade.WARN, message, about, fix)


def failed(code: str, message: str, about: Iterable[str] = (), fix: Sequence[str] = ()) -> Finding:
    return _finding(code, Grade.FAIL, message, about, fix)


def unchecked(code: str, why: Unknown | str, about: Iterable[str] = (), fix: Sequence[str] = ()) -> Finding:
    words = why.why if isinstance(why, Unknown) else why
    return _finding(code, Grade.INCONCLUSIVE, f"could not check: {words}", about, fix)


def _finding(code: str, verdict: Grade, message: str, about: Iterable[str], fix: Sequence[str]) -> Finding:
    return Finding(code=code, group=CODES[code], verdict=verdict, message=message, about=tuple(about), fix=tuple(fix))


def verdict_of(findings: Iterable[Finding]) -> Grade:
    return worst(one.verdict for one in findings)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """By group, else as they came."""
    groups = list(dict.fromkeys(CODES.values()))
    return tuple(sorted(findings, key=lambda one: groups.index(one.group)))


def named(names: Iterable[str], most: int = NAMES_MAX) -> str:
    """The first few, and how many more."""
    every = list(names)
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more} more" if more > 0 else "")


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# Every code and its group, in the order of the output.
CODES: dict[str, str] = {
    # Kubernetes
    "cluster": "cluster",
    "client": "cluster",
    "gpu-nodes": "nodes",
    "gpus-announced": "nodes",
    "mixed-cluster": "nodes",
    "node-missing": "nodes",
    "node-not-ready": "nodes",
    "node-cordoned": "nodes",
    "taints": "nodes",
    "gpus-unhealthy": "gpus",
    "gpus-missing": "gpus",
    "gpus-in-use": "gpus",
    "gpus-differ": "gpus",
    "gpus-shared": "gpus",
    "gpu-labels": "gpus",
    "gpu-selector": "gpus",
    "device-plugin": "software",
    "drivers": "software",
    "rdma": "network",
    "nccl": "network",
    "nccl-advice": "network",
    "image": "image",
    "pull-secret": "image",
    "shm": "memory",
    "namespace": "namespace",
    "admission": "namespace",
    "quota": "namespace",
    "limit-range": "namespace",
    "rights": "rights",
    "trial": "trial",
    "trial-gpu": "trial",
    "trial-node": "trial",
    "trial-network": "trial",
    "trial-left": "trial",
    # Docker
    "engine": "engine",
    "engine-gpus": "engine",
    "engine-runtime": "engine",
    "engine-image": "engine",
    "engine-shm": "engine",
    "engine-memlock": "engine",
    # ssh
    "host-login": "hosts",
    "host-python": "hosts",
    "host-program": "hosts",
    "host-folder": "hosts",
    "host-gpus": "gpus",
    "host-drivers": "software",
    "host-shm": "memory",
    "host-clock": "clocks",
    "host-master": "network",
    # Ray
    "ray-cluster": "cluster",
    "ray-version": "cluster",
    "ray-jobs": "cluster",
    "ray-dead": "nodes",
    "ray-nodes": "nodes",
    "ray-gpus": "gpus",
    "ray-free": "gpus",
}
