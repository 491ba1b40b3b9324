"""Commands of gpukeeper in shell text of examples, and whether the command line has them with those options."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import typer
from typer._click.exceptions import UsageError

from gpukeeper.__main__ import app
from gpukeeper.interfaces.cli.main import LazyCommand

_ENDS = re.compile(r"[|&;<>(){}]+")  # tokens that end a simple command
_BEFORE = {"if", "until", "while", "then", "do", "else", "!", "sudo", "exec", "time"}


def in_shell(text: str) -> list[list[str]]:
    """The words of each: where a command begins, or after `--` (kubectl exec … -- gpukeeper plan)."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        simple: list[list[str]] = [[]]
        for token in lexer:
            if _ENDS.fullmatch(token):
                simple.append([])
            else:
                simple[-1].append(token)
        found += [words for one in simple if (words := _of_gpukeeper(one))]
    return found


def _of_gpukeeper(words: list[str]) -> list[str]:
    if "--" in words:
        words = words[words.index("--") + 1 :]
    while words and (words[0] in _BEFORE or re.match(r"\w+=", words[0])):
        words = words[1:]
    return words[1:] if words and PurePosixPath(words[0]).name == "gpukeeper" else []


def why_not_there(words: list[str]) -> str:
    """As `why_wrong`, of words in a sentence: they may name a group of commands, or an option without its value."""
    why = why_wrong(words)
    group = _root()
    for word in words:
        group = getattr(group, "commands", {}).get(word)
        group = group.loaded if isinstance(group, LazyCommand) else group
    return "" if group is not None or why.endswith("requires an argument.") else why


def why_wrong(words: list[str]) -> str:
    """What the command line says about these words, or nothing. Values are not read: they may be variables."""
    command: Any = _root()
    if words[:1] in (["--version"], ["--help"], ["--install-completion"], ["--show-completion"]):
        return ""
    context = typer.Context(command, info_name="gpukeeper")
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        listed = command.commands[rest.pop(0)]
        command = listed.loaded if isinstance(listed, LazyCommand) else listed
        context = typer.Context(command, parent=context, info_name=command.name)
    if hasattr(command, "commands") and not command.invoke_without_command:
        return f"no such command: gpukeeper {' '.join(words)}"
    try:
        _, left, _ = command.make_parser(context).parse_args(rest)
    except UsageError as error:
        return f"gpukeeper {' '.join(words)}: {error.format_message()}"
    return f"gpukeeper {' '.join(words)}: {left} is too much" if left else ""


@cache
def _root() -> Any:
    return typer.main.get_command(app)
