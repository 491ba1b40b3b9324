"""Parquet files for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

import pyarrow
from pyarrow import parquet

PARQUET_MAPPING = """\
time: {column: at, zone: UTC}
workload: name
owner: user
values: {gpu: {column: use, unit: percent}}
new_run_after: 1h
"""


def as_parquet(columns: Mapping[str, Any], **options: Any) -> bytes:
    """`columns`: arrays of pyarrow, or values whose type it finds."""
    arrays = {name: pyarrow.array(one) if isinstance(one, Sequence) else one for name, one in columns.items()}
    file = BytesIO()
    parquet.write_table(pyarrow.table(arrays), file, **options)
    return file.getvalue()


def parquet_files() -> Iterator[bytes]:
    """A few encodings, to damage."""
    count = 40
    columns = {
        "at": pyarrow.array([minute * 60_000_000 for minute in range(count)], pyarrow.timestamp("us")),
        "name": pyarrow.array([f"w{number % 3}" for number in range(count)]),
        "user": pyarrow.array(["ann" if number % 3 else None for number in range(count)]).dictionary_encode(),
        "use": pyarrow.array([None if number % 7 == 0 else number * 1.5 for number in range(count)]),
    }
    yield as_parquet(columns)
    yield as_parquet(columns, compression="none", use_dictionary=False, row_group_size=16)
    yield as_parquet(columns, compression="zstd", data_page_version="2.0", write_page_checksum=True)
