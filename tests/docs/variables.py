"""Which environment variables gpukeeper reads, found in its source.

What is taken from, or looked for in, a mapping that is called `environ` or `variables`: by name, by a constant, in a
loop over constants, or by a helper that gets the mapping and the name.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.tree import SOURCE, modules, nodes

MAPPINGS = ("environ", "_environ", "variables")
PROBES = "acceptance/probes/"  # where the mapping is called `environment`, and a reader of it `read`
# Of another process, or of a Prometheus; no mapping of ours.
_IS_BEGINNING = re.compile(r"[A-Z]+_")
NOT_OURS = ("platforms/host/trees.py", "devices/counters.py")


@cache
def read_in_source() -> dict[str, set[str]]:
    """By name: the modules that read it. `PET_*`: all that begin so."""
    found: dict[str, set[str]] = {}
    for path in modules():
        where = str(path.relative_to(SOURCE))
        if where not in NOT_OURS:
            for name in _read_in(path):
                found.setdefault(name, set()).add(where)
    return found


def _read_in(path: Path) -> Iterator[str]:
    loops = _loops(path)
    in_probe = str(path.relative_to(SOURCE)).startswith(PROBES)
    for node in nodes(path):
        for wanted in (*_wanted(node), *(_wanted_by_probe(node) if in_probe else ())):
            yield from _values(wanted, path, loops)
        for beginning in _beginnings(node):
            words = _values(beginning, path, loops)
            yield from (f"{word}*" for word in words if _IS_BEGINNING.fullmatch(word))


def _wanted(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that name a variable."""
    match node:
        case ast.Subscript(value=mapping, slice=key, ctx=ast.Load()) if _is_mapping(mapping):
            yield key
        case ast.Call(func=ast.Attribute(value=mapping, attr="get"), args=[key, *_]) if _is_mapping(mapping):
            yield key
        case ast.Compare(left=key, comparators=[mapping]) if _is_mapping(mapping):
            yield key
        case ast.Call(func=ast.Name(), args=[mapping, key, *_]) if _is_mapping(mapping) and _is_word(key):
            yield key
        case _:
            pass


def _wanted_by_probe(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="read" | "self")), args=[key, *_]) if _is_word(key):
            yield key
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environment"), attr="get"), args=[key, *_]):
            yield key
        case ast.Compare(left=key, ops=[ast.In()], comparators=[ast.Name(id="environment")]):
            yield key
        case _:
            pass


def _beginnings(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr="startswith"), args=[begin]):
            yield begin
        case _:
            pass


def _is_mapping(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in MAPPINGS


def _is_word(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isupper()


def _loops(path: Path) -> dict[str, list[ast.expr]]:
    """What a name stands for in turn: `for name in VARIABLES`."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes(path):
        if isinstance(node, ast.For | ast.comprehension):
            targets = node.target.elts[:1] if isinstance(node.target, ast.Tuple) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.iter)
    return found


def _values(node: ast.expr, path: Path, loops: dict[str, list[ast.expr]]) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(word)):
            yield word
        case ast.Name(id=name) if hasattr(_imported(path), name):
            yield from _words(getattr(_imported(path), name))
        case ast.Name(id=name):
            for one in loops.get(name, ()):
                yield from _values(one, path, loops)
        case ast.Tuple(elts=inside) | ast.List(elts=inside):
            for one in inside:
                yield from _values(one, path, loops)
        case ast.Starred(value=inside):
            yield from _values(inside, path, loops)
        case _:
            pass


def _words(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list | dict | frozenset):
        for one in value:
            yield from _words(one[0] if isinstance(one, tuple) else one)


def _imported(path: Path) -> object:
    """For its constants. Probes import torch, so that of those only what stands in the text is seen."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    try:
        return importlib.import_module(".".join(parts))
    except ImportError:
        return object()
