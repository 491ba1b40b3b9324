"""Where a controller is usually found, and the finalizers that controllers put on objects."""

from __future__ import annotations

import msgspec


class Controller(msgspec.Struct, frozen=True):
    """Where one is usually found."""

    name: str
    deployments: tuple[str, ...] = ()  # none: part of the control plane, which may run outside the cluster
    lease: str = ""
    namespaces: tuple[str, ...] = ()  # read one by one if listing all is not permitted
    word: str = ""  # part of the image name, to find it under another name


class Finalizer(msgspec.Struct, frozen=True):
    name: str
    whose: str  # for people
    controller: Controller
    stuck: str  # when it usually is
    remedy: str
    without: bool = False  # it may be removed if its controller does not run


# Pods, Jobs, Deployments and the like belong to the control plane itself.
BUILT_IN = Controller("kube-controller-manager", lease="kube-controller-manager", namespaces=("kube-system",))
START = "Start its controller again: it then completes the removal"  # a remedy
