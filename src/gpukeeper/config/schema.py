"""The JSON Schema of a policy file, for editors; the reference page is written from it too."""

from __future__ import annotations

from typing import Any

from gpukeeper.config.fields import Form
from gpukeeper.config.layers import PRESETS
from gpukeeper.config.sections import (
    Entries,
    Items,
    KubernetesPlaces,
    Maybe,
    PolicyFile,
    Section,
    Setting,
    Shape,
    settings_of,
    value_as_written,
)
from gpukeeper.model.policy import DiskMarks, LedgerKeep, MarkSettings

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NAMES = {DiskMarks: "Disk", LedgerKeep: "Ledger", MarkSettings: "Marks"}


def json_schema() -> dict[str, Any]:
    parts: dict[str, Any] = {}
    schema = _section(PolicyFile, parts)
    schema["properties"]["preset"]["enum"] = list(PRESETS)
    retention, environments = schema["properties"]["retention"], schema["properties"]["environments"]
    retention["anyOf"] = [{"$ref": retention.pop("$ref")}, {"const": "manual"}]
    environments["additionalProperties"] = {"anyOf": [environments["additionalProperties"], {"const": "manual"}]}
    head = {"$schema": _DIALECT, "$defs": dict(sorted(parts.items()))}
    return head | schema | {"title": "gpukeeper policy", "required": ["scope"]}


def _section(section: Section, parts: dict[str, Any]) -> dict[str, Any]:
    """Those inside are added to `parts`."""
    settings = settings_of(section).values()
    found: dict[str, Any] = {"additionalProperties": False}
    if section in (PolicyFile, KubernetesPlaces):
        found["description"] = section.__doc__
    found["properties"] = {one.name: _setting(one, parts) for one in settings}
    if required := [one.name for one in settings if one.required]:
        found["required"] = required
    return found | {"type": "object"}


def _setting(setting: Setting, parts: dict[str, Any]) -> dict[str, Any]:
    """Defaults as people write them; no null, which a policy file does not have."""
    found = {"description": setting.about} | _shape(setting.shape, parts)
    if not isinstance(setting.shape, Maybe):
        found = dict(sorted(found.items()))
    default = None if setting.required else value_as_written(setting.default, setting.shape)
    if not isinstance(default, dict | None):  # the sections inside have their own
        found["default"] = default
    return found


def _shape(shape: Shape, parts: dict[str, Any]) -> dict[str, Any]:
    match shape:
        case Form():
            return dict(shape.schema)
        case Items(of):
            return {"items": _shape(of, parts), "type": "array"}
        case Entries(of):
            return {"additionalProperties": _shape(of, parts), "type": "object"}
        case Maybe(of):
            return _shape(of, parts)
        case section:
            name = _NAMES.get(section, section.__name__.removesuffix("Settings"))
            if name not in parts:
                parts[name] = _section(section, parts)
            return {"$ref": f"#/$defs/{name}"}
