"""A small client of the engine's API for the tests: Docker's own view, independent of gpukeeper's code."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode


@dataclass(frozen=True)
class Answer:
    status: int
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw) if self.raw else None

    @property
    def ok(self) -> bool:
        return self.status < 400


class Refused(AssertionError):
    """The engine said no where a test needed a yes."""


class Api:
    """One connection for each call: a daemon that is restarted leaves nothing half open."""

    def __init__(self, path: str) -> None:
        self.path = path

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, object] | None = None,
        deadline: float = 90,
    ) -> Answer:
        """`body`: bytes or chunks of bytes go as they are, all else as JSON. OSError when nobody answers."""
        connection = _UnixConnection(self.path, deadline)
        try:
            payload, kind = _payload(body)
            headers = {"Host": "engine"} | ({"Content-Type": kind} if kind else {})
            connection.request(method, quote(path) + _tail(query), payload, headers)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())
        finally:
            connection.close()

    def must(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        """The answer's JSON, or its bytes when it is none; a refusal fails the test in the engine's own words."""
        answer = self.call(method, path, body, **more)
        if not answer.ok:
            raise Refused(f"{method} {path}: {answer.status} {answer.raw.decode('utf-8', 'replace').strip()}")
        try:
            return answer.json
        except ValueError:
            return answer.raw

    def answers(self) -> bool:
        try:
            return self.call("GET", "/_ping", deadline=5).status == 200
        except (OSError, http.client.HTTPException):
            return False


def unframed(raw: bytes) -> bytes:
    """Output without the eight bytes before each piece that Docker adds when there is no terminal."""
    text, at = b"", 0
    while at + 8 <= len(raw):
        length = int.from_bytes(raw[at + 4 : at + 8], "big")
        text += raw[at + 8 : at + 8 + length]
        at += 8 + length
    return text


def json_lines(raw: bytes) -> list[Any]:
    return [json.loads(line) for line in raw.splitlines() if line.strip()]


def _payload(body: object) -> tuple[Any, str]:
    if body is None:
        return None, ""
    if isinstance(body, bytes) or (isinstance(body, Iterable) and not isinstance(body, (str, Mapping, list, tuple))):
        return body, "application/x-tar"
    return json.dumps(body).encode(), "application/json"


def _tail(query: Mapping[str, object] | None) -> str:
    if not query:
        return ""
    return "?" + urlencode({key: json.dumps(v) if isinstance(v, dict) else v for key, v in query.items()}, doseq=True)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, deadline: float) -> None:
        super().__init__("engine", timeout=deadline)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
