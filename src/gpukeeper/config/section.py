"""The settings of a section of a policy file, as its struct declares them (see `model.setting`)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args, get_origin

import msgspec

from gpukeeper.config.fields import FORMS, TEXT, TRUTH, Form, words_of
from gpukeeper.model.setting import InFile, Kind

Section: TypeAlias = type[msgspec.Struct]


class Items(NamedTuple):
    """A list."""

    of: Shape


class Entries(NamedTuple):
    """A mapping from names that the user chooses."""

    of: Shape


class Maybe(NamedTuple):
    """What need not be there."""

    of: Shape


Shape: TypeAlias = Form | Items | Entries | Maybe | Section


class Setting(NamedTuple):
    name: str  # in the file
    field: str  # of the struct
    shape: Shape
    about: str
    required: bool
    default: Any = None


@cache
def settings_of(section: Section) -> Mapping[str, Setting]:
    """By name, in the order of the file."""
    found: list[Setting] = []
    for field in msgspec.structs.fields(section):
        _, *notes = get_args(field.type) if get_origin(field.type) is Annotated else (field.type,)
        about = next((note for note in notes if isinstance(note, str)), None)
        if about is None:
            continue
        place = next((note for note in notes if isinstance(note, InFile)), InFile())
        shape = _shape(field.type)
        leaf = shape.of if isinstance(shape, Items) else shape
        if isinstance(leaf, Form):
            about = about.replace("{examples}", leaf.examples)
        made = None if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        default = made if field.default is msgspec.NODEFAULT else field.default
        setting = Setting(place.name or field.name, field.name, shape, about, field.required, default)
        before = [one.name for one in found].index(place.after) + 1 if place.after else len(found)
        found.insert(before, setting)
    return {one.name: one for one in found}


def _shape(given: Any) -> Shape:
    if get_origin(given) is Annotated:
        given, *notes = get_args(given)
        form = next((_form(note) for note in notes if isinstance(note, Kind | Form)), None)
        return form or _shape(given)
    inner = [part for part in get_args(given) if part not in (NoneType, Ellipsis)]
    if NoneType in get_args(given):
        return Maybe(_shape(inner[0]))
    if get_origin(given) is tuple:
        return Items(_shape(inner[0]))
    if get_origin(given) is Mapping:
        return Entries(_shape(inner[1]))
    if given in (str, bool):
        return TEXT if given is str else TRUTH
    if issubclass(given, StrEnum):
        return words_of([word.value for word in given], given)
    section: Section = given
    return section


def _form(note: Kind | Form) -> Form:
    return FORMS[note.name] if isinstance(note, Kind) else note


def section_in(shape: Shape) -> Section | None:
    """The section that it is, or that each of its items or entries is."""
    if isinstance(shape, Items | Entries | Maybe):
        return section_in(shape.of)
    return None if isinstance(shape, Form) else shape


def as_written(section: msgspec.Struct) -> dict[str, Any]:
    """As plain values in the words of a policy file."""
    settings = settings_of(type(section)).values()
    return {one.name: value_as_written(getattr(section, one.field), one.shape) for one in settings}


def value_as_written(value: Any, shape: Shape) -> Any:
    match shape:
        case Form():
            return shape.write(value)
        case Maybe(of):
            return None if value is None else value_as_written(value, of)
        case Items(of):
            return [value_as_written(one, of) for one in value]
        case Entries(of):
            return {name: value_as_written(one, of) for name, one in value.items()}
        case _:
            return as_written(value)
