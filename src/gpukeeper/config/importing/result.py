"""What an import gives: a policy as text, with a comment beside each value; and all that could not be translated."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gpukeeper.config.document import Document, read
from gpukeeper.config.problems import messages_in_order
from gpukeeper.model.errors import UsageError
from gpukeeper.model.words import plain

WIDEST_COMMENT = 160
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_AMOUNT = re.compile(r"(?:[0-9]+(?:ms|us|[dhmsw]))+|[0-9]+(?:\.[0-9]+)?%|[0-9]+(?:B|[kMGTP]B|[KMGTP]iB)")
# Words that a YAML reader, also one of version 1.1, takes for something else than text.
_RESERVED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


class Noted(msgspec.Struct, frozen=True):
    """A value, and where it came from."""

    value: Any
    note: str


class NotTranslated(msgspec.Struct, frozen=True, kw_only=True):
    """`where`: file and line, or the option. `why` also says what the policy does instead."""

    where: str
    what: str
    why: str
    todo: str

    def lines(self) -> tuple[str, str]:
        return f"{self.where}: {self.what}", f"  {self.why}. {self.todo.rstrip('.')}."


def policy_text(head: list[str], tree: Mapping[str, Any], missed: Sequence[NotTranslated] = ()) -> str:
    """`tree`: mappings of mappings, whose leaves are Noted; a list has only Noted."""
    said = [f"# {_comment(line)}".rstrip() for line in head]
    if missed:
        words = [part for one in missed for line in one.lines() for part in _wrapped(line)]
        said += ["# Not translated:", *(f"# {line}" for line in words)]
    return "\n".join([*said, *_lines(tree, "")]) + "\n"


def _wrapped(line: str) -> list[str]:
    inside = line.startswith(" ")
    words = " ".join(plain(line).split())
    return textwrap.wrap(words, WIDEST_COMMENT, initial_indent="    " * inside, subsequent_indent="    ")


def _lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Noted):
            yield f"{indent}{_flow(key)}: {_flow(value.value)}  # {_comment(value.note)}"
        elif isinstance(value, list):
            yield f"{indent}{_flow(key)}:"
            for entry in value:
                yield f"{indent}  - {_flow(entry.value)}  # {_comment(entry.note)}"
        else:
            yield f"{indent}{_flow(key)}:"
            yield from _lines(value, indent + "  ")


def _comment(text: str) -> str:
    """On one line, whatever the other tool's file contains."""
    shown = " ".join(plain(text).split())
    return shown if len(shown) <= WIDEST_COMMENT else shown[:WIDEST_COMMENT] + "…"


def _flow(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            return _text(value)
        case dict():
            return "{" + ", ".join(f"{_flow(key)}: {_flow(one)}" for key, one in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(_flow(one) for one in value) + "]"
        case _:
            raise AssertionError(f"This is a bug in gpukeeper: {type(value).__name__} in a policy")


def _text(value: str) -> str:
    is_plain = (_WORD.fullmatch(value) and value.lower() not in _RESERVED) or _AMOUNT.fullmatch(value)
    return value if is_plain else json.dumps(value)


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    policy: str
    not_translated: tuple[NotTranslated, ...] = ()


def refuse(problems: Sequence[str]) -> UsageError:
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    return UsageError("\n".join((*problems, f"{count}. Nothing was written. Correct the file, then import it again.")))


def source_document(text: str, name: str) -> Document:
    """The other tool's YAML. Raises UsageError with the line of everything that is no YAML."""
    found = read(text, foreign=True)
    if found.problems:
        raise refuse(messages_in_order(found.problems, name, found.lines))
    return found
