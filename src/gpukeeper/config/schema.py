"""The JSON Schema of a policy file, for editors; the reference page is written from it too."""

from __future__ import annotations

import warnings
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import PydanticJsonSchemaWarning

from gpukeeper.config.presets import PRESETS
from gpukeeper.config.section import Section
from gpukeeper.config.sections import PolicyFile

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PydanticJsonSchemaWarning)  # defaults are written again below
        schema = PolicyFile.model_json_schema(by_alias=True)
    sections = {one.__name__: one for one in Section.__subclasses__()}
    for name, part in schema["$defs"].items():
        _in_file_words(part, sections[name])
    _in_file_words(schema, PolicyFile)
    schema["properties"]["preset"]["enum"] = list(PRESETS)
    retention, environments = schema["properties"]["retention"], schema["properties"]["environments"]
    retention["anyOf"] = [{"$ref": retention.pop("$ref")}, {"const": "manual"}]
    environments["additionalProperties"] = {"anyOf": [environments["additionalProperties"], {"const": "manual"}]}
    return {"$schema": _DIALECT, **schema, "title": "gpukeeper policy", "required": ["scope"]}


def _in_file_words(part: dict[str, Any], section: type[BaseModel]) -> None:
    """Defaults as people write them; no null, which a policy file does not have; no titles made of names."""
    defaults = section.model_construct().model_dump(mode="json", by_alias=True, warnings=False)
    part.pop("title", None)
    for name, setting in part.get("properties", {}).items():
        setting.pop("title", None)
        setting.pop("default", None)
        if "anyOf" in setting:
            choices = [choice for choice in setting.pop("anyOf") if choice != {"type": "null"}]
            setting.update(choices[0] if len(choices) == 1 else {"anyOf": choices})
        if not isinstance(defaults.get(name), dict | None):  # the sections inside have their own
            setting["default"] = defaults[name]
