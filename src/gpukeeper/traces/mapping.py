"""The mapping file of a table: which column is what, in which unit, and what one row covers. Strict.

All keys are in docs/reference/traces.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zoneinfo import ZoneInfo

import msgspec

from gpukeeper.config import document, problems
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.series import MINUTE, Signal

PAGE = "Keys and examples: docs/reference/traces.md, examples/traces."
EVERY_MAX = timedelta(hours=1)
_LARGEST = 1024 * 1024
_UNITS: Mapping[Signal, frozenset[str]] = {
    Signal.GPU: frozenset({"percent", "ratio"}),
    Signal.CPU: frozenset({"percent", "ratio"}),
    Signal.NETWORK: frozenset({"bytes", "bytes/s"}),
    Signal.DISK: frozenset({"bytes", "bytes/s"}),
    Signal.TERMINAL: frozenset({"flag"}),
}
Columns: TypeAlias = str | tuple[str, ...]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TimeColumn(_Strict, frozen=True, kw_only=True):
    """`format`: iso, epoch (seconds), epoch-ms, or as strptime has it. `stamp`: a row is of the time after it, or of
    the time before it."""

    column: str
    format: str = "iso"
    zone: str = ""
    stamp: Literal["begin", "end"] = "begin"


class ValueColumn(_Strict, frozen=True, kw_only=True):
    """`when`: only rows whose `signal` column has this text."""

    column: str
    unit: Literal["percent", "ratio", "bytes", "bytes/s", "flag"]
    when: str = ""
    slice: bool = False


class Accounting(_Strict, frozen=True, kw_only=True):
    """What `sacct` wrote. `file` is relative to the mapping file."""

    file: str
    zone: str = ""


class TableMapping(_Strict, frozen=True, kw_only=True):
    time: TimeColumn
    workload: Columns
    values: Mapping[Signal, ValueColumn]
    owner: str = ""
    class_: str = msgspec.field(name="class", default="")
    namespace: str = ""
    device: Columns = ()
    start: str = ""
    end: str = ""
    signal: str = ""
    labels: Mapping[str, str] = {}
    every: str = "1m"
    new_run_after: str = "1d"
    since: str = ""
    until: str = ""
    not_measured: tuple[str, ...] = ("", "NA", "N/A", "[N/A]", "NaN", "nan", "null", "None", "-")
    shape: Literal["csv", "dcgmi-dmon"] = "csv"
    separator: str = ","
    header: tuple[str, ...] = ()
    comment: str = ""
    sacct: Accounting | None = None
    platform: str = "docker"
    kind: str = "container"
    place: str = "trace"

    @property
    def zone(self) -> tzinfo | None:
        """None: a time must have its own."""
        return zone_of(self.time.zone)

    @property
    def minutes(self) -> int:
        return reading.span(self.every) // MINUTE

    def columns(self) -> dict[str, str]:
        """Every column that it names, by the key that names it."""
        one = {
            "time.column": self.time.column,
            **{key: name for key in ("owner", "namespace", "start", "end", "signal") if (name := getattr(self, key))},
            **({"class": self.class_} if self.class_ else {}),
            **{f"values.{signal}.column": value.column for signal, value in self.values.items()},
            **{f"labels.{label}": name for label, name in self.labels.items()},
        }
        for key, names in (("workload", names_of(self.workload)), ("device", names_of(self.device))):
            one |= {f"{key}[{number}]" if len(names) > 1 else key: name for number, name in enumerate(names)}
        return one


def zone_of(name: str) -> tzinfo | None:
    return None if not name else UTC if name == "UTC" else ZoneInfo(name)


def names_of(columns: Columns) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else columns


def read_mapping(path: Path) -> TableMapping:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        return parse_mapping(content.decode(), str(path))
    except UnicodeDecodeError:
        raise UsageError(f"The mapping file {path} is not UTF-8 text. Nothing was read. {PAGE}") from None
    except OSError as error:
        raise UsageError(
            f"The mapping file {path} cannot be read: {error.strerror or error}. Nothing was read. Check its path."
        ) from error


def parse_mapping(text: str, name: str) -> TableMapping:
    """UsageError with every problem of the file's syntax, or the first of its values."""
    found = document.read(text)
    if found.problems:
        raise UsageError("\n".join(problems.messages_in_order(found.problems, name, found.lines)))
    try:
        mapping = msgspec.convert(_short(found.tree), TableMapping)
    except msgspec.ValidationError as error:
        raise _unusable(name, _in_words(str(error))) from None
    for key, why in _mistakes(mapping):
        raise _unusable(name, f"`{key}` {why}")
    return mapping


