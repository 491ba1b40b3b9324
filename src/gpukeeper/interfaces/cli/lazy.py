"""Commands that are imported when they are used. Their names and the first sentence of their help are a table, so that
`gpukeeper --help` and the completion of command names import none of them; each module has its imports at the top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info, get_group_from_info
from typer.models import CommandInfo, TyperInfo

DESTRUCTIVE = frozenset({"apply", "remove", "stop", "stop-all"})


@dataclass(frozen=True)
class Entry:
    """One row of the table. The target is a function, or the Typer of a group."""

    target: str  # module:attribute
    help: str  # the first sentence of its own help; a test compares them
    settings: Mapping[str, Any] = field(default_factory=dict)  # context settings of Click


class LazyCommand(TyperCommand):
    """Listed by its entry. Replaced by the real command as soon as its arguments are parsed or completed."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.help, add_help_option=False, rich_markup_mode=None)
        self.entry = entry

    @cached_property
    def loaded(self) -> TyperCommand | TyperGroup:
        module, _, attribute = self.entry.target.partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            own = isinstance(found.info.cls, type)  # one of `group_of`
            group = TyperInfo(found, name=self.name, cls=found.info.cls if own else CarefulGroup)
            return get_group_from_info(
                group, pretty_exceptions_short=True, suggest_commands=True, rich_markup_mode=None
            )
        info = CommandInfo(name=self.name, callback=found, context_settings=dict(self.entry.settings))
        command = get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode=None)
        assert isinstance(command, TyperCommand)
        return command

    def make_context(self, *args: Any, **extra: Any) -> Any:
        return self.loaded.make_context(*args, **extra)


class CarefulGroup(TyperGroup):
    """For an unknown word similar commands are suggested, but none that ends work or deletes: people repeat what a
    message says."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.commands:
            return super().resolve_command(ctx, args)
        destructive = {name: self.commands.pop(name) for name in DESTRUCTIVE & self.commands.keys()}
        try:
            return super().resolve_command(ctx, args)
        finally:
            self.commands.update(destructive)


def group_of(entries: Mapping[str, Entry]) -> type[TyperGroup]:
    """The class of a group with these commands: `typer.Typer(cls=group_of(…))`."""

    class LazyGroup(CarefulGroup):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.commands.update({name: LazyCommand(name, entry) for name, entry in entries.items()})

    return LazyGroup
