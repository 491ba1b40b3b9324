"""A real Prometheus with three hours of history, scraping two exporters of ours: who is idle, who is kept, and why.

One exporter's labels are honoured, those of the other are renamed by Prometheus. No cluster is needed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.clients.prometheus import Prometheus
from gpukeeper.devices.busy import GpuUse
from gpukeeper.interfaces.telemetry.metrics import Metrics
from gpukeeper.ledger.signals import open_signals
from gpukeeper.lifecycle.rules import idle
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.policy import ClassSettings, Policy
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import EMPTY, Ref, Seen, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.meter import ClusterMeter
from gpukeeper.platforms.kubernetes.node_use import PodGpu, PodGpus, PodName, PodUse
from tests.engines import has_prometheus, require

MINUTE = timedelta(minutes=1)
HISTORY, EVERY = timedelta(hours=3), 30
POLICY = Policy(classes={"managed": ClassSettings(idle=30 * MINUTE)})
FIELDS = {
    "engine": "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "util": "DCGM_FI_DEV_GPU_UTIL",
    "energy": "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
    "power": "DCGM_FI_DEV_POWER_USAGE",
}
COUNTERS = {
    "cpu": "container_cpu_usage_seconds_total",
    "received": "container_network_receive_bytes_total",
    "sent": "container_network_transmit_bytes_total",
    "written": "container_fs_writes_bytes_total",
}


class Wall:
    def now(self) -> datetime:
        return datetime.now(UTC)


@dataclass
class Gpu:
    """`ended`: how long ago its exporter fell silent; only history then."""

    uuid: str
    pod: str
    engine: float = 0.0
    util: float = 0.0
    watts: float = 70.0
    ended: timedelta | None = None
    slice: str = ""
    counts: bool = True  # whether its energy counter moves
    cores: float | None = 0.004  # what its pod takes; None: no kubelet tells

    def labels(self) -> dict[str, str]:
        part = {"GPU_I_ID": self.slice, "GPU_I_PROFILE": "1g.10gb"} if self.slice else {}
        return {"gpu": "0", "UUID": self.uuid, "Hostname": "node-1", **part}

    def value(self, name: str, at: float) -> float:
        if name == "energy":
            return round(at * self.watts) if self.counts else 5e9
        return {"engine": self.engine, "util": self.util, "power": self.watts}[name]


HONOURED = [
    Gpu("GPU-idle", "idle-0"),
    Gpu("GPU-busy", "busy-0", engine=0.63, util=88, watts=600),
    *(Gpu(f"GPU-eight-{n}", "eight-0") for n in range(8) if n != 5),  # one series of eight is missing
    *(Gpu(f"GPU-all-{n}", "all-0") for n in range(8)),
    Gpu("GPU-stopped", "stopped-0", ended=10 * MINUTE),
    Gpu("GPU-stuck", "stuck-0", counts=False),
    Gpu("GPU-power", "power-0", watts=640),
    Gpu("GPU-cut", "slice-0", slice="3"),
    Gpu("GPU-cut", "slice-1", slice="4", engine=0.02),
    Gpu("GPU-compile", "compile-0", cores=0.9),
    Gpu("GPU-nokubelet", "unscraped-0", cores=None),
    Gpu("GPU-wakes", "wakes-0"),
    Gpu("GPU-leaves", "leaves-0"),
]
RENAMED = [
    Gpu("GPU-r-idle", "renamed-idle-0"),
    Gpu("GPU-r-busy", "renamed-busy-0", engine=0.4, util=35, watts=500),
    Gpu("GPU-r-wakes", "renamed-wakes-0"),
]


@dataclass
class Exporter:
    """Serves what it is told to, as dcgm-exporter prints it."""

    gpus: list[Gpu]
    url: str = ""
    agent: PodUse | None = None  # what an agent of ours publishes, on the same page

    def text(self) -> str:
        metrics = Metrics(Wall(), elects=False, process=False)
        metrics.node_use = self.agent
        lines = [] if self.agent is None else [metrics.text().decode()]
        for gpu in self.gpus:
            if gpu.ended is None:
                labels = _labels({**gpu.labels(), "namespace": "lab", "pod": gpu.pod, "container": "main"})
                lines += [f"{name}{labels} {gpu.value(short, time.time())}\n" for short, name in FIELDS.items()]
        return "".join(lines)


@contextmanager
def exporting(gpus: list[Gpu]) -> Iterator[Exporter]:
    exporter = Exporter(gpus)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = exporter.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    exporter.url = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield exporter
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Monitoring:
    url: str
    honoured: Exporter
    renamed: Exporter
    gpus: Mapping[str, Gpu] = field(default_factory=dict)


@pytest.fixture(scope="module")
def monitoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitoring]:
    require("prometheus", has_prometheus())
    folder = tmp_path_factory.mktemp("prometheus")
    honoured, renamed = [Gpu(**vars(one)) for one in HONOURED], [Gpu(**vars(one)) for one in RENAMED]
    with exporting(honoured) as one, exporting(renamed) as other:
        _write_history(folder, one, other)
        with _running(folder, one, other) as url:
            yield Monitoring(url, one, other, {gpu.pod: gpu for gpu in honoured + renamed})


def _write_history(folder: Path, honoured: Exporter, renamed: Exporter) -> None:
    """As Prometheus would have stored it."""
    now = time.time()
    stamps = [now - HISTORY.total_seconds() + n * EVERY for n in range(int(HISTORY.total_seconds()) // EVERY)]
    found: list[str] = []
    for exporter, job in ((honoured, "honoured"), (renamed, "renamed")):
        for gpu in exporter.gpus:
            target = {"instance": exporter.url, "job": job, "namespace": "lab", "pod": gpu.pod, "container": "main"}
            if job == "renamed":
                target |= {"namespace": "monitoring", "pod": "dcgm-exporter-x"}
                target |= {"exported_namespace": "lab", "exported_pod": gpu.pod, "exported_container": "main"}
                target |= {"container": "exporter"}
            last = now - (gpu.ended or timedelta()).total_seconds()
            labels = _labels({**gpu.labels(), **target})
            for short, name in FIELDS.items():
                found += [f"{name}{labels} {gpu.value(short, at)} {at:.3f}\n" for at in stamps if at <= last]
    found += _counters([*honoured.gpus, *renamed.gpus], stamps)
    grouped = sorted(found, key=lambda line: line.partition("{")[0])  # a family must not be interrupted
    (folder / "history.om").write_text("".join(grouped) + "# EOF\n")
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "history.om", folder / "data"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 0, made.stderr


def _counters(gpus: list[Gpu], stamps: list[float]) -> list[str]:
    """What a kubelet's cAdvisor counts, of the pods that it is scraped for."""
    found = []
    for pod, cores in {gpu.pod: gpu.cores for gpu in gpus if gpu.cores is not None}.items():
        common = {"namespace": "lab", "pod": pod, "instance": "node-1:10250", "job": "kubelet"}
        rates = {"cpu": cores, "received": 40.0, "sent": 20.0, "written": 15.0}
        for short, name in COUNTERS.items():
            own = {"interface": "eth0"} if short in {"received", "sent"} else {"container": "main"}
            labels = _labels({**common, **own})
            begin = stamps[0]
            found += [f"{name}{labels} {(at - begin) * rates[short]:.6f} {at:.3f}\n" for at in stamps]
    return found


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