def check_columns(mapping: TableMapping, existing: Collection[str], what: str) -> None:
    """UsageError if the table does not have what the mapping names."""
    missing = {key: name for key, name in mapping.columns().items() if name not in existing}
    if missing:
        named = ", ".join(f"`{key}` names {name!r}" for key, name in missing.items())
        raise UsageError(
            f"{what} does not have every column of its mapping: {named}. Nothing was read. "
            f"It has: {', '.join(existing)[:1000]}. Name one of these in the mapping."
        )


def _short(tree: Any) -> Any:
    """`time: COLUMN` is short for `time: {column: COLUMN}`."""
    if isinstance(tree, dict) and isinstance(tree.get("time"), str):
        return {**tree, "time": {"column": tree["time"]}}
    return tree


def _in_words(message: str) -> str:
    """`Object missing required field `unit` - at `$.values[...]`` without the dollar sign."""
    return message.replace("`$.", "`").replace(" - at `$`", "").replace("[...]", ".SIGNAL")


def _unusable(name: str, why: str) -> UsageError:
    return UsageError(f"The mapping file {name} cannot be used: {why}. Nothing was read. {PAGE}")


def _mistakes(mapping: TableMapping) -> Iterable[tuple[str, str]]:
    for key in ("every", "new_run_after"):
        try:
            reading.span(getattr(mapping, key))
        except ValueError as problem:
            yield key, f"{problem}; write it like 5m"
    for key in ("since", "until"):
        try:
            if getattr(mapping, key):
                reading.moment(getattr(mapping, key))
        except ValueError as problem:
            yield key, f"{problem}; write it like 2026-01-05T00:00:00Z"
    yield from _mistakes_of_time(mapping)
    if not names_of(mapping.workload) or not all(names_of(mapping.workload)):
        yield "workload", "names no column"
    if Signal.GPU not in mapping.values:
        yield "values", "has no `gpu`: without it nothing can be decided"
    for signal, value in mapping.values.items():
        if value.unit not in _UNITS[signal]:
            yield f"values.{signal}.unit", f"must be {' or '.join(sorted(_UNITS[signal]))}, not {value.unit}"
        if bool(value.when) != bool(mapping.signal):
            yield f"values.{signal}.when", "and `signal` must both be there (one row for each signal), or none of them"
    if mapping.separator not in {"spaces", "tab"} and len(mapping.separator) != 1:
        yield "separator", "must be one character, `tab` or `spaces`"


def _mistakes_of_time(mapping: TableMapping) -> Iterable[tuple[str, str]]:
    every = reading.span(mapping.every)
    if every % MINUTE or not MINUTE <= every <= EVERY_MAX:
        yield "every", "must be whole minutes, from 1m to 1h"
    if reading.span(mapping.new_run_after) < max(every, MINUTE):
        yield "new_run_after", "must not be shorter than `every`"
    for key, name in (("time.zone", mapping.time.zone), ("sacct.zone", mapping.sacct.zone if mapping.sacct else "")):
        try:
            zone_of(name)
        except (OSError, ValueError, LookupError):
            yield key, f"{name!r} is not known on this machine; write it like Europe/Berlin or UTC"
    form = mapping.time.format
    if "%" in form and not _round_trip(form):
        yield "time.format", f"{form!r} is not a format of strptime with a date and a time; like %Y-%m-%d %H:%M:%S"
    elif "%" not in form and form not in {"iso", "epoch", "epoch-ms"}:
        yield "time.format", "must be iso, epoch, epoch-ms, or a format of strptime such as %Y-%m-%d %H:%M:%S"
    if "%" in form and "%z" not in form and not mapping.time.zone:
        yield "time.zone", "is missing, and `time.format` has no %z; write it like Europe/Berlin or UTC"


def _round_trip(form: str) -> bool:
    """Whether it has a date and the minutes of a time."""
    at = datetime(2026, 2, 13, 14, 35, tzinfo=UTC)
    try:
        return reading.local(at.strftime(form), form, UTC) == at
    except (ValueError, UnicodeError):
        return False
