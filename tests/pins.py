"""The requirements files as values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True)
class Pin:
    requirement: Requirement
    hashes: frozenset[str]

    @property
    def version(self) -> str:
        (exact,) = self.requirement.specifier
        return exact.version


def read_pins(file: Path) -> list[Pin]:
    """One pin is several lines: the requirement, its hashes and comments that say what asks for it."""
    pins = re.split(r"^(?=\w)", file.read_text(), flags=re.MULTILINE)[1:]
    return [
        Pin(Requirement(text.partition("\\")[0]), frozenset(re.findall(r"--hash=sha256:(\w+)", text))) for text in pins
    ]
