"""Which rule wins most at the regret that is allowed: fitted on one part of the recorded time, chosen on the next,
and reported on the last. Values only; nothing is switched on.

The plain rule has an idle time for each class, and one GPU threshold. A candidate has one thing more: other signals
that count as use, owners with a longer idle time, or the times at which passes act.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise

import msgspec

from gpukeeper.lifecycle.replay import GIVEN, Variant
from gpukeeper.lifecycle.replay_outcome import Afterwards, JudgedRun, Judging
from gpukeeper.lifecycle.rules import idle
from gpukeeper.model.policy import Policy
from gpukeeper.model.words import in_words
from gpukeeper.views.backtest import Tally, TraceFacts, tally, wilson

STOPS_MIN = 10  # with a known end: with fewer a share of regrets says nothing
RETURNS_MIN = 2  # regretted stops of an owner that make a habit
MEMBERS_MAX = 0.5  # of the owners: more are no exception
TIE = 0.05  # a candidate must win this share more than the plain rule
AROUND_NONE = 3  # idle times that are tried where the plain rule has none: the longest
NOTHING = Tally()
HOURS = {  # cron words: when passes act
    "*/5 9-17 * * 1-5": "on weekdays from 9:00 to 18:00",
    "*/5 12-17 * * 1-5": "on weekdays from 12:00 to 18:00",
}

Judged = Mapping[Variant, Sequence[JudgedRun]]


class Kind(StrEnum):
    PLAIN = "plain"
    SIGNALS = "signals"
    OWNERS = "owners"
    HOURS = "hours"


_NOT_FITTED = {
    Kind.SIGNALS: "other signals that count as use",
    Kind.OWNERS: "owners who came back, with a longer idle time",
    Kind.HOURS: "passes that act only at certain times",
}


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """`choices`: by class; `rest`: of the other classes, whose idle time stays as it is. `returns`: owners who have the
    idle time of `for_members` in every class that has one, and how often each was seen to come back."""

    kind: Kind = Kind.PLAIN
    choices: Mapping[str, Variant] = {}
    rest: Variant = GIVEN
    for_members: Variant | None = None
    returns: Mapping[str, int] = {}

    def variant(self, class_: str, owner: str | None) -> Variant:
        if self.for_members is not None and owner in self.returns:
            return self.for_members
        return self.choices.get(class_, self.rest)

    @property
    def variants(self) -> frozenset[Variant]:
        found = {self.rest, *self.choices.values()}
        return frozenset(found if self.for_members is None else found | {self.for_members})

    @property
    def fitted_variants(self) -> frozenset[Variant]:
        """Of the classes for which it has an idle time."""
        return self.variants - {self.rest} if self.choices else frozenset()

    @property
    def words(self) -> str:
        if not self.choices and self.kind in _NOT_FITTED:
            return _NOT_FITTED[self.kind]
        match self.kind:
            case Kind.SIGNALS:
                return f"signals that count as use: {', '.join(self.rest.signals or ()) or 'none'}"
            case Kind.HOURS:
                return f"passes act only {HOURS.get(self.rest.at or '', self.rest.at)}"
            case Kind.OWNERS:
                window = self.for_members.window if self.for_members else None
                return f"{_count(self.returns)} with an idle time of {in_words(window) if window else 'the class'}"
            case _:
                return "idle times of classes alone"


def _count(names: Collection[str]) -> str:
    return f"{len(names)} owner{'' if len(names) == 1 else 's'}"


def under(rule: Rule, judged: Judged) -> list[JudgedRun]:
    """Each run as that rule would have treated it."""
    return [judged[rule.variant(one.class_, one.owner)][number] for number, one in enumerate(_any(judged))]


def _any(judged: Judged) -> Sequence[JudgedRun]:
    """Classes and owners are the same under all variants."""
    return next(iter(judged.values()), ())


def of_class(name: str, runs: Sequence[JudgedRun]) -> Tally:
    return tally((one for one in runs if one.class_ == name), idle.NAME)


def advised(rule: Rule, judged: Judged, classes: Collection[str] | None = None) -> Tally:
    """Of these classes; None: of those for which it has an idle time."""
    names = rule.choices if classes is None else classes
    runs = enumerate(_any(judged))
    mine = [(n, rule.variant(one.class_, one.owner)) for n, one in runs if one.class_ in names]
    return tally((judged[variant][n] for n, variant in mine), idle.NAME)


def is_allowed(found: Tally, allowed: float) -> bool:
    return found.known >= STOPS_MIN and found.regret is not None and found.regret <= allowed


def fit_plain(classes: Collection[str], threshold: float, judged: Judged, allowed: float) -> Rule:
    """`threshold`: of the given policy. It wins ties; then the lowest, which stops least."""
    grid = [one for one in judged if one != GIVEN]
    thresholds = sorted({_threshold(one, threshold) for one in grid}, key=lambda one: (one != threshold, one))
    rules = []
    for each in thresholds:
        mine = [one for one in grid if _threshold(one, threshold) == each]
        rest = GIVEN if each == threshold else Variant(None, each)
        rules.append(Rule(choices=_best_of(classes, mine, judged, allowed), rest=rest))
    return max(rules, key=lambda one: _fitted(one, judged), default=Rule())


def fit_setting(rest: Variant, classes: Collection[str], judged: Judged, allowed: float) -> Rule:
    """The idle times under one setting of signals or times."""
    kind = Kind.HOURS if rest.at is not None else Kind.SIGNALS
    grid = [one for one in judged if one.window and msgspec.structs.replace(one, window=None) == rest]
    return Rule(kind=kind, choices=_best_of(classes, grid, judged, allowed), rest=rest)


def best_fit(rules: Sequence[Rule], judged: Judged) -> Rule:
    """The first wins ties."""
    return max(rules, key=lambda one: _fitted(one, judged))


def fit_owners(plain: Rule, classes: Collection[str], judged: Judged, allowed: float) -> Rule:
    """A group of the owners who came back after stops of one idle time, with a longer one of their own."""
    grid = sorted((one for one in judged if one.window and _as_rest(one, plain.rest)), key=_window)
    best, most = Rule(kind=Kind.OWNERS, rest=plain.rest), 0.0
    for returns in _habits([judged[one] for one in grid]):
        theirs = {one: _by_class(judged[one], returns, members=True) for one in grid}
        others = {one: _by_class(judged[one], returns, members=False) for one in grid}
        for place, longer in enumerate(grid):
            shorter = grid[:place]
            choices = {}
            for name in classes:
                own = theirs[longer].get(name, NOTHING)
                fitted = _best(shorter, {one: _sum(others[one].get(name, NOTHING), own) for one in shorter}, allowed)
                if fitted is not None:
                    choices[name] = fitted
            rule = Rule(kind=Kind.OWNERS, choices=choices, rest=plain.rest, for_members=longer, returns=returns)
            won = _fitted(rule, judged)
            if won > most:
                best, most = rule, won
    return best


def _window(one: Variant) -> timedelta:
    return one.window or timedelta()


def _by_class(runs: Sequence[JudgedRun], names: Collection[str], *, members: bool) -> Mapping[str, Tally]:
    grouped: dict[str, list[JudgedRun]] = {}
    for one in runs:
        if (one.owner in names) is members:
            grouped.setdefault(one.class_, []).append(one)
    return {name: tally(mine, idle.NAME) for name, mine in grouped.items()}


def _sum(one: Tally, other: Tally) -> Tally:
    return Tally(**{name: getattr(one, name) + getattr(other, name) for name in Tally.__struct_fields__})


def _habits(swept: Sequence[Sequence[JudgedRun]]) -> Iterator[Mapping[str, int]]:
    """For each idle time the owners who came back repeatedly, and how often."""
    seen = set()
    for runs in swept:
        owners = {one.owner for one in runs if one.owner}
        back = Counter(one.owner for one in runs if one.owner and _was_regretted(one))
        found = {name: count for name, count in back.items() if count >= RETURNS_MIN}
        if found and len(found) <= len(owners) * MEMBERS_MAX and frozenset(found) not in seen:
            seen.add(frozenset(found))
            yield dict(sorted(found.items()))


def _was_regretted(one: JudgedRun) -> bool:
    return one.stop is not None and one.stop.rule == idle.NAME and one.stop.afterwards is Afterwards.REGRET


def _as_rest(one: Variant, rest: Variant) -> bool:
    return msgspec.structs.replace(one, window=None) == rest


def _threshold(one: Variant, given: float) -> float:
    return given if one.threshold is None else one.threshold


def _best_of(classes: Collection[str], grid: Sequence[Variant], judged: Judged, allowed: float) -> dict[str, Variant]:
    found = {}
    for name in classes:
        best = _best(grid, {one: of_class(name, judged[one]) for one in grid}, allowed)
        if best is not None:
            found[name] = best
    return found


def _best(grid: Sequence[Variant], tallies: Mapping[Variant, Tally], allowed: float) -> Variant | None:
    """The longer window wins ties."""
    good = [one for one in grid if is_allowed(tallies[one], allowed)]
    return max(good, key=lambda one: (round(tallies[one].net, 6), one.window or timedelta()), default=None)


def _fitted(rule: Rule, judged: Judged) -> float:
    return advised(rule, judged).net if rule.choices else 0.0


def settings_to_try(policy: Policy, plain: Rule, recorded: Collection[str]) -> tuple[Variant, ...]:
    """Signals: each that was recorded alone, all, and none; those that were not recorded stay as they are. Times: only
    if the policy has none yet."""
    given = policy.activity.signals
    kept = tuple(name for name in given if name not in recorded)
    sets = [(), *((name,) for name in sorted(recorded)), tuple(sorted(recorded))]
    tried = dict.fromkeys(tuple(sorted({*kept, *one})) for one in sets)
    signals = [Variant(None, plain.rest.threshold, one) for one in tried if set(one) != set(given)]
    times = [] if policy.schedule.at is not None else [Variant(None, plain.rest.threshold, None, at) for at in HOURS]
    return (*signals, *times)


def around(plain: Rule, windows: Collection[timedelta]) -> tuple[timedelta, ...]:
    """The idle times of the plain rule, and those beside them."""
    order = sorted(windows)
    chosen = {order.index(one.window) for one in plain.choices.values() if one.window in order}
    near = {at + step for at in chosen for step in (-1, 0, 1)}
    return tuple(one for at, one in enumerate(order) if at in near) if chosen else tuple(order[-AROUND_NONE:])


def owners_can_differ(policy: Policy) -> bool:
    """Not where groups of the policy have idle times already: of several groups the most generous counts."""
    return not any(group.idle is not None and group.members for group in policy.groups.values())


def why_not(candidate: Tally, plain: Tally, allowed: float) -> str:
    """On a part that neither was fitted to. Empty: the candidate wins."""
    if candidate.known < STOPS_MIN:
        return f"fewer than {STOPS_MIN} stops with a known end"
    if not is_allowed(candidate, allowed):
        return "more regret than allowed"
    if plain.known and wilson(plain.regrets, plain.known).low > allowed and candidate.net > 0:
        return ""
    if candidate.net <= plain.net:
        return "wins no more than the plain rule"
    if candidate.net < plain.net * (1 + TIE):
        return f"wins less than {TIE:.0%} more than the plain rule: a tie"
    return ""


class ClassAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """`window` None: no advice, and `why` says why. `held_up`: the regret of the later part is within what is allowed;
    None: it had no stop whose end is known."""

    class_: str = msgspec.field(name="class")
    today: timedelta | None
    window: timedelta | None
    why: str
    found: Tally
    later: Tally
    today_later: Tally
    held_up: bool | None


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that was compared: fitted on the first part (`found`), compared on the next (`unseen`), both of the
    classes for which it has an idle time. `why`: why it was not taken; empty: it was."""

    kind: Kind
    words: str
    found: Tally
    unseen: Tally
    why: str


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Rules were fitted before `begin` and compared from then to the split. None: only the plain rule was tried, and
    `why` says why. `tried`: the plain rule first."""

    begin: datetime | None = None
    tried: tuple[Tried, ...] = ()
    why: str = ""


PLAIN_ALONE = Choice()


class Returners(msgspec.Struct, frozen=True, kw_only=True):
    """Owners with an idle time of their own. `returns`: how many stops of each would have been regretted."""

    idle: timedelta
    returns: Mapping[str, int]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`threshold`: of GPU use, in percent. `kind`: of the rule that was chosen; `signals`, `at` and `owners` are what
    it has beside idle times. `total` and `plain_total`: what it and the plain rule do in the time after `split`, in
    classes for which each has an idle time. `refused`: why there is no advice at all."""

    policy: str
    trace: TraceFacts
    judging: Judging
    allowed: float
    split: datetime
    threshold: float
    kind: Kind
    signals: tuple[str, ...] | None
    at: str | None
    owners: Returners | None
    choice: Choice
    total: Tally
    plain_total: Tally
    classes: tuple[ClassAdvice, ...]
    refused: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`idle`: the idle times of the classes in the given policy. `threshold`: its GPU threshold."""

    policy: str
    trace: TraceFacts
    judging: Judging
    allowed: float
    split: datetime
    idle: Mapping[str, timedelta | None]
    threshold: float


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A rule, and the judged runs of the first part that it was fitted to."""

    rule: Rule
    fitted: Judged


