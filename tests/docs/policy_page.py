"""The reference page of the policy file, written from its schema: `python -m tests.docs.policy_page`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Set
from typing import Any

from gpukeeper.config.checks import RULE_NAMES
from gpukeeper.config.layers import BUILT_IN, PRESETS
from gpukeeper.config.sections import json_schema

_OPENING = """\
# The policy file

Every setting, its default and what it means. This page is generated from the schema (`gpukeeper policy schema` prints
it for editors); [Write a policy](../how-to/write-a-policy.md) shows how to use it.

A policy is YAML 1.2. A value comes from the file, else from the preset in the file, else from the built-in defaults;
`gpukeeper policy show` prints each value and where it came from. A mapping is merged key by key, a list replaces a
list. An unknown setting, a setting given twice and a setting without a value are errors.

| kind of value | written like |
|---|---|
| duration | `30s`, `30m`, `1h30m`, `7d`, `2w`, `0`; at most 100 years |
| size | `500MB`, `5GB` (decimal), `512MiB`, `20GiB` (binary) |
| percentage | `80%`, `0.5%` |
| date | `2026-09-01` (to the end of that day, UTC) or `2026-09-01T18:00Z` |
| pattern | as in a shell: `team-*`, `node-[0-9]` |

`none` (also `never`) means no limit, `manual` keeps until a person removes it, `as class` uses the class's value.

The file is searched for in this order: `--policy`, `$GPUKEEPER_POLICY`, for all users except root
`$XDG_CONFIG_HOME/gpukeeper/policy.yaml` (default `~/.config`), `/etc/gpukeeper/policy.yaml`. Without a file the
built-in policy applies: preset `shared-host`, mode `plan`, all platforms that are found.
"""
_SAME_AS_RETENTION = "Each has the settings of [retention](#retention): `ci: {succeeded: 0, failed: 1d}`.\n"
_TABLE = "| setting | value | default | meaning |\n|---|---|---|---|"


def reference_page() -> str:
    schema = json_schema()
    parts = [_OPENING, "## Top level\n", _table(_plain(schema)), ""]
    for name, setting in schema["properties"].items():
        section = _section(setting, schema)
        if section is not None:
            tables = _tables(name, section, schema) if name != "environments" else (_SAME_AS_RETENTION,)
            parts += [f"## {name}\n", f"{setting['description']}\n", *tables]
    parts += _presets()
    return "\n".join(parts).rstrip() + "\n"


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: s for name, s in schema["properties"].items() if _section(s, schema) is None}


def _section(setting: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """What a setting holds when that is a mapping of settings: itself, each of its entries or each of its items."""
    for part in (setting, *setting.get("anyOf", ()), setting.get("additionalProperties"), setting.get("items")):
        if not isinstance(part, dict):
            continue
        if "$ref" in part:
            found: dict[str, Any] = schema["$defs"][part["$ref"].rpartition("/")[2]]
            return found
        if part is not setting and part.get("anyOf"):
            return _section(part, schema)
    return None


def _tables(name: str, section: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    yield _table(section["properties"], set(section.get("required", ())))
    yield ""
    alike: dict[int, list[str]] = {}
    inside = {key: inner for key, s in section["properties"].items() if (inner := _section(s, schema)) is not None}
    for key, inner in inside.items():
        alike.setdefault(id(inner), []).append(f"{name}.{key}")
    for names in alike.values():
        inner = inside[names[0].partition(".")[2]]
        yield f"### {', '.join(names)}\n"
        yield _table(inner["properties"], set(inner.get("required", ())))
        yield ""


def _table(settings: dict[str, Any], required: Set[str] = frozenset()) -> str:
    lines = [_TABLE]
    for name, setting in settings.items():
        default = "required" if name in required else _default(setting)
        lines.append(f"| `{name}` | {_kind(setting)} | {default} | {setting['description']} |")
    return "\n".join(lines)


def _kind(setting: dict[str, Any]) -> str:
    if "enum" in setting:
        return ", ".join(f"`{word}`" for word in setting["enum"])
    if "x-kind" in setting:
        return str(setting["x-kind"])
    if setting.get("type") == "array":
        kind = _kind(setting["items"])
        return f"list of {kind}{'s' if kind in ('percentage', 'pattern', 'absolute path') else ''}"
    return {"boolean": "`true`, `false`", "string": "text"}.get(setting.get("type", ""), "mapping")


def _default(setting: dict[str, Any]) -> str:
    value = setting.get("default")
    if isinstance(value, list):
        return f"`[{', '.join(str(item) for item in value)}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "–" if value in (None, {}) else f"`{value}`"


def _classes(classes: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| class | idle | when idle | max runtime | above it | other |\n|---|---|---|---|---|---|"
    for name, one in classes.items():
        idle, longest = one["idle"], one["max_runtime"]
        then = {"keep": ", keep", "remove": ", remove"}.get(one.get("after_idle", ""), "")
        when = "" if idle == "none" else "report" if one.get("on_idle") == "report" else f"stop{then}"
        above = "" if longest == "none" else one.get("on_max_runtime", "stop")
        yield f"| {name} | {idle} | {when} | {longest} | {above} | {'untouchable' if 'untouchable' in one else ''} |"


def _presets() -> Iterator[str]:
    yield "## The built-in classes\n"
    yield from _classes(BUILT_IN["classes"])
    yield "\n## The presets\n"
    for name, preset in PRESETS.items():
        kept = preset["retention"]
        extra = f", `at_finish: {preset['at_finish']}`" if "at_finish" in preset else ""
        yield f"- `{name}`: succeeded {kept['succeeded']}, failed {kept['failed']}{extra}" + (
            ", and groups (the site defines their members)" if "groups" in preset else ""
        )
    for grouped in ("shared-host", "ds01"):
        yield f"\nThe groups of `{grouped}`:\n"
        yield "| group | idle | max runtime | hold after stop |\n|---|---|---|---|"
        for name, one in PRESETS[grouped]["groups"].items():
            limits = [one.get(key, "as class") for key in ("idle", "max_runtime", "hold_after_stop")]
            yield f"| {name} | {' | '.join(limits)} |"
    ds01 = PRESETS["ds01"]
    warned = " and ".join(ds01["warnings"]["idle"])
    yield (
        f"\n`ds01` has the values of a university server: warnings at {warned} of the idle time, which need not be"
        f" delivered, {ds01['demand']['idle_factor']} of it under high demand, and these classes:\n"
    )
    yield from _classes({name: one | ds01["classes"].get(name, {}) for name, one in BUILT_IN["classes"].items()})
    yield "\n## Rules that an exemption can name\n"
    yield ", ".join(f"`{rule}`" for rule in RULE_NAMES) + "."


if __name__ == "__main__":
    sys.stdout.write(reference_page())
