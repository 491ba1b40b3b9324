"""A journal line as it is stored: JSON of the whole line, and the columns that are searched. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast, get_args

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.condition import CheckResult
from gpukeeper.model.decision import Result
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import (
    Closed,
    Complaint,
    Event,
    GpuChecked,
    Intended,
    NodeMarked,
    NodeTested,
    Notified,
    Passed,
    Quarantined,
    WarningSent,
)
from gpukeeper.model.grade import Grade
from gpukeeper.model.unknown import Unknown

TYPES = frozenset(str(one.__struct_config__.tag) for one in get_args(Event))
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_DECODER: reading.Decoder[Event] = reading.Decoder(cast("type[Event]", Event))
_FAILED = frozenset({Result.STILL_THERE, Result.NOT_CAPTURED, Result.REFUSED, Result.UNKNOWN})


class NumberedLine(msgspec.Struct, frozen=True):
    """Lines with their numbers, as a daemon sends them."""

    lines: tuple[tuple[int, Event], ...]


COLUMNS = (
    "at",
    "type",
    "platform",
    "place",
    "workload",
    "key",
    "owner",
    "rule",
    "result",
    "pass_id",
    "step",
    "error",
    "line",
)


def decode(stored: str | bytes, where: str) -> Event:
    try:
        return _DECODER.decode(stored)
    except msgspec.MsgspecError as error:
        raise LedgerError(
            f"{where} cannot be read ({error}). It was written by another version, or it is damaged. "
            "Nothing was changed. Details: gpukeeper doctor"
        ) from error


def text(words: str) -> str:
    """What a store can hold of any string: bytes that are no text are written as \\udcXX."""
    return words.encode("utf-8", "backslashreplace").decode()


def fit(line: Event) -> tuple[Event, str]:
    """The line as a store can hold it, and its JSON. JSON has no NaN: a figure that is not a number is unknown."""
    if isinstance(line, Closed) and isinstance(line.gpu_hours, float) and not math.isfinite(line.gpu_hours):
        line = msgspec.structs.replace(line, gpu_hours=Unknown("not a finite number"))
    if isinstance(line, Passed) and not math.isfinite(line.seconds):
        line = msgspec.structs.replace(line, seconds=0.0)
    try:
        return line, msgspec.json.encode(line).decode()
    except UnicodeEncodeError:
        # Bytes of a file name that are no text. No name may keep a line out of the journal.
        stored = msgspec.json.encode(storable(msgspec.to_builtins(line))).decode()
        return decode(stored, "A line with invalid text"), stored


def type_of(line: Event) -> str:
    return str(type(line).__struct_config__.tag)


def micros(at: datetime) -> int:
    """Microseconds since 1970, exact. A time without zone is a bug and raises."""
    return (at - EPOCH) // _MICROSECOND


def moment(value: int) -> datetime:
    return EPOCH + value * _MICROSECOND


def row(line: Event, stored: str) -> tuple[object, ...]:
    """The values of COLUMNS."""
    ref = line.ref
    place: Any = line if isinstance(line, Passed) else ref
    return (
        micros(line.at),
        type_of(line),
        place and place.platform,
        place and place.place,
        ref and ref.path,
        ref and ref.key,
        line.owner,
        getattr(line, "rule", None),
        result_of(line),
        getattr(line, "pass_id", None),
        getattr(line, "step", None),
        int(is_error(line)),
        stored,
    )


def result_of(line: Event) -> str | None:
    if isinstance(line, WarningSent | Notified):
        return (Result.DELIVERED if line.delivered else Result.UNDELIVERED).value
    result = getattr(line, "verdict" if isinstance(line, NodeTested) else "result", None)
    return None if result is None else str(result)


def begins(line: Event) -> bool:
    """Whether something is about to be done that was not begun before."""
    return isinstance(line, Intended) or (isinstance(line, NodeMarked) and line.result == "begun")


def is_error(line: Event) -> bool:
    """What an admin may have to fix: a step that did not end well, a pass that did not see or do everything, a GPU
    that did not come back clean."""
    match line:
        case Closed():
            return line.result in _FAILED
        case Passed():
            return bool(line.failed or line.unseen or line.breaker)
        case WarningSent() | Notified():
            return not line.delivered
        case GpuChecked():
            return line.result is not CheckResult.CLEANED
        case NodeTested():
            return line.verdict in (Grade.FAIL, Grade.INCONCLUSIVE)
        case NodeMarked():
            return line.result == "failed" or (line.out and line.action in ("quarantine", "taint"))
        case _:
            return isinstance(line, Complaint | Quarantined)


def storable(value: Any) -> Any:
    """Builtins with every string as a store can hold it."""
    match value:
        case str():
            return text(value)
        case dict():
            return {storable(k): storable(v) for k, v in value.items()}
        case list() | tuple():
            return [storable(v) for v in value]
        case _:
            return value


def says(line: Event, wanted: str) -> bool:
    """Whether this text is in any of its words, or in the path of what it is about; letters of either case."""
    path = [line.ref.path] if line.ref is not None else []
    return any(wanted.casefold() in one.casefold() for one in (*path, *_strings(msgspec.to_builtins(line))))


def _strings(value: object) -> Iterator[str]:
    """The values only: a name of a field is in every line."""
    if isinstance(value, str):
        yield value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for one in inside:
        yield from _strings(one)
