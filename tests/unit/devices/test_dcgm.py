"""The exporter's text: lines as dcgm-exporter prints them (those of slices made after its templates), and any text."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.clients import prometheus
from gpukeeper.clients.prometheus import Metric, fetch_dcgm, parse_export, parse_export_line, read_dcgm
from gpukeeper.model.unknown import Unknown

LABELS = (
    'gpu="0",UUID="GPU-1",pci_bus_id="00000000:18:00.0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",'
    'Hostname="node-1",DCGM_FI_DRIVER_VERSION="580.95.05"'
)
TEXT = f"""\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{LABELS}}} 345
# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{{{LABELS}}} 71.184000
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{LABELS}}} 156214896021
DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} 12
DCGM_FI_DEV_XID_ERRORS{{{LABELS},err_code="0",err_msg="No Error"}} 0
DCGM_FI_DEV_FB_USED{{{LABELS}}} 615
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{LABELS}}} 0.091734
"""
SLICE = LABELS + ',GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"'


def only(text: str) -> prometheus.ExportedGpu:
    found = read_dcgm(text)
    assert not isinstance(found, Unknown), found
    ((_key, export),) = found.items()
    return export


def one(name: str, value: str, labels: str = LABELS) -> prometheus.ExportedGpu:
    return only(f"{name}{{{labels}}} {value}\n")


def test_a_whole_gpu_is_read() -> None:
    export = only(TEXT)
    assert (export.uuid, export.gpu_instance, export.hostname) == ("GPU-1", None, "node-1")
    assert export.engine == pytest.approx(9.1734)
    assert (export.utilisation, export.energy_mj, export.power_watts) == (12.0, 156214896021, 71.184)
    assert (export.xid, export.memory_used_mib) == (0, 615)


def test_a_slice_is_named_by_its_parent_and_instance() -> None:
    found = read_dcgm(TEXT + f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{SLICE}}} 0.5\n")
    assert isinstance(found, dict)
    assert found["GPU-1", 7].engine == 50.0
    assert found["GPU-1", 7].profile == "1g.10gb"


def test_utilisation_of_a_slice_is_not_supported_and_never_idle() -> None:
    found = read_dcgm(f"DCGM_FI_DEV_GPU_UTIL{{{SLICE}}} 0\nDCGM_FI_DEV_FB_USED{{{SLICE}}} 3\n")
    assert isinstance(found, dict)
    assert isinstance(found["GPU-1", 7].utilisation, Unknown)
    assert isinstance(found["GPU-1", 7].engine, Unknown)


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", "0.25", "engine", 25.0),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", "35", "utilisation", 35.0),  # percent, as in 4.6
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", "0.35", "utilisation", 35.0),  # a part of one, as in 4.7
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", "1", "utilisation", 100.0),  # either: the larger
        ("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", "12", "energy_mj", 12_000),
        ("DCGM_FI_DEV_BOARD_POWER_WATTS", "80.5", "power_watts", 80.5),
        ("DCGM_FI_DEV_XID_ERROR", "79", "xid", 79),
        ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "1.02", "engine", 100.0),  # above 100 % means all of it
        ("DCGM_FI_DEV_GPU_UTIL", "130", "utilisation", 100.0),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "9e+12", "energy_mj", 9_000_000_000_000),
    ],
)
def test_new_names_and_odd_values(name: str, value: str, field: str, expected: float) -> None:
    assert getattr(one(name, value), field) == expected


@pytest.mark.parametrize("blank", ["9223372036854775794", "NaN", "+Inf", "-Inf", "-1", "2147483634", "140737488355328"])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "engine"),
        ("DCGM_FI_DEV_GPU_UTIL", "utilisation"),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", "utilisation"),
        ("DCGM_FI_DEV_POWER_USAGE", "power_watts"),
        ("DCGM_FI_DEV_FB_USED", "memory_used_mib"),
    ],
)
def test_a_blank_is_unknown(name: str, field: str, blank: str) -> None:
    assert "blank" in getattr(one(name, blank), field).why


@pytest.mark.parametrize("blank", ["9223372036854775794", "NaN", "140737488355330", "-1"])
def test_a_blank_energy_is_unknown(blank: str) -> None:
    assert isinstance(one("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", blank).energy_mj, Unknown)


def test_the_renamed_host_label_is_read_too() -> None:
    assert one("DCGM_FI_DEV_FB_USED", "1", LABELS.replace("Hostname", "hostname")).hostname == "node-1"


def test_the_same_gpu_for_two_workloads_takes_the_larger_and_a_value_beats_a_blank() -> None:
    lines = [
        f'DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{LABELS},pod="{pod}"}} {value}\n' for pod, value in (("a", 0.75), ("b", 0.5))
    ]
    assert only("".join(lines)).engine == 75.0
    blank = f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{LABELS}}} NaN\n"
    assert only(blank + "".join(lines) + blank).engine == 75.0


def test_nothing_exported_is_an_empty_answer() -> None:
    assert read_dcgm("") == {}
    assert read_dcgm("# nothing\n\ngo_goroutines 12\n") == {}


@pytest.mark.parametrize(
    "text",
    [
        TEXT[:-5],  # the connection broke
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1" 3\n',
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1"}\n',
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1"} many\n',
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1"} 1_0\n',
        'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 3\n',
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1",GPU_I_ID="x"} 3\n',
        "<html>502</html>\n",
    ],
)
def test_what_cannot_be_read_makes_all_unknown(text: str) -> None:
    assert isinstance(read_dcgm(text), Unknown)


def test_escapes_braces_and_times_are_read() -> None:
    metric = parse_export_line(r'a_b{x="1}, y=\"2\"\\ \n",z="",} 1.5e-3 1700000000000')
    assert metric == Metric("a_b", {"x": '1}, y="2"\\ \n', "z": ""}, 0.0015, 1700000000000)
    assert parse_export_line("up 1") == Metric("up", {}, 1.0)
    assert parse_export_line('up { a = "b" } 1') == Metric("up", {"a": "b"}, 1.0)
    assert math.isnan(parse_export_line("up NaN").value)
    assert parse_export_line("up -Inf").value == -math.inf


def written(metric: Metric) -> str:
    escaped = {
        name: value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        for name, value in metric.labels.items()
    }
    labels = ",".join(f'{name}="{value}"' for name, value in escaped.items())
    time = "" if metric.timestamp_ms is None else f" {metric.timestamp_ms}"
    return f"{metric.name}{{{labels}}} {metric.value!r}{time}\n"


names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
# Go writes no carriage return or other line break into a label unescaped; a line ends with a newline only.
values = st.text(st.characters(codec="utf-8"), max_size=12)
metrics = st.builds(
    Metric,
    names,
    st.dictionaries(names, values, max_size=4),
    st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.integers(0, 2**60),
)


@given(st.lists(metrics, max_size=5))
def test_what_is_written_is_read_again(lines: list[Metric]) -> None:
    assert list(parse_export("".join(map(written, lines)))) == lines


@given(st.text(max_size=200))
def test_any_text_is_read_or_unknown(text: str) -> None:
    assert isinstance(read_dcgm(text), (dict, Unknown))


# Over HTTP.


@contextmanager
def serving(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: Any) -> None:
            """Not into the test's output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetched(url: str, deadline: timedelta = timedelta(minutes=1)) -> Any:
    return asyncio.run(fetch_dcgm(url, deadline))