def advise(
    asked: Request, found: Judged, later: Judged, chosen: Chosen | None = None, choice: Choice = PLAIN_ALONE
) -> Advice:
    """`found` has the given policy under GIVEN and a grid of windows and thresholds, `later` the given policy and all
    variants of the chosen rule and of the plain one. Nothing chosen: the plain one."""
    refused = too_short((asked.trace.begin, asked.split, asked.trace.end), found, asked.judging)
    plain = fit_plain(asked.idle, asked.threshold, found, asked.allowed)
    chosen = chosen or Chosen(rule=plain, fitted=found)
    rule = chosen.rule
    rows = [] if refused else [_row(name, chosen, asked, found, later) for name in asked.idle]
    own = rule.for_members.window if rule.for_members is not None else None
    return Advice(
        policy=asked.policy,
        trace=asked.trace,
        judging=asked.judging,
        allowed=asked.allowed,
        split=asked.split,
        threshold=asked.threshold if rule.rest.threshold is None else rule.rest.threshold,
        kind=rule.kind,
        signals=rule.rest.signals,
        at=rule.rest.at,
        owners=None if own is None else Returners(idle=own, returns=rule.returns),
        choice=choice,
        total=Tally() if refused else advised(rule, later),
        plain_total=Tally() if refused else advised(plain, later),
        classes=tuple(row for row in rows if row is not None),
        refused=refused,
    )


