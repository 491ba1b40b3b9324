"""Traces that are small when packed: what a child needs at most to read one, and what it reports."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from gpukeeper.traces.parquet import ROWS
from tests.patience import PATIENCE
from tests.unit.traces.parquet_examples import PARQUET_MAPPING

MIB = 1024 * 1024
MEMORY = 64 * MIB  # instead of 2 GiB, so that the files can be made in little time
SPARE = 200  # MiB for Python and Arrow themselves
NAIVE = pyarrow.timestamp("us")
OPEN = """
import json, sys
from pathlib import Path
from gpukeeper.model.errors import UsageError
from gpukeeper.traces import parquet
from gpukeeper.traces.table import parse_mapping
from gpukeeper.traces.open import open_trace
def peak():
    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM:')) // 1024
parquet.MEMORY = int(sys.argv[3])
before, bad, why = peak(), 0, None
try:
    bad = open_trace(sys.argv[1], Path(sys.argv[2])).bad_count
except UsageError as error:
    why = str(error)
print(json.dumps([peak() - before, why, bad]))
"""


def opened(path: Path, memory: int = MEMORY) -> tuple[int, str | None, int]:
    """MiB that it needed at most, the error, and how many rows were bad. Above 8 GiB it fails, not the machine."""
    mapping = path.with_name("mapping.yaml")
    mapping.write_text(PARQUET_MAPPING)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 * 1024 * MIB,) * 2)

    done = subprocess.run(
        [sys.executable, "-P", "-c", OPEN, path, mapping, str(memory)],
        capture_output=True,
        timeout=PATIENCE,
        check=False,
        preexec_fn=limit,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    needed, why, bad = json.loads(done.stdout)
    return needed, why, bad


def at(count: int) -> pyarrow.Array:
    return pyarrow.array([minute * 60_000_000 for minute in range(count)], NAIVE)


def written(path: Path, names: pyarrow.Array, **options: object) -> Path:
    count = len(names)
    table = {"at": at(count), "name": names, "user": ["ann"] * count, "use": [1.0] * count}
    parquet.write_table(pyarrow.table(table), path, compression="zstd", **options)
    return path


def big_dictionary(path: Path) -> Path:
    """One value of a megabyte, in each of 8,192 rows."""
    indices = pyarrow.array([0] * ROWS, pyarrow.int32())
    return written(path, pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * MIB])))


def big_value(path: Path) -> Path:
    return written(path, pyarrow.array(["a", "x" * (150 * MIB), "b"]), use_dictionary=False)


def shared_beginnings(path: Path) -> Path:
    """Each value is the one before it and a letter more, and only that letter is stored."""
    names = pyarrow.array(["x" * (MIB // 4 + row) for row in range(1024)])
    return written(path, names, use_dictionary=False, column_encoding={"name": "DELTA_BYTE_ARRAY"})


@pytest.mark.parametrize("make", [big_dictionary, big_value, shared_beginnings])
def test_a_parquet_file_that_unpacks_to_too_much_is_refused_with_its_row_group(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    path = make(tmp_path / "trace.parquet")
    assert path.stat().st_size < MIB
    needed, why, _ = opened(path, MEMORY)
    assert why is not None
    assert f"{path} cannot be read: row group 1, from row 1 on, needs more than 64 MiB of memory" in why
    assert "write it again with smaller pages and values, or as CSV" in why
    assert needed < 64 + SPARE


@pytest.mark.slow
def test_a_large_row_group_in_usual_pages_is_read_in_little_memory(tmp_path: Path) -> None:
    path, count = tmp_path / "trace.parquet", 64
    name = "x" * 900
    batch = pyarrow.table({"at": at(ROWS), "name": [name] * ROWS, "user": ["ann"] * ROWS, "use": [1.0] * ROWS})
    with parquet.ParquetWriter(path, batch.schema, compression="zstd", use_dictionary=False) as file:
        file.write_table(pyarrow.concat_tables([batch] * count), row_group_size=count * ROWS)
    assert parquet.read_metadata(path).row_group(0).total_byte_size > 400 * MIB
    needed, why, bad = opened(path)
    assert (why, bad) == (None, 0)
    assert needed < 64 + SPARE


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_line_without_an_end_is_a_bad_row_and_never_in_memory(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("trace.csv.gz" if packed else "trace.csv")
    head = b"at,name,user,use\n1970-01-01T00:01:00,w,ann,1\n"
    with gzip.open(path, "wb", 1) if packed else path.open("wb") as file:
        file.write(head)
        for _ in range(512):
            file.write(b"x" * MIB)
    needed, why, bad = opened(path)
    assert (why, bad) == (None, 1)
    assert needed < SPARE


def test_if_nothing_else_is_in_it_the_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b"at,name,user,use\n")
        for _ in range(64):
            file.write(b"x" * MIB)
    needed, why, _ = opened(path)
    assert why is not None
    assert str(path) in why
    assert "line 2: it has more than 262144 characters" in why
    assert needed < SPARE
