"""An admin's exemption suspends rules until it expires. An invalid one keeps the workload and is reported."""

from __future__ import annotations

from datetime import datetime
from fnmatch import fnmatchcase

from gpukeeper.lifecycle.rule import Rule
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import EVERY_RULE, Answer, Verdict, View
from gpukeeper.model.policy import Exemption
from gpukeeper.model.subject import Shape, Subject
from gpukeeper.model.unknown import Unknown, is_known

NAME = "exemption"

_NONE = Answer(NAME, Verdict.SILENT, "no exemption")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    exemptions = settings.policy.exemptions
    asks = view.subject.marks.asks_exemption
    if isinstance(exemptions, Unknown):
        why = f"the exemptions could not be read ({exemptions.why}), so everything is kept"
        return Answer(NAME, Verdict.UNKNOWN, why, suspends=EVERY_RULE, complaint=why)
    if not exemptions and asks is None:
        return _NONE
    mine = [one for one in exemptions if _is_for(one, view.subject, settings)]
    if not mine and asks is None:
        return _NONE
    answered = any(_answers(one, now) and _is_surely_for(one, view.subject, settings) for one in exemptions)
    broken = [one for one in mine if isinstance(one.until, Unknown)]
    valid = [one for one in mine if not one.refused and _lasts(one, now)]
    suspends = frozenset[str]().union(*(_rules(one) for one in (*broken, *valid)))
    if asks is not None and not answered:
        why = f"it requests an exemption ({asks}); an admin has to grant or refuse it in the policy"
        return Answer(NAME, Verdict.PROTECT, why, suspends=EVERY_RULE, complaint=why)
    if broken:
        why = f"its exemption is invalid ({_why(broken[0])}); kept until it is fixed"
        return Answer(NAME, Verdict.UNKNOWN, why, suspends=suspends, complaint=why)
    if valid:
        return Answer(NAME, Verdict.PROTECT, "; ".join(_in_words(one) for one in valid), suspends=suspends)
    return _NONE


RULE = Rule(
    name=NAME,
    summary="Exempt work is skipped by the rules that the exemption names, until it expires.",
    shapes=tuple(Shape),
    acts=False,
    while_removed=True,
    evaluate=evaluate,
)


def _answers(one: Exemption, now: datetime) -> bool:
    """An admin granted or refused what a label requests. What exempts an owner or a class from some rules was written
    about all of their work, and says nothing about this one."""
    return one.refused or (_lasts(one, now) and (one.workload is not None or not one.rules))


def _lasts(one: Exemption, now: datetime) -> bool:
    return one.until is None or (isinstance(one.until, datetime) and one.until > now)


def _why(broken: Exemption) -> str:
    assert isinstance(broken.until, Unknown)
    return broken.until.why


def _in_words(one: Exemption) -> str:
    until = f" until {one.until:%Y-%m-%d %H:%M} UTC" if isinstance(one.until, datetime) else ""
    return f"exempt{until}: {one.reason}"


def _is_surely_for(one: Exemption, subject: Subject, settings: Settings) -> bool:
    """Answering the request of a label removes protection, so every fact that it names must be known."""
    known = (one.owner is None or is_known(subject.owner)) and (one.class_ is None or is_known(settings.class_))
    return known and _is_for(one, subject, settings)


def _is_for(one: Exemption, subject: Subject, settings: Settings) -> bool:
    """Every given condition fits. An unknown owner or class may be the exempt one."""
    if one.class_ is not None and is_known(settings.class_) and one.class_ != settings.class_:
        return False
    if one.owner is not None and not isinstance(subject.owner, Unknown) and one.owner != subject.owner:
        return False
    if one.workload is None:
        return True
    path = subject.ref.path
    patterns = (one.workload, "*/" + one.workload)
    return subject.ref.ends_with(one.workload) or any(fnmatchcase(path, pattern) for pattern in patterns)


def _rules(one: Exemption) -> frozenset[str]:
    return frozenset(one.rules) if one.rules else EVERY_RULE
