"""PolicyFile → Policy. Nothing is decided here; only the members of Unix groups are added."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from gpukeeper.config import sections
from gpukeeper.config.digest import digest_of
from gpukeeper.config.sections import PLATFORMS, KubernetesPlaces, PolicyFile
from gpukeeper.config.unix_groups import members_of
from gpukeeper.config.web_section import Web
from gpukeeper.model import policy as model
from gpukeeper.model.subject import Category
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.settings import KubernetesSettings
from gpukeeper.platforms.ray.settings import RaySettings

V = TypeVar("V", bound=model.Value)
_OTHER_NAMES = {"grace": "stop_grace"}


def build(file: PolicyFile, exemptions: tuple[model.Exemption, ...] | Unknown) -> model.Policy:
    policy = model.Policy(
        preset=file.preset,
        mode=file.mode,
        scope=_scope(file),
        retention=_value(model.Retention, file.retention),
        environments={name: _value(model.Retention, one) for name, one in file.environments.items()},
        at_finish=file.at_finish,
        own_ttl=file.ttl.own,
        foreign_ttl=tuple(file.ttl.foreign),
        classes={name: _value(model.ClassSettings, one) for name, one in file.classes.items()},
        groups={name: _group(one) for name, one in file.groups.items()},
        admins=tuple(file.admins),
        owner_labels=tuple(file.owner_labels),
        match=tuple(_value(model.Match, one) for one in file.match),
        exemptions=exemptions,
        warnings=_value(model.Warnings, file.warnings),
        activity=_value(model.Activity, file.activity),
        demand=_value(model.Demand, file.demand),
        budget=_value(model.Budget, file.budget),
        breaker=_value(model.Breaker, file.breaker),
        temporary=(*(_value(model.Temporary, one) for one in file.temporary), *_of_nodes(file)),
        kept=_kept(file),
        disk=_value(model.DiskMarks, file.disk),
        reports=_value(model.Reports, file.reports),
        images=_value(model.Images, file.images),
        build_cache=_value(model.BuildCache, file.build_cache),
        volumes=_value(model.Volumes, file.volumes),
        networks=_value(model.Networks, file.networks),
        orphans=file.orphans,
        loops=file.loops,
        hold_total=file.holds.total,
        hold_within=file.holds.within,
        keep_alive=file.holds.keep_alive,
        capture=_value(model.Capture, file.capture),
        gpu=_value(model.GpuSettings, file.gpu),
        release=tuple(file.kubernetes.release),
        platforms={
            "kubernetes": _value(KubernetesSettings, file.kubernetes, but=("release",)),
            "ray": _value(RaySettings, file.ray),
        },
        marks=_value(model.MarkSettings, file.acceptance.marks),
        notify=_value(model.Notify, file.notify),
        web=_web(file.web),
        schedule=_value(model.Schedule, file.schedule),
        ledger=_value(model.LedgerKeep, file.ledger),
        prices=_value(model.Prices, file.prices),
        backtest=_value(model.BacktestSettings, file.backtest),
        metrics=_value(model.MetricsSettings, file.metrics),
        fleet=_value(model.Fleet, file.fleet),
    )
    return msgspec.structs.replace(policy, digest=digest_of(policy))


def build_exemption(one: sections.Exemption) -> model.Exemption:
    return _value(model.Exemption, one)


def _value(kind: type[V], section: BaseModel, *, but: Collection[str] = ()) -> V:
    given: dict[str, Any] = {}
    for name in type(section).model_fields.keys() - set(but):
        value = getattr(section, name)
        given[_OTHER_NAMES.get(name, name)] = tuple(value) if isinstance(value, list) else value
    return kind(**given)


def _of_nodes(file: PolicyFile) -> tuple[model.Temporary, ...]:
    """The temporary directories of Ray nodes, where Ray is covered, are judged like those of the machine itself."""
    if file.scope.ray is None:
        return ()
    ray = file.ray
    same = {name: getattr(ray, name) for name in ("above", "older_than", "under_pressure")}
    names, keep = tuple(ray.names), tuple(ray.keep)
    return tuple(model.Temporary(root=root, names=names, keep=keep, platform="ray", **same) for root in ray.roots)


def _kept(file: PolicyFile) -> dict[str, model.Kept]:
    """An hour is the least for a session: one that is just starting has directories and no processes yet."""
    return {
        Category.UNFINISHED.value: model.Kept(older_than=timedelta()),
        Category.DEAD_SESSION.value: model.Kept(older_than=file.ray.sessions, under_pressure=model.HOUR),
        Category.DEAD_LOGS.value: model.Kept(older_than=file.ray.logs, under_pressure=model.DAY),
        Category.REPORT.value: model.Kept(older_than=file.reports.older_than),
    }


def _web(section: Web) -> model.Web:
    return msgspec.structs.replace(
        _value(model.Web, section, but=("proxy", "tls")),
        proxy=_value(model.WebProxy, section.proxy),
        tls=_value(model.WebTls, section.tls),
    )


def _scope(file: PolicyFile) -> dict[str, model.PlaceScope]:
    scope = {}
    for name in PLATFORMS:
        places = getattr(file.scope, name)
        if places is not None:
            namespaces = tuple(places.namespaces) if isinstance(places, KubernetesPlaces) else ("*",)
            scope[name] = model.PlaceScope(places=tuple(places.places), namespaces=namespaces)
    return scope


def _group(section: sections.Group) -> model.Group:
    group = _value(model.Group, section)
    added = members_of(group.unix_group) if group.unix_group is not None else None
    return msgspec.structs.replace(group, members=tuple(dict.fromkeys((*group.members, *(added or ())))))
