"""Whatever a file holds: a policy or a PolicyError with sentences, never a trace; and exemptions never stop a load."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from gpukeeper.config.load import load_file, load_text, read_exemptions
from gpukeeper.config.sections import json_schema
from gpukeeper.model.errors import PolicyError
from gpukeeper.model.unknown import Unknown

SCHEMA = json_schema()
NAMES = sorted({name for part in (SCHEMA, *SCHEMA["$defs"].values()) for name in part["properties"]})
WORDS = ["30m", "0", "7d", "-1h", "80%", "5GB", "manual", "none", "*", "managed", "idle", "/tmp", "plan", "2026-09-01"]
scalars = st.one_of(st.sampled_from(WORDS), st.text(max_size=5), st.integers(), st.floats(), st.booleans(), st.none())
names = st.one_of(st.sampled_from(NAMES), st.sampled_from(WORDS), st.text(max_size=3))
trees = st.recursive(
    scalars, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(names, inside, max_size=4), max_leaves=12
)
files = st.dictionaries(st.sampled_from(sorted(SCHEMA["properties"])), trees, max_size=6)


def problems(text: str) -> tuple[str, ...] | None:
    try:
        load_text(text)
    except PolicyError as error:
        return error.problems
    return None


def load_or_refuse(text: str) -> None:
    told = problems(text)
    assert told is None or (told and all(problem.startswith("policy.yaml:") for problem in told))


@given(st.text(max_size=60))
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    load_or_refuse(text)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(files)
def test_any_tree_is_a_policy_or_a_policy_error(tmp_path: Path, tree: object) -> None:
    path = tmp_path / "tree.yaml"
    with path.open("w", encoding="utf-8") as out:
        YAML(typ="safe", pure=True).dump(tree, out)
    load_or_refuse(path.read_text(encoding="utf-8"))


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.dictionaries(st.sampled_from(["owner", "class", "until", "rules", "reason", "x"]), trees), max_size=3)
)
def test_a_file_of_exemptions_keeps_each_of_its_entries_or_everything(tmp_path: Path, entries: list[object]) -> None:
    path = tmp_path / "exempt.yaml"
    with path.open("w", encoding="utf-8") as out:
        YAML(typ="safe", pure=True).dump(entries, out)
    found = read_exemptions(path, ["managed"]).exemptions
    assert isinstance(found, Unknown) or len(found) == len(entries)


def test_a_very_deep_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("[" * 20_000)
    with pytest.raises(PolicyError):
        load_file(path)
