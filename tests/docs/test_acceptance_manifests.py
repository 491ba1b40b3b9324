"""examples/acceptance-on-kubernetes is what the launcher creates."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from tests.docs.acceptance_manifests import FOLDER, RUNS, rendered
from tests.unit.acceptance.kubernetes.test_forms import templates, variables


def test_the_example_is_what_the_launcher_creates() -> None:
    old = [name for name in RUNS if (FOLDER / f"{name}.yaml").read_text() != rendered(name)]
    assert not old, f"run python -m tests.docs.acceptance_manifests: {old} differ"


def test_every_file_is_made_by_the_code_and_described() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(RUNS)
    words = (FOLDER / "README.md").read_text()
    assert not [name for name in RUNS if f"`{name}.yaml`" not in words]


@pytest.mark.parametrize("name", RUNS)
def test_every_node_is_told_whether_it_is_tested_alone_or_as_one_of_several(name: str) -> None:
    """Without --together each of them would be tested alone, and pass."""
    together = RUNS[name][4].get("together", False)
    nodes = RUNS[name][1]
    found = [pod for one in YAML(typ="safe").load_all(FOLDER / f"{name}.yaml") for pod in templates(one)]
    assert found
    for pod in found:
        assert ("--together" in pod["spec"]["containers"][0]["command"]) is together
        assert variables(pod)["GPUKEEPER_GROUP_SIZE"] == (str(nodes) if together else "1")
