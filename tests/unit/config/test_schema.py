"""The schema for editors and the reference page say what the code does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpukeeper.config.sections import json_schema
from tests.docs.policy_page import reference_page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "policy.md"


def settings(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in (schema, *schema["$defs"].values()):
        yield from part["properties"].items()


def test_every_setting_is_described() -> None:
    assert [name for name, setting in settings(json_schema()) if not setting.get("description")] == []


def test_unknown_settings_are_refused_everywhere() -> None:
    schema = json_schema()
    assert all(part["additionalProperties"] is False for part in (schema, *schema["$defs"].values()))


def test_defaults_are_written_as_people_write_them() -> None:
    parts = json_schema()["$defs"]
    assert parts["Class"]["properties"]["start_grace"]["default"] == "30m"
    assert parts["Class"]["properties"]["idle"]["default"] == "none"
    assert parts["Retention"]["properties"]["failed"]["default"] == "7d"
    assert parts["Warnings"]["properties"]["idle"]["default"] == ["20%", "95%"]
    assert parts["Capture"]["properties"]["quota"]["default"] == "20GiB"


def test_there_is_no_null() -> None:
    assert "null" not in json.dumps(json_schema())


def test_only_the_scope_is_required() -> None:
    assert json_schema()["required"] == ["scope"]


def test_the_reference_page_is_not_stale() -> None:
    assert PAGE.read_text() == reference_page(), (
        "Write it anew: python -m tests.docs.policy_page > docs/reference/policy.md"
    )


def test_every_setting_is_on_the_reference_page() -> None:
    page = reference_page()
    assert [name for name, _ in settings(json_schema()) if f"`{name}`" not in page and f"## {name}" not in page] == []
