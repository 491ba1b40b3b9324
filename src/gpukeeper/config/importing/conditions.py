"""JMESPath conditions of kube-janitor's rules as patterns of a policy's `match`. Pure.

Only conditions about namespace, name and labels of the object itself can be translated. For any other the result says
so, and what is left of it covers at least what the condition covers, so that it can be used to keep that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import msgspec

TERMS_MAX = 64
LONGEST = 4096  # characters
DEEPEST = 40
_TOKEN = re.compile(
    r"""\s*(?:(?P<op>\|\||&&|==|!=|<=|>=|[<>!(),.@])|(?P<raw>'(?:[^'\\]|\\.)*')|(?P<quoted>"(?:[^"\\])*")|"""
    r"""(?P<literal>`[^`\\]*`)|(?P<word>[A-Za-z_][A-Za-z0-9_]*))"""
)
_TEXT = re.compile(
    r"[A-Za-z0-9._-]+"
)  # characters of names and of values of labels; none of them is special in a pattern
_KEY = re.compile(r"[A-Za-z0-9._/-]+")
_COMPARES = {"==", "!=", "<", "<=", ">", ">="}
_FIELDS = ("namespace", "name")
_FUNCTIONS = {"starts_with": ("", "*"), "ends_with": ("*", ""), "contains": ("*", "*")}
_OWN_LABEL = "image"  # `match` uses it for the container image


class Term(msgspec.Struct, frozen=True):
    """One alternative: all of its patterns must match. Not `exact`: the condition covers less than them."""

    namespace: str | None = None
    name: str | None = None
    label: str | None = None
    exact: bool = True

    def patterns(self) -> dict[str, str]:
        given = {"namespace": self.namespace, "name": self.name, "label": self.label}
        return {key: value for key, value in given.items() if value is not None}


ALWAYS, UNCLEAR = Term(), Term(exact=False)


class _Path(msgspec.Struct, frozen=True):
    parts: tuple[str, ...]


class _Text(msgspec.Struct, frozen=True):
    value: str


class _Truth(msgspec.Struct, frozen=True):
    """Something with a known truth, or with an unknown one (None)."""

    value: bool | None


_Value = _Path | _Text | _Truth | tuple[Term, ...]


def terms_of(condition: str) -> tuple[Term, ...]:
    """The alternatives of a condition. None of them: it is never true."""
    tokens = _tokens(condition)
    if tokens is None:
        return (UNCLEAR,)
    parser = _Parser(tokens)
    try:
        found = _as_terms(parser.alternatives())
    except _UnclearError:
        return (UNCLEAR,)
    return found if parser.at_end() else (UNCLEAR,)


class _UnclearError(Exception):
    """A part of JMESPath that is not read here."""


def _tokens(condition: str) -> list[tuple[str, str]] | None:
    if len(condition) > LONGEST:
        return None
    found: list[tuple[str, str]] = []
    at, end = 0, len(condition.rstrip())
    while at < end:
        token = _TOKEN.match(condition, at, end)
        if token is None or token.lastgroup is None:
            return None
        found.append((token.lastgroup, token[token.lastgroup]))
        at = token.end()
    return found