def choose(
    rules: Sequence[Rule], found: Judged, unseen: Judged, allowed: float, begin: datetime
) -> tuple[Rule, Choice]:
    """The plain rule first; it is kept unless another one wins clearly in the time that none was fitted to."""
    plain, *others = rules
    before = {one.kind: advised(one, found) if one.choices else Tally() for one in rules}
    after = {one.kind: advised(one, unseen) if one.choices else Tally() for one in rules}
    reasons = {one.kind: _not_taken(one, after[one.kind], after[plain.kind], allowed) for one in others}
    better = [one for one in others if not reasons[one.kind]]
    best = max(better, key=lambda one: after[one.kind].net, default=plain)
    for one in better:
        if one is not best:
            reasons[one.kind] = "another candidate wins more"
    if best is not plain:
        reasons[plain.kind] = "a candidate wins more"
    tried = (
        Tried(
            kind=one.kind,
            words=one.words,
            found=before[one.kind],
            unseen=after[one.kind],
            why=reasons.get(one.kind, ""),
        )
        for one in rules
    )
    return best, Choice(begin=begin, tried=tuple(tried))


def _not_taken(one: Rule, mine: Tally, plain: Tally, allowed: float) -> str:
    if not one.choices:
        return "no class with an allowed regret in the time that it was fitted to"
    return why_not(mine, plain, allowed)


