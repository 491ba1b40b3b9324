"""The policy file as sections: the settings of each, as its struct declares them (see `model.setting`), what the file
has that the policy has not, the way from one to the other, and the JSON Schema of it, for editors and for the reference
page. A policy is identified by a digest of its values. Nothing is decided here; only the members of Unix groups are
added.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args, get_origin

import msgspec

from gpukeeper.config.fields import FORMS, TEXT, TRUTH, Form, words_of
from gpukeeper.config.layers import PRESETS
from gpukeeper.config.machine import members_of
from gpukeeper.model import policy as model
from gpukeeper.model import setting as s
from gpukeeper.model.policy import BacktestSettings, DiskMarks, LedgerKeep, MarkSettings, Mode, Policy, Value
from gpukeeper.model.setting import InFile, Kind
from gpukeeper.model.subject import Category
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.settings import KubernetesSettings
from gpukeeper.platforms.ray.settings import RaySettings

Section: TypeAlias = type[msgspec.Struct]


class Items(NamedTuple):
    """A list."""

    of: Shape


class Entries(NamedTuple):
    """A mapping from names that the user chooses."""

    of: Shape


class Maybe(NamedTuple):
    """What need not be there."""

    of: Shape


Shape: TypeAlias = Form | Items | Entries | Maybe | Section


class Setting(NamedTuple):
    name: str  # in the file
    field: str  # of the struct
    shape: Shape
    about: str
    required: bool
    default: Any = None


@cache
def settings_of(section: Section) -> Mapping[str, Setting]:
    """By name, in the order of the file."""
    found: list[Setting] = []
    for field in msgspec.structs.fields(section):
        _, *notes = get_args(field.type) if get_origin(field.type) is Annotated else (field.type,)
        about = next((note for note in notes if isinstance(note, str)), None)
        if about is None:
            continue
        place = next((note for note in notes if isinstance(note, InFile)), InFile())
        shape = _shape(field.type)
        leaf = shape.of if isinstance(shape, Items) else shape
        if isinstance(leaf, Form):
            about = about.replace("{examples}", leaf.examples)
        made = None if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        default = made if field.default is msgspec.NODEFAULT else field.default
        setting = Setting(place.name or field.name, field.name, shape, about, field.required, default)
        before = [one.name for one in found].index(place.after) + 1 if place.after else len(found)
        found.insert(before, setting)
    return {one.name: one for one in found}


def _shape(given: Any) -> Shape:
    if get_origin(given) is Annotated:
        given, *notes = get_args(given)
        form = next((_form(note) for note in notes if isinstance(note, Kind | Form)), None)
        return form or _shape(given)
    inner = [part for part in get_args(given) if part not in (NoneType, Ellipsis)]
    if NoneType in get_args(given):
        return Maybe(_shape(inner[0]))
    if get_origin(given) is tuple:
        return Items(_shape(inner[0]))
    if get_origin(given) is Mapping:
        return Entries(_shape(inner[1]))
    if given in (str, bool):
        return TEXT if given is str else TRUTH
    if issubclass(given, StrEnum):
        return words_of([word.value for word in given], given)
    section: Section = given
    return section


def _form(note: Kind | Form) -> Form:
    return FORMS[note.name] if isinstance(note, Kind) else note


def section_in(shape: Shape) -> Section | None:
    """The section that it is, or that each of its items or entries is."""
    if isinstance(shape, Items | Entries | Maybe):
        return section_in(shape.of)
    return None if isinstance(shape, Form) else shape


def as_written(section: msgspec.Struct) -> dict[str, Any]:
    """As plain values in the words of a policy file."""
    settings = settings_of(type(section)).values()
    return {one.name: value_as_written(getattr(section, one.field), one.shape) for one in settings}


def value_as_written(value: Any, shape: Shape) -> Any:
    match shape:
        case Form():
            return shape.write(value)
        case Maybe(of):
            return None if value is None else value_as_written(value, of)
        case Items(of):
            return [value_as_written(one, of) for one in value]
        case Entries(of):
            return {name: value_as_written(one, of) for name, one in value.items()}
        case _:
            return as_written(value)


PLATFORMS = ("host", "docker", "kubernetes", "ray")
_P = model.Policy()


class Places(Value, frozen=True, kw_only=True):
    places: Annotated[tuple[str, ...], "Hosts or clusters, by name. Shell patterns."] = ("*",)


class KubernetesPlaces(Value, frozen=True, kw_only=True):
    """All namespaces are covered only if the file requests it."""

    namespaces: Annotated[tuple[str, ...], 'Namespaces: [research, "team-*"], or ["*"] for all.']
    places: Annotated[tuple[str, ...], "Clusters, by name. Shell patterns."] = ("*",)


class Scope(Value, frozen=True, kw_only=True):
    host: Annotated[Places | None, "This machine itself: temporary trees, processes that hold GPUs. {} covers it."] = (
        None
    )
    docker: Annotated[Places | None, "Docker hosts. {} covers this host."] = None
    kubernetes: Annotated[KubernetesPlaces | None, "Kubernetes clusters and their namespaces."] = None
    ray: Annotated[Places | None, "Ray clusters. {} covers all that are found."] = None
    simulated: Annotated[Places | None, "The simulated fleet of `gpukeeper demo`."] = None


class Kubernetes(KubernetesSettings, frozen=True, kw_only=True):
    release: Annotated[
        tuple[str, ...],
        "Finalizers that may be removed from an object whose deletion is proven to be stuck.",
        s.InFile(after="gitops"),
    ] = _P.release


class Holds(Value, frozen=True, kw_only=True):
    total: Annotated[s.Span, "Maximum total of a user's holds on one workload or one GPU ..."] = _P.hold_total
    within: Annotated[s.Span, "... within this time."] = _P.hold_within
    keep_alive: Annotated[str, "Path of a file inside a workload that requests a hold."] = _P.keep_alive


class Ttl(Value, frozen=True, kw_only=True):
    own: Annotated[bool, "Use a workload's own TTL, shorter or longer, up to `retention.max`."] = _P.own_ttl
    foreign: Annotated[tuple[str, ...], "TTL annotations of other tools to use as well, such as janitor/ttl."] = (
        _P.foreign_ttl
    )


class Acceptance(Value, frozen=True, kw_only=True):
    marks: Annotated[model.MarkSettings, "Marks on nodes of a cluster: `accept mark`, `node quarantine`."] = _P.marks


class PolicyFile(model.Settings, frozen=True, kw_only=True):
    """A whole policy file after merging."""

    scope: Annotated[Scope, "What the policy covers. Other platforms are never changed.", s.InFile(after="mode")] = (
        Scope()
    )
    ttl: Annotated[Ttl, "TTLs that workloads set for themselves.", s.InFile(after="at_finish")] = Ttl()
    exemptions: Annotated[
        tuple[model.Exemption, ...],
        "Suspends rules for an owner, a workload or a class.",
        s.InFile(after="match"),
    ] = ()
    exemptions_from: Annotated[
        str | None, "File with further exemptions, written by other tools.", s.InFile(after="exemptions")
    ] = None
    ray: Annotated[
        RaySettings,
        "Ray nodes on this machine, and which of their temporary files may be deleted.",
        s.InFile(after="reports"),
    ] = RaySettings()
    holds: Annotated[Holds, "Limits of holds.", s.InFile(after="loops")] = Holds()
    kubernetes: Annotated[Kubernetes, "Access to Kubernetes clusters.", s.InFile(after="gpu")] = Kubernetes()
    acceptance: Annotated[
        Acceptance, "What acceptance runs and quarantines may change on nodes.", s.InFile(after="kubernetes")
    ] = Acceptance()


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


def digest_of(policy: Policy) -> str:
    """Identifies the policy that decided: the same for the same values, whatever file or order they came from."""
    plain = msgspec.to_builtins(msgspec.structs.replace(policy, digest=""))
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def deciding_digest(policy: Policy) -> str:
    """Of the same policy in any mode: a backtest in mode plan counts when it is switched on."""
    return digest_of(msgspec.structs.replace(policy, mode=Mode.PLAN, backtest=BacktestSettings()))


_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCHEMA_NAMES = {DiskMarks: "Disk", LedgerKeep: "Ledger", MarkSettings: "Marks"}


def json_schema() -> dict[str, Any]:
    parts: dict[str, Any] = {}
    schema = _section_schema(PolicyFile, parts)
    schema["properties"]["preset"]["enum"] = list(PRESETS)
    retention, environments = schema["properties"]["retention"], schema["properties"]["environments"]
    retention["anyOf"] = [{"$ref": retention.pop("$ref")}, {"const": "manual"}]
    environments["additionalProperties"] = {"anyOf": [environments["additionalProperties"], {"const": "manual"}]}
    head = {"$schema": _DIALECT, "$defs": dict(sorted(parts.items()))}
    return head | schema | {"title": "gpukeeper policy", "required": ["scope"]}


def _section_schema(section: Section, parts: dict[str, Any]) -> dict[str, Any]:
    """Those inside are added to `parts`."""
    settings = settings_of(section).values()
    found: dict[str, Any] = {"additionalProperties": False}
    if section in (PolicyFile, KubernetesPlaces):
        found["description"] = section.__doc__
    found["properties"] = {one.name: _setting_schema(one, parts) for one in settings}
    if required := [one.name for one in settings if one.required]:
        found["required"] = required
    return found | {"type": "object"}


def _setting_schema(setting: Setting, parts: dict[str, Any]) -> dict[str, Any]:
    """Defaults as people write them; no null, which a policy file does not have."""
    found = {"description": setting.about} | _shape_schema(setting.shape, parts)
    if not isinstance(setting.shape, Maybe):
        found = dict(sorted(found.items()))
    default = None if setting.required else value_as_written(setting.default, setting.shape)
    if not isinstance(default, dict | None):  # the sections inside have their own
        found["default"] = default
    return found


def _shape_schema(shape: Shape, parts: dict[str, Any]) -> dict[str, Any]:
    match shape:
        case Form():
            return dict(shape.schema)
        case Items(of):
            return {"items": _shape_schema(of, parts), "type": "array"}
        case Entries(of):
            return {"additionalProperties": _shape_schema(of, parts), "type": "object"}
        case Maybe(of):
            return _shape_schema(of, parts)
        case section:
            name = _SCHEMA_NAMES.get(section, section.__name__.removesuffix("Settings"))
            if name not in parts:
                parts[name] = _section_schema(section, parts)
            return {"$ref": f"#/$defs/{name}"}
