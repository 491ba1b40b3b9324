"""The table of commands: its help is that of the commands, and listing them imports none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from gpukeeper.__main__ import app
from gpukeeper.interfaces.cli.main import DESTRUCTIVE, LazyCommand

ROOT = ("", "--version", "--help", "no-such-command")
SHARED = {"cli", "cli.main", "terminal", "terminal.messages"}
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


def groups(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], TyperGroup]]:
    found = command.loaded if isinstance(command, LazyCommand) else command
    if isinstance(found, TyperGroup):
        yield path, found
        for name, one in found.commands.items():
            yield from groups(one, (*path, name))


@pytest.mark.parametrize(
    ("path", "group"),
    list(groups(typer.main.get_command(app))),
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else "",
)
def test_no_unknown_word_is_answered_with_a_command_that_ends_work(path: tuple[str, ...], group: TyperGroup) -> None:
    known = set(group.commands)
    for name in sorted(DESTRUCTIVE & known):
        said = CliRunner().invoke(app, [*path, f"{name}x"])
        assert (said.exit_code, f"'{name}'" in said.output.partition("Did you mean")[2]) == (2, False), said.output
    assert set(group.commands) == known


def test_other_commands_are_suggested() -> None:
    assert "Did you mean 'release'" in CliRunner().invoke(app, ["workload", "releasex"]).output
    assert "Did you mean 'observe'" in CliRunner().invoke(app, ["observex"]).output