@contextmanager
def _running(folder: Path, honoured: Exporter, renamed: Exporter) -> Iterator[str]:
    target = {"namespace": "monitoring", "pod": "dcgm-exporter-x", "container": "exporter"}
    jobs = [
        {
            "job_name": name,
            "honor_labels": name == "honoured",
            "static_configs": [{"targets": [exporter.url], "labels": target}],
        }
        for name, exporter in (("honoured", honoured), ("renamed", renamed))
    ]
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as probe:
        port = probe.server_port
    command = ["setpriv", "--pdeathsig", "KILL", "prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("w") as log:
        program = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            _until(lambda: _count(url, "count(DCGM_FI_DEV_GPU_UTIL offset 1s)") >= 20, folder / "log")
            yield url
        finally:
            program.terminate()
            program.wait(timeout=30)


def _count(url: str, query: str) -> float:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?query={urllib.request.quote(query)}", timeout=5) as answer:  # type: ignore[attr-defined]
            found = json.load(answer)["data"]["result"]
    except OSError:
        return 0.0
    return float(found[0]["value"][1]) if found else 0.0


def _until(holds: Callable[[], bool], log: Path | None = None) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end, log.read_text()[-4000:] if log else "it did not come about within a minute"
        time.sleep(0.2)


def workload(pod: str, count: int = 1, slices: bool = False) -> Subject:
    now = Wall().now()
    devices = tuple(f"{pod}/{n}" for n in range(count))
    return Subject(
        seen=Seen(Ref("kubernetes", "prod", "job", pod, f"uid-{pod}", "lab"), "1", "", now),
        state=State.RUNNING,
        owner="ann",
        class_="managed",
        created=now - timedelta(days=1),
        started=now - timedelta(days=1),
        devices=devices,
        slices=devices if slices else (),
    )


def measured(monitoring: Monitoring, *subjects: Subject) -> list[Sample]:
    return list(asyncio.run(ClusterMeter(Wall(), prometheus=Prometheus(monitoring.url)).read(subjects)))


def answer(folder: Path, samples: list[Sample], subject: Subject) -> Answer:
    """What the idle rule says, with the samples folded by the ledger."""
    signals = open_signals(folder / "ledger.sqlite", write=True)

    async def ask() -> Answer:
        await signals.add(samples)
        now = Wall().now()
        series = await signals.series([subject.ref.key], now - 2 * timedelta(hours=1), now)
        view = View(subject, series.get(subject.ref.key, ()), EMPTY)
        return idle.evaluate(view, Rulebook(POLICY).settings(subject), now)

    try:
        return asyncio.run(ask())
    finally:
        signals.close()


def asked(monitoring: Monitoring, folder: Path, subject: Subject) -> Answer:
    return answer(folder, measured(monitoring, subject), subject)


@pytest.mark.parametrize(
    "subject",
    [
        workload("idle-0"),
        workload("all-0", 8),
        workload("slice-0", slices=True),
        workload("renamed-idle-0"),
    ],
    ids=lambda subject: subject.ref.name,
)
def test_idle_for_the_whole_window_is_warned(monitoring: Monitoring, tmp_path: Path, subject: Subject) -> None:
    said = asked(monitoring, tmp_path, subject)
    assert (said.verdict, said.action) == (Verdict.DUE, Action.WARN), said
    assert "idle for" in said.reason
    assert "terminal (terminal input in a pod" in said.reason
    assert "cpu" not in said.reason, "cAdvisor's counters are there, so they were looked at"


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        (workload("busy-0"), "GPU busy-0/0 was in use"),
        (workload("renamed-busy-0"), "GPU renamed-busy-0/0 was in use"),
        (workload("slice-1", slices=True), "GPU slice-1/0 was in use"),
        (workload("compile-0"), "cpu was in use"),
    ],
    ids=lambda one: one.ref.name if isinstance(one, Subject) else "",
)
def test_what_is_used_is_kept(monitoring: Monitoring, tmp_path: Path, subject: Subject, words: str) -> None:
    said = asked(monitoring, tmp_path, subject)
    assert said.verdict is Verdict.WAIT
    assert words in said.reason


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        (workload("eight-0", 8), "was not measured; every GPU must be"),
        (workload("all-0", 7), "GPU use was not measured"),  # eight series, seven asked for
        (workload("stopped-0"), "ago; not measured is not idle"),
        (workload("stuck-0"), "GPU use was not measured"),
        (workload("power-0"), "GPU use was not measured"),
        (workload("unscraped-0"), "cpu use was not measured, and it can veto"),
        (workload("nobody-0"), "GPU use was not measured"),
    ],
    ids=lambda one: one.ref.name if isinstance(one, Subject) else "",
)
def test_what_is_unknown_is_kept(monitoring: Monitoring, tmp_path: Path, subject: Subject, words: str) -> None:
    said = asked(monitoring, tmp_path, subject)
    assert said.verdict is Verdict.UNKNOWN, said
    assert words in said.reason


