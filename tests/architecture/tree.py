"""The modules of the source tree, parsed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "gpukeeper"


def modules(*below: str) -> list[Path]:
    """Python files below these folders of the package; all of them without any."""
    folders = [SOURCE / name for name in below] or [SOURCE]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Names the module gives to things: classes, functions, arguments, variables, attributes it sets."""
    for node in ast.walk(parsed(path)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case _:
                pass
