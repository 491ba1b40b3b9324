"""Writes gpukeeper as one file, and the same in ConfigMaps, for images that have PyTorch and not gpukeeper.

    python deploy/acceptance/program.py build/image dist

build/image is the context of the images (context.sh): the wheel of this clone and the pinned wheels. Without the
optional parts (Kubernetes, dashboard, metrics, mail) and without rich: no `top`, no `demo`. Written are

- gpukeeper.pyz: python3 gpukeeper.pyz COMMAND
- gpukeeper-program.yaml: it as ConfigMaps, for --option program=gpukeeper-program
- accept-every-gpu-node.yaml: these and a DaemonSet for every GPU node, on a public image of PyTorch
"""

from __future__ import annotations

import base64
import io
import platform
import re
import sys
import tarfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

from gpukeeper.acceptance.fleet.launcher import RunSpec
from gpukeeper.acceptance.launchers.kubernetes.forms import items
from gpukeeper.acceptance.launchers.kubernetes.launcher import as_yaml
from gpukeeper.acceptance.launchers.kubernetes.objects import PROGRAM_PARTS, Plan, options_of

HERE = Path(__file__).parent
NEEDED = (
    "annotated_doc",
    "annotated_types",
    "cronsim",
    "msgspec",
    "nvidia_ml_py",
    "pydantic",
    "pydantic_core",
    "ruamel_yaml",
    "shellingham",
    "typer",
    "typing_extensions",
    "typing_inspection",
)
EPOCH = (1980, 1, 1, 0, 0, 0)
PART = 1_000_000  # bytes; a ConfigMap has at most 1 MiB
NAME = "gpukeeper-program"
LABEL = "nvidia.com/gpu.present=true"


def packed(context: Path) -> bytes:
    """The same wheels give the same file, byte by byte."""
    own = sorted(context.glob("gpukeeper-*.whl"))
    if len(own) != 1:
        sys.exit(
            f"{context} has {len(own)} wheels of gpukeeper; one is needed. Run: deploy/acceptance/context.sh {context}"
        )
    files: dict[str, bytes] = {}
    pythons = set()
    for wheel in [*own, *(one for name in NEEDED for one in sorted(context.glob(f"wheels/{name}-*.whl")))]:
        tag = re.search(r"-(cp\d+)-cp", wheel.name)
        pythons |= {tag[1]} if tag else set()
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.endswith((".pyi", "/")) and ".dist-info/sboms/" not in name:
                    files[f"{tag[1] if tag else 'lib'}/{name}"] = archive.read(name)
    payload = io.BytesIO()
    with tarfile.open(fileobj=payload, mode="w:xz", preset=9) as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as program:
        for name, content in (
            ("__main__.py", (HERE / "program_main.py").read_bytes()),
            ("machine", platform.machine().encode()),
            ("pythons", " ".join(sorted(pythons)).encode()),
            ("payload.tar.xz", payload.getvalue()),
        ):
            program.writestr(zipfile.ZipInfo(name, EPOCH), content)
    return b"#!/usr/bin/env python3\n" + made.getvalue()


def config_maps(program: bytes) -> list[dict[str, object]]:
    parts = [program[at : at + PART] for at in range(0, len(program), PART)]
    if len(parts) > PROGRAM_PARTS:
        sys.exit(f"{len(program):,} bytes are more than {PROGRAM_PARTS} ConfigMaps hold")
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{NAME}-{number}"},
            "binaryData": {"part": base64.b64encode(part).decode()},
        }
        for number, part in enumerate(parts, start=1)
    ]


def every_gpu_node(image: str) -> list[dict[str, object]]:
    spec = RunSpec(
        run="every-gpu-node",
        owner="kubectl",
        created=datetime(2026, 1, 1, tzinfo=UTC),
        engine="kubernetes",
        form="daemonset",
        selector=LABEL,
        gpus_per_node=8,
        image=image,
        arguments=("--expect", "8"),
    )
    return [one.manifest for one in items(Plan(spec, options_of({"program": NAME}), (), by_label=True))]


def base_image() -> str:
    found = re.search(r"^ARG BASE=(\S+)$", (HERE / "Containerfile").read_text(), re.MULTILINE)
    assert found is not None, "the Containerfile names a base"
    return found[1]


def main(context: Path, dist: Path) -> None:
    program = packed(context)
    maps = config_maps(program)
    dist.mkdir(exist_ok=True)
    (dist / "gpukeeper.pyz").write_bytes(program)
    (dist / "gpukeeper.pyz").chmod(0o755)
    (dist / f"{NAME}.yaml").write_text(as_yaml(maps))
    (dist / "accept-every-gpu-node.yaml").write_text(as_yaml([*maps, *every_gpu_node(base_image())]))
    sys.stdout.write(f"{dist / 'gpukeeper.pyz'}: {len(program):,} bytes, {len(maps)} ConfigMaps\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
