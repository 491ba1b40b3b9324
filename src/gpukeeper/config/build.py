"""PolicyFile → Policy. Nothing is decided here; only the members of Unix groups are added."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from gpukeeper.config.digest import digest_of
from gpukeeper.config.sections import PLATFORMS, PolicyFile
from gpukeeper.config.unix_groups import members_of
from gpukeeper.model import policy as model
from gpukeeper.model.subject import Category
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.settings import KubernetesSettings


def build(file: PolicyFile, exemptions: tuple[model.Exemption, ...] | Unknown) -> model.Policy:
    shared = _fields(file, model.Settings) | {
        "groups": {name: _group(one) for name, one in file.groups.items()},
        "temporary": (*file.temporary, *_of_nodes(file)),
    }
    policy = model.Policy(
        **shared,
        scope=_scope(file),
        own_ttl=file.ttl.own,
        foreign_ttl=file.ttl.foreign,
        exemptions=exemptions,
        kept=_kept(file),
        hold_total=file.holds.total,
        hold_within=file.holds.within,
        keep_alive=file.holds.keep_alive,
        release=file.kubernetes.release,
        platforms={
            "kubernetes": KubernetesSettings(**_fields(file.kubernetes, KubernetesSettings)),
            "ray": file.ray,
        },
        marks=file.acceptance.marks,
    )
    return msgspec.structs.replace(policy, digest=digest_of(policy))


def _fields(value: model.Value, kind: type[model.Value]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in kind.__struct_fields__}


def _of_nodes(file: PolicyFile) -> tuple[model.Temporary, ...]:
    """The temporary directories of Ray nodes, where Ray is covered, are judged like those of the machine itself."""
    if file.scope.ray is None:
        return ()
    same = {name: getattr(file.ray, name) for name in ("names", "keep", "above", "older_than", "under_pressure")}
    return tuple(model.Temporary(root=root, platform="ray", **same) for root in file.ray.roots)


def _kept(file: PolicyFile) -> dict[str, model.Kept]:
    """An hour is the least for a session: one that is just starting has directories and no processes yet."""
    return {
        Category.UNFINISHED.value: model.Kept(older_than=timedelta()),
        Category.DEAD_SESSION.value: model.Kept(older_than=file.ray.sessions, under_pressure=model.HOUR),
        Category.DEAD_LOGS.value: model.Kept(older_than=file.ray.logs, under_pressure=model.DAY),
        Category.REPORT.value: model.Kept(older_than=file.reports.older_than),
    }


def _scope(file: PolicyFile) -> dict[str, model.PlaceScope]:
    covered = {name: getattr(file.scope, name) for name in PLATFORMS}
    return {
        name: model.PlaceScope(places=one.places, namespaces=getattr(one, "namespaces", ("*",)))
        for name, one in covered.items()
        if one is not None
    }


def _group(group: model.Group) -> model.Group:
    added = members_of(group.unix_group) if group.unix_group is not None else None
    return msgspec.structs.replace(group, members=tuple(dict.fromkeys((*group.members, *(added or ())))))
