"""Queries to a Prometheus server, or to a server with its HTTP API. Reads only, and uses no incomplete response.

A warning (a store of a federation did not answer) makes the whole response Unknown: missing series would look as if
they were not exported. Credentials come with the address or from the environment; no message contains them.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote, urlencode, urlsplit

import msgspec

from gpukeeper import http_client
from gpukeeper.blocking import in_thread
from gpukeeper.model import reading
from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown

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
