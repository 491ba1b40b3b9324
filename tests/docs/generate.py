"""Writes what the docs take from code: `python -m tests.docs.generate`. Tests compare it.

The pages of rules and of the command line, and the output of the demo in the tutorial.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from gpukeeper.__main__ import app
from gpukeeper.lifecycle.decide import RULES
from gpukeeper.model.subject import Shape

DOCS = Path(__file__).resolve().parents[2] / "docs"
RULES_PAGE = DOCS / "reference" / "rules.md"
CLI_PAGE = DOCS / "reference" / "cli.md"
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
_CLI_OPENING = """\
# Command line

Written from the code by `python -m tests.docs.generate`; do not edit by hand.

A verb looks or changes, never both; `plan` is the dry run of `apply`. Results are on stdout, talk is on stderr.
A WORKLOAD is `platform/place/[namespace/kind/]name`, and any unique ending will do. `--json` prints one document,
described in [JSON documents](json.md). With `gpukeeper VERB --help` every verb explains itself.

"""
# Beyond those that every verb has: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
_EXIT_CODES = {
    "apply": {3: "some was deferred, failed or could not be seen", 11: "lease held", 12: "breaker open"},
    "doctor": {1: "it found a problem"},
    "operator": {11: "another one, or `serve`, uses this ledger"},
    "plan": {3: "not all was seen, with `--exit-code`", 4: "something is due, with `--exit-code`"},
    "serve": {11: "another daemon serves here"},
    "stop-all": {3: "some were not stopped, or could not be seen"},
}


def rules_page() -> str:
    rows = [f"| {n} | [`{r.NAME}`](#{r.NAME}) | {_asked_about(r)} | {r.SAYS} |" for n, r in enumerate(RULES, start=1)]
    sections = [f"## {r.NAME}\n\n{_docstring(r)}\n\n{r.SAYS}\n" for r in RULES]
    return _OPENING + "\n".join(rows) + "\n\n" + "\n".join(sections)


def cli_page() -> str:
    found = dict(verbs())
    rows = [
        f"| [`gpukeeper {name}`](#gpukeeper-{name.replace(' ', '-')}) | {verb.help} |" for name, verb in found.items()
    ]
    head = "| verb | what it does |\n|---|---|\n" + "\n".join(rows) + "\n"
    return _CLI_OPENING + head + "".join(_verb_section(name, verb) for name, verb in found.items())


def verbs(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every verb as typer knows it, by its words: `plan`, `ledger list`."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{path}{name} ")
        else:
            yield path + name, command


def tutorial_page() -> str:
    """The tutorial with the first two parts of what the demo prints now."""
    program = Path(sys.executable).with_name("gpukeeper")
    printed = subprocess.run([program, *DEMO], capture_output=True, text=True, check=True).stdout
    first = "\n\n".join(printed.split("\n\n")[:2]).rstrip()
    return _DEMO_BLOCK.sub(lambda found: f"{found[1]}{first}\n{found[2]}", TUTORIAL.read_text())


def _verb_section(name: str, verb: Any) -> str:
    arguments = [one for one in verb.params if one.param_type_name == "argument"]
    flags = [one for one in verb.params if one.param_type_name == "option"]
    words = [one.metavar or one.name.upper() for one in arguments]
    usage = " ".join([name, *(w if one.required else f"[{w}]" for w, one in zip(words, arguments, strict=True))])
    rows = [f"| `{word}` | {_help(one)} |" for word, one in zip(words, arguments, strict=True)]
    rows += [f"| {_flag(one)} | {_help(one)} |" for one in flags]
    table = "\n| | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return f"\n## gpukeeper {name}\n\n`gpukeeper {usage}`\n\n{verb.help}\n{table}\n{_exit_codes(name, flags)}\n"


def _flag(flag: Any) -> str:
    """A flag that takes a value shows it: `--owner …`."""
    value = "" if flag.is_flag else f" {flag.metavar or '…'}"
    return ", ".join(f"`{word}{value}`" for word in flag.opts)


def _help(one: Any) -> str:
    default = f" Default: `{one.default}`." if one.default not in (None, False, "") else ""
    return (one.help or "").replace("|", "\\|") + default


def _exit_codes(name: str, flags: list[Any]) -> str:
    special = dict(_EXIT_CODES.get(name, {}))
    if any("--policy" in flag.opts for flag in flags):
        special[10] = "invalid policy"
    told = "; ".join(f"{code}: {why}" for code, why in sorted(special.items()))
    return "[Exit codes](exit-codes.md): " + (f"{told}; else the common ones." if told else "the common ones.")


def _asked_about(rule: ModuleType) -> str:
    shapes = [shape for shape in Shape if shape in rule.FOR]
    return "everything" if len(shapes) == len(Shape) else ", ".join(f"{shape}s" for shape in shapes)


def _docstring(rule: ModuleType) -> str:
    return inspect.cleandoc(rule.__doc__ or "")


if __name__ == "__main__":
    RULES_PAGE.write_text(rules_page())
    CLI_PAGE.write_text(cli_page())
    TUTORIAL.write_text(tutorial_page())
    print("wrote docs/reference/rules.md, docs/reference/cli.md and the demo in docs/tutorial/first-plan.md")
