"""Numbers in the format of Prometheus: queries to a server with its HTTP API, and the text of a DCGM exporter. Reads
only, judges nothing, and uses no incomplete response. A warning of a server makes the whole response Unknown:
missing series would look as if they were not exported. A blank of DCGM, printed as a huge number, is Unknown.
Credentials come with the address or the environment; no message has them.
"""

from __future__ import annotations

import asyncio
import base64
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote, urlencode, urlsplit

import msgspec

from gpukeeper import http_client
from gpukeeper.blocking import in_thread
from gpukeeper.model import reading
from gpukeeper.model.unknown import Unknown, larger
from gpukeeper.model.words import in_words

SIZE_MAX: Final = 64 * 1024 * 1024
DEADLINE: Final = timedelta(seconds=20)
TOKEN, TOKEN_FILE = "GPUKEEPER_PROMETHEUS_TOKEN", "GPUKEEPER_PROMETHEUS_TOKEN_FILE"
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")  # re.escape also escapes "-", and addresses become long
# Annotations of PromQL about a query, as opposed to missing data.
_REMARKS = ("PromQL ",)

T = TypeVar("T")


class SeriesSelector(msgspec.Struct, frozen=True):
    """Which series: of these names, with one of these values of a label, and with exactly these other labels."""

    names: tuple[str, ...]
    label: str
    values: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()

    def matchers(self) -> str:
        """As PromQL writes them between braces."""
        found = [f"__name__=~{_any(self.names)}", f"{self.label}=~{_any(self.values)}"]
        return ",".join(found + [f"{name}={_quoted(value)}" for name, value in self.also])


