"""A person's own reference table is as strict as ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.config.own_reference import EXAMPLE, read_rows
from gpukeeper.model.errors import UsageError


def written(folder: Path, text: str) -> Path:
    path = folder / "reference.yaml"
    path.write_text(text)
    return path


def test_the_example_in_the_message_is_a_table(tmp_path: Path) -> None:
    row = read_rows(written(tmp_path, EXAMPLE))[0]
    assert (row.gpu, row.metric, row.floor, row.ceiling) == ("NVIDIA H200", "bf16", 720, 989)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ("rows: 1", "Expected `array`"),
        ("[{gpu: X}]", "missing required field"),
        (EXAMPLE.replace("floor", "floorr"), "floorr"),
        (EXAMPLE.replace("720", "72"), "detects nothing"),
        (EXAMPLE.replace("720", "7200"), "check units and digits"),
        (EXAMPLE.replace("TFLOP/s", "parsecs"), "unit 'parsecs' is unknown"),
        (EXAMPLE.replace("NVIDIA H200", "NVIDIA ("), "is not a valid regular expression"),
        ("[{gpu: X, gpu: Y}]", "gpu"),
        ("[{", "this is not valid YAML"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match="Nothing was run") as refused:
        read_rows(written(tmp_path, text))
    assert said in str(refused.value)
    assert "reference.yaml" in str(refused.value)


def test_a_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="could not be read: No such file"):
        read_rows(tmp_path / "nothing.yaml")