def test_prometheus_renamed_what_it_did_not_honour(monitoring: Monitoring) -> None:
    """The live series, not only those that were written for it."""
    assert (
        _count(monitoring.url, 'count(DCGM_FI_DEV_GPU_UTIL{exported_pod="renamed-idle-0",pod="dcgm-exporter-x"})') == 1
    )
    assert _count(monitoring.url, 'count(DCGM_FI_DEV_GPU_UTIL{exported_pod="",pod="idle-0"})') == 1


@pytest.mark.parametrize("pod", ["wakes-0", "renamed-wakes-0"])
def test_a_last_read_sees_work_that_began_a_moment_ago(monitoring: Monitoring, tmp_path: Path, pod: str) -> None:
    meter = ClusterMeter(Wall(), prometheus=Prometheus(monitoring.url))
    subject, gpu = workload(pod), monitoring.gpus[pod]
    samples = list(asyncio.run(meter.read([subject])))
    assert answer(tmp_path, samples, subject).verdict is Verdict.DUE
    gpu.engine = 0.7
    try:
        _until(lambda: _count(monitoring.url, f'max(DCGM_FI_PROF_GR_ENGINE_ACTIVE{{UUID="{gpu.uuid}"}})') > 0.5)
        fresh = list(asyncio.run(meter.read([subject])))
    finally:
        gpu.engine = 0.0
    assert answer(tmp_path, fresh, subject).verdict is Verdict.WAIT
    minutes = [{one.at for one in some if one.signal is Signal.GPU} for some in (samples, fresh)]
    assert not minutes[0] & minutes[1], "what was said is not said again"


