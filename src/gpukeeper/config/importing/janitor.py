"""kube-janitor's rules file as a policy. Pure.

Each rule becomes a class with its `match` entries, in the order of the file, because in both tools the first that
matches applies. A rule with a condition that cannot be translated covers, as a class that is kept, at least what the
rule covers: what it protected from a later rule stays protected. Work without a rule is exempt from every rule that
kube-janitor does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gpukeeper.config.importing.conditions import Term, terms_of
from gpukeeper.config.importing.result import Imported, Noted, NotTranslated, policy_text, refuse, source_document
from gpukeeper.config.problems import Path, did_you_mean, line_of
from gpukeeper.config.units import shown, span_in_words
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Warnings
from gpukeeper.model.reading import SPAN_MAX
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS
from gpukeeper.platforms.kubernetes.kinds.kind import INFRASTRUCTURE
from gpukeeper.platforms.kubernetes.marks import JANITOR_EXPIRES, JANITOR_TTL
from gpukeeper.platforms.kubernetes.translate import CLUSTER, OURS, PLATFORM, SYSTEM

KEPT, EXCLUDED = "janitor-kept", "janitor-excluded"
EVERYTHING, ALL = "*", "all"
FOREVER = "forever"
KEYS = ("id", "resources", "jmespath", "ttl")
# Rules of gpukeeper that act on a workload for which kube-janitor has no rule. Idle work is only reported.
NOT_THEIRS = ("max_runtime", "never_started", "restart_loop", "retention")
NOT_OF_A_RULE = ("restart_loop",)
NO_LIMITS = {"idle": "30m", "on_idle": "report", "max_runtime": "none", "never_started": "none"}
UNTOUCHABLE = {"untouchable": True, "never_started": "none"}
DAEMONS = "daemonsets"
THEIR_DEFAULTS = frozenset({"events", "controllerrevisions"})
BY_PLURAL = {kind.plural: kind.name for kind in KINDS if kind.class_ != INFRASTRUCTURE}
# Classes that the platform assigns where no entry of `match` fits, and in which rules may act.
RECOGNIZED = tuple(sorted({CLUSTER, *(kind.class_ for kind in KINDS if kind.class_ not in ("", INFRASTRUCTURE))}))
_ID = re.compile(r"[a-z][a-z0-9-]{0,100}")
_TTL = re.compile(r"([0-9]{1,9})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_RUNNING = "kube-janitor also deletes objects that still run; the policy stops nothing"


class JanitorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """kube-janitor's flags that change what it covers, with its defaults. `running`: also limit running work."""

    include_namespaces: tuple[str, ...] = (ALL,)
    exclude_namespaces: tuple[str, ...] = ("kube-system",)
    include_resources: tuple[str, ...] = (ALL,)
    exclude_resources: tuple[str, ...] = tuple(sorted(THEIR_DEFAULTS))
    running: bool = False


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """`ttl` None: for ever. `line`: of its `id`."""

    id: str
    resources: tuple[str, ...]
    condition: str
    ttl: timedelta | None
    line: int


def import_rules(text: str, name: str, options: JanitorOptions | None = None) -> Imported:
    """Raises UsageError with every problem of the file or of an option."""
    return _Import(name, options or JanitorOptions(), read_rules(text, name)).result()


def read_rules(text: str, name: str) -> tuple[Rule, ...]:
    document = source_document(text, name)
    tree, lines = document.tree, document.lines
    if not isinstance(tree, dict) or not isinstance(tree.get("rules"), list):
        raise refuse([f"{name}:1: this is not a rules file of kube-janitor: it has no list of rules at the top."])
    problems = [
        f"{name}:{lines.get((key,), 1)}: unknown setting {shown(key)}. A rules file has only rules."
        for key in tree
        if key != "rules"
    ]
    rules: list[Rule] = []
    for number, entry in enumerate(tree["rules"]):
        at: Path = ("rules", number)
        found = list(_problems(entry))
        problems += [f"{name}:{line_of((*at, key), lines)}: rule {number + 1}: {why}" for key, why in found]
        if not found:
            rules.append(_rule(entry, line_of(at, lines)))
    if problems:
        raise refuse(problems)
    return tuple(rules)


