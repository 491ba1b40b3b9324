"""The kinds of value a policy file has: how each is read, written back, and described to an editor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any
from urllib.parse import urlsplit

from cronsim import CronSim, CronSimError
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from gpukeeper.config import units
from gpukeeper.config.problems import did_you_mean
from gpukeeper.ledger.copy.connect import problem_of_address, problem_of_machine
from gpukeeper.model import reading
from gpukeeper.model.policy import AfterIdle, Amount, AtFinish, ChannelSettings, Mode, OnLimit
from gpukeeper.notify.addresses import problem_of_address as problem_of_owner_address
from gpukeeper.notify.addresses import problem_of_template
from gpukeeper.notify.catalog import ADMIN_KINDS, OWNER_KINDS
from gpukeeper.notify.channel import ChannelKind
from gpukeeper.notify.command import CommandKind
from gpukeeper.notify.quiet import read_quiet_hours
from gpukeeper.platforms.ray.settings import Counted

_SPAN_PATTERN = r"(\d+(\.\d+)?(w|d|h|ms|us|m|s))+"


def kind(read: Callable[[Any], Any], write: Callable[[Any], Any], schema: dict[str, Any]) -> tuple[Any, ...]:
    return PlainValidator(read), PlainSerializer(write), WithJsonSchema(schema)


def _span_or(*words: str, meaning: str) -> tuple[Any, ...]:
    """A duration, or one of the words, which is None."""

    def read(value: object) -> timedelta | None:
        if isinstance(value, str) and value.lower() in words:
            return None
        return units.read_span(value, f", or {words[0]} {meaning}")

    def write(span: timedelta | None) -> str:
        return words[0] if span is None else units.span_in_words(span)

    pattern = rf"^({_SPAN_PATTERN}|0|{'|'.join(words)})$"
    return kind(read, write, {"type": ["string", "integer"], "pattern": pattern, "x-kind": f"duration or {words[0]}"})


def _read_as_class(value: object) -> timedelta | float | None:
    if isinstance(value, str) and value.lower() == "as class":
        return None
    if isinstance(value, str) and units.is_factor(value):
        return units.read_factor(value)
    return units.read_span(value, ", as a factor of the class's value like 2x, or as class for the class's value")


def _write_as_class(value: timedelta | float | None) -> str:
    if value is None:
        return "as class"
    return units.span_in_words(value) if isinstance(value, timedelta) else units.factor_in_words(value)


_AS_CLASS_SCHEMA = {
    "type": ["string", "integer"],
    "pattern": rf"^({_SPAN_PATTERN}|0|\d+(\.\d+)?x|as class)$",
    "x-kind": "duration, factor or as class",
}


def _longer_than_nothing(value: object) -> timedelta:
    span = units.read_span(value)
    if not span:
        raise ValueError(f"{units.shown(value)} is too short. Write it like 30s, 5m or 1h.")
    return span


_SPAN_SCHEMA = {"type": ["string", "integer"], "pattern": rf"^({_SPAN_PATTERN}|0)$", "x-kind": "duration"}
_SIZE_SCHEMA = {
    "type": ["string", "integer"],
    "pattern": r"^(\d+(\.\d+)? ?(B|kB|[MGTP]B|[KMGTP]iB)|0)$",
    "x-kind": "size",
}
_PERCENT_SCHEMA = {"type": "string", "pattern": r"^\d+(\.\d+)? ?%$", "x-kind": "percentage"}

Span = Annotated[timedelta, *kind(units.read_span, units.span_in_words, _SPAN_SCHEMA)]
Interval = Annotated[timedelta, *kind(_longer_than_nothing, units.span_in_words, _SPAN_SCHEMA)]
Limit = Annotated[timedelta | None, *_span_or("none", "never", meaning="for no limit")]
Kept = Annotated[timedelta | None, *_span_or("manual", meaning="to keep it until a person removes it")]
AsClass = Annotated[timedelta | float | None, *kind(_read_as_class, _write_as_class, _AS_CLASS_SCHEMA)]
Size = Annotated[int, *kind(units.read_size, units.size_in_words, _SIZE_SCHEMA)]
Percent = Annotated[float, *kind(units.read_percent, units.percent_in_words, _PERCENT_SCHEMA)]
Share = Annotated[float, *kind(units.read_share, units.share_in_words, _PERCENT_SCHEMA)]


def one_of(value: object, known: list[str]) -> str:
    if isinstance(value, str) and value in known:
        return value
    hint = did_you_mean(value, known) if isinstance(value, str) else f"Valid values: {', '.join(known)}."
    raise ValueError(f"{units.shown(value)} is not a valid value. {hint}")


def _words(words: type[StrEnum]) -> tuple[Any, ...]:
    known = [word.value for word in words]
    return kind(lambda value: words(one_of(value, known)), str, {"enum": known, "x-kind": " or ".join(known)})


def word(*known: str) -> tuple[Any, ...]:
    """One of these words, as text."""
    return kind(lambda value: one_of(value, list(known)), str, {"enum": list(known), "x-kind": " or ".join(known)})


ModeWord = Annotated[Mode, *_words(Mode)]
AtFinishWord = Annotated[AtFinish, *_words(AtFinish)]
CountedWord = Annotated[Counted, *_words(Counted)]
OnLimitWord = Annotated[OnLimit, *_words(OnLimit)]
AfterIdleWord = Annotated[AfterIdle, *_words(AfterIdle)]


def _read_count(value: object, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{units.shown(value)} is not a whole number. Write it like 20.")
    if value < least:
        raise ValueError(f"{value} is less than {least}. Write {least} or more.")
    return value


Count = Annotated[int, *kind(_read_count, int, {"type": "integer", "minimum": 1, "x-kind": "number"})]
CountOrZero = Annotated[
    int, *kind(lambda value: _read_count(value, 0), int, {"type": "integer", "minimum": 0, "x-kind": "number"})
]


def _read_rate(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{units.shown(value)} is not a number above 0. Write it like 20.")
    return float(value)


Rate = Annotated[float, *kind(_read_rate, float, {"type": "number", "exclusiveMinimum": 0, "x-kind": "number"})]


def _read_price(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e6:
        raise ValueError(f"{units.shown(value)} is not a price. Write it like 2.5.")
    return float(value)


Price = Annotated[float, *kind(_read_price, float, {"type": "number", "minimum": 0, "x-kind": "price"})]


def _read_currency(value: object) -> str:
    if not isinstance(value, str) or len(value) > 8 or not value.isprintable():
        raise ValueError(f"{units.shown(value)} is not a currency. Write it like EUR.")
    return value


Currency = Annotated[str, *kind(_read_currency, str, {"type": "string", "maxLength": 8, "x-kind": "text"})]


def _read_amount(value: object) -> Amount:
    """20, 10%, or {count: 20, share: 10%}: then the smaller of the two holds."""
    if isinstance(value, dict) and value and set(value) <= {"count", "share"}:
        count = _read_count(value["count"]) if "count" in value else None
        return Amount(count=count, share=units.read_share(value["share"]) if "share" in value else None)
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"{value} would allow no steps. Write 1 or more; for a dry run, write mode: plan.")
        return Amount(count=value)
    if isinstance(value, str) and value.endswith("%"):
        return Amount(share=units.read_share(value))
    raise ValueError(f"{units.shown(value)} is not an amount. Write it like 20, 10% or {{count: 20, share: 10%}}.")


def write_amount(amount: Amount) -> int | str | dict[str, int | str]:
    if amount.share is None:
        return amount.count or 0
    share = units.share_in_words(amount.share)
    return share if amount.count is None else {"count": amount.count, "share": share}


_AMOUNT_SCHEMA = {
    "oneOf": [
        {"type": "integer", "minimum": 1},
        _PERCENT_SCHEMA,
        {
            "type": "object",
            "properties": {"count": {"type": "integer", "minimum": 1}, "share": _PERCENT_SCHEMA},
            "additionalProperties": False,
        },
    ],
    "x-kind": "number, percentage or both",
}
AmountValue = Annotated[Amount, *kind(_read_amount, write_amount, _AMOUNT_SCHEMA)]


def _read_until(value: object) -> datetime:
    """A bare date means the end of that day, UTC: of the two readings the one that protects longer."""
    advice = "Write it like 2026-09-01 (that whole day, UTC) or 2026-09-01T18:00Z."
    try:
        until = reading.moment(value, naive_is_utc=True) if isinstance(value, str) else None
    except ValueError:
        until = None
    if until is None or not isinstance(value, str):
        raise ValueError(f"{units.shown(value)} is not a date. {advice}")
    if len(value) <= len("2026-09-01"):
        return datetime.combine(until.date(), time.max, UTC)
    if datetime.fromisoformat(value).tzinfo is None:
        raise ValueError(f"{units.shown(value)} has no time zone. {advice}")
    return until


Until = Annotated[
    datetime | None,
    *kind(
        _read_until,
        lambda until: until and until.isoformat().replace("+00:00", "Z"),
        {"type": "string", "x-kind": "date"},
    ),
]


def _read_cron(value: object) -> str:
    try:
        if not isinstance(value, str):
            raise CronSimError("not text")
        CronSim(value, datetime(2026, 1, 1, tzinfo=UTC))
    except CronSimError as error:
        raise ValueError(
            f"{units.shown(value)} is not a cron expression ({str(error).lower()})."
            ' Write it like "0 2 * * *" (daily at 02:00).'
        ) from None
    return value


Cron = Annotated[str | None, *kind(_read_cron, lambda words: words, {"type": "string", "x-kind": "cron expression"})]


def _read_folder(value: object) -> str:
    if not isinstance(value, str) or not PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts:
        raise ValueError(f'{units.shown(value)} is not an absolute path. Begin it with /, and do not use "..".')
    return value


_FOLDER_SCHEMA = {"type": "string", "pattern": "^/", "x-kind": "absolute path"}
Folder = Annotated[str, *kind(_read_folder, str, _FOLDER_SCHEMA)]

# A typo here would delete what cannot be restored, so these are never temporary.
_NEVER_TEMPORARY = frozenset(
    f"/{name}"
    for name in (
        *("", "bin", "boot", "dev", "etc", "home", "lib", "lib64", "opt", "proc"),
        *("root", "run", "sbin", "srv", "sys", "usr", "var", "var/lib"),
    )
)


def _read_root(value: object) -> str:
    directory = str(PurePosixPath("/", *PurePosixPath(_read_folder(value)).parts[1:]))  # //tmp/ is /tmp
    if directory in _NEVER_TEMPORARY:
        raise ValueError(
            f"{units.shown(value)} is not allowed as a temporary directory. Use one such as /tmp or /scratch/tmp."
        )
    return directory


Root = Annotated[str, *kind(_read_root, str, _FOLDER_SCHEMA)]


def _read_pattern(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or value in {".", ".."}:
        raise ValueError(f"{units.shown(value)} is not a pattern for a name. Write it like tmp* or pip-*.")
    if "/" in value:
        raise ValueError(f"{units.shown(value)} contains /. Write only the name; the directory belongs in root.")
    return value


NamePattern = Annotated[str, *kind(_read_pattern, str, {"type": "string", "pattern": "^[^/]+$", "x-kind": "pattern"})]


def _read_address(value: object) -> str | None:
    if value == "none":
        return None
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in {"http", "https"} or not parts.hostname or parts.username is not None:
        advice = "Write it like http://localhost:9400/metrics, or none."
        raise ValueError(f"{units.shown(value)} is not a valid URL. {advice}")
    return str(value)


_ADDRESS_SCHEMA = {"type": "string", "pattern": "^(https?://.+|none)$", "x-kind": "address or none"}


def _channel(kinds: Mapping[str, ChannelKind]) -> tuple[Any, ...]:
    """One kind of channel and its words: {command: [/usr/bin/mail, root]}."""

    def read(value: object) -> ChannelSettings:
        example = next(f"{{{name}: {kind.example}}}" for name, kind in kinds.items())
        if not isinstance(value, dict) or len(value) != 1:
            raise ValueError(f"this is not a channel. Write it like {example}.")
        name, words = next(iter(value.items()))
        kind = kinds[one_of(name, list(kinds))]
        words = [words] if isinstance(words, str) else words
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(
                f"{name}: this is neither a string nor a list of strings. Write it like {{{name}: {kind.example}}}."
            )
        problem = kind.problem(words)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        return ChannelSettings(kind=name, words=tuple(words))

    def write(one: ChannelSettings) -> str:
        """For people: its words may be secret."""
        return f"{one.kind}: {kinds[one.kind].shown(one.words)}"

    words = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(kinds, words),
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "x-kind": "channel",
    }
    return kind(read, write, schema)


AdminChannelValue = Annotated[ChannelSettings, *_channel(ADMIN_KINDS)]
OwnerChannelValue = Annotated[ChannelSettings, *_channel(OWNER_KINDS)]


def _read_owner_address(value: object) -> str:
    problem = problem_of_owner_address(value) if isinstance(value, str) else "it is not text"
    if problem is not None:
        raise ValueError(f"this is not an address: {problem}. Write it like ann@uni.example.")
    return str(value)


OwnerAddress = Annotated[str, *kind(_read_owner_address, str, {"type": "string", "x-kind": "address"})]


def _read_template(value: object) -> str | None:
    if value == "none":
        return None
    problem = problem_of_template(value) if isinstance(value, str) else "it is not text"
    if problem is not None:
        raise ValueError(f'this is not a template of addresses: {problem}. Write it like "{{owner}}@uni.example".')
    return str(value)


_TEMPLATE_SCHEMA = {"type": "string", "pattern": r"^(.*\{owner\}.*|none)$", "x-kind": "template or none"}
AddressTemplate = Annotated[str | None, *kind(_read_template, lambda template: template or "none", _TEMPLATE_SCHEMA)]


def _read_command(value: object) -> ChannelSettings | None:
    if value == "none":
        return None
    words = [value] if isinstance(value, str) else value
    example = "[/usr/local/bin/address-of]"
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"this is neither a string nor a list of strings. Write it like {example}.")
    if CommandKind().problem(words) is not None:
        raise ValueError(f"a command begins with the absolute path of a program. Write it like {example}.")
    return ChannelSettings(kind="command", words=tuple(words))


_COMMAND_SCHEMA = {
    "oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    "x-kind": "command or none",
}
AddressCommand = Annotated[
    ChannelSettings | None,
    *kind(_read_command, lambda one: "none" if one is None else CommandKind().shown(one.words), _COMMAND_SCHEMA),
]


def _read_quiet(value: object) -> str | None:
    if value == "none":
        return None
    read_quiet_hours(value if isinstance(value, str) else "")
    return str(value)


_QUIET_SCHEMA = {"type": "string", "pattern": r"^(\d\d:\d\d-\d\d:\d\d \S+|none)$", "x-kind": "hours or none"}
Quiet = Annotated[str | None, *kind(_read_quiet, lambda words: words or "none", _QUIET_SCHEMA)]


def _read_web_address(value: object) -> str | None:
    if value == "none":
        return None
    parts = urlsplit(value) if isinstance(value, str) else None
    plain = parts is not None and parts.scheme in {"http", "https"} and bool(parts.hostname)
    if parts is None or not plain or parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"{units.shown(value)} is not the URL of a web server. Write it like https://gpu.example.")
    return str(value).rstrip("/")


_WEB_SCHEMA = {"type": "string", "pattern": "^(https?://[^?#]+|none)$", "x-kind": "address or none"}
WebAddress = Annotated[str | None, *kind(_read_web_address, lambda address: address or "none", _WEB_SCHEMA)]


Address = Annotated[str | None, *kind(_read_address, lambda address: address or "none", _ADDRESS_SCHEMA)]


def _read_database(value: object) -> str | None:
    if value == "none":
        return None
    problem = problem_of_address(value) if isinstance(value, str) else "it is not text"
    if problem is not None:
        shown = f"{units.shown(value)} is" if "password" not in problem else "this is"
        advice = "Write it like postgresql://gpukeeper_machine_node-1@db.example/gpukeeper, or none."
        raise ValueError(f"{shown} not an address of a database: {problem}. {advice}")
    return str(value)


_DATABASE_SCHEMA = {"type": "string", "pattern": "^(postgres(ql)?://.*|none)$", "x-kind": "address or none"}
DatabaseAddress = Annotated[str | None, *kind(_read_database, lambda address: address or "none", _DATABASE_SCHEMA)]


def _read_secret_file(value: object) -> str | None:
    return None if value == "none" else _read_folder(value)


_SECRET_SCHEMA = {"type": "string", "pattern": "^(/.*|none)$", "x-kind": "absolute path or none"}
SecretFile = Annotated[str | None, *kind(_read_secret_file, lambda path: path or "none", _SECRET_SCHEMA)]
FilePath = SecretFile  # one that others may read


def _read_machine_name(value: object) -> str | None:
    if value == "none":
        return None
    problem = problem_of_machine(value) if isinstance(value, str) else "it is not text"
    if problem is not None:
        raise ValueError(f"{units.shown(value)} is not a name for a machine: {problem}.")
    return str(value)


_MACHINE_SCHEMA = {"type": "string", "pattern": "^[a-z0-9][a-z0-9._-]{0,44}$", "x-kind": "name or none"}
MachineName = Annotated[str | None, *kind(_read_machine_name, lambda name: name or "none", _MACHINE_SCHEMA)]
