"""examples/acceptance-on-kubernetes is what the launcher creates."""

from __future__ import annotations

from tests.docs.acceptance_manifests import FOLDER, RUNS, rendered


def test_the_example_is_what_the_launcher_creates() -> None:
    old = [name for name in RUNS if (FOLDER / f"{name}.yaml").read_text() != rendered(name)]
    assert not old, f"run python -m tests.docs.acceptance_manifests: {old} differ"


def test_every_file_is_made_by_the_code_and_described() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(RUNS)
    words = (FOLDER / "README.md").read_text()
    assert not [name for name in RUNS if f"`{name}.yaml`" not in words]


def test_what_tests_several_nodes_as_one_run_says_so_to_each_of_them() -> None:
    """Without --together each of them would be tested alone, and pass."""
    group = {name for name in RUNS if "GPUKEEPER_GROUP_SIZE" in rendered(name)}
    assert group == {name for name in RUNS if "- --together" in rendered(name)}
    assert group == {name for name, (*_, more) in RUNS.items() if more.get("together")}
