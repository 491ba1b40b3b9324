"""The modules of the source tree, read and parsed once, and how a rule about them is reported."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "gpukeeper"


def refuse(found: Iterable[tuple[Path, int, str]], advice: str) -> None:
    """Fails with a line for each place at which a rule is broken, and what to do there."""
    if broken := [f"{name_of(path)}:{line}: {what}: {advice}" for path, line, what in found]:
        pytest.fail("\n".join(broken), pytrace=False)


@cache
def _all_modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def modules(*below: str) -> list[Path]:
    """Python files below these folders of the package; all of them without any."""
    folders = {SOURCE / name for name in below}
    return [path for path in _all_modules() if not folders or folders.intersection(path.parents)]


@cache
def lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


@cache
def parsed(path: Path) -> ast.Module:
    gc.disable()  # trees have no garbage, and to look for it takes twice as long as to parse them
    try:
        return ast.parse(path.read_text(), filename=str(path))
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Names the module gives to things: classes, functions, arguments, variables, attributes it sets."""
    for node in nodes(path):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case _:
                pass
