"""Parquet files as rows of text, as a table in CSV has them: table.py gives them their meaning, by the mapping file.

Read in batches, and only the columns that the mapping names: memory does not grow with the file. A file may unpack to
any size, so the kernel limits what one batch takes. Null is the empty text, which is always "not measured" here.
Numbers and times are written as text and parsed again, so that there is one parser of values; the type of a time says
how it is written, not `time.format`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from gpukeeper.model.errors import UsageError
from gpukeeper.model.reading import EPOCH
from gpukeeper.traces.spool import Spool, SpooledTrace
from gpukeeper.traces.table import NumberedRow, Table, TableMapping, check_columns, fill, stamp

NULL: Final = ""
SUFFIXES: Final = frozenset({".parquet", ".pq"})
ROWS: Final = 8192  # in memory at a time
BUFFER: Final = 256 * 1024  # bytes of each column; without it a whole row group is read at once
MEMORY: Final = 2 * 1024**3  # bytes that one batch may take, unpacked and as text
_EPOCH = EPOCH.replace(tzinfo=None)

Words: TypeAlias = Callable[[Any], list[str]]  # a column of a batch as text


def open_parquet(path: Path, mapping: TableMapping, spool: Spool | None = None) -> SpooledTrace:
    """As `open_table`. Reads all of it."""
    spool = Spool() if spool is None else spool
    with _opened(path, mapping) as table:
        fill(spool, msgspec.structs.replace(mapping, not_measured=(*mapping.not_measured, NULL)), table, str(path))
    return SpooledTrace(spool, stamp(mapping, str(path)))


@contextmanager
def _opened(path: Path, mapping: TableMapping) -> Iterator[Table]:
    """UsageError for a file that cannot be read, also while its rows are read."""
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # the others reserve 1 GiB, which would count
    try:
        import pyarrow as arrow  # an extra
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            f"{path} is a Parquet file, which needs an extra. Nothing was read. Install it: pip install "
            "'gpukeeper[parquet]' (in a clone of gpukeeper: pip install '.[parquet]'), or write the file as CSV."
        ) from None
    if mapping.shape != "csv":
        raise UsageError(
            f"{path} is a Parquet file, but its mapping has `shape: {mapping.shape}`, which is text. Nothing was read. "
            "Remove `shape` from the mapping."
        )
    try:
        with path.open("rb") as raw:
            with _limited("its footer"):
                file = parquet.ParquetFile(raw, buffer_size=BUFFER, page_checksum_verification=True)
            with file:
                yield _table(arrow, file, mapping, str(path))
    except _TooLargeError as error:
        raise UsageError(
            f"The trace {path} cannot be read: {error.where} needs more than {MEMORY // 1024**2} MiB of memory when it "
            "is unpacked. Nothing was replayed. If you trust the file, write it again with smaller pages and values, "
            "or as CSV."
        ) from error
    except (arrow.ArrowException, OSError, MemoryError, OverflowError, UnicodeError) as error:
        inside = isinstance(error, OSError) and error.strerror
        why = inside or "it is not a Parquet file, or it is damaged or not complete"
        raise UsageError(f"The trace {path} cannot be read: {why}. Nothing was replayed. Check the file.") from error


def _table(arrow: Any, file: Any, mapping: TableMapping, what: str) -> Table:
    schema = file.schema_arrow
    check_columns(mapping, schema.names, what)
    columns = tuple(dict.fromkeys(mapping.columns().values()))
    for name in columns:
        if schema.names.count(name) > 1:
            raise UsageError(f"{what} has more than one column {name!r}. Nothing was read. Name them differently.")
    words = [_words(arrow, schema.field(name).type) for name in columns]
    for name, one in zip(columns, words, strict=True):
        if one is None:
            raise UsageError(
                f"Column {name!r} of {what} is of type {schema.field(name).type}: no text, number or time. Nothing was "
                "read. Name another column in the mapping."
            )
    times = frozenset(name for name in columns if _is_time(arrow, schema.field(name).type))
    return Table(columns, _rows(file, columns, [one for one in words if one is not None]), times, "row")


def _rows(file: Any, columns: Sequence[str], words: Sequence[Words]) -> Iterator[NumberedRow]:
    number = 0
    batches = file.iter_batches(batch_size=ROWS, columns=list(columns), use_threads=False)
    while True:
        with _limited(_place(file.metadata, number)):
            batch = next(batches, None)
            if batch is None:
                return
            texts = [one(batch.column(name)) for name, one in zip(columns, words, strict=True)]
        for row in zip(*texts, strict=True):
            number += 1
            yield number, row


def _place(metadata: Any, number: int) -> str:
    """Where the row after that one is; row groups are counted from 1."""
    last = 0
    for group in range(metadata.num_row_groups):
        last += metadata.row_group(group).num_rows
        if number < last:
            return f"row group {group + 1}, from row {number + 1} on,"
    return f"what is after row {number}"


class _TooLargeError(Exception):
    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


@contextmanager
def _limited(where: str) -> Iterator[None]:
    """MEMORY more than now: then an allocation fails, and not the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = (one for one in (soft, hard, _data_now() + MEMORY) if one != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    except MemoryError as error:  # Arrow's is one, too
        raise _TooLargeError(where) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_now() -> int:
    """Bytes that count for that limit."""
    for line in Path("/proc/self/status").read_bytes().splitlines():
        if line.startswith(b"VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _is_time(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_timestamp(kind) or arrow.types.is_date(kind))


def _words(arrow: Any, kind: Any) -> Words | None:
    """None: a type that no column of a mapping can have."""
    types = arrow.types
    if types.is_dictionary(kind):
        inner = _words(arrow, kind.value_type)
        return None if inner is None else lambda column: inner(column.dictionary_decode())
    if _is_time(arrow, kind):
        zone = "+00:00" if getattr(kind, "tz", None) else ""
        return lambda column: [_time(one, zone) for one in _micros(arrow, column)]
    if types.is_boolean(kind):
        return lambda column: [NULL if one is None else "1" if one else "0" for one in column.to_pylist()]
    if types.is_null(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return lambda column: [_number(one) for one in column.to_pylist()]
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        # As bytes: text of a damaged file need not be UTF-8.
        return lambda column: [_text(one) for one in column.cast(arrow.large_binary()).to_pylist()]
    return None


def _text(value: bytes | None) -> str:
    return NULL if value is None else value.decode("utf-8", "backslashreplace").strip()


def _number(value: float | Decimal | None) -> str:
    return NULL if value is None else format(value, "f") if isinstance(value, Decimal) else repr(value)


def _micros(arrow: Any, column: Any) -> list[int | None]:
    """Since 1970; a part of a microsecond is cut off. As whole numbers: one that no calendar has is a bad row."""
    kind = arrow.timestamp("us", tz=getattr(column.type, "tz", None))
    found: list[int | None] = column.cast(kind, safe=False).cast(arrow.int64()).to_pylist()
    return found


def _time(micros: int | None, zone: str) -> str:
    if micros is None:
        return NULL
    try:
        return (_EPOCH + timedelta(microseconds=micros)).isoformat(timespec="seconds") + zone
    except OverflowError:
        return f"{micros} microseconds"
