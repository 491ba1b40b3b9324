"""Writes what the docs take from code: `python -m tests.docs.generate`. Tests compare it.

The pages of rules, checks, reference figures, of the command line and of open parts of the checklist, the output of the
demo in the tutorial, the picture in the README, the man page and the completion scripts.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from gpukeeper.__main__ import app
from gpukeeper.acceptance.check import Check, CheckSize, RunMode
from gpukeeper.acceptance.judging.reference import ROWS
from gpukeeper.acceptance.suite import CHECKS, deadline_s
from gpukeeper.interfaces.cli.main import LazyCommand
from gpukeeper.lifecycle.decide import RULES
from gpukeeper.lifecycle.rule import Rule
from gpukeeper.model.subject import Shape
from tests.docs import manual
from tests.docs.checklist import OPEN_PAGE, open_page
from tests.docs.picture import PICTURE, picture

DOCS = Path(__file__).resolve().parents[2] / "docs"
RULES_PAGE = DOCS / "reference" / "rules.md"
CHECKS_PAGE = DOCS / "reference" / "checks.md"
MODELS_PAGE = DOCS / "reference" / "gpu-models.md"
CLI_PAGE = DOCS / "reference" / "cli.md"
TUTORIAL = DOCS / "tutorial" / "first-plan.md"
DEMO = ("demo", "--seed", "7", "--days", "1", "--once")

_DEMO_BLOCK = re.compile(r"(<!-- demo: [^\n]*-->\n```text\n).*?(```\n)", re.DOTALL)
_OPENING = """\
# Rules

Written from the code by `python -m tests.docs.generate`; do not edit by hand.

A rule evaluates one object and returns one verdict: silent (does not apply), wait, due, protect, unknown, or report.
The rules are evaluated in the order below. A verdict can suspend rules after it. The first rule that is due and not
suspended decides. If there is none, the object is kept, and the decision shows the most relevant verdict.
`gpukeeper explain WORKLOAD` shows the verdict of every rule.

A rule never acts on an unknown fact. The settings are in [the policy reference](policy.md); why precedence is data is
explained in [ADR 11](../decisions/0011-precedence-as-data.md).

| | rule | applies to | summary |
|---|---|---|---|
"""
_CHECKS_OPENING = """\
# Checks

Written from the code by `python -m tests.docs.generate`; do not edit by hand.

`gpukeeper accept` runs these checks in this order, as many as fit into the time (`--within`): each once, then longer
variants, the most informative per minute first. The report lists what was skipped. `gpukeeper check show NAME` prints
the same information. A check that has no result at its deadline is ended and INCONCLUSIVE; `--check-timeout` sets one
for all. See also [What a verdict means](../explanation/what-a-verdict-means.md) and the
[reference values of each GPU model](gpu-models.md).

| check | what | runs on | quick |
|---|---|---|---|
"""
_MODELS_OPENING = """\
# Reference values of GPU models

Written from the code by `python -m tests.docs.generate`; do not edit by hand.

A measurement below its floor is a FAIL, below `warn` a WARN, above its ceiling implausible (INCONCLUSIVE). A row
applies to one method only (`*` is a wildcard); for another method there is no floor, and the finding says so. Rows
without a measurement by this method can only warn. If lower is better (latency), floor and ceiling are swapped.
`--reference FILE` adds rows. Each heading is a pattern of GPU names.

"""
_MODELS_HEAD = """\
| check | metric | floor | warn | reference | ceiling | unit | kind | method | source |
|---|---|---|---|---|---|---|---|---|---|
"""
_RUNS_ON = {
    RunMode.LOOK: "no GPU: reads driver and kernel",
    RunMode.EACH: "each GPU, all at the same time",
    RunMode.TOGETHER: "all GPUs together",
}
_CLI_OPENING = """\
# Command line

Written from the code by `python -m tests.docs.generate`; do not edit by hand.

A command either reads or changes, never both; `plan` is the dry run of `apply`. Results are printed on stdout,
messages on stderr. A WORKLOAD is `platform/place/[namespace/kind/]name`, or any unique ending of it. `--json` prints
one document, described in [JSON documents](json.md). `gpukeeper COMMAND --help` prints the help of a command.
Tables fit the width of the terminal; in a pipe each row is one line. `NO_COLOR`, `FORCE_COLOR` and other variables:
[environment variables](environment.md).

`gpukeeper --install-completion` installs completion for the current shell: commands, flags, workloads, checks,
acceptance runs, policy sections, rules. It reads what the ledger or the daemon already knows and queries no platform;
`--show-completion` prints the script instead.

