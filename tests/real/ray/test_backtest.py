"""A backtest on a real Ray cluster of two nodes gives, bit by bit, what one process gives."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

import gpukeeper
from tests.engines import has_ray, require
from tests.real.ray.clusters import NEWEST, Cluster, until
from tests.real.ray.with_gpukeeper import cluster_with, environment

TRUSTED = ("--trust-cluster",)  # root is asked for it
OPTIONS = ("backtest", "synthetic:7", "--policy", "short.yaml", "--sweep", "window=30m/5h", "--json")


def backtest(cluster: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(cluster.python), "-m", "gpukeeper", *OPTIONS, *options]
    return subprocess.run(
        command, env=environment(cluster), cwd=cluster.root, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require("ray", has_ray(NEWEST))
    with cluster_with(tmp_path_factory.mktemp("site")) as found:
        write_policy(found)
        yield found


@pytest.fixture(scope="module")
def bare_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require("ray", has_ray(NEWEST))
    with cluster_with(tmp_path_factory.mktemp("site"), ()) as found:
        write_policy(found)
        yield found


def write_policy(cluster: Cluster) -> None:
    """Short limits: with the built-in ones the breaker opens in more passes, and a replay takes thrice as long."""
    (cluster.root / "short.yaml").write_text("preset: ds01\nscope: {docker: {}}\n")


@pytest.fixture(scope="module")
def by_one_process(cluster: Cluster) -> str:
    here = backtest(cluster, "--workers", "1")
    assert here.returncode == 0, here.stderr
    return here.stdout


def test_a_cluster_gives_the_very_same_as_one_process(cluster: Cluster, by_one_process: str) -> None:
    there = backtest(cluster, "--on", cluster.address, *TRUSTED)
    assert there.returncode == 0, there.stderr
    assert there.stdout == by_one_process


def test_a_node_that_dies_in_the_middle_changes_nothing(cluster: Cluster, by_one_process: str) -> None:
    lost = cluster.add_node()
    command = [str(cluster.python), "-m", "gpukeeper", *OPTIONS, "--on", cluster.address, *TRUSTED]
    child = subprocess.Popen(
        command, env=environment(cluster), cwd=cluster.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: child.poll() is not None or any("_run" in title for title in lost.titles()), "it has a task")
        assert child.poll() is None, "it was done before its node could die: make the trace longer"
        lost.kill_raylet()
        out, err = child.communicate(timeout=300)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 0, err
    assert out == by_one_process


def test_nodes_without_gpukeeper_are_named_as_the_reason(bare_cluster: Cluster) -> None:
    ran = backtest(bare_cluster, "--on", bare_cluster.address, *TRUSTED)
    assert (ran.returncode, ran.stdout) == (1, ""), ran
    assert f"Its nodes need gpukeeper {gpukeeper.__version__} in Ray's Python" in " ".join(ran.stderr.split())


def test_no_cluster_at_the_address_is_an_error_with_the_next_step(cluster: Cluster) -> None:
    ran = backtest(cluster, "--on", "127.0.0.1:1", *TRUSTED)
    assert (ran.returncode, ran.stdout) == (1, ""), ran
    assert "nothing answers at 127.0.0.1:1" in " ".join(ran.stderr.split())


@contextmanager
def listener(reply: bytes) -> Iterator[int]:
    """A service that is not Ray: it accepts, says this to what it reads, and keeps the connection open."""
    open_: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    open_.append(connection)
                    connection.recv(100)
                    connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for one in open_:
        one.close()


@pytest.mark.parametrize(
    ("reply", "said"),
    [(b"", "it said nothing"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it does not speak gRPC")],
    ids=["silent", "http"],
)
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_another_service_at_the_address_is_named_before_ray_tries(
    cluster: Cluster, reply: bytes, said: str, scheme: str
) -> None:
    with listener(reply) as port:
        ran = backtest(cluster, "--on", f"{scheme}127.0.0.1:{port}", *TRUSTED)
    assert (ran.returncode, ran.stdout) == (1, ""), ran
    words = " ".join(ran.stderr.split())
    assert f"the service at 127.0.0.1:{port} is not Ray: {said}" in words
    assert "--on HOST:6379" in words


def test_the_dashboard_of_a_cluster_is_not_its_address(cluster: Cluster) -> None:
    ran = backtest(cluster, "--on", cluster.dashboard.removeprefix("http://"), *TRUSTED)
    assert (ran.returncode, ran.stdout) == (1, ""), ran
    assert "its dashboard (8265) is neither" in " ".join(ran.stderr.split())
