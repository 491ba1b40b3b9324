"""Conditions of kube-janitor: which can be translated, and that none is translated into less than it covers."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.config.importing.conditions import ALWAYS, DEEPEST, LONGEST, UNCLEAR, Term, terms_of


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("metadata.namespace == 'temp'", (Term(namespace="temp"),)),
        ("'temp' == metadata.namespace", (Term(namespace="temp"),)),
        ("starts_with(metadata.name, 'pr-')", (Term(name="pr-*"),)),
        ("ends_with(metadata.name, '-tmp')", (Term(name="*-tmp"),)),
        ("contains(metadata.name, 'test')", (Term(name="*test*"),)),
        ("metadata.labels.team", (Term(label="team=?*"),)),
        ("metadata.labels.team == 'nlp'", (Term(label="team=nlp"),)),
        ("""metadata.labels."app.kubernetes.io/name" == 'web'""", (Term(label="app.kubernetes.io/name=web"),)),
        ("metadata.namespace == 'a' && metadata.labels.x", (Term(namespace="a", label="x=?*"),)),
        ("metadata.name == 'a' || metadata.name == 'b'", (Term(name="a"), Term(name="b"))),
        (
            "(metadata.name == 'a' || metadata.name == 'b') && metadata.namespace == 'n'",
            (Term(name="a", namespace="n"), Term(name="b", namespace="n")),
        ),
        ("`true`", (ALWAYS,)),
        ("@", (ALWAYS,)),
        ("!`false`", (ALWAYS,)),
        ("`false`", ()),
        ("metadata.name == 'a' && `false`", ()),
    ],
)
def test_what_can_be_translated(condition: str, expected: tuple[Term, ...]) -> None:
    assert terms_of(condition) == expected


@pytest.mark.parametrize(
    "condition",
    [
        "!(spec.template.metadata.labels.application)",
        "!metadata.labels.team",
        "metadata.namespace != 'prod'",
        "metadata.creationTimestamp > '2019-04-01'",
        "spec.replicas == `0`",
        "metadata.annotations.x",
        "metadata.labels.image",  # `match` uses that name for the container image
        "metadata.name == 'a*'",  # special in a pattern
        "contains(['a', 'b'], metadata.namespace)",
        "metadata.ownerReferences[0].kind == 'Job'",
        "items[*].name | [0]",
        "metadata.name == 'a' extra",
        "starts_with(metadata.name",
        "metadata.name == '\\''",
        "&&",
        "",
        "(" * (DEEPEST + 1) + "@" + ")" * (DEEPEST + 1),
        "!" * (DEEPEST + 1) + "@",
        "@" + " " * LONGEST + "&& @",
    ],
)
def test_what_cannot_be_translated_is_not_exact_and_covers_everything(condition: str) -> None:
    assert terms_of(condition) == (UNCLEAR,)


@pytest.mark.parametrize(
    ("condition", "covers"),
    [
        ("metadata.namespace == 'temp' && spec.paused", Term(namespace="temp", exact=False)),
        ("metadata.labels.a && metadata.labels.b", Term(label="a=?*", exact=False)),  # one label in an entry
        ("metadata.name == 'a' && metadata.name == 'b'", Term(name="a", exact=False)),
    ],
)
def test_what_is_translated_in_part_still_covers_all_of_it(condition: str, covers: Term) -> None:
    assert terms_of(condition) == (covers,)


def test_too_many_alternatives_are_not_written() -> None:
    either = "(metadata.name == 'a' || metadata.labels.b)"
    assert terms_of(" && ".join([either] * 20)) == (UNCLEAR,)
    assert terms_of(" || ".join(f"metadata.name == 'n{number}'" for number in range(100))) == (UNCLEAR,)


NAMES = st.sampled_from(["a", "ab", "pr-1", "temp"])
ATOMS = st.one_of(
    st.builds("metadata.{0} == '{1}'".format, st.sampled_from(["name", "namespace"]), NAMES),
    st.builds("{0}(metadata.name, '{1}')".format, st.sampled_from(["starts_with", "ends_with", "contains"]), NAMES),
    st.builds("metadata.labels.{0}".format, NAMES.filter(str.isalpha)),
    st.builds("metadata.labels.{0} == '{1}'".format, NAMES.filter(str.isalpha), NAMES),
    st.sampled_from(["`true`", "`false`"]),
)


def holds(node: object, thing: dict[str, str]) -> bool:
    """What kube-janitor answers, from the tree that the condition was written from."""
    match node:
        case ("&&", left, right):
            return holds(left, thing) and holds(right, thing)
        case ("||", left, right):
            return holds(left, thing) or holds(right, thing)
        case ("!", inside):
            return not holds(inside, thing)
        case str():
            return _atom(node, thing)
    raise AssertionError(node)


def _atom(text: str, thing: dict[str, str]) -> bool:
    if text.startswith("`"):
        return text == "`true`"
    if "(" in text:
        function, wanted = text.partition("(")[0], text.split("'")[1]
        tests = {"starts_with": thing["name"].startswith, "ends_with": thing["name"].endswith}
        return wanted in thing["name"] if function == "contains" else tests[function](wanted)
    key, equal, wanted = text.partition(" == ")
    value = thing.get(key.removeprefix("metadata.").removeprefix("labels."), "")
    return value == wanted.strip("'") if equal else bool(value)


def written(node: object) -> str:
    match node:
        case (operator, left, right):
            return f"({written(left)} {operator} {written(right)})"
        case ("!", inside):
            return f"!({written(inside)})"
    return str(node)


TREES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(st.tuples(st.sampled_from(["&&", "||"]), inner, inner), st.tuples(st.just("!"), inner)),
    max_leaves=6,
)
THINGS = st.fixed_dictionaries(
    {"name": NAMES, "namespace": NAMES}, optional={"a": st.sampled_from(["", "a", "x"]), "temp": NAMES}
)


@given(tree=TREES, thing=THINGS)
def test_terms_cover_at_least_the_condition_and_exactly_it_when_they_say_so(
    tree: object, thing: dict[str, str]
) -> None:
    terms = terms_of(written(tree))
    true, covered = holds(tree, thing), any(_fits(term, thing) for term in terms)
    assert covered or not true
    if all(term.exact for term in terms):
        assert covered is true


def _fits(term: Term, thing: dict[str, str]) -> bool:
    given = term.patterns()
    key, _, value = given.pop("label", "").partition("=")
    label = not key or (key in thing and key not in ("name", "namespace") and fnmatchcase(thing[key], value))
    return label and all(fnmatchcase(thing[field], pattern) for field, pattern in given.items())
