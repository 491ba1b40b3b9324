"""Small programs in the place of the child, for tests of its clients: they answer, hang, print garbage or die."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

# `for question in asked(): give(question, record)`
_PRELUDE = """
import json, sys
def asked():
    for line in sys.stdin:
        yield json.loads(line)
def give(question, record):
    print(json.dumps({"id": question["id"], **record}), flush=True)
"""


def program(text: str) -> list[str]:
    return [sys.executable, "-c", _PRELUDE + text]


def answering(answers: Mapping[str, Any]) -> list[str]:
    """The same record to every question, or by its subject."""
    chosen = "answers" if "state" in answers else "answers[question['about']]"
    return program(f"answers = {dict(answers)!r}\nfor question in asked(): give(question, {chosen})")
