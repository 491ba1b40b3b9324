"""Options of the engine, as text, read into values. All problems are reported at once. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
KEEP_FINISHED_S = 24 * 3600
_QUANTITY = re.compile(r"[0-9]{1,12}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the pods of a run are made. Empty: not set."""

    namespace: str = ""
    gpu: str = ""  # the resource; empty: the one that the nodes announce
    shm: str = "16Gi"
    rdma: Mapping[str, int] = {}  # resource and count
    cpu: str = ""
    memory: str = ""
    priority: str = ""  # the name of a PriorityClass
    pull_secrets: tuple[str, ...] = ()
    pull_policy: str = ""
    runtime_class: str = ""
    service_account: str = ""
    tolerate: bool = True  # every taint
    host_network: bool = False
    ttl_s: int | None = KEEP_FINISHED_S
    at_once: int = 32  # requests at the same time while objects are created
    busy: str = "exclude"  # or wait: a node whose GPUs others have
    framework: str = "torch"  # of the runtime of a TrainJob; or tensorflow: the Trainer then sets no PET_ variables


def options_of(options: Mapping[str, str]) -> KubernetesOptions:
    """`context` belongs to the connection."""
    found: dict[str, object] = {}
    problems: list[str] = []
    for name, text in options.items():
        if name == "context":
            continue
        reader = _READERS.get(name)
        if reader is None:
            near = difflib.get_close_matches(name, [*_READERS, "context"], 1)
            problems.append(f'unknown option "{name}"{f"; did you mean {near[0]}" if near else ""}')
            continue
        field, read = reader
        try:
            found[field] = read(text)
        except ValueError as problem:
            problems.append(f'{name}="{text[:80]}" {problem}')
    if problems:
        known = ", ".join(sorted([*_READERS, "context"]))
        raise UsageError(f"{'. '.join(problems)}. Nothing was created. Options of kubernetes: {known}.")
    return msgspec.convert(found, KubernetesOptions)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("is not a valid name: lower case letters, digits, dashes and dots")
    return text


def _quantity(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise ValueError("is not a quantity; write it like 16Gi or 14")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(one.strip()) for one in text.split(",") if one.strip())


def _resource(text: str) -> str:
    if "/" not in text or not _LABEL.fullmatch(text):
        raise ValueError("is not a resource; write it like nvidia.com/gpu")
    return text


def _resources(text: str) -> dict[str, int]:
    """`rdma/ib`, `rdma/ib=8`, several with commas."""
    found = {}
    for one in filter(None, text.split(",")):
        name, _, count = one.partition("=")
        found[_resource(name.strip())] = reading.whole(count.strip()) if count else 1
    return found


def _switch(text: str) -> bool:
    if text not in {"yes", "no"}:
        raise ValueError("is neither yes nor no")
    return text == "yes"


def _seconds(text: str) -> int | None:
    """`never`: the objects stay until they are removed."""
    return None if text == "never" else int(reading.span(text).total_seconds())


def _count(text: str) -> int:
    count = reading.whole(text)
    if not 1 <= count <= 256:
        raise ValueError("is not between 1 and 256")
    return count


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"is none of {', '.join(words)}")
        return text

    return read


_READERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "namespace": ("namespace", _name),
    "gpu": ("gpu", _resource),
    "shm": ("shm", _quantity),
    "rdma": ("rdma", _resources),
    "cpu": ("cpu", _quantity),
    "memory": ("memory", _quantity),
    "priority": ("priority", _name),
    "pull-secrets": ("pull_secrets", _names),
    "pull-policy": ("pull_policy", _one_of("Always", "IfNotPresent", "Never")),
    "runtime-class": ("runtime_class", _name),
    "service-account": ("service_account", _name),
    "tolerate": ("tolerate", _switch),
    "host-network": ("host_network", _switch),
    "ttl": ("ttl_s", _seconds),
    "at-once": ("at_once", _count),
    "busy": ("busy", _one_of("exclude", "wait")),
    "framework": ("framework", _one_of("torch", "tensorflow")),
}


def is_label_value(text: str) -> bool:
    return bool(_VALUE.fullmatch(text))
