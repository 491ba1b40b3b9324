"""Every query of the Grafana dashboards, against a real Prometheus that scrapes a running gpukeeper.

Grafana itself is not started: what is checked is that each query is accepted, and returns data if gpukeeper exports its
series here.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import pytest

from gpukeeper.model.subject import State
from tests.cli.fleet import Fleet
from tests.cli.test_metrics import page_of, record_acceptance, serving
from tests.docs.markdown import ROOT
from tests.engines import has_prometheus, require
from tests.unit.platforms.docker.examples import told
from tests.unit.platforms.docker.fake_engine import FakeEngine, served

DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
RULES = sorted((ROOT / "deploy" / "prometheus").glob("*.yaml"))
POLICY = """\
preset: development
mode: enforce
scope: {docker: {}}
"""
# What gpukeeper exports of this fleet at least, so that an empty Prometheus passes nothing.
EXPECTED = {
    *("gpukeeper_gpus", "gpukeeper_gpu_state", "gpukeeper_gpu_holder", "gpukeeper_decisions", "gpukeeper_workloads"),
    *("gpukeeper_acceptance_verdict", "gpukeeper_reclaimed_total", "gpukeeper_last_pass_timestamp_seconds"),
    *("gpukeeper_idle_checks_total", "gpukeeper_pass_seconds", "gpukeeper_oldest_overdue_seconds"),
    *("gpukeeper_disk_used_ratio", "gpukeeper_tree_bytes", "gpukeeper_not_measured"),
    *("gpukeeper_owner_gpus", "gpukeeper_events_last_day", "gpukeeper_state_disk_used_ratio"),
    *("gpukeeper_image_bytes", "gpukeeper_workload_written_bytes", "gpukeeper_workload_log_bytes"),
    *("gpukeeper_build_cache_bytes", "gpukeeper_storage_timestamp_seconds", "gpukeeper_storage_not_measured"),
}
HOST_POLICY = """\
preset: development
scope: {docker: {}, host: {}}
temporary: [{root: TREES, names: ["tmp*"], above: 0, older_than: 1h}]
metrics: {sizes: 1s}
"""
# What panels ask for and these two do not have: Ray nodes, measurements of GPUs, failures, warnings, a fleet database.
NOT_HERE = {
    *("ray_object_store_memory", "ray_resources", "gpukeeper_node_busy", "gpukeeper_node_temporary_bytes"),
    *("gpukeeper_gpu_use_ratio", "gpukeeper_gpu_memory_used_ratio", "gpukeeper_gpu_idle_seconds"),
    *("gpukeeper_owner_cpu_cores", "gpukeeper_owner_gpu_memory_bytes", "gpukeeper_gpu_state"),
    *("gpukeeper_failed_total", "gpukeeper_passes_failed_total", "gpukeeper_warnings_total"),
    "gpukeeper_fleet_copy_lag_seconds",
}
PATIENCE = 180.0


class Query(NamedTuple):
    panel: str
    expression: str

    @property
    def series(self) -> set[str]:
        return set(re.findall(r"\b(?:gpukeeper|ray|process)_\w+", self.expression)) - {"process_"}


def queries() -> Iterator[Query]:
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                yield Query(f"{file.stem}: {panel['title']}", target["expr"].replace("$instance", ".*"))


def ask(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=20) as answer:
        return json.load(answer)["data"]


@contextmanager
def prometheus(folder: Path, *targets: str) -> Iterator[str]:
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(one) for one in RULES],
        "scrape_configs": [{"job_name": "gpukeeper", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["setpriv", "--pdeathsig", "KILL", "prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        program = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            program.send_signal(signal.SIGTERM)
            program.wait(timeout=30)


@contextmanager
def container_engine(log: Path) -> Iterator[str]:
    """With an image, a build cache and a container that wrote something and has a log. Its address."""
    log.write_text("hello\n")
    container = {**told(name="/writer"), "LogPath": str(log)}
    fake = FakeEngine(container)
    fake.usage = {
        "LayersSize": 900,
        "Images": [{"Id": "sha256:aaa", "RepoTags": ["lab:1"], "Size": 900, "SharedSize": 600}],
        "Containers": [{"Id": container["Id"], "Names": ["/writer"], "SizeRw": 42}],
        "BuildCache": [{"ID": "a", "Size": 7}],
    }
    addresses: Queue[str] = Queue()
    ended = threading.Event()

    async def serve() -> None:
        async with served(fake) as engine:
            addresses.put(engine.address)
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield addresses.get(timeout=30)
    finally:
        ended.set()
        thread.join()


def exported(url: str) -> set[str]:
    try:
        return set(ask(url, "label/__name__/values"))
    except OSError:
        return set()


def scraped_twice(url: str) -> bool:
    """Each counter, those that appeared last too: a rate needs two values."""
    found = ask(url, "query", query='{__name__=~"gpukeeper_.+_total"}[5m]')["result"]
    return bool(found) and all(len(one["values"]) > 1 for one in found)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gpukeeper with a workload on two GPUs, one that it reclaims, a tree and an acceptance run, and one with a
    container engine."""
    require("prometheus", has_prometheus())
    folder = tmp_path_factory.mktemp("monitored")
    tree = folder / "trees" / "tmpabc"
    tree.mkdir(parents=True)
    (tree / "file").write_bytes(b"x" * 1000)
    fleet = Fleet(folder, POLICY)
    begun = datetime.now(UTC) - timedelta(days=1)
    fleet.add("train", state=State.RUNNING, created=begun, started=begun, devices=("GPU-0", "GPU-1"))
    fleet.ended("old", days=2)
    record_acceptance(fleet)
    (folder / "engine").mkdir()
    beside = Fleet(folder / "engine", HOST_POLICY.replace("TREES", str(tree.parent)))
    with (
        container_engine(folder / "log-of-writer") as address,
        serving(fleet, "--metrics", "0") as daemon,
        serving(beside, "--metrics", "0", GPUKEEPER_FLEET="", DOCKER_HOST=address) as another,
    ):
        pages = [urllib.parse.urlsplit(page_of(one)).netloc for one in (daemon, another)]
        with prometheus(folder, *pages) as url:
            end = time.monotonic() + PATIENCE
            while not (exported(url) >= EXPECTED and scraped_twice(url)):
                assert time.monotonic() < end, (EXPECTED - exported(url), (folder / "log").read_text()[-3000:])
                time.sleep(0.5)
            yield url