class TimeSeries(msgspec.Struct, frozen=True):
    """One series: its labels, including the name, and its points as seconds since the epoch and value."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


class Prometheus:
    """`url` may have a path (a prefix), user and password. Tokens are read again for each query."""

    def __init__(
        self,
        url: str,
        environ: Mapping[str, str] | None = None,
        *,
        deadline: timedelta = DEADLINE,
        size_max: int = SIZE_MAX,
    ) -> None:
        self._environ, self._deadline, self._size_max = environ or {}, deadline, size_max
        self._login = ""
        self._base: str | Unknown = self._address(url)

    async def clock(self) -> datetime | Unknown:
        """The time of the server."""
        found = await self._query("query", {"query": "time()"}, lambda body: _data(body, _Scalar))
        if isinstance(found, Unknown):
            return found
        try:
            return reading.instant(found.result[0])
        except ValueError:
            return Unknown("Prometheus returned an impossible time")

    async def label_names(self, name: str, since: datetime, until: datetime) -> frozenset[str] | Unknown:
        """Of all series of that name; empty when there is none."""
        query = {"match[]": f"{{__name__={_quoted(name)}}}", "start": _time(since), "end": _time(until)}
        return await self._query("labels", query, lambda body: frozenset(_data(body, list[str])))

    async def series(
        self, wheres: Sequence[SeriesSelector], since: datetime, until: datetime
    ) -> list[Mapping[str, str]] | Unknown:
        """The labels of every series that has points in that time, or nearly."""
        query = {"match[]": [f"{{{one.matchers()}}}" for one in wheres], "start": _time(since), "end": _time(until)}
        return await self._query("series", query, lambda body: _data(body, list[Mapping[str, str]]))

    async def raw(self, where: SeriesSelector, since: datetime, until: datetime) -> list[TimeSeries] | Unknown:
        """Every point as it was scraped, without interpolation and without stale values."""
        span = max(1, round((until - since).total_seconds()))
        query = {"query": f"{{{where.matchers()}}}[{span}s]", "time": _time(until)}
        return await self._query("query", query, _lines)

    async def range(self, query: str, since: datetime, until: datetime, step: timedelta) -> list[TimeSeries] | Unknown:
        """A PromQL expression, evaluated at each step."""
        parameters = {"query": query, "start": _time(since), "end": _time(until), "step": f"{step.total_seconds():.0f}"}
        return await self._query("query_range", parameters, _lines)

    async def _query(self, what: str, query: Mapping[str, Sequence[str]], read: Callable[[bytes], T]) -> T | Unknown:
        if isinstance(self._base, Unknown):
            return self._base
        url = f"{self._base}/api/v1/{what}?{urlencode(query, doseq=True)}"
        try:
            async with asyncio.timeout(self._deadline.total_seconds()):
                body = await self._download(url)
                return await in_thread(lambda: read(body), self._deadline)  # many points: the event loop continues
        except TimeoutError:
            return Unknown(f"Prometheus at {self._base} did not answer within {in_words(self._deadline)}")
        except (OSError, ValueError, http_client.HttpError) as error:
            return Unknown(f"Prometheus at {self._base} could not be queried: {error}")

    def _address(self, url: str) -> str | Unknown:
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            shown = url.rpartition("@")[2]
            return Unknown(f"{shown!r} is not a valid address of a Prometheus; write it like http://prometheus:9090")
        host = parts.netloc.rpartition("@")[2]
        if parts.username is not None:
            words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._login = "Basic " + base64.b64encode(words.encode()).decode()
        return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"

    def _headers(self) -> dict[str, str]:
        if self._login:
            return {"Authorization": self._login}
        named = self._environ.get(TOKEN_FILE)
        token = Path(named).read_text().strip() if named else self._environ.get(TOKEN, "").strip()
        if not all("!" <= letter <= "~" for letter in token):  # no message contains it
            raise ValueError(f"the token in {named or TOKEN} contains invalid characters")
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def _download(self, url: str) -> bytes:
        answer = await http_client.get(url, headers=self._headers(), size_max=self._size_max, purpose="prometheus")
        if answer.status >= 300:
            raise ValueError(_refusal(answer))
        return answer.body


class _ApiResponse(msgspec.Struct, frozen=True, rename="camel"):
    status: str
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    warnings: tuple[str, ...] | None = None


class _Row(msgspec.Struct, frozen=True, gc=False):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Matrix(msgspec.Struct, frozen=True, rename="camel", tag_field="resultType", tag="matrix"):
    result: list[_Row]


class _Scalar(msgspec.Struct, frozen=True, rename="camel", tag_field="resultType", tag="scalar"):
    result: tuple[float, str]


def _data(body: bytes, kind: type[T]) -> T:
    """ValueError if it is no complete response."""
    try:
        answer = reading.decode(body, type=_ApiResponse)
        if answer.status != "success":
            raise ValueError(answer.error or f"its status is {answer.status!r}")
        partial = [one for one in answer.warnings or () if not one.startswith(_REMARKS)]
        if partial:
            raise ValueError(f"its response may be incomplete: {partial[0]}")
        return reading.decode(answer.data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"its response could not be read: {error}") from error


def _lines(body: bytes) -> list[TimeSeries]:
    rows = _data(body, _Matrix).result
    return [TimeSeries(row.metric, [(_seconds(at), _value(value)) for at, value in row.values]) for row in rows]


def _seconds(at: float) -> float:
    reading.instant(at)
    return at


def _value(text: str) -> float:
    if text in {"NaN", "+Inf", "-Inf"}:
        return float(text)
    try:
        return reading.number(text)
    except ValueError as problem:
        raise ValueError(f"{text[:40]!r} {problem}") from None


def _refusal(answer: http_client.Response) -> str:
    try:
        message = reading.decode(answer.body, type=_ApiResponse).error
    except msgspec.MsgspecError:
        message = ""
    words = f"it answered {answer.status} {message or answer.reason}"
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        words += f"; set a token in {TOKEN} or {TOKEN_FILE}, or user and password in the address"
    return words


def _any(values: Iterable[str]) -> str:
    return _quoted("|".join(_SPECIAL.sub(r"\\\g<0>", value) for value in values))


def _quoted(words: str) -> str:
    escaped = words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _time(at: datetime) -> str:
    return f"{at.timestamp():.3f}"


EXPORT_SIZE_MAX: Final = 8 * 1024 * 1024
INT64_BLANK, FP64_BLANK, INT32_BLANK = 0x7FFFFFFFFFFFFFF0, 140737488355328.0, 0x7FFFFFF0
NOT_EXPORTED: Final = Unknown("the DCGM exporter does not export it")

_INSTANCE = re.compile(r"[0-9]{0,9}")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*')
_ESCAPED = re.compile(r"\\(.)")
_REAL = {"\\": "\\", '"': '"', "n": "\n"}


class Metric(msgspec.Struct, frozen=True):
    """One line of the exposition format."""

    name: str
    labels: Mapping[str, str]
    value: float
    timestamp_ms: int | None = None


class ExportedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """Of one GPU, or of one GPU instance of it."""

    uuid: str  # of the GPU, also for a slice
    gpu_instance: int | None = None
    profile: str = ""
    hostname: str = ""
    engine: float | Unknown = NOT_EXPORTED  # percent of the time with work on it
    utilisation: float | Unknown = NOT_EXPORTED  # percent; whole GPUs only
    energy_mj: int | Unknown = NOT_EXPORTED
    power_watts: float | Unknown = NOT_EXPORTED
    xid: int | Unknown = NOT_EXPORTED  # the last error that the driver reported; 0: none
    memory_used_mib: int | Unknown = NOT_EXPORTED


def read_dcgm(text: str) -> dict[tuple[str, int | None], ExportedGpu] | Unknown:
    """By uuid of the GPU and GPU instance. All or nothing: with half a response GPUs would seem to be missing."""
    try:
        metrics = [metric for metric in parse_export(text) if metric.name in DCGM_FIELDS]
    except ValueError as error:
        return Unknown(f"the response of the DCGM exporter could not be read: {error}")
    found: dict[tuple[str, int | None], dict[str, float | int | Unknown]] = {}
    named: dict[tuple[str, int | None], Mapping[str, str]] = {}
    for metric in metrics:
        instance = metric.labels.get("GPU_I_ID", "")
        if not metric.labels.get("UUID") or not (_INSTANCE.fullmatch(instance)):
            return Unknown(f"the DCGM exporter reports an unknown GPU: {metric.name} {str(dict(metric.labels))[:200]}")
        key = (metric.labels["UUID"], int(instance) if instance else None)
        field, read = DCGM_FIELDS[metric.name]
        if field == "utilisation" and key[1] is not None:
            continue  # slices have none: a 0 there means "not supported"
        values = found.setdefault(key, {})
        # The same GPU may appear twice, under two names or for two workloads.
        value, other = read(metric.value), values.get(field)
        values[field] = value if other is None else larger(value, other)
        named[key] = metric.labels
    return {key: _exported(key, named[key], values) for key, values in found.items()}


async def fetch_dcgm(url: str, deadline: timedelta) -> dict[tuple[str, int | None], ExportedGpu] | Unknown:
    text = await fetch_dcgm_text(url, deadline)
    return text if isinstance(text, Unknown) else read_dcgm(text)


async def fetch_dcgm_text(url: str, deadline: timedelta) -> str | Unknown:
    if not url.startswith(("http://", "https://")):
        return Unknown(
            f"{url!r} is not a valid address of a DCGM exporter: it begins with neither http:// nor https://"
        )
    try:
        async with asyncio.timeout(deadline.total_seconds()):
            answer = await http_client.get(url, size_max=EXPORT_SIZE_MAX, purpose="dcgm")
        if answer.status != HTTPStatus.OK:
            return Unknown(
                f"the DCGM exporter at {url} could not be queried: it answered {answer.status} {answer.reason}"
            )
        return answer.body.decode("utf-8")
    except TimeoutError:
        return Unknown(f"the DCGM exporter at {url} did not answer within {in_words(deadline)}")
    except (http_client.HttpError, ValueError) as error:
        return Unknown(f"the DCGM exporter at {url} could not be queried: {error}")


def parse_export(text: str) -> Iterator[Metric]:
    """ValueError names the line that cannot be parsed; a truncated response ends with such a line."""
    if text and not text.endswith("\n"):
        raise ValueError("it ends in the middle of a line")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                yield parse_export_line(line.strip())
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def parse_export_line(line: str) -> Metric:
    name = _NAME.match(line)
    if name is None:
        raise ValueError("it has no name")
    labels, position = _exported_labels(line, name.end())
    words = line[position:].split()
    if not 1 <= len(words) <= 2:
        raise ValueError("it has no value")
    return Metric(
        name.group(),
        labels,
        _exported_number(words[0]),
        reading.whole(words[1].removeprefix("-")) if len(words) == 2 else None,
    )


def _exported_labels(line: str, position: int) -> tuple[dict[str, str], int]:
    labels: dict[str, str] = {}
    while position < len(line) and line[position] == " ":
        position += 1
    if not line.startswith("{", position):
        return labels, position
    position += 1
    while (label := _LABEL.match(line, position)) is not None:
        labels[label.group(1)] = _ESCAPED.sub(lambda found: _REAL.get(found.group(1), found.group()), label.group(2))
        position = label.end()
        if not line.startswith(",", position):
            break
        position += 1
    while position < len(line) and line[position] == " ":
        position += 1
    if not line.startswith("}", position):
        raise ValueError("its labels are not terminated")
    return labels, position + 1


def _exported_number(word: str) -> float:
    """As Go prints them; Python would also accept 1_000 and infinity in full."""
    if word in {"NaN", "+Inf", "-Inf", "Inf"}:
        return float(word)
    try:
        return reading.number(word)
    except ValueError as problem:
        raise ValueError(f"{word[:40]!r} {problem}") from None


def _ratio(value: float) -> float | Unknown:
    return _percent(value * 100) if not _is_blank(value) else _blank(value)


def _percent(value: float) -> float | Unknown:
    """Above 100 is known to happen and means all of it; other impossible values are blanks."""
    return min(value, 100.0) if not _is_blank(value) and value >= 0 else _blank(value)


def _ratio_or_percent(value: float) -> float | Unknown:
    """DCGM 4.6 exported percent under this name, 4.7 exports a fraction. An ambiguous value is taken for the larger."""
    return _ratio(value) if value <= 1 else _percent(value)


def _count(value: float) -> int | Unknown:
    return round(value) if not _is_blank(value) and value >= 0 else _blank(value)


def _millijoules(value: float) -> int | Unknown:
    """A counter over years: only the exact blanks are blank."""
    if not math.isfinite(value) or value < 0 or value >= INT64_BLANK or 0 <= value - FP64_BLANK < 16:
        return _blank(value)
    return round(value)


def _joules(value: float) -> int | Unknown:
    millijoules = _millijoules(value)
    return millijoules if isinstance(millijoules, Unknown) else millijoules * 1000


def _watts(value: float) -> float | Unknown:
    return value if not _is_blank(value) and value >= 0 else _blank(value)


def _is_blank(value: float) -> bool:
    return not math.isfinite(value) or value >= INT32_BLANK


def _blank(value: float) -> Unknown:
    return Unknown(f"the DCGM exporter returned a blank ({value:.0f})")


DCGM_FIELDS: Final[Mapping[str, tuple[str, Callable[[float], float | int | Unknown]]]] = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("engine", _ratio),
    "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": ("engine", _ratio),
    "DCGM_FI_DEV_GPU_UTIL": ("utilisation", _percent),
    "DCGM_FI_DEV_GPU_UTIL_RATIO": ("utilisation", _ratio_or_percent),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy_mj", _millijoules),
    "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL": ("energy_mj", _joules),
    "DCGM_FI_DEV_POWER_USAGE": ("power_watts", _watts),
    "DCGM_FI_DEV_BOARD_POWER_WATTS": ("power_watts", _watts),
    "DCGM_FI_DEV_XID_ERRORS": ("xid", _count),
    "DCGM_FI_DEV_XID_ERROR": ("xid", _count),
    "DCGM_FI_DEV_FB_USED": ("memory_used_mib", _count),
}


def _exported(
    key: tuple[str, int | None], labels: Mapping[str, str], values: Mapping[str, float | int | Unknown]
) -> ExportedGpu:
    return msgspec.convert(
        {
            "uuid": key[0],
            "gpu_instance": key[1],
            "profile": labels.get("GPU_I_PROFILE", ""),
            "hostname": labels.get("Hostname", labels.get("hostname", "")),
            **values,
        },
        ExportedGpu,
    )
