"""A YAML 1.2 text as plain values, with the line of every setting. What it cannot read becomes a problem, not a guess.

Works on the composed nodes, because they keep what constructed values lose: duplicate keys, and dates as written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gpukeeper.config.problems import Path, Problem
from gpukeeper.safe_yaml import DEEPEST, safe_yaml

LARGEST = 1024 * 1024  # characters
_TAG = "tag:yaml.org,2002:"
_AS_WRITTEN = {_TAG + "str", _TAG + "timestamp"}  # 2026-09-01 stays text: only `until` interprets it
_NUMBERS = {_TAG + "int", _TAG + "float", _TAG + "bool"}


@dataclass
class Document:
    tree: Any = None  # None: an empty file
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read(text: str, *, foreign: bool = False) -> Document:
    """`foreign`: a file of another tool, in which an empty value (None) and a number as a name have a meaning."""
    document, yaml = Document(), safe_yaml()
    if len(text) > LARGEST:
        document.problems.append(_not_yaml(f"the file is larger than {LARGEST // 1024} KiB", 1))
        return document
    try:
        depth = 0
        for event in safe_yaml().parse(text):
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > DEEPEST:  # reading on costs the square of the depth
                raise RecursionError
            if isinstance(event, AliasEvent):
                line = event.start_mark.line + 1
                document.problems.append(_unusable("this is an alias (*name) of an anchor (&name)", _ALIAS, line))
                return document
        root = yaml.compose(text)
        if root is not None:
            document.tree = _Reader(yaml, document, foreign).value(root, ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        document.problems.append(_in_our_words(error.problem or "unexpected text", mark.line + 1 if mark else 1))
    except (YAMLError, ValueError) as error:
        document.problems.append(_not_yaml(str(error).splitlines()[0], 1))
    except RecursionError:
        document.problems.append(_not_yaml("it is nested too deeply", 1))
    return document


_ALIAS = "Aliases are not supported: repeat the value where it is used"
_TAB = "YAML indentation must not contain tabs: replace the tab with spaces"
_DOCUMENT = "The file must contain one document: remove the line ---, or move the rest to another file"


def _in_our_words(problem: str, line: int) -> Problem:
    if "'\\t'" in problem:
        return _unusable("a tab was found", _TAB, line)
    if "another document" in problem:
        return _unusable("a second document begins", _DOCUMENT, line)
    return _not_yaml(problem, line)


def _unusable(what: str, advice: str, line: int) -> Problem:
    return Problem(((),), f"{what}. {advice}, then check again.", line=line)


def _not_yaml(why: str, line: int) -> Problem:
    return Problem(((),), f"this is not valid YAML: {why}. Fix this first, then check again.", line=line)


@dataclass
class _Reader:
    yaml: YAML
    document: Document
    foreign: bool = False

    def value(self, node: Node, path: Path) -> Any:
        self.document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            named = key_node.tag in _AS_WRITTEN or (self.foreign and key_node.tag in _NUMBERS)
            if not isinstance(key_node, ScalarNode) or not named:
                self._complain((*path, key), f'a setting\'s name must be text. Put it in quotes: "{key}".', line)
                continue
            if key in mapping:
                first = self.document.lines[*path, key]
                self._complain((*path, key), f"set twice, first in line {first}. Remove one of them.", line)
                continue
            self.document.lines[*path, key] = line
            value = self.value(value_node, (*path, key))
            if value is not None or self.foreign:
                mapping[key] = value
        return mapping

    def _scalar(self, node: Node, path: Path) -> Any:
        if node.tag in _AS_WRITTEN:
            return node.value
        if node.tag in _NUMBERS:
            try:
                return self.yaml.constructor.construct_object(node)
            except (ConstructorError, ValueError):
                return node.value
        if node.tag == _TAG + "null" and self.foreign:
            return None
        if node.tag == _TAG + "null" and path:
            # Absent is not zero: an empty value must not fall back to a default that is not visible.
            self._complain(path, "has no value. Write one, or remove the line.", None)
        elif path:
            self._complain(path, f"the tag {node.tag} is not supported. Write a plain value.", None)
        return None

    def _complain(self, path: Path, sentence: str, line: int | None) -> None:
        self.document.problems.append(Problem((path,), sentence, line=line))