def _row(name: str, chosen: Chosen, asked: Request, found: Judged, later: Judged) -> ClassAdvice | None:
    today, present = asked.idle[name], of_class(name, found[GIVEN])
    rule, choice = chosen.rule, chosen.rule.choices.get(name)
    if choice is None and not present.runs:
        return None
    then = of_class(name, under(rule, later))
    held_up = None if choice is None or then.regret is None else then.regret <= asked.allowed
    return ClassAdvice(
        class_=name,
        today=today,
        window=None if choice is None else choice.window or today,
        why=_why_not(name, asked, found) if choice is None else "",
        found=present if choice is None else advised(rule, chosen.fitted, (name,)),
        later=then,
        today_later=of_class(name, later[GIVEN]),
        held_up=held_up,
    )


def _why_not(name: str, asked: Request, found: Judged) -> str:
    if asked.idle[name] is None:
        return "it has no idle time in the policy"
    tallies = [of_class(name, runs) for variant, runs in found.items() if variant != GIVEN]
    if max((one.known for one in tallies), default=0) < STOPS_MIN:
        return f"fewer than {STOPS_MIN} stops with a known end"
    least = min(one.regret for one in tallies if one.known >= STOPS_MIN and one.regret is not None)
    return f"every idle time that was tried has more regret; the least is {least:.0%}"


def too_short(times: Sequence[datetime], variants: Collection[Variant], judging: Judging) -> str:
    """`times`: begin and end of the trace, and where it is split between them."""
    needed = judging.horizon + max((one.window for one in variants if one.window is not None), default=timedelta())
    parts = [after - before for before, after in pairwise(times)]
    if min(parts) >= needed:
        return ""
    *some, last = map(in_words, parts)
    return (
        f"The trace is too short: its parts are {', '.join(some)} and {last} long, and each must "
        f"be at least {in_words(needed)}: the longest idle time that is tried, and the time within which a return "
        "counts as regret. Record longer, or try shorter ones with --sweep and --horizon."
    )
