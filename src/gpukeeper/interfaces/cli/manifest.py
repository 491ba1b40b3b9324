"""`gpukeeper explain NAME --manifest FILE`: the resulting TrainJob, from files alone. No cluster is contacted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from gpukeeper.config.document import read
from gpukeeper.interfaces.terminal import show
from gpukeeper.model.errors import UsageError
from gpukeeper.model.printable import plain
from gpukeeper.platforms.kubernetes.manifests import merge

_NEXT = re.compile(r"^---.*$", re.MULTILINE)


def explain_files(workload: str, files: Sequence[Path], *, json: bool) -> None:
    found = merge([one for path in files for one in _objects(path)], workload)
    if json:
        show.as_json("explain-manifest", msgspec.to_builtins(found))
        return
    for line in found.lines():
        typer.echo(plain(line))


def _objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, and of a List those in it."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path} could not be read: {problem}. Nothing was explained.") from problem
    found: list[dict[str, Any]] = []
    for part in _NEXT.split(text):
        document = read(part)
        if document.problems:
            raise UsageError(f"{path} is not a valid manifest: {document.problems[0]}. Nothing was explained.")
        tree = document.tree
        items = tree.get("items", [tree]) if isinstance(tree, dict) else []
        found += [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []
    return found
