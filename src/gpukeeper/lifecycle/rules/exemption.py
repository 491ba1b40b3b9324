"""An admin's exemption suspends rules until it expires. A broken one keeps, and complains."""

from __future__ import annotations

from datetime import datetime
from fnmatch import fnmatchcase

from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import EVERY_RULE, Answer, Verdict, View
from gpukeeper.model.policy import Exemption
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown

NAME = "exemption"
SAYS = "What an admin exempted is left alone by the rules the exemption names, until it expires."

_NONE = Answer(NAME, Verdict.SILENT, "no exemption")


def ask(view: View, settings: Settings, now: datetime) -> Answer:
    exemptions = settings.policy.exemptions
    asks = view.subject.marks.asks_exemption
    if isinstance(exemptions, Unknown):
        why = f"the exemptions could not be read ({exemptions.why}), so everything is kept"
        return Answer(NAME, Verdict.UNKNOWN, why, suspends=EVERY_RULE, complaint=why)
    if not exemptions and asks is None:
        return _NONE
    mine = [one for one in exemptions if _is_for(one, view.subject, settings.class_name)]
    for one in mine:
        if isinstance(one.until, Unknown):
            why = f"its exemption is broken ({one.until.why}); kept until somebody mends it"
            return Answer(NAME, Verdict.UNKNOWN, why, suspends=_rules(one), complaint=why)
    for one in mine:
        if not one.refused and (one.until is None or (isinstance(one.until, datetime) and one.until > now)):
            until = f" until {one.until:%Y-%m-%d %H:%M}" if isinstance(one.until, datetime) else ""
            return Answer(NAME, Verdict.PROTECT, f"exempt{until}: {one.reason}", suspends=_rules(one))
    if asks is not None and not any(one.refused for one in mine):
        why = f"it asks to be left alone ({asks}); an admin has to grant or refuse that in the policy"
        return Answer(NAME, Verdict.PROTECT, why, suspends=EVERY_RULE, complaint=why)
    return _NONE


def _is_for(one: Exemption, subject: Subject, class_name: str) -> bool:
    """Every given condition fits. An owner nobody could learn may be the exempt one."""
    if one.class_ is not None and one.class_ != class_name:
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
