"""What the forms are made from: the run, its options and the nodes that can be tested. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gpukeeper.acceptance.fleet.spec import RunSpec, Target
from gpukeeper.acceptance.launchers.kubernetes import marks
from gpukeeper.acceptance.launchers.kubernetes.api import Resource
from gpukeeper.acceptance.launchers.kubernetes.options import GPU_RESOURCES, KubernetesOptions
from gpukeeper.model.errors import UsageError


class Item(msgspec.Struct, frozen=True):
    """An object to create. `owned`: the first root owns it, so that it goes with the run."""

    resource: Resource
    manifest: dict[str, Any]
    owned: bool = False


class Plan(msgspec.Struct, frozen=True):
    spec: RunSpec
    options: KubernetesOptions
    targets: tuple[Target, ...]  # all, with those that are excluded

    @property
    def nodes(self) -> tuple[Target, ...]:
        return tuple(one for one in self.targets if not one.excluded)

    @property
    def name(self) -> str:
        return marks.name(self.spec.run)

    def gpus(self, target: Target) -> int:
        """0: the nodes announce none; the pods then request none."""
        return target.gpus or 0 if self.spec.gpus_per_node is None else self.spec.gpus_per_node

    def devices(self, target: Target) -> dict[str, int]:
        """The resource of its GPUs, and how many."""
        count = self.gpus(target)
        return {self.options.gpu or target.resource or GPU_RESOURCES[0]: count} if count else {}

    def same_devices(self) -> dict[str, int]:
        """Of forms whose pods are all alike."""
        kinds = sorted({tuple(self.devices(one).items()) for one in self.nodes})
        if len(kinds) > 1:
            words = ", ".join(f"{count} {name}" for kind in kinds for name, count in kind)
            raise UsageError(
                f"--as {self.spec.form}: the nodes have different GPUs ({words}), and its pods are all alike. "
                "Nothing was created. Use --gpus-per-node, --as job, or a selector for nodes of one kind."
            )
        return dict(kinds[0]) if kinds else {}

    def metadata(self, name: str, *, whole: bool = True, node: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {"name": name}
        if self.options.namespace:
            found["namespace"] = self.options.namespace
        found["labels"] = marks.labels(self.spec)
        found["annotations"] = marks.described(self.spec, self.targets, whole=whole)
        if node:
            found["annotations"][marks.NODE] = node
        return found


def head(resource: Resource) -> dict[str, Any]:
    return {"apiVersion": resource.api_version, "kind": resource.kind}


def names(targets: Sequence[Target]) -> tuple[str, ...]:
    return tuple(one.node for one in targets)
