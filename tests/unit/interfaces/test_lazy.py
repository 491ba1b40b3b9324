"""The table of commands: its help is that of the commands, and listing them imports none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperGroup

from gpukeeper.__main__ import app
from gpukeeper.interfaces.cli.lazy import LazyCommand

ROOT = ("", "--version", "--help", "no-such-command")
SHARED = {"cli", "cli.lazy", "cli.main", "terminal", "terminal.messages", "terminal.layout"}
HEAVY = {
    "msgspec",
    "ruamel.yaml",
    "rich",
    "asyncio",
    "sqlite3",
    "gpukeeper.wiring",
    "gpukeeper.engine",
    "gpukeeper.config",
}


def lazy_commands(group: object, path: str = "") -> Iterator[tuple[str, LazyCommand]]:
    assert isinstance(group, TyperGroup)
    for name, command in group.commands.items():
        if isinstance(command, LazyCommand):
            yield path + name, command
            if isinstance(command.loaded, TyperGroup):
                yield from lazy_commands(command.loaded, f"{path}{name} ")


COMMANDS = dict(lazy_commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_table_has_the_first_sentence_of_each_command(name: str) -> None:
    command, long = COMMANDS[name], 1000
    assert command.entry.help == command.loaded.get_short_help_str(long), f"correct the help of {name} in its table"


def test_all_commands_are_lazy_at_the_root() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    assert all(isinstance(one, LazyCommand) for one in group.commands.values())


@pytest.mark.parametrize("words", ROOT)
def test_the_root_imports_no_command(words: str) -> None:
    assert not _imported(words) & HEAVY
    assert _interfaces(_imported(words)) == SHARED


def test_completing_a_command_name_imports_no_command() -> None:
    asked = {"_GPUKEEPER_COMPLETE": "complete_bash", "COMP_WORDS": "gpukeeper pl", "COMP_CWORD": "1"}
    assert _interfaces(_imported("", **asked)) == SHARED


def _interfaces(names: set[str]) -> set[str]:
    package = "gpukeeper.interfaces."
    return {name.removeprefix(package) for name in names if name.startswith(package)}


def _imported(words: str, **env: str) -> set[str]:
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['gpukeeper', *{words.split()}]\n"
        "from gpukeeper.__main__ import run\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    return set(done.stderr.splitlines()[-1].split())
