"""The same table as CSV and as Parquet is the same trace, whatever is in it."""

from __future__ import annotations

import csv
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.model.errors import UsageError
from gpukeeper.traces.parquet import open_parquet
from gpukeeper.traces.spool import Spool
from gpukeeper.traces.table import TableMapping, open_table, parse_mapping
from tests.effort import examples
from tests.unit.traces.parquet_examples import as_parquet

MAPPING = """\
time: {column: at, format: FORM, zone: Europe/Berlin}
workload: name
owner: user
device: [name, gpu]
start: start
values: {gpu: {column: use, unit: percent}, cpu: {column: cores, unit: ratio}}
new_run_after: 30m
every: EVERY
"""
BEGIN = datetime(2026, 3, 28, 23, 30)  # noqa: DTZ001, the night in which the clock is changed in Berlin
TIMES = st.integers(0, 240).map(lambda minute: BEGIN + timedelta(minutes=minute))
NAMES = st.one_of(st.none(), st.sampled_from(["a", "b", "ü b", "x,y", 'q"r', "N/A"]))
ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), TIMES),
        NAMES,
        st.one_of(st.none(), st.sampled_from(["ann", "bob"])),
        st.integers(0, 2),
        st.one_of(st.none(), st.floats(-1, 120), st.floats(width=32), st.just(float("nan"))),
        st.one_of(st.none(), st.integers(-1, 64)),
        st.one_of(st.none(), TIMES),
    ),
    max_size=30,
)
COLUMNS = ("at", "name", "user", "gpu", "use", "cores", "start")


def result(opener: Any, path: Path, mapping: TableMapping, shift: int) -> object:
    """Everything that a trace says; `shift`: of the header, which Parquet does not count."""
    spool = Spool()
    try:
        trace = opener(path, mapping, spool)
        runs = [
            (
                run.name,
                run.owner,
                run.started,
                run.ended,
                run.devices,
                [(one.signal, one.device, one.start, one.minutes.tobytes()) for one in run.series],
            )
            for run in trace.runs()
        ]
        return trace.begin, trace.end, trace.rows, runs, [(one.line - shift, one.why) for one in trace.bad]
    except UsageError as error:
        return str(error).partition("(")[0].replace(str(path), "")
    finally:
        spool.close()


@examples(0.5)
@given(ROWS, st.booleans(), st.booleans(), st.sampled_from(["1m", "5m"]), st.integers(1, 40))
def test_csv_and_parquet_are_the_same_trace(rows: Any, aware: bool, texts: bool, every: str, group: int) -> None:
    """With zone or without, times as timestamps or as text, in row groups of any size."""
    zone = UTC if aware else None
    lines = [
        [None if one is None else one.replace(tzinfo=zone) if isinstance(one, datetime) else one for one in row]
        for row in rows
    ]
    mapping = parse_mapping(MAPPING.replace("FORM", "iso").replace("EVERY", every), "mapping.yaml")
    with tempfile.TemporaryDirectory() as folder:
        table, columns = Path(folder, "t.csv"), Path(folder, "t.parquet")
        with table.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows([_text(one) for one in line] for line in lines)
        kinds = dict.fromkeys(("at", "start"), pyarrow.timestamp("us", tz="UTC" if aware else None))
        kinds |= {"name": pyarrow.string(), "user": pyarrow.string(), "gpu": pyarrow.int32()}
        kinds |= {"use": pyarrow.float64(), "cores": pyarrow.int64()}
        if texts:
            kinds["at"] = kinds["start"] = pyarrow.string()
            lines = [[_text(one) if isinstance(one, datetime) else one for one in line] for line in lines]
        arrays = {name: pyarrow.array([line[n] for line in lines], kinds[name]) for n, name in enumerate(COLUMNS)}
        columns.write_bytes(as_parquet(arrays, row_group_size=group))
        assert result(open_parquet, columns, mapping, 0) == result(open_table, table, mapping, 1)


def _text(value: object) -> str:
    return "" if value is None else value.isoformat() if isinstance(value, datetime) else str(value)