"""
# In addition to the common ones: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
_EXIT_CODES = {
    "accept": {
        4: "a check failed",
        5: "inconclusive: not everything could be tested",
        11: "another run is testing this machine",
    },
    "advise": {3: "the trace is too short: no advice"},
    "accept compare": {4: "something got worse by more than the noise, with `--exit-code`"},
    "accept mark": {
        3: "nodes were kept as they are, deferred or not marked",
        12: "breaker open: most nodes failed, no taint was written",
    },
    "node quarantine": {
        3: "with `--on`: the limit is reached, or not everything was written",
        12: "with `--on`: breaker open, most GPU nodes are out",
    },
    "node return": {3: "with `--on`: a node was kept, or not everything was written"},
    "accept merge": {4: "a node failed", 5: "a node is inconclusive or missing"},
    "accept preflight": {4: "something would prevent the run", 5: "something could not be checked"},
    "apply": {3: "some steps were deferred, failed or could not be read", 11: "lease held", 12: "breaker open"},
    "doctor": {1: "it found a problem"},
    "ledger restore": {11: "a daemon or a pass is running"},
    "ledger verify": {1: "something is damaged"},
    "operator": {11: "another operator or daemon uses this ledger"},
    "policy import": {3: "written or printed, but something could not be translated"},
    "plan": {
        1: "no place answered",
        3: "a place of the scope could not be read, or, with `--exit-code`, not everything",
        4: "something is due, with `--exit-code`",
    },
    "setup host": {1: "the service does not run, or doctor found a problem"},
    "setup remove": {3: "files that were changed since were kept"},
    "serve": {11: "another daemon is running"},
    "stop-all": {3: "some workloads were not stopped, or could not be read"},
}


def rules_page() -> str:
    rows = [
        f"| {n} | [`{r.name}`](#{r.name}) | {_asked_about(r)} | {r.summary} |" for n, r in enumerate(RULES, start=1)
    ]
    sections = [f"## {r.name}\n\n{docstring(r)}\n\n{r.summary}\n" for r in RULES]
    return _OPENING + "\n".join(rows) + "\n\n" + "\n".join(sections)


def checks_page() -> str:
    rows = [f"| [`{c.name}`](#{c.name}) | {c.title} | {_RUNS_ON[c.how]} | {_quick(c)} |" for c in CHECKS]
    return _CHECKS_OPENING + "\n".join(rows) + "\n\n" + "\n".join(map(_check_section, CHECKS))


def _quick(check: Check) -> str:
    first = check.servings[0]
    return f"{first.seconds:g} s" if first.depth == 0 else "no"


def _check_section(check: Check) -> str:
    servings = [
        f"| {one.depth} | {one.seconds:g} s | {_deadline(check, one)} | {one.what} | {_params(one.params)} |"
        for one in check.servings
    ]
    table = "| depth | about | deadline | what | parameters |\n|---|---|---|---|---|\n" + "\n".join(servings) + "\n"
    needs = f" Needs {check.least_gpus} GPUs." if check.least_gpus > 1 else ""
    said = f"{check.title}.{needs}\n\n**Proves:** {check.proves}\n\n**Cannot:** {check.cannot}"
    return f"## {check.name}\n\n{said}\n\n{table}"


def _deadline(check: Check, size: CheckSize) -> str:
    found = deadline_s(check, size)
    return "–" if found is None else f"{found:g} s"


def _params(params: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={_value(value)}`" for name, value in params.items()) or "–"


def _value(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def models_page() -> str:
    models = sorted({row.gpu for row in ROWS})
    return _MODELS_OPENING + "\n".join(_model_section(model) for model in models)


def _model_section(model: str) -> str:
    rows = [
        f"| {row.check} | {row.metric} | {_figure(row.floor)} | {_figure(row.warn)} | {_figure(row.reference)} "
        f"| {_figure(row.ceiling)} | {row.unit} | {row.origin}{'' if row.may_fail else ', may only warn'} "
        f"| {_cell(row.method or 'any')} | {_cell('. '.join(filter(None, (row.source, row.waiver, row.superseded))))} |"
        for row in ROWS
        if row.gpu == model
    ]
    return f"## `{model}`\n\n{_MODELS_HEAD}" + "\n".join(rows) + "\n"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.5g}"


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("*", "\\*")


def cli_page() -> str:
    found = dict(verbs())
    rows = [
        f"| [`gpukeeper {name}`](#gpukeeper-{name.replace(' ', '-')}) | {' '.join(verb.help.split())} |"
        for name, verb in found.items()
    ]
    head = "| command | description |\n|---|---|\n" + "\n".join(rows) + "\n"
    return _CLI_OPENING + head + "".join(_verb_section(name, verb) for name, verb in found.items())


def verbs(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every verb as typer knows it, by its words: `plan`, `ledger list`."""
    for name, listed in (group or typer.main.get_command(app)).commands.items():
        command = listed.loaded if isinstance(listed, LazyCommand) else listed
        if hasattr(command, "commands"):
            if command.invoke_without_command:
                yield path + name, command
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
    default = f" Default: `{one.default}`." if one.default not in (None, False, "", []) else ""
    return (one.help or "").replace("|", "\\|") + default


def _exit_codes(name: str, flags: list[Any]) -> str:
    special = dict(_EXIT_CODES.get(name, {}))
    if any("--policy" in flag.opts for flag in flags):
        special[10] = "invalid policy"
    told = "; ".join(f"{code}: {why}" for code, why in sorted(special.items()))
    return "[Exit codes](exit-codes.md): " + (f"{told}; otherwise the common ones." if told else "the common ones.")


def _asked_about(rule: Rule) -> str:
    shapes = [shape for shape in Shape if shape in rule.shapes]
    return "everything" if len(shapes) == len(Shape) else ", ".join(f"{shape}s" for shape in shapes)


def docstring(rule: Rule) -> str:
    return inspect.cleandoc(sys.modules[rule.evaluate.__module__].__doc__ or "")


if __name__ == "__main__":
    RULES_PAGE.write_text(rules_page())
    CHECKS_PAGE.write_text(checks_page())
    MODELS_PAGE.write_text(models_page())
    CLI_PAGE.write_text(cli_page())
    OPEN_PAGE.write_text(open_page())
    TUTORIAL.write_text(tutorial_page())
    PICTURE.write_text(picture())
    manual.write(typer.main.get_command(app), dict(verbs()))
    print("wrote docs/reference, the demo of the tutorial, the picture and deploy/share")