class _Parser:
    """By precedence: `||`, `&&`, comparisons, `!`, as in JMESPath."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def at_end(self) -> bool:
        return self._at == len(self._tokens)

    def alternatives(self) -> _Value:
        self._depth += 1
        if self._depth > DEEPEST:
            raise _UnclearError
        first = self._together()
        rest = list(self._repeated("||"))
        self._depth -= 1
        if not rest:
            return first
        return _bounded([term for one in (first, *rest) for term in _as_terms(one)])

    def _repeated(self, operator: str) -> Iterator[_Value]:
        while self._take("op", operator):
            yield self._together() if operator == "||" else self._comparison()

    def _together(self) -> _Value:
        first = self._comparison()
        rest = list(self._repeated("&&"))
        if not rest:
            return first
        return _all_of([_as_terms(one) for one in (first, *rest)])

    def _comparison(self) -> _Value:
        left = self._operand()
        kind, word = self._next()
        if kind != "op" or word not in _COMPARES:
            return left
        self._at += 1
        return _compared(left, word, self._operand())

    def _operand(self) -> _Value:
        kind, word = self._next()
        self._at += 1
        match kind, word:
            case "op", "!":
                self._depth += 1
                if self._depth > DEEPEST:
                    raise _UnclearError
                inside = self._operand()
                self._depth -= 1
                return _Truth(None if not isinstance(inside, _Truth) or inside.value is None else not inside.value)
            case "op", "(":
                inside = self.alternatives()
                self._expect(")")
                return inside
            case "op", "@":
                return _Truth(True)  # the object itself
            case "raw", _:
                return _Text(word[1:-1]) if "\\" not in word else _Truth(None)
            case "literal", _:
                return _literal(word[1:-1].strip())
            case "word" | "quoted", _:
                return self._call(word) if self._take("op", "(") else self._path(word.strip('"'))
            case _:
                raise _UnclearError

    def _path(self, first: str) -> _Path:
        parts = [first]
        while self._take("op", "."):
            kind, word = self._next()
            if kind not in ("word", "quoted"):
                raise _UnclearError
            self._at += 1
            parts.append(word.strip('"'))
        return _Path(tuple(parts))

    def _call(self, function: str) -> _Value:
        arguments = [self.alternatives()]
        while self._take("op", ","):
            arguments.append(self.alternatives())
        self._expect(")")
        match arguments:
            case [_Path(parts=("metadata", field)), _Text(value=text)] if function in _FUNCTIONS and field in _FIELDS:
                before, after = _FUNCTIONS[function]
                return (_pattern(field, text, before, after),)
            case _:
                return _Truth(None)

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _take(self, kind: str, word: str) -> bool:
        if self._next() != (kind, word):
            return False
        self._at += 1
        return True

    def _expect(self, word: str) -> None:
        if not self._take("op", word):
            raise _UnclearError


def _literal(text: str) -> _Truth:
    return _Truth({"true": True, "false": False, "null": False}.get(text))


def _compared(left: _Value, operator: str, right: _Value) -> _Value:
    if operator != "==":
        return _Truth(None)
    match left, right:
        case (_Path() as path, _Text(value=text)) | (_Text(value=text), _Path() as path):
            return _equal(path.parts, text)
        case _:
            return _Truth(None)


def _equal(path: tuple[str, ...], text: str) -> _Value:
    match path:
        case ("metadata", field) if field in _FIELDS:
            return (_pattern(field, text),)
        case ("metadata", "labels", key) if _is_label(key) and _TEXT.fullmatch(text):
            return (Term(label=f"{key}={text}"),)
        case _:
            return _Truth(None)


def _pattern(field: str, text: str, before: str = "", after: str = "") -> Term:
    """Names and namespaces have none of the characters that are special in a pattern; a text that has, fits none."""
    if not _TEXT.fullmatch(text):
        return UNCLEAR
    pattern = f"{before}{text}{after}"
    return Term(namespace=pattern) if field == "namespace" else Term(name=pattern)


def _is_label(key: str) -> bool:
    return _KEY.fullmatch(key) is not None and key != _OWN_LABEL


def _as_terms(value: _Value) -> tuple[Term, ...]:
    match value:
        case tuple():
            return value
        case _Truth(value=True):
            return (ALWAYS,)
        case _Truth(value=False):
            return ()
        case _Path(parts=("metadata",) | ("metadata", "name") | ("metadata", "uid")):
            return (ALWAYS,)  # every object has them
        case _Path(parts=("metadata", "labels", key)) if _is_label(key):
            return (Term(label=f"{key}=?*"),)  # an empty value is false
        case _:
            return (UNCLEAR,)


def _all_of(parts: list[tuple[Term, ...]]) -> tuple[Term, ...]:
    size = 1
    for part in parts:
        size *= len(part)
        if size > TERMS_MAX:
            return (UNCLEAR,)
    return _bounded([_merged(choice) for choice in product(*parts)])


def _merged(terms: tuple[Term, ...]) -> Term:
    """`match` has one pattern of each sort. The first stays; without the others the term is no longer exact."""
    exact, given = all(term.exact for term in terms), dict[str, str]()
    for term in terms:
        for key, pattern in term.patterns().items():
            exact &= given.setdefault(key, pattern) == pattern
    return Term(given.get("namespace"), given.get("name"), given.get("label"), exact)


def _bounded(terms: list[Term]) -> tuple[Term, ...]:
    return tuple(dict.fromkeys(terms)) if len(terms) <= TERMS_MAX else (UNCLEAR,)
