"""The HTTP API: what is asked, with which credentials, and what is not believed."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gpukeeper.clients.prometheus import TOKEN, TOKEN_FILE, Prometheus, SeriesSelector, TimeSeries
from gpukeeper.model.unknown import Unknown

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
MATRIX = {"resultType": "matrix", "result": [{"metric": {"__name__": "up", "pod": "a"}, "values": [[1.5, "0.25"]]}]}


class Server:
    """Answers every question the same way and remembers what it was asked."""

    def __init__(self, body: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status, self.headers = status, headers or {}
        self.paths: list[str] = []
        self.logins: list[str | None] = []
        self.url = ""

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.paths[-1]).query)


@contextmanager
def served(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server(body, status, headers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.paths.append(self.path)
            server.logins.append(self.headers["Authorization"])
            self.send_response(server.status)
            for name, value in {"Content-Length": str(len(server.body)), **server.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(server.body)

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def success(data: object, **more: object) -> dict[str, object]:
    return {"status": "success", "data": data, **more}


def raw(prometheus: Prometheus) -> list[TimeSeries] | Unknown:
    return asyncio.run(prometheus.raw(SeriesSelector(("up",), "pod", ("a",)), NOW - 5 * MINUTE, NOW))


def test_points_are_requested_as_they_were_scraped() -> None:
    with served(success(MATRIX)) as server:
        assert raw(Prometheus(server.url)) == [TimeSeries({"__name__": "up", "pod": "a"}, [(1.5, 0.25)])]
    assert server.paths[0].startswith("/api/v1/query?")
    assert server.query == {"query": ['{__name__=~"up",pod=~"a"}[300s]'], "time": [f"{NOW.timestamp():.3f}"]}


def test_an_expression_is_worked_out_at_each_step() -> None:
    with served(success(MATRIX)) as server:
        found = asyncio.run(Prometheus(server.url + "/prefix/").range("rate(x[2m])", NOW - MINUTE, NOW, MINUTE))
    assert isinstance(found, list)
    assert server.paths[0].startswith("/prefix/api/v1/query_range?")
    assert (server.query["query"], server.query["step"]) == (["rate(x[2m])"], ["60"])


def test_series_and_labels_are_requested_in_a_time() -> None:
    with served(success([{"pod": "a"}])) as server:
        wheres = [
            SeriesSelector(("up",), "pod", ("a",)),
            SeriesSelector(("up",), "exported_pod", ("a",), (("cluster", 'x"y'),)),
        ]
        assert asyncio.run(Prometheus(server.url).series(wheres, NOW - MINUTE, NOW)) == [{"pod": "a"}]
    assert server.query["match[]"] == [
        '{__name__=~"up",pod=~"a"}',
        '{__name__=~"up",exported_pod=~"a",cluster="x\\"y"}',
    ]
    with served(success(["pod", "UUID"])) as server:
        assert asyncio.run(Prometheus(server.url).label_names("up", NOW - MINUTE, NOW)) == {"pod", "UUID"}
    assert server.query["match[]"] == ['{__name__="up"}']


def test_names_are_taken_literally() -> None:
    assert SeriesSelector(("a", "b"), "pod", ("x.y-0", "z|w")).matchers() == '__name__=~"a|b",pod=~"x\\\\.y-0|z\\\\|w"'


def test_its_clock_is_read() -> None:
    with served(success({"resultType": "scalar", "result": [NOW.timestamp(), "1"]})) as server:
        assert asyncio.run(Prometheus(server.url).clock()) == NOW


def test_credentials_come_with_the_address_or_from_the_environment(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    with served(success(MATRIX)) as server:
        with_login = server.url.replace("http://", "http://ann:se%40cret@")
        raw(Prometheus(with_login, {TOKEN: "ignored"}))
        raw(Prometheus(server.url, {TOKEN: "abc"}))
        mounted = Prometheus(server.url, {TOKEN_FILE: str(token), TOKEN: "ignored"})
        raw(mounted)
        token.write_text("second\n")
        raw(mounted)
        raw(Prometheus(server.url))
    login = "Basic " + base64.b64encode(b"ann:se@cret").decode()
    assert server.logins == [login, "Bearer abc", "Bearer first", "Bearer second", None]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"status": "error", "error": "bad_data: parse error"}, 400, "400 bad_data: parse error"),
        (b"<html>nginx</html>", 502, "502 Bad Gateway"),
        ({"status": "error", "error": "no"}, 401, TOKEN_FILE),
        ({"status": "error", "error": "half done"}, 200, "half done"),
        (success(MATRIX, warnings=["store 10.0.0.7 did not answer"]), 200, "may be incomplete: store 10.0.0.7"),
        (success({"resultType": "vector", "result": []}), 200, "could not be read"),
        (
            success({"resultType": "matrix", "result": [{"metric": {}, "values": [[1, "soon"]]}]}),
            200,
            "'soon' is not a number",
        ),
        (success(None), 200, "could not be read"),
        (b'{"status":"success","data":{"resultType":"mat', 200, "could not be read"),
        (b"", 200, "could not be read"),
    ],
)
def test_no_half_answer_is_accepted(body: object, status: int, words: str) -> None:
    with served(body, status) as server:
        found = raw(Prometheus(server.url))
    assert isinstance(found, Unknown)
    assert words in found.why


def test_remarks_about_the_query_are_no_missing_data() -> None:
    with served(success(MATRIX, warnings=["PromQL info: metric might not be a counter"])) as server:
        assert isinstance(raw(Prometheus(server.url)), list)


def test_an_answer_that_breaks_off_or_grows_too_large_is_not_accepted() -> None:
    body = json.dumps(success(MATRIX)).encode()
    with served(body, headers={"Content-Length": str(len(body) + 7)}) as server:
        found = raw(Prometheus(server.url))
    assert isinstance(found, Unknown)
    assert "was cut off" in found.why or "IncompleteRead" in found.why
    with served(success(MATRIX)) as server:
        found = raw(Prometheus(server.url, size_max=50))
    assert isinstance(found, Unknown)
    assert "larger than" in found.why


def test_a_redirect_is_not_followed() -> None:
    with served(success(MATRIX)) as other, served(b"", 302, {"Location": other.url}) as server:
        found = raw(Prometheus(server.url, {TOKEN: "secret"}))
    assert isinstance(found, Unknown)
    assert not other.paths


def test_silence_has_an_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        found = raw(Prometheus(url, deadline=timedelta(milliseconds=200)))
    assert isinstance(found, Unknown)
    assert "did not answer within" in found.why or "timed out" in found.why


@pytest.mark.parametrize("url", ["prometheus:9090", "file:///etc/passwd", "http://", "http://[", "ftp://u:hush@host"])
def test_what_is_no_address_is_reported_to_be_none(url: str) -> None:
    found = raw(Prometheus(url))
    assert isinstance(found, Unknown)
    assert "write it like http://prometheus:9090" in found.why
    assert "hush" not in found.why


def test_no_message_repeats_a_secret(tmp_path: Path) -> None:
    with served(success(MATRIX)) as server:
        bad = raw(Prometheus(server.url, {TOKEN: "hush\nhush"}))
        gone = raw(Prometheus(server.url, {TOKEN_FILE: str(tmp_path / "none")}))
        url = server.url.replace("http://", "http://ann:hush@")
    closed = raw(Prometheus(url))
    for found in (bad, gone, closed):
        assert isinstance(found, Unknown)
        assert "hush" not in found.why
