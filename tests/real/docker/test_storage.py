"""Bytes of images, containers and logs, as real engines report them (C15.1)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gpukeeper.interfaces.telemetry.machine import StorageFacts, of_storage
from gpukeeper.model.decision import Action
from gpukeeper.model.ports import StorageBytes, WorkloadBytes
from gpukeeper.model.unknown import Unknown
from tests.cli.test_metrics import got, page_of
from tests.real.docker.harness import Harness, ended, policy
from tests.real.docker.private_engine import DockerEngine, PrivateEngine

MIB = 1024**2


def measured(engine: PrivateEngine) -> StorageBytes:
    harness = Harness(engine)
    harness.subjects()  # a pass inspects every container
    return harness.run(harness.platform.read_storage())


def workload(found: StorageBytes, name: str) -> WorkloadBytes:
    return next(one for one in found.workloads if one.name == name)


def test_what_a_container_wrote_and_logged(engine: PrivateEngine) -> None:
    write = f"dd if=/dev/zero of=/written bs={MIB} count=3; seq 1 2000"
    engine.run("writer", cmd=["sh", "-c", write])
    engine.until(lambda: engine.state("writer") == "exited", "it wrote")
    ended(engine, "quiet")
    found = measured(engine)
    assert 3 * MIB <= _known(workload(found, "writer").written) < 4 * MIB
    assert _known(workload(found, "quiet").written) < MIB / 10
    log = Path((engine.inspect("writer") or {})["LogPath"])
    assert workload(found, "writer").log == log.stat().st_size > 10_000
    assert 0 < _known(workload(found, "quiet").log) < 1_000


def test_a_container_that_never_started_has_no_log(docker: DockerEngine) -> None:
    docker.create("new")
    assert workload(measured(docker), "new").log is None


def test_a_log_that_is_kept_elsewhere_is_not_measured(docker: DockerEngine) -> None:
    docker.run("local", cmd=["echo", "hello"], host_config={"LogConfig": {"Type": "local"}})
    docker.run("none", cmd=["echo", "hello"], host_config={"LogConfig": {"Type": "none"}})
    found = measured(docker)
    assert isinstance(workload(found, "local").log, Unknown)
    assert workload(found, "none").log is None


def test_a_layer_that_two_images_share_counts_once(docker: DockerEngine) -> None:
    docker.create("base")  # its image is here before anything is measured, whichever test comes first
    docker.remove_container("base")
    before = measured(docker)
    docker.run("source", cmd=["dd", "if=/dev/zero", "of=/more", f"bs={MIB}", "count=2"])
    docker.until(lambda: docker.state("source") == "exited", "it wrote")
    docker.api.must("POST", "/commit", {}, query={"container": "source", "repo": "more", "tag": "1"})
    try:
        found = measured(docker)
    finally:
        docker.remove_container("source")
        docker.api.call("DELETE", "/images/more:1")
    own = {one.name: one.own for one in found.images}
    assert 2 * MIB <= _known(own["more:1"]) < 3 * MIB, "without the layers of its base"
    assert _known(found.layers) - _known(before.layers) == own["more:1"]
    (images, *_) = of_storage([StorageFacts(("docker", "here"), found)])
    assert sum(one.value for one in images.samples) == found.layers
    assert images.samples[-1].labels["image"] == "(shared)"


def test_a_daemon_exports_them_a_moment_after_the_first_scrape(docker: DockerEngine) -> None:
    docker.run("writer", cmd=["sh", "-c", f"dd if=/dev/zero of=/written bs={MIB} count=3; seq 1 2000; sleep 600"])
    daemon = docker.popen("serve", "--metrics", "0", policy=policy(mode="plan", metrics={"sizes": "1s"}))
    try:
        page = page_of(daemon)
        text = docker.until(lambda: found if _is_complete(found := got(page)) else "", "they are there")
    finally:
        daemon.terminate()
        daemon.communicate(timeout=60)
    assert re.search(r'^gpukeeper_workload_written_bytes\{.*workload="writer"\} 3\.\d+e\+06$', text, re.MULTILINE)
    assert 'what="logs"} 0.0' in text
    assert 'image="(shared)"' in text
    assert docker.state("writer") == "running"


def _is_complete(text: str) -> bool:
    """It may be measured first while the container has not written its log yet."""
    logged = re.search(r'^gpukeeper_workload_log_bytes\{.*workload="writer"\} [1-9]', text, re.MULTILINE)
    return "gpukeeper_image_bytes{" in text and logged is not None


def _known(value: int | Unknown | None) -> int:
    assert isinstance(value, int), value
    return value


def test_a_container_that_floods_its_log_is_reported_and_nothing_else(docker: DockerEngine) -> None:
    docker.run("flood", cmd=["sleep", "100"])
    docker.run(
        "limited", cmd=["sleep", "100"], host_config={"LogConfig": {"Type": "json-file", "Config": {"max-size": "9g"}}}
    )
    for name in ("flood", "limited"):
        docker.until(lambda name=name: Path((docker.inspect(name) or {})["LogPath"]).exists(), "it has a log")  # type: ignore[misc]
        os.truncate((docker.inspect(name) or {})["LogPath"], 1024 * MIB)  # sparse
    harness = Harness(docker)
    found = harness.subjects()
    assert "never rotates it" in " ".join(found["flood"].findings)
    assert found["limited"].findings == ()
    assert harness.decisions()["flood"].action is Action.KEEP
