"""Writes the reference pages that come from code: `python -m tests.docs.generate`. A test compares them."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

from gpukeeper.lifecycle.decide import _ASK, RULES
from gpukeeper.model.subject import Shape

DOCS = Path(__file__).resolve().parents[2] / "docs"
RULES_PAGE = DOCS / "reference" / "rules.md"

_OPENING = """\
# Rules

Written from the code by `python -m tests.docs.generate`; do not edit by hand.

A rule is asked about one thing and gives one answer: nothing to say, wait until, due, protected, not known, or report
only. The rules are asked in the order below. An answer may suspend rules after it. The first rule that is due and
not suspended decides; if none is, the thing is kept, and the decision names the answer that says most about why.
`gpukeeper explain WORKLOAD` shows the answer of every rule.

A rule never acts on a fact that is not known. Which settings it reads is in [the policy reference](policy.md); why
precedence is data is in [ADR 11](../decisions/0011-precedence-as-data.md).

| | rule | asked about | in one sentence |
|---|---|---|---|
"""


def rules_page() -> str:
    rows = [f"| {n} | [`{r.NAME}`](#{r.NAME}) | {_asked_about(r)} | {r.SAYS} |" for n, r in enumerate(RULES, start=1)]
    sections = [f"## {r.NAME}\n\n{_docstring(r)}\n\n{r.SAYS}\n" for r in RULES]
    return _OPENING + "\n".join(rows) + "\n\n" + "\n".join(sections)


def _asked_about(rule: ModuleType) -> str:
    shapes = [shape for shape in Shape if rule.NAME in dict(_ASK[shape])]
    return "everything" if len(shapes) == len(Shape) else ", ".join(f"{shape}s" for shape in shapes)


def _docstring(rule: ModuleType) -> str:
    return inspect.cleandoc(rule.__doc__ or "")


if __name__ == "__main__":
    RULES_PAGE.write_text(rules_page())
    print(f"wrote {RULES_PAGE.relative_to(DOCS.parent)}")
