"""A reader of YAML whose time grows with the length of the text, whatever is in it."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scanner import Scanner

DEEPEST = 50  # levels


class _Scanner(Scanner):
    """Refuses deep nesting before searching for its end, which costs the square of the depth."""

    def fetch_flow_collection_start(self, TokenClass: Any, to_push: str) -> None:  # noqa: N803 - theirs
        if self.flow_level >= DEEPEST:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass, to_push)


def safe_yaml() -> YAML:
    """It also raises RecursionError."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Scanner = _Scanner
    return yaml
