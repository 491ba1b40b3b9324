"""One HTTP exchange: what is asked, how much of the answer is read, and what a failure means."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from gpukeeper.model.errors import PlatformError
from gpukeeper.platforms.kubernetes.errors import ClusterSilent, TooLarge

if TYPE_CHECKING:
    import httpx2


class Broken(ClusterSilent):
    """The connection failed or ended too early: a read may be asked again."""


def checked(path: str) -> str:
    """Names come from people and from ledgers; one must not lead to another object."""
    if not path.startswith("/") or re.search(r"[?#%\s\\]|//|/\.{1,2}(/|$)", path):
        raise PlatformError(f"{path!r} is not a valid API path; no request was sent")
    return path


def as_text(query: Mapping[str, object]) -> dict[str, str]:
    return {
        name: (str(value).lower() if isinstance(value, bool) else str(value))
        for name, value in query.items()
        if value is not None
    }


async def read(answer: httpx2.Response, most: int, cut: bool, what: str) -> bytearray:
    """At most this much: an answer without end must not fill the memory."""
    taken = bytearray()
    async for chunk in answer.aiter_bytes():
        taken += chunk
        if len(taken) > most:
            if not cut:
                raise TooLarge(f"the cluster's response to {what} is longer than {most} bytes; it was not read")
            del taken[most:]
            break
    return taken


def retry_after(answer: httpx2.Response, skew: timedelta | None) -> float | None:
    """Seconds, or a time by the server's clock."""
    said = answer.headers.get("Retry-After", "").strip()
    if said.isdecimal():
        return float(said)
    try:
        at = parsedate_to_datetime(said)
        return max(0.0, (at - datetime.now(UTC) - (skew or timedelta())).total_seconds())
    except (ValueError, TypeError):
        return None


def words_of(error: BaseException) -> str:
    """The kernel's words where there are any: libraries put "All connection attempts failed" before them."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"certificate verify failed: {cause.verify_message}"
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0 and not isinstance(cause, ssl.SSLError):
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