def _problems(entry: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(entry, dict):
        yield "", "this is not a mapping. A rule has id, resources, jmespath and ttl."
        return
    for key in entry:
        if key not in KEYS:
            yield key, f"unknown setting {shown(key)}. {did_you_mean(key, KEYS, 'settings')}"
    for key in KEYS:
        if entry.get(key) is None:
            yield key, f"{key} is missing."
    known = {key: entry.get(key) for key in KEYS if entry.get(key) is not None}
    if "id" in known and not (isinstance(known["id"], str) and _ID.fullmatch(known["id"])):
        yield "id", f"{shown(known['id'])} is not an id: lowercase letters, digits and hyphens, at most 100."
    listed = known.get("resources")
    if "resources" in known and not (isinstance(listed, list) and all(isinstance(one, str) for one in listed)):
        yield "resources", "resources must be a list of names, like [deployments, jobs]."
    if "jmespath" in known and not isinstance(known["jmespath"], str):
        yield "jmespath", f"{shown(known['jmespath'])} is not a condition."
    if "ttl" in known and not (isinstance(known["ttl"], str) and _is_ttl(known["ttl"])):
        yield "ttl", f"{shown(known['ttl'])} is not a TTL. Write one number and a unit, like 60s, 5m, 8h, 7d or 2w."


def _is_ttl(text: str) -> bool:
    return text.lower() == FOREVER or _TTL.fullmatch(text) is not None


def _rule(entry: dict[str, Any], line: int) -> Rule:
    ttl = _TTL.fullmatch(entry["ttl"])
    span = None if ttl is None else timedelta(**{_UNITS[ttl[2]]: int(ttl[1])})
    return Rule(
        id=entry["id"],
        resources=tuple(entry["resources"]),
        condition=entry["jmespath"],
        ttl=span if span is not None and span <= SPAN_MAX else None,  # in a century: as good as never
        line=line,
    )


class _Covered(msgspec.Struct, frozen=True, kw_only=True):
    """A rule as far as it could be translated. `kinds` None: all. Not `exact`: what it covers is kept."""

    rule: Rule
    kinds: tuple[str, ...] | None
    terms: tuple[Term, ...]
    exact: bool

    @property
    def removes(self) -> bool:
        return self.exact and self.rule.ttl is not None and bool(self.terms) and self.kinds != ()

    @property
    def class_(self) -> str:
        return f"janitor-{self.rule.id}" if self.removes else KEPT


class _Import:
    def __init__(self, name: str, options: JanitorOptions, rules: Sequence[Rule]) -> None:
        self._name, self._options = name, options
        self._missed: list[NotTranslated] = []
        self._namespaces = self._included_namespaces()
        self._excluded = self._excluded_namespaces()
        self._left_out = self._left_out_kinds()
        self._rules = [self._covered(rule) for rule in _once(rules, name)]

    def result(self) -> Imported:
        tree = {
            "mode": Noted("plan", "an import never enforces anything"),
            "scope": {PLATFORM: {"namespaces": Noted(list(self._namespaces), self._namespaces_from())}},
            "ttl": {"foreign": Noted([JANITOR_TTL, JANITOR_EXPIRES], "kube-janitor's annotations, of finished work")},
            "retention": self._retention(self._general(), "rules without a namespace"),
            **self._by_namespace(),
            "classes": self._classes(),
            "match": self._match(),
            "exemptions": list(self._exemptions()),
        }
        self._add_what_differs()
        return Imported(
            source=self._name, policy=policy_text(self._head(), tree, self._missed), not_translated=tuple(self._missed)
        )

    def _head(self) -> list[str]:
        return [
            f"Imported from the rules of kube-janitor in {self._name}.",
            "A TTL counts from the end of the work here, not from its creation. Read the plan before you enforce this.",
        ]

    # What is covered

    def _included_namespaces(self) -> tuple[str, ...]:
        given = self._options.include_namespaces
        if ALL in given:
            return (EVERYTHING,)
        usable = tuple(one for one in given if _NAME.fullmatch(one))
        for one in given:
            if one not in usable:
                self._miss(
                    "--include-namespaces", one, "it is not the name of a namespace, and is not covered", "Name it."
                )
        if not usable:
            raise UsageError("--include-namespaces names no namespace. Nothing was written.")
        return usable

    def _excluded_namespaces(self) -> tuple[str, ...]:
        for one in self._options.exclude_namespaces:
            if not _NAME.fullmatch(one):  # without it the policy would cover more
                raise UsageError(
                    f'--exclude-namespaces: "{one}" is not the name of a namespace. Nothing was written. List the '
                    "names that it stands for."
                )
        return tuple(dict.fromkeys((*sorted(SYSTEM), *self._options.exclude_namespaces)))

    def _left_out_kinds(self) -> tuple[str, ...]:
        """Of our kinds, those that its flags leave out."""
        wanted, unwanted = self._options.include_resources, self._options.exclude_resources
        for flag, given in (("--include-resources", wanted), ("--exclude-resources", unwanted)):
            for one in given:
                if one not in BY_PLURAL and one not in (ALL, EVERYTHING, *THEIR_DEFAULTS):
                    self._miss(flag, one, "gpukeeper acts on workloads only, never on these", "Nothing to do.")
        return tuple(
            name
            for plural, name in BY_PLURAL.items()
            if plural in unwanted or not (plural in wanted or ALL in wanted or EVERYTHING in wanted)
        )

    def _covered(self, rule: Rule) -> _Covered:
        where, terms = f"{self._name}:{rule.line}", terms_of(rule.condition)
        exact = all(term.exact for term in terms)
        if not exact:
            self._missed.append(
                NotTranslated(
                    where=where,
                    what=f"rule {rule.id}: jmespath: {rule.condition[:200]}",
                    why="the condition is not only about namespace, name and one label of the object. What it may "
                    "cover is kept",
                    todo=f"Set a label on such work and match it: {{label: KEY=VALUE, class: NAME}}; or annotate it "
                    f"with gpukeeper.io/ttl: {_words(rule.ttl)}.",
                )
            )
        elif not terms:
            self._miss(where, f"rule {rule.id}", "its condition is never true, so it has no effect", "Remove the rule.")
        return _Covered(rule=rule, kinds=self._kinds(rule, where), terms=terms, exact=exact)

    def _kinds(self, rule: Rule, where: str) -> tuple[str, ...] | None:
        if EVERYTHING in rule.resources:
            return None
        for one in rule.resources:
            if one == DAEMONS:
                self._miss(where, f"rule {rule.id}: {one}", "gpukeeper never acts on DaemonSets", _BY_HAND)
            elif one not in BY_PLURAL:
                self._miss(
                    where, f"rule {rule.id}: {one}", "gpukeeper acts on workloads only, never on these", _BY_HAND
                )
        return tuple(dict.fromkeys(BY_PLURAL[one] for one in rule.resources if one in BY_PLURAL))

    # The policy

    def _general(self) -> list[_Covered]:
        return [one for one in self._rules if one.removes and any(_namespace_of(term) is None for term in one.terms)]

    def _by_namespace(self) -> dict[str, Any]:
        """Retention is a setting of namespaces: in one that rules name, the longest TTL of those that apply there."""
        named = self._named()
        if not named:
            return {}
        environments = {f"janitor-{name}": self._retention(self._in(name), f"rules for {name}") for name in named}
        names = {
            name: Noted(
                f"janitor-{name}", "retention of this namespace; its label gpukeeper.io/environment would replace it"
            )
            for name in named
        }
        return {"environments": environments, "kubernetes": {"environments": names}}

    def _named(self) -> tuple[str, ...]:
        """Namespaces that a rule names alone."""
        named = [_namespace_of(term) for one in self._rules if one.removes for term in one.terms]
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def _in(self, namespace: str) -> list[_Covered]:
        return [
            one
            for one in self._rules
            if one.removes and any(fnmatchcase(namespace, term.namespace or EVERYTHING) for term in one.terms)
        ]

    def _retention(self, rules: Sequence[_Covered], whose: str) -> dict[str, Noted]:
        longest = max(((one.rule.ttl or timedelta(), one.rule.id) for one in rules), default=None)
        kept, why = (span_in_words(longest[0]), f"ttl of rule {longest[1]}") if longest else ("manual", f"no {whose}")
        if longest and len({one.rule.ttl for one in rules}) > 1:
            why += f", the longest of the {whose}"
        outcomes = {name: Noted(kept, why) for name in ("succeeded", "failed", "stopped")}
        return {**outcomes, "max": Noted(span_in_words(SPAN_MAX), "kube-janitor has no maximum of a TTL")}

    def _classes(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            KEPT: _noted(NO_LIMITS, "work that no translated rule removes"),
            EXCLUDED: Noted(UNTOUCHABLE, "what the flags of kube-janitor exclude"),
        }
        for one in self._rules:
            if one.removes:
                found[one.class_] = {**_noted(NO_LIMITS, "idle work is only reported"), **self._running(one.rule)}
        return found

    def _running(self, rule: Rule) -> dict[str, Noted]:
        if not self._options.running or rule.ttl is None:
            return {
                key: Noted(NO_LIMITS[key], "running work is not limited") for key in ("max_runtime", "never_started")
            }
        if rule.ttl <= Warnings().lead:
            self._miss(
                f"{self._name}:{rule.line}",
                f"rule {rule.id}: ttl for running work",
                f"{_words(rule.ttl)} is too short to warn the owner; running work is not limited",
                f"Write a limit of more than {span_in_words(Warnings().lead)} as max_runtime.",
            )
            return {}
        limit = Noted(_words(rule.ttl), f"ttl of rule {rule.id}, line {rule.line}")
        return {"max_runtime": limit, "never_started": limit}

    def _match(self) -> list[Noted]:
        first = [
            *(({"namespace": one}, EXCLUDED, "--exclude-namespaces, or of the system") for one in self._excluded),
            *(({"label": f"{key}={value}"}, INFRASTRUCTURE, "gpukeeper itself") for key, value in OURS),
            ({"kind": "daemonset"}, INFRASTRUCTURE, "gpukeeper never acts on DaemonSets"),
            *(({"kind": kind}, EXCLUDED, "--include-resources, --exclude-resources") for kind in self._left_out),
        ]
        entries = [*first, *(entry for one in self._rules for entry in _entries(one))]
        return [Noted({"platform": PLATFORM, **given, "class": class_}, why) for given, class_, why in entries]

    def _exemptions(self) -> Iterator[Noted]:
        for class_ in (KEPT, *RECOGNIZED):
            why = "kube-janitor has no rule for it, or one that could not be translated"
            yield Noted({"class": class_, "rules": list(NOT_THEIRS), "reason": why}, "not covered by kube-janitor")
        for class_ in dict.fromkeys(one.class_ for one in self._rules if one.removes):
            why = "kube-janitor has no such rule"
            yield Noted({"class": class_, "rules": list(NOT_OF_A_RULE), "reason": why}, "only by the TTL")

    # What is said about it

    def _namespaces_from(self) -> str:
        return "--include-namespaces" if self._namespaces != (EVERYTHING,) else "kube-janitor's default: all"

    def _add_what_differs(self) -> None:
        removing = [one for one in self._rules if one.removes]
        for one in removing:
            for namespace, longest in self._kept_longer(one):
                self._miss(
                    f"{self._name}:{one.rule.line}",
                    f"rule {one.rule.id}: ttl: {_words(one.rule.ttl)}",
                    f"{namespace} finished work is kept for {_words(longest)}: retention is one value for all "
                    "kinds of a namespace, and another rule has a longer ttl",
                    f"Annotate such work with gpukeeper.io/ttl: {_words(one.rule.ttl)}.",
                )
        if removing and not self._options.running:
            self._miss(self._name, "ttl of running work", _RUNNING, "To limit the runtime by the same ttl: --running")

    def _kept_longer(self, one: _Covered) -> Iterator[tuple[str, timedelta]]:
        places = [None] if one in self._general() else []
        for namespace in (*places, *(name for name in self._named() if one in self._in(name))):
            rules = self._general() if namespace is None else self._in(namespace)
            longest = max(each.rule.ttl or timedelta() for each in rules)
            if one.rule.ttl is not None and longest > one.rule.ttl:
                yield ("its" if namespace is None else f"in namespace {namespace} its"), longest

    def _miss(self, where: str, what: str, why: str, todo: str) -> None:
        self._missed.append(NotTranslated(where=where, what=what, why=why, todo=todo))


_BY_HAND = "Keep kube-janitor for them, or remove them by hand."


def _once(rules: Iterable[Rule], name: str) -> list[Rule]:
    seen: dict[str, Rule] = {}
    for rule in rules:
        first = seen.setdefault(rule.id, rule)
        if first is not rule:
            raise refuse([f'{name}:{rule.line}: the id "{rule.id}" is used twice, first in line {first.line}.'])
    return list(seen.values())


def _namespace_of(term: Term) -> str | None:
    """The one namespace that it is about. None: several."""
    return None if term.namespace is None or EVERYTHING in term.namespace else term.namespace


def _entries(one: _Covered) -> Iterator[tuple[dict[str, str], str, str]]:
    why = f"rule {one.rule.id}, line {one.rule.line}" + ("" if one.exact else ": its condition could not be translated")
    kinds: tuple[str | None, ...] = (None,) if one.kinds is None else one.kinds
    for term in one.terms:
        for kind in kinds:
            yield {**({} if kind is None else {"kind": kind}), **term.patterns()}, one.class_, why


def _noted(values: dict[str, str], note: str) -> dict[str, Noted]:
    return {key: Noted(value, note) for key, value in values.items()}


def _words(ttl: timedelta | None) -> str:
    return FOREVER if ttl is None else span_in_words(ttl)
