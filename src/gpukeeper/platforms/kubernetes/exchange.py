"""One HTTP exchange: path and query, the size limit of the response, and the meaning of failures."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import msgspec

from gpukeeper.model.errors import PlatformError
from gpukeeper.platforms.kubernetes.errors import ClusterUnavailable, ResponseTooLarge, cannot_connect

if TYPE_CHECKING:
    import httpx2

MOST = 64 * 1024 * 1024  # bytes of one response


class ConnectionFailed(ClusterUnavailable):
    """The connection failed or ended too early: a read may be retried."""


class ApiRequest(msgspec.Struct, frozen=True):
    method: str
    path: str
    query: Mapping[str, object]
    data: bytes | None = None
    content: str = "application/json"  # the type of the data
    accept: str = ""
    most: int = MOST
    cut: bool = False  # a longer response is cut, not refused

    @property
    def words(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def headers(self) -> dict[str, str]:
        content = {} if self.data is None else {"Content-Type": self.content}
        return content | ({"Accept": self.accept} if self.accept else {})


@contextmanager
def translated_errors(what: str, place: str, address: str) -> Iterator[None]:
    """Errors of the HTTP client and of the login, as ours. `what`: the request."""
    import httpx2
    from lightkube.core.exceptions import ConfigError

    try:
        yield
    except (httpx2.ConnectError, httpx2.ProxyError) as error:
        silent = cannot_connect(place, address, words_of(error))
        raise ConnectionFailed(str(silent)) from error
    except httpx2.TransportError as error:
        raise ConnectionFailed(f"the connection to the cluster failed during {what}: {words_of(error)}") from error
    except httpx2.HTTPError as error:
        raise ClusterUnavailable(f"the cluster's response to {what} is invalid: {words_of(error)}") from error
    except ConfigError as error:
        raise ClusterUnavailable(f"cannot log in to {place}: {error}") from error


def checked(path: str) -> str:
    """Names come from users and ledgers; they must not lead to another object."""
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
    """At most this much: an endless response must not fill the memory."""
    taken = bytearray()
    async for chunk in answer.aiter_bytes():
        taken += chunk
        if len(taken) > most:
            if not cut:
                raise ResponseTooLarge(f"the cluster's response to {what} is longer than {most} bytes; it was not read")
            del taken[most:]
            break
    return taken


def retry_after(answer: httpx2.Response, skew: timedelta | None, now: datetime) -> float | None:
    """Seconds, or a time by the server's clock."""
    value = answer.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
        return max(0.0, (at - now - (skew or timedelta())).total_seconds())
    except (ValueError, TypeError):
        return None


def words_of(error: BaseException) -> str:
    """The error of the kernel if there is one: libraries hide it behind "All connection attempts failed"."""
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
