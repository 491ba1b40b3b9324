"""gpukeeper as one file on an image that has Python and PyTorch, on a real engine: no image of ours, nothing installed.

C1.6, C16.4
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import has_docker, has_image, require
from tests.real.docker.private_engine import DockerEngine, docker_engine
from tests.real.image import acceptance_image as image

BASE = "local/python:1"  # PyTorch is mounted, as if it were in it


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require("image", has_image())
    image.root_filesystem()  # makes the context, too
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(image.STEPS / "program.py"), str(image.folder() / "context"), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "gpukeeper.pyz"


@pytest.fixture(scope="module")
def engine() -> Iterator[DockerEngine]:
    require("docker", has_docker())
    with docker_engine(in_memory="2g") as started:
        image.import_into(started, image.folder() / "base.tar", BASE)
        yield started


def test_a_container_of_a_plain_image_gives_a_verdict(engine: DockerEngine, program: Path) -> None:
    words = "accept --json --device cpu --check environment,exact"
    made = engine.run(
        "accept",
        cmd=("sh", "-c", f"python3 /gpukeeper.pyz {words}; echo code=$?; echo left=$(ls /tmp | grep -c gpukeeper-)"),
        image=BASE,
        binds=[f"{image.torch_packages()}:{image.SITE}:ro", f"{program}:/gpukeeper.pyz:ro"],
        env={"OMP_NUM_THREADS": "1"},
        network="none",
    )
    engine.api.must("POST", f"/containers/{made}/wait", deadline=280)
    said = engine.logs(made)
    assert "code=5" in said, said[-3000:]
    found, _ = json.JSONDecoder().raw_decode(said[said.index("{\n") :])
    assert ("exact", "PASS") in {(one["check"], one["verdict"]) for one in found["findings"]}
    assert "left=0" in said, "it deletes what it unpacks"
