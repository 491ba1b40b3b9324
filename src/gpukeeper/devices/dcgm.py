"""What a DCGM exporter reports about GPUs and slices. Parses its text; stores nothing and judges nothing.

Slices are identified by their parent's uuid and their GPU instance; the compute instance is not exported. Old and new
names of a field are accepted. A blank, which is printed as a huge number, is Unknown.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from http import HTTPStatus
from typing import Final

import msgspec

from gpukeeper import http_client
from gpukeeper.model import reading
from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown

SIZE_MAX: Final = 8 * 1024 * 1024
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
        metrics = [metric for metric in parse(text) if metric.name in FIELDS]
    except ValueError as error:
        return Unknown(f"the response of the DCGM exporter could not be read: {error}")
    found: dict[tuple[str, int | None], dict[str, float | int | Unknown]] = {}
    named: dict[tuple[str, int | None], Mapping[str, str]] = {}
    for metric in metrics:
        instance = metric.labels.get("GPU_I_ID", "")
        if not metric.labels.get("UUID") or not (_INSTANCE.fullmatch(instance)):
            return Unknown(f"the DCGM exporter reports an unknown GPU: {metric.name} {str(dict(metric.labels))[:200]}")
        key = (metric.labels["UUID"], int(instance) if instance else None)
        field, read = FIELDS[metric.name]
        if field == "utilisation" and key[1] is not None:
            continue  # slices have none: a 0 there means "not supported"
        values = found.setdefault(key, {})
        values[field] = _larger(values.get(field), read(metric.value))
        named[key] = metric.labels
    return {key: _exported(key, named[key], values) for key, values in found.items()}


async def fetch(url: str, deadline: timedelta) -> dict[tuple[str, int | None], ExportedGpu] | Unknown:
    text = await fetch_text(url, deadline)
    return text if isinstance(text, Unknown) else read_dcgm(text)


async def fetch_text(url: str, deadline: timedelta) -> str | Unknown:
    if not url.startswith(("http://", "https://")):
        return Unknown(
            f"{url!r} is not a valid address of a DCGM exporter: it begins with neither http:// nor https://"
        )
    try:
        async with asyncio.timeout(deadline.total_seconds()):
            answer = await http_client.get(url, size_max=SIZE_MAX, purpose="dcgm")
        if answer.status != HTTPStatus.OK:
            return Unknown(
                f"the DCGM exporter at {url} could not be queried: it answered {answer.status} {answer.reason}"
            )
        return answer.body.decode("utf-8")
    except TimeoutError:
        return Unknown(f"the DCGM exporter at {url} did not answer within {in_words(deadline)}")
    except (http_client.HttpError, ValueError) as error:
        return Unknown(f"the DCGM exporter at {url} could not be queried: {error}")


def parse(text: str) -> Iterator[Metric]:
    """ValueError names the line that cannot be parsed; a truncated response ends with such a line."""
    if text and not text.endswith("\n"):
        raise ValueError("it ends in the middle of a line")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                yield parse_line(line.strip())
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def parse_line(line: str) -> Metric:
    name = _NAME.match(line)
    if name is None:
        raise ValueError("it has no name")
    labels, position = _labels(line, name.end())
    words = line[position:].split()
    if not 1 <= len(words) <= 2:
        raise ValueError("it has no value")
    return Metric(
        name.group(), labels, _number(words[0]), reading.whole(words[1].removeprefix("-")) if len(words) == 2 else None
    )


def _labels(line: str, position: int) -> tuple[dict[str, str], int]:
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


def _number(word: str) -> float:
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


FIELDS: Final[Mapping[str, tuple[str, Callable[[float], float | int | Unknown]]]] = {
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


def _larger(one: float | int | Unknown | None, other: float | int | Unknown) -> float | int | Unknown:
    """The same GPU may appear twice, under two names or for two workloads; a value wins over a blank."""
    if one is None or isinstance(one, Unknown):
        return other
    return one if isinstance(other, Unknown) else max(one, other)


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