def test_an_exporter_is_queried_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
    with serving(TEXT.encode()) as url:
        assert fetched(url)["GPU-1", None].utilisation == 12.0


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://exporter/metrics", "exporter:9400", ""])
def test_only_web_addresses_are_opened(url: str) -> None:
    assert "is not a valid address" in fetched(url).why


def test_failures_are_unknown_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(b"gone", 503) as url:
        assert "503" in fetched(url).why
    assert "could not be queried" in fetched(url).why  # nobody listens there any more
    with serving(b"", 302, {"Location": "http://127.0.0.1:1/"}) as url:
        assert "302" in fetched(url).why
    with serving(b"\xff\xfe\n") as url:
        assert "could not be queried" in fetched(url).why
    with serving(TEXT.encode(), headers={"Content-Length": str(len(TEXT) + 1)}) as url:
        assert "was cut off" in fetched(url).why  # at the end of a line, so that the text alone looks whole
    with serving(b"zz\r\n", headers={"Transfer-Encoding": "chunked"}) as url:
        assert "could not be queried" in fetched(url).why
    monkeypatch.setattr(prometheus, "EXPORT_SIZE_MAX", 10)
    with serving(TEXT.encode()) as url:
        assert "larger than" in fetched(url).why


# A connection that is made in the moment in which asyncio gives it up is closed by the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exporter_that_never_answers_is_given_up() -> None:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # listens, and nobody accepts
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        assert "did not answer within" in fetched(url, timedelta(milliseconds=100)).why
    finally:
        server.server_close()
