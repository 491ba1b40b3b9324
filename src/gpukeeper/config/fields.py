"""How each kind of value in a policy file is read, written back, and described to an editor."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from cronsim import CronSim, CronSimError

from gpukeeper.config import units
from gpukeeper.config.problems import did_you_mean
from gpukeeper.ledger.copy.connect import problem_of_address, problem_of_machine
from gpukeeper.model import reading
from gpukeeper.model.policy import Amount, Capture, ChannelSettings
from gpukeeper.model.series import Signal
from gpukeeper.notify.catalog import ADMIN_KINDS, OWNER_KINDS, ChannelKind
from gpukeeper.notify.command import CommandKind, problem_of_template
from gpukeeper.notify.command import problem_of_address as problem_of_owner_address
from gpukeeper.notify.messages import QUIET_EXAMPLE, read_quiet_hours

_SPAN_PATTERN = r"(\d+(\.\d+)?(w|d|h|ms|us|m|s))+"


@dataclass(frozen=True, eq=False)  # hashed as it is, for an annotation
class Form:
    """How one value is written."""

    read: Callable[[Any], Any]  # raises ValueError with a sentence about what to write instead
    write: Callable[[Any], Any]
    schema: Mapping[str, Any]
    examples: str = ""  # in the place of {examples} in the description of a setting


def _or_none(read: Callable[[Any], Any], schema: Mapping[str, Any], examples: str = "") -> Form:
    """Where the word none is None."""
    return Form(lambda value: None if value == "none" else read(value), lambda value: value or "none", schema, examples)


def _span_or(*words: str, meaning: str) -> Form:
    """A duration, or one of the words, which is None."""

    def read(value: object) -> timedelta | None:
        if isinstance(value, str) and value.lower() in words:
            return None
        return units.read_span(value, f", or {words[0]} {meaning}")

    def write(span: timedelta | None) -> str:
        return words[0] if span is None else units.span_in_words(span)

    pattern = rf"^({_SPAN_PATTERN}|0|{'|'.join(words)})$"
    return Form(read, write, {"pattern": pattern, "type": ["string", "integer"], "x-kind": f"duration or {words[0]}"})


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
    "pattern": rf"^({_SPAN_PATTERN}|0|\d+(\.\d+)?x|as class)$",
    "type": ["string", "integer"],
    "x-kind": "duration, factor or as class",
}


def _longer_than_nothing(value: object) -> timedelta:
    span = units.read_span(value)
    if not span:
        raise ValueError(f"{units.shown(value)} is too short. Write it like 30s, 5m or 1h.")
    return span


_SPAN_SCHEMA = {"pattern": rf"^({_SPAN_PATTERN}|0)$", "type": ["string", "integer"], "x-kind": "duration"}
_SIZE_SCHEMA = {
    "pattern": r"^(\d+(\.\d+)? ?(B|kB|[MGTP]B|[KMGTP]iB)|0)$",
    "type": ["string", "integer"],
    "x-kind": "size",
}
_PERCENT_SCHEMA = {"pattern": r"^\d+(\.\d+)? ?%$", "type": "string", "x-kind": "percentage"}


def _one_of(value: object, known: list[str]) -> str:
    if isinstance(value, str) and value in known:
        return value
    hint = did_you_mean(value, known) if isinstance(value, str) else f"Valid values: {', '.join(known)}."
    raise ValueError(f"{units.shown(value)} is not a valid value. {hint}")


def words_of(known: Sequence[str], read: Callable[[str], Any] = str) -> Form:
    """One of these words."""
    known = list(known)
    return Form(lambda value: read(_one_of(value, known)), str, {"enum": known, "x-kind": " or ".join(known)})


def _read_count(value: object, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{units.shown(value)} is not a whole number. Write it like 20.")
    if value < least:
        raise ValueError(f"{value} is less than {least}. Write {least} or more.")
    return value


def _read_rate(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{units.shown(value)} is not a number above 0. Write it like 20.")
    return float(value)


def _read_price(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e6:
        raise ValueError(f"{units.shown(value)} is not a price. Write it like 2.5.")
    return float(value)


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        quote = f' Put it in quotes: "{value}".' if isinstance(value, int | float) else " Write one name."
        raise ValueError(f"{units.shown(value)} is not text.{quote}")
    return value


def _read_truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{units.shown(value)} is neither true nor false. Write true or false.")
    return value


TEXT = Form(_read_text, str, {"type": "string"})
TRUTH = Form(_read_truth, bool, {"type": "boolean"})


def _read_currency(value: object) -> str:
    if not isinstance(value, str) or len(value) > 8 or not value.isprintable():
        raise ValueError(f"{units.shown(value)} is not a currency. Write it like EUR.")
    return value


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


def _write_amount(amount: Amount) -> int | str | dict[str, int | str]:
    if amount.share is None:
        return amount.count or 0
    share = units.share_in_words(amount.share)
    return share if amount.count is None else {"count": amount.count, "share": share}


_AMOUNT_SCHEMA = {
    "oneOf": [
        {"minimum": 1, "type": "integer"},
        _PERCENT_SCHEMA,
        {
            "additionalProperties": False,
            "properties": {"count": {"minimum": 1, "type": "integer"}, "share": _PERCENT_SCHEMA},
            "type": "object",
        },
    ],
    "x-kind": "number, percentage or both",
}


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


def _read_folder(value: object) -> str:
    if not isinstance(value, str) or not PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts:
        raise ValueError(f'{units.shown(value)} is not an absolute path. Begin it with /, and do not use "..".')
    return value


_FOLDER_SCHEMA = {"pattern": "^/", "type": "string", "x-kind": "absolute path"}

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


def _read_pattern(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or value in {".", ".."}:
        raise ValueError(f"{units.shown(value)} is not a pattern for a name. Write it like tmp* or pip-*.")
    if "/" in value:
        raise ValueError(f"{units.shown(value)} contains /. Write only the name; the directory belongs in root.")
    return value


def _read_address(value: object) -> str:
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in {"http", "https"} or not parts.hostname or parts.username is not None:
        advice = "Write it like http://localhost:9400/metrics, or none."
        raise ValueError(f"{units.shown(value)} is not a valid URL. {advice}")
    return str(value)


_ADDRESS_SCHEMA = {"pattern": "^(https?://.+|none)$", "type": "string", "x-kind": "address or none"}


def _channel(kinds: Mapping[str, ChannelKind]) -> Form:
    """One kind of channel and its words: {command: [/usr/bin/mail, root]}."""

    def read(value: object) -> ChannelSettings:
        example = next(f"{{{name}: {kind.example}}}" for name, kind in kinds.items())
        if not isinstance(value, dict) or len(value) != 1:
            raise ValueError(f"this is not a channel. Write it like {example}.")
        name, words = next(iter(value.items()))
        kind = kinds[_one_of(name, list(kinds))]
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

    words = {"oneOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}]}
    schema = {
        "additionalProperties": False,
        "maxProperties": 1,
        "minProperties": 1,
        "properties": dict.fromkeys(kinds, words),
        "type": "object",
        "x-kind": "channel",
    }
    return Form(read, write, schema, "; ".join(f"`{name}: {kind.example}`" for name, kind in kinds.items()))


def _read_owner_address(value: object) -> str:
    problem = problem_of_owner_address(value) if isinstance(value, str) else "it is not text"
    if problem is not None:
        raise ValueError(f"this is not an address: {problem}. Write it like ann@uni.example.")
    return str(value)


def _read_template(value: object) -> str:
    problem = problem_of_template(value) if isinstance(value, str) else "it is not text"
    if problem is not None:
        raise ValueError(f'this is not a template of addresses: {problem}. Write it like "{{owner}}@uni.example".')
    return str(value)


_TEMPLATE_SCHEMA = {"pattern": r"^(.*\{owner\}.*|none)$", "type": "string", "x-kind": "template or none"}


def _read_command(value: object) -> ChannelSettings:
    words = [value] if isinstance(value, str) else value
    example = "[/usr/local/bin/address-of]"
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"this is neither a string nor a list of strings. Write it like {example}.")
    if CommandKind().problem(words) is not None:
        raise ValueError(f"a command begins with the absolute path of a program. Write it like {example}.")
    return ChannelSettings(kind="command", words=tuple(words))


_COMMAND_SCHEMA = {
    "oneOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}],
    "x-kind": "command or none",
}


def _read_quiet(value: object) -> str:
    read_quiet_hours(value if isinstance(value, str) else "")
    return str(value)


_QUIET_SCHEMA = {"pattern": r"^(\d\d:\d\d-\d\d:\d\d \S+|none)$", "type": "string", "x-kind": "hours or none"}


def _read_web_address(value: object) -> str:
    parts = urlsplit(value) if isinstance(value, str) else None
    plain = parts is not None and parts.scheme in {"http", "https"} and bool(parts.hostname)
    if parts is None or not plain or parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"{units.shown(value)} is not the URL of a web server. Write it like https://gpu.example.")
    return str(value).rstrip("/")


_WEB_SCHEMA = {"pattern": "^(https?://[^?#]+|none)$", "type": "string", "x-kind": "address or none"}


def _read_database(value: object) -> str:
    problem = problem_of_address(value) if isinstance(value, str) else "it is not text"
    if problem is not None:
        shown = f"{units.shown(value)} is" if "password" not in problem else "this is"
        advice = "Write it like postgresql://gpukeeper_machine_node-1@db.example/gpukeeper, or none."
        raise ValueError(f"{shown} not an address of a database: {problem}. {advice}")
    return str(value)


_DATABASE_SCHEMA = {"pattern": "^(postgres(ql)?://.*|none)$", "type": "string", "x-kind": "address or none"}


_FILE_SCHEMA = {"pattern": "^(/.*|none)$", "type": "string", "x-kind": "absolute path or none"}


def _read_machine_name(value: object) -> str:
    problem = problem_of_machine(value) if isinstance(value, str) else "it is not text"
    if problem is not None:
        raise ValueError(f"{units.shown(value)} is not a name for a machine: {problem}.")
    return str(value)


_MACHINE_SCHEMA = {"pattern": "^[a-z0-9][a-z0-9._-]{0,44}$", "type": "string", "x-kind": "name or none"}


def _read_account(value: object) -> str:
    if not isinstance(value, str) or not _ACCOUNT.fullmatch(value):
        raise ValueError(f"{units.shown(value)} is not the name of a user. Write it like nobody or www-data.")
    return value


_ACCOUNT = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_ACCOUNT_SCHEMA = {"pattern": f"^{_ACCOUNT.pattern}$", "type": "string", "x-kind": "user"}


def _read_header(value: object) -> str:
    if not isinstance(value, str) or not _HEADER.fullmatch(value):
        raise ValueError(f"{units.shown(value)} is not the name of a header. Write it like X-Forwarded-User.")
    if value.lower() in _OTHER_HEADERS:
        raise ValueError(f"{value} has another meaning. Use a header that only the proxy sets, like X-Forwarded-User.")
    return value


_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}")  # proxies drop those with an underscore, or confuse them
_OTHER_HEADERS = frozenset(
    (
        *("accept", "authorization", "connection", "content-length", "content-type", "cookie", "forwarded", "host"),
        *("if-none-match", "origin", "referer", "transfer-encoding", "upgrade", "user-agent", "via", "x-csrf-token"),
        *("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"),
    )
)
_HEADER_SCHEMA = {"pattern": f"^{_HEADER.pattern}$", "type": "string", "x-kind": "header or none"}


def _read_network(value: object) -> str:
    example = "Write it like 10.0.0.2, 10.1.0.0/24 or fd00::2."
    try:
        network = ipaddress.ip_network(value if isinstance(value, str) else "")
    except ValueError as error:
        why = f" ({error})" if "host bits" in str(error) else ""
        raise ValueError(f"{units.shown(value)} is not an address or a network{why}. {example}") from None
    if network.prefixlen == 0:
        raise ValueError(
            f"{units.shown(value)} includes every address, so any client could act as any person. {example}"
        )
    return str(value)


FORMS: dict[str, Form] = {
    "span": Form(units.read_span, units.span_in_words, _SPAN_SCHEMA),
    "interval": Form(_longer_than_nothing, units.span_in_words, _SPAN_SCHEMA),
    "limit": _span_or("none", "never", meaning="for no limit"),
    "retained": _span_or("manual", meaning="to keep it until a person removes it"),
    "as class": Form(_read_as_class, _write_as_class, _AS_CLASS_SCHEMA),
    "size": Form(units.read_size, units.size_in_words, _SIZE_SCHEMA),
    "percent": Form(units.read_percent, units.percent_in_words, _PERCENT_SCHEMA),
    "share": Form(units.read_share, units.share_in_words, _PERCENT_SCHEMA),
    "count": Form(_read_count, int, {"minimum": 1, "type": "integer", "x-kind": "number"}),
    "count or zero": Form(
        lambda value: _read_count(value, 0), int, {"minimum": 0, "type": "integer", "x-kind": "number"}
    ),
    "rate": Form(_read_rate, float, {"exclusiveMinimum": 0, "type": "number", "x-kind": "number"}),
    "price": Form(_read_price, float, {"minimum": 0, "type": "number", "x-kind": "price"}),
    "currency": Form(_read_currency, str, {"maxLength": 8, "type": "string", "x-kind": "text"}),
    "amount": Form(_read_amount, _write_amount, _AMOUNT_SCHEMA),
    "until": Form(
        _read_until,
        lambda until: until and until.isoformat().replace("+00:00", "Z"),
        {"type": "string", "x-kind": "date"},
    ),
    "cron": Form(_read_cron, lambda words: words, {"type": "string", "x-kind": "cron expression"}),
    "folder": Form(_read_folder, str, _FOLDER_SCHEMA),
    "root": Form(_read_root, str, _FOLDER_SCHEMA),
    "name pattern": Form(_read_pattern, str, {"pattern": "^[^/]+$", "type": "string", "x-kind": "pattern"}),
    "admin channel": _channel(ADMIN_KINDS),
    "owner channel": _channel(OWNER_KINDS),
    "owner address": Form(_read_owner_address, str, {"type": "string", "x-kind": "address"}),
    "address template": _or_none(_read_template, _TEMPLATE_SCHEMA),
    "address command": Form(
        lambda value: None if value == "none" else _read_command(value),
        lambda one: "none" if one is None else CommandKind().shown(one.words),
        _COMMAND_SCHEMA,
    ),
    "quiet": _or_none(_read_quiet, _QUIET_SCHEMA, QUIET_EXAMPLE),
    "web address": _or_none(_read_web_address, _WEB_SCHEMA),
    "address": _or_none(_read_address, _ADDRESS_SCHEMA),
    "database address": _or_none(_read_database, _DATABASE_SCHEMA),
    "file or none": _or_none(_read_folder, _FILE_SCHEMA),
    "machine name": _or_none(_read_machine_name, _MACHINE_SCHEMA),
    "account": Form(_read_account, str, _ACCOUNT_SCHEMA),
    "account or none": _or_none(_read_account, {**_ACCOUNT_SCHEMA, "x-kind": "user or none"}),
    "header name": _or_none(_read_header, _HEADER_SCHEMA),
    "network": Form(_read_network, str, {"type": "string", "x-kind": "address or network"}),
    "signal": words_of([signal.value for signal in Signal if signal is not Signal.GPU]),
    "evidence": words_of(Capture().what),
}
