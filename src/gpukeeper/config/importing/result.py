"""What an import gives: a policy as text, and everything that could not be translated."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpukeeper.config.document import Document, read
from gpukeeper.config.problems import messages_in_order
from gpukeeper.model.errors import UsageError


class NotTranslated(msgspec.Struct, frozen=True, kw_only=True):
    """`where`: file and line, or the option. `why` also says what the policy does instead."""

    where: str
    what: str
    why: str
    todo: str


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
