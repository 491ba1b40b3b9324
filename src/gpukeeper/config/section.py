"""The base of all sections of a policy file."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)


def about(default: Any, text: str, **more: Any) -> Any:
    return Field(default=default, description=text, **more)
