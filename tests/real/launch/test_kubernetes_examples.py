"""A real API server, with the CRDs of the controllers, takes every file of examples/acceptance-on-kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.test_examples import STRICT, placed

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "acceptance-on-kubernetes"
CRDS = {"JobSet": "jobset", "PyTorchJob": "training-operator", "TrainJob": "trainer-v2.3.0"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_api_server_takes_it_to_the_last_field(path: Path, plane: ControlPlane, namespace: str) -> None:
    documents = list(YAML(typ="safe").load_all(path))
    assert documents
    for kind in {one["kind"] for one in documents} & set(CRDS):
        plane.need("jobset")  # the Trainer needs it, too
        plane.need(CRDS[kind])
    for one in documents:
        where, made = placed(one, namespace)
        answer = plane.api.call("POST", where, made, query=STRICT)
        assert answer.ok, f"{path.name}: {made['kind']}: {answer.raw.decode()}"