@pytest.mark.smoke
def test_every_query_is_accepted_and_returns_what_is_exported(scraped: str) -> None:
    there = exported(scraped)
    refused, empty, answered = [], [], set()
    for query in queries():
        try:
            found = ask(scraped, "query", query=query.expression)["result"]
        except urllib.error.HTTPError as problem:
            refused.append((query, problem.read().decode()))
            continue
        if found:
            answered |= query.series
        elif query.series <= there and not _selects_a_value(query):
            empty.append(query)
    assert not refused
    assert not empty
    assert {name for query in queries() for name in query.series} - answered == NOT_HERE
    assert {"gpukeeper_gpus", "gpukeeper_gpu_holder", "gpukeeper_decisions"} <= answered


def _selects_a_value(query: Query) -> bool:
    """Failed or quarantined GPUs: there are none here."""
    return bool(re.search(r'verdict="FAIL"|state=~"quarantined', query.expression))


def test_the_instances_to_choose_from_are_those_that_are_scraped(scraped: str) -> None:
    assert len(ask(scraped, "label/instance/values", **{"match[]": "gpukeeper_info"})) == 2


def test_prometheus_loads_every_rule_and_evaluates_it_without_an_error(scraped: str) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        rules = [rule for group in ask(scraped, "rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules):
            break
        assert time.monotonic() < end
        time.sleep(0.5)
    assert len(rules) > 40
    assert {rule["health"] for rule in rules} == {"ok"}
