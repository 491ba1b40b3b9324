"""Writes what the docs take from code: `python -m tests.docs.generate`. Tests compare it.

The page of rules, and the output of the demo in the tutorial.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from gpukeeper.lifecycle.decide import _ASK, RULES
from gpukeeper.model.subject import Shape

DOCS = Path(__file__).resolve().parents[2] / "docs"
RULES_PAGE = DOCS / "reference" / "rules.md"
TUTORIAL = DOCS / "tutorial" / "first-plan.md"
DEMO = ("demo", "--seed", "7", "--days", "1", "--once")

_DEMO_BLOCK = re.compile(r"(<!-- demo: [^\n]*-->\n```text\n).*?(```\n)", re.DOTALL)
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


def tutorial_page() -> str:
    """The tutorial with the first two parts of what the demo prints now."""
    program = Path(sys.executable).with_name("gpukeeper")
    printed = subprocess.run([program, *DEMO], capture_output=True, text=True, check=True).stdout
    first = "\n\n".join(printed.split("\n\n")[:2]).rstrip()
    return _DEMO_BLOCK.sub(lambda found: f"{found[1]}{first}\n{found[2]}", TUTORIAL.read_text())


def _asked_about(rule: ModuleType) -> str:
    shapes = [shape for shape in Shape if rule.NAME in dict(_ASK[shape])]
    return "everything" if len(shapes) == len(Shape) else ", ".join(f"{shape}s" for shape in shapes)


def _docstring(rule: ModuleType) -> str:
    return inspect.cleandoc(rule.__doc__ or "")


if __name__ == "__main__":
    RULES_PAGE.write_text(rules_page())
    TUTORIAL.write_text(tutorial_page())
    print("wrote docs/reference/rules.md and the demo in docs/tutorial/first-plan.md")
