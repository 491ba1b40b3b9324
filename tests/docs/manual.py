"""The man page and the completion scripts that the wheel installs below share/; `tests.docs.generate` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer import completion

SHARE = Path(__file__).resolve().parents[2] / "deploy" / "share"
MAN = SHARE / "man" / "man1" / "gpukeeper.1"
COMPLETION = {
    "bash": SHARE / "bash-completion" / "completions" / "gpukeeper",
    "zsh": SHARE / "zsh" / "site-functions" / "_gpukeeper",
    "fish": SHARE / "fish" / "vendor_completions.d" / "gpukeeper.fish",
}
_END = """\
.SH EXIT STATUS
0: done. 1: failed. 2: wrong usage. 3: some steps were deferred, failed or could not be read.
4: a check failed, or something is due. 5: inconclusive. 10: invalid policy.
11: another pass or run is active. 12: the breaker is open. 130: interrupted.
.SH FILES
.TP
.I /etc/gpukeeper/policy.yaml
The policy of the machine.
.TP
.I /var/lib/gpukeeper
The state directory: the ledger, captures, reports.
.SH SEE ALSO
.BR docker (1),
.BR kubectl (1),
.BR nvidia-smi (1)
"""


def man_page(root: Any, verbs: dict[str, Any]) -> str:
    head = '.TH GPUKEEPER 1 "" "gpukeeper" "User Commands"\n'
    head += ".SH NAME\ngpukeeper \\- test GPU nodes and reclaim GPUs and disk space\n"
    synopsis = ".SH SYNOPSIS\n.B gpukeeper\n.I COMMAND\n[\\fIOPTION\\fR ...]\n"
    about = f".SH DESCRIPTION\n{_text(root.help)}\n.SH COMMANDS\n"
    return head + synopsis + about + "".join(line for name, verb in verbs.items() for line in _verb(name, verb)) + _END


def completion_script(shell: str) -> str:
    script = completion.get_completion_script(prog_name="gpukeeper", complete_var="_GPUKEEPER_COMPLETE", shell=shell)
    return script.rstrip() + "\n"


def _verb(name: str, verb: Any) -> Iterator[str]:
    arguments = [one for one in verb.params if one.param_type_name == "argument"]
    words = [one.metavar or one.name.upper() for one in arguments]
    yield f'.SS "gpukeeper {" ".join([name, *words])}"\n{_text(verb.help)}\n'
    for word, one in zip(words, arguments, strict=True):
        if one.help:
            yield f".TP\n.I {_text(word)}\n{_text(one.help)}\n"
    for one in verb.params:
        if one.param_type_name == "option" and not one.hidden:
            value = "" if one.is_flag else f" \\fI{_text(one.metavar or 'VALUE')}\\fR"
            flags = ", ".join(f"\\fB{_text(flag)}\\fR{value}" for flag in one.opts)
            yield f".TP\n{flags}\n{_text(one.help)}\n"


def _text(words: str | None) -> str:
    """One paragraph, as roff reads it literally: backslashes and leading dots escaped, hyphens kept as typed."""
    flat = re.sub(r"\s+", " ", words or "").strip().replace("\\", "\\e").replace("-", "\\-")
    flat = re.sub(r"[^\x00-\x7f]", lambda found: f"\\[u{ord(found[0]):04X}]", flat)
    return f"\\&{flat}" if flat.startswith((".", "'")) else flat


def write(root: typer.core.TyperGroup, verbs: dict[str, Any]) -> None:
    for path, content in files(root, verbs).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def files(root: Any, verbs: dict[str, Any]) -> dict[Path, str]:
    return {MAN: man_page(root, verbs)} | {path: completion_script(shell) for shell, path in COMPLETION.items()}