def test_a_pod_that_loses_its_label_is_not_spoken_of(monitoring: Monitoring) -> None:
    meter = ClusterMeter(Wall(), prometheus=Prometheus(monitoring.url), back=5 * MINUTE)
    subject, gpu = workload("leaves-0"), monitoring.gpus["leaves-0"]
    assert any(not isinstance(one.value, Unknown) for one in asyncio.run(meter.read([subject])))
    gpu.pod = ""
    try:
        _until(lambda: _count(monitoring.url, 'count(DCGM_FI_DEV_GPU_UTIL{pod="leaves-0"})') == 0)
        values = [one.value for one in asyncio.run(meter.read([subject])) if one.signal is Signal.GPU]
    finally:
        gpu.pod = "leaves-0"
    assert all(isinstance(value, Unknown) for value in values), values


@pytest.mark.parametrize("where", ["honoured", "renamed"])
def test_what_an_agent_of_ours_publishes_is_read_as_that_of_an_exporter(monitoring: Monitoring, where: str) -> None:
    pod, uuid = PodName("lab", f"agent-{where}-0", f"uid-{where}"), f"GPU-agent-{where}"
    use = GpuUse(uuid=uuid, slice=False, busy=90.0, memory_used_mib=600, pids=(), energy_mj=1000)
    exporter: Exporter = getattr(monitoring, where)
    exporter.agent = PodUse(at=Wall().now(), uses={uuid: use}, busiest={uuid: 90.0}, pods=PodGpus((PodGpu(uuid, pod),)))
    label = "pod" if where == "honoured" else "exported_pod"
    try:
        _until(lambda: _count(monitoring.url, f'count(DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{label}="{pod.name}"}})') == 1)
        values = [one.value for one in measured(monitoring, workload(pod.name)) if one.signal is Signal.GPU]
    finally:
        exporter.agent = None
    assert values
    assert values == [pytest.approx(90.0)] * len(values)  # two, if a minute just ended


def test_many_workloads_are_read_together(monitoring: Monitoring) -> None:
    subjects = [workload("idle-0"), workload("busy-0"), workload("all-0", 8)]
    found: dict[str, set[str]] = {}
    for one in measured(monitoring, *subjects):
        if one.signal is Signal.GPU and not isinstance(one.value, Unknown):
            found.setdefault(one.key, set()).add(one.device)
    assert found == {one.ref.key: set(one.devices) for one in subjects if not isinstance(one.devices, Unknown)}


def test_without_a_prometheus_the_exporters_are_queried(monitoring: Monitoring) -> None:
    """No history then: what is busy is said at once, an idle minute when it is over."""
    meter = ClusterMeter(Wall(), exporters=[f"http://{monitoring.honoured.url}/metrics", "http://127.0.0.1:9/metrics"])
    busy, quiet = workload("busy-0"), workload("idle-0")
    found = {one.key: one.value for one in asyncio.run(meter.read([busy, quiet])) if one.signal is Signal.GPU}
    assert found[busy.ref.key] == pytest.approx(88.0)
    assert isinstance(found[quiet.ref.key], Unknown)


def test_a_prometheus_that_is_gone_is_unknown(monitoring: Monitoring) -> None:
    samples = measured(Monitoring("http://127.0.0.1:9", monitoring.honoured, monitoring.renamed), workload("idle-0"))
    assert [isinstance(one.value, Unknown) for one in samples] == [True]
