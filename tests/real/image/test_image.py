"""The images: built from their Containerfiles by a real engine, and as root filesystems by the same steps without one.

Every program starts, nothing needs root, and a run on the CPU gives its report. No GPU, no PyTorch base image.
C1.6, C16.4
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gpukeeper.acceptance.fleet.collect import decode_frames
from tests.engines import has_docker, has_image, require
from tests.real.docker.private_engine import DockerEngine, docker_engine
from tests.real.image import acceptance_image as image
from tests.real.torch import installation

BASE, BUILT, OPERATOR = "local/base:1", "local/built:1", "local/operator:1"
LIST = f"find {' '.join(image.MADE)} -printf '%p %y %m %U:%G %l\\n'"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerEngine]:
    """With the image, built from the Containerfile; the base is Debian with Python."""
    require("docker", has_docker())
    require("image", has_image())
    image.root_filesystem()  # makes the context, too
    with docker_engine(in_memory="3g") as started:
        image.import_into(started, image.folder() / "base.tar", BASE)
        for name, file in ((BUILT, "Containerfile"), (OPERATOR, "Containerfile.operator")):
            said = image.build_in(started, BASE, name, tmp_path_factory.mktemp("context"), file)
            assert "Successfully tagged" in said, said[-3000:]
        yield started


def run(engine: DockerEngine, *words: str, entrypoint: str | None = None, **host: Any) -> tuple[int, str]:
    """A container to its end, with PyTorch mounted: exit code and output. Without words: what the image runs."""
    more: dict[str, object] = {"Cmd": list(words)} if words else {"Cmd": None}
    if entrypoint is not None:
        more["Entrypoint"] = entrypoint.split()
    user, name = host.pop("user", ""), host.pop("image", BUILT)
    environ = {"OMP_NUM_THREADS": "1", **host.pop("env", {})}
    made = engine.run(
        f"accept-{len(engine.containers())}",
        image=name,
        binds=[f"{image.torch_packages()}:{image.SITE}:ro"],
        env=environ,
        user=user,
        network="none",
        config=more,
        host_config=host,
    )
    code = engine.api.must("POST", f"/containers/{made}/wait", deadline=280)["StatusCode"]
    found = engine.logs(made)
    engine.remove_container(made)
    return int(code), found


def test_with_and_without_an_engine_the_steps_leave_the_same(engine: DockerEngine) -> None:
    """The root filesystem is made by the same script; what calls it must not differ either."""
    code, built = run(engine, "-c", LIST, entrypoint="sh", user="0")
    assert code == 0, built
    assert "/usr/local/bin/gpukeeper l 777 0:0 /opt/gpukeeper/bin/gpukeeper" in built
    assert set(built.splitlines()) == image.made_by_steps(image.root_filesystem())
    for name, file in ((BUILT, image.CONTAINERFILE), (OPERATOR, image.OPERATOR)):
        config = engine.api.must("GET", f"/images/{name}/json")["Config"]
        expected = image.settings(file).config
        assert {key: config[key] for key in expected} == expected


def test_the_operator_runs_without_root_rights_and_without_writing_to_its_root(engine: DockerEngine) -> None:
    """And without a shell: the entry point is the program. Where there is no cluster it says so."""
    settled: dict[str, Any] = {"image": OPERATOR, "ReadonlyRootfs": True, "CapDrop": ["ALL"]}
    code, said = run(engine, "policy", "check", **settled)
    assert code == 0, said
    scratch = {"/var/lib/gpukeeper": "uid=65532,gid=65532,mode=0700", "/tmp": ""}
    code, said = run(engine, Tmpfs=scratch, **settled)
    assert code == 2, said
    assert "kubeconfig" in said
    code, said = run(engine, "-c", "id -u; ls /opt/gpukeeper/bin/pip", entrypoint="sh", **settled)
    assert said.startswith("65532\n")
    assert "No such file" in said


@pytest.mark.smoke
def test_every_program_starts(engine: DockerEngine) -> None:
    """gpukeeper and the interpreter of the probes; the shell, timeout and test that launchers start."""
    wheel = next((image.folder() / "context").glob("gpukeeper-*.whl"))
    assert run(engine, "--version", entrypoint="gpukeeper") == (0, f"gpukeeper {wheel.name.split('-')[1]}\n")
    code, said = run(engine, "-c", "import torch; print(torch.__version__)", entrypoint="python3")
    assert (code, said.partition("+")[0].strip()) == (0, installation.VERSION), said
    words = 'timeout 5 gpukeeper check list >/dev/null && test -s /etc/passwd && echo "$(id -u):$(id -g) $PWD $HOME"'
    assert run(engine, "-c", words, entrypoint="sh") == (0, "10001:10001 /app /var/lib/accept\n")


def test_what_is_not_needed_is_not_there(engine: DockerEngine) -> None:
    """Nothing of the context, no installer, and nothing of gpukeeper that its user can change."""
    words = "ls /context /opt/install.sh /opt/gpukeeper/bin/pip; touch /opt/gpukeeper/x /usr/local/bin/x"
    code, said = run(engine, "-c", words, entrypoint="sh")
    assert code != 0
    assert said.count("No such file") == 3, said
    assert said.count("Permission denied") == 2, said


def test_by_itself_it_runs_a_quick_acceptance_and_finds_no_gpu(engine: DockerEngine) -> None:
    code, said = run(engine)
    assert code == 5, said
    assert "INCONCLUSIVE" in said
    assert "No GPU" in said


def test_a_quick_run_on_the_cpu_with_a_read_only_root(engine: DockerEngine) -> None:
    scratch = {"/tmp": "", "/var/lib/accept": "uid=10001,gid=10001,mode=0700"}
    code, said = run(
        engine,
        "--quick",
        "--json",
        "--device",
        "cpu",
        "--check",
        "environment,gemm,exact",
        ReadonlyRootfs=True,
        Tmpfs=scratch,
        CapDrop=["ALL"],
    )
    assert code == 5, said
    findings = json.loads(said[said.index("{\n") :])["findings"]
    assert ("exact", "PASS") in {(one["check"], one["verdict"]) for one in findings}, said[-2000:]
    assert "gemm" in {one["check"] for one in findings}  # nothing to compare the speed of a CPU with


def test_a_node_that_can_write_nothing_still_reports(engine: DockerEngine) -> None:
    """A user that the image does not know, a root that is read-only, and no directory for temporary files."""
    code, said = run(
        engine,
        *("--report-to-log", "r1", "--device", "cpu", "--check", "environment,exact"),
        user="5000",
        env={"GPUKEEPER_NODE": "gpu1"},
        ReadonlyRootfs=True,
        CapDrop=["ALL"],
    )
    assert code == 5, said
    (report,) = decode_frames(said.encode(), "r1", "gpu1").reports
    found = json.loads(report)
    assert "exact" in {one["check"] for one in found["findings"] if one["verdict"] == "PASS"}, said[:3000]
