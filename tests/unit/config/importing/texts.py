"""Files of other tools, for tests."""

from __future__ import annotations

from io import StringIO
from typing import Any

from ruamel.yaml import YAML


def as_yaml(tree: dict[str, Any]) -> str:
    out = StringIO()
    YAML(typ="safe").dump(tree, out)
    return out.getvalue()
