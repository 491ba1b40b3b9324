"""A journal line as it is stored: JSON of the whole line, and the columns that are searched; and as other programs
get it: JSON lines, CSV and lines of a syslog, one event a line, each below 4 KiB. Pure.

Names and labels come from users: for other programs control characters are escaped, and no cell can begin a formula.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast, get_args

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import (
    SCHEMA_VERSION,
    Checkpoint,
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
from gpukeeper.model.gpu import CheckResult, Grade
from gpukeeper.model.reading import EPOCH
from gpukeeper.model.unknown import Unknown

TYPES = frozenset(str(one.__struct_config__.tag) for one in get_args(Event))
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


FIELDS = ("timestamp", "event_type", "user", "source", "details", "schema_version")
LINE_BYTES = 4095  # with the line's end
NAME_CHARACTERS = 200
KEPT_CHARACTERS = 120
CUT = " [cut]"
IDLE_KILL, RUNTIME_KILL = "maintenance.idle_kill", "maintenance.runtime_kill"
CONTAINER_REMOVE, WORKLOAD_REMOVE = "container.remove", "workload.remove"
HEALTH_CHECK = "gpu.health_check"
_TAGS, CLEANUP_TAG = {"idle": "ds01-idle", "max_runtime": "ds01-maxruntime"}, "ds01-cleanup"
SAID_CHARACTERS = 500
_STOPS = {"idle": IDLE_KILL, "max_runtime": RUNTIME_KILL}
_ENVELOPE = frozenset({"type", "at", "owner"})


def json_lines(lines: Iterable[tuple[int, Event]]) -> Iterator[str]:
    for seq, line in lines:
        yield _within(_fields(line), details(seq, line), _json_line)


def csv_lines(lines: Iterable[tuple[int, Event]]) -> Iterator[str]:
    yield _csv_row(FIELDS)
    for seq, line in lines:
        yield _within(_fields(line), details(seq, line), _csv_line)


def syslog_lines(lines: Iterable[tuple[int, Event]]) -> Iterator[str]:
    """For people and for what watches a syslog: time, place, tag and what happened."""
    for _, line in lines:
        yield _escaped(_syslog(line)).encode()[: LINE_BYTES - 1].decode(errors="ignore") + "\n"


def _syslog(line: Event) -> str:
    fields, place = _fields(line), line if isinstance(line, Passed) else line.ref
    result = getattr(line, "result", "")
    about = [str(fields["event_type"]), str(result), _short(line.ref.path) if line.ref is not None else ""]
    whose = [f"user={fields['user']}"] if fields["user"] else []
    text = next((str(words) for name in ("reason", "message", "what") if (words := getattr(line, name, ""))), "")
    words = " ".join(one for one in (*about, *whose) if one)
    host = _short(place.place).replace(" ", "_") if place is not None and place.place else "-"
    return f"{fields['timestamp']} {host} {tag_of(line)}: {words}{': ' if text else ''}{text[:SAID_CHARACTERS]}"


def tag_of(line: Event) -> str:
    """Those that the scripts of ds01 wrote, for what is stopped or removed and for the warnings before it."""
    if isinstance(line, Closed | Intended | WarningSent):
        if line.rule in _TAGS:
            return _TAGS[line.rule]
        if isinstance(line, Closed | Intended) and line.action is Action.REMOVE:
            return CLEANUP_TAG
    return "gpukeeper"


def event_type(line: Event) -> str:
    """Stops and removals that were seen to happen, and checks of GPUs, have names of their own; everything else is
    gpukeeper.<type>."""
    if isinstance(line, GpuChecked):
        return HEALTH_CHECK
    if isinstance(line, Closed) and line.result is Result.RECLAIMED:
        if line.action is Action.STOP and line.rule in _STOPS:
            return _STOPS[line.rule]
        if line.action is Action.REMOVE:
            is_container = line.ref is not None and (line.ref.platform, line.ref.kind) == ("docker", "container")
            return CONTAINER_REMOVE if is_container else WORKLOAD_REMOVE
    return f"gpukeeper.{type_of(line)}"


def details(seq: int, line: Event) -> dict[str, Any]:
    """Everything in the line beyond the other fields."""
    found: dict[str, Any] = {"seq": seq}
    if line.ref is not None:
        found["gpu" if isinstance(line, GpuChecked) else "workload"] = line.ref.path
    if isinstance(line, Checkpoint):
        # State, not history: only how much of it there was.
        return found | {"memories": len(line.memories), "present": len(line.present), "open": len(line.open)}
    plain: dict[str, Any] = msgspec.to_builtins(line)
    return found | {k: v for k, v in plain.items() if k not in _ENVELOPE and v is not None}


def _fields(line: Event) -> dict[str, Any]:
    place = line if isinstance(line, Passed) else line.ref
    return {
        "timestamp": line.at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "event_type": event_type(line),
        "user": _short(line.owner or ""),
        "source": _short(f"gpukeeper/{place.platform}/{place.place}") if place else "gpukeeper",
        "schema_version": SCHEMA_VERSION,
    }


def _within(fields: Mapping[str, Any], found: dict[str, Any], write: Callable[[Mapping[str, Any]], str]) -> str:
    """The largest detail is shortened, then dropped, until the line fits; `cut` names what is not all there."""
    cut: list[str] = []
    while True:
        shown = found | {"cut": cut} if cut else found
        written = write({**fields, "details": shown})
        if len(written.encode()) <= LINE_BYTES:
            return written
        name = max(found, key=lambda k: len(_json(found[k])))
        value = found[name]
        if isinstance(value, str) and len(value) > KEPT_CHARACTERS + len(CUT):
            found = found | {name: value[:KEPT_CHARACTERS] + CUT}
        else:
            found = {k: v for k, v in found.items() if k != name}
        if name not in cut:
            cut.append(name)


def _json_line(fields: Mapping[str, Any]) -> str:
    return _json({name: fields[name] for name in FIELDS}) + "\n"


def _csv_line(fields: Mapping[str, Any]) -> str:
    return _csv_row([_json(fields[n]) if n == "details" else str(fields[n]) for n in FIELDS])


def _csv_row(cells: Iterable[str]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow([_cell(cell) for cell in cells])
    return written.getvalue()


def _cell(words: str) -> str:
    """Spreadsheets run what begins with = + - or @; an apostrophe makes it text."""
    shown = _escaped(words)
    return "'" + shown if shown.lstrip().startswith(("=", "+", "-", "@")) else shown


def _json(value: Any) -> str:
    # JSON allows DEL, C1 and direction marks as they are; a terminal that shows the line would obey them.
    return _escaped(msgspec.json.encode(value).decode())


def _escaped(words: str) -> str:
    return words if words.isprintable() else "".join(ch if ch.isprintable() else _escape(ch) for ch in words)


def _escape(character: str) -> str:
    """As JSON does, so that it may stand inside a JSON string."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))


def _short(words: str) -> str:
    return words if len(words) <= NAME_CHARACTERS else words[:NAME_CHARACTERS] + CUT
