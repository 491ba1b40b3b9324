"""Parquet by a mapping file: types, nulls, times, bad rows, files that cannot be read, and memory."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from gpukeeper.model.errors import UsageError
from gpukeeper.model.series import RecordedRun, Signal
from gpukeeper.traces.open import open_trace
from gpukeeper.traces.parquet import ROWS, open_parquet
from gpukeeper.traces.spool import SpooledTrace
from gpukeeper.traces.table import parse_mapping
from tests.unit.traces.parquet_examples import PARQUET_MAPPING, as_parquet

NAIVE, AWARE = pyarrow.timestamp("us"), pyarrow.timestamp("us", tz="Asia/Tokyo")
EIGHT = 1_767_600_000_000_000  # 2026-01-05T08:00Z


def opened(folder: Path, columns: dict[str, Any], mapping: str = PARQUET_MAPPING, **options: Any) -> SpooledTrace:
    path = folder / "trace.parquet"
    path.write_bytes(as_parquet(columns, **options))
    return open_parquet(path, parse_mapping(mapping, "mapping.yaml"))


def minutes(count: int, kind: Any = AWARE) -> Any:
    return pyarrow.array([EIGHT + minute * 60_000_000 for minute in range(count)], kind)


def gpu(run: RecordedRun) -> str:
    """As text: NaN is not equal to itself."""
    return repr([list(one.minutes) for one in run.series if one.signal is Signal.GPU])


def test_null_is_not_measured_whatever_the_mapping_says(tmp_path: Path) -> None:
    columns = {"at": minutes(4), "name": ["w"] * 4, "user": [None, "ann", None, "ann"], "use": [50.5, None, 0.0, 7.0]}
    for words in ("", "not_measured: [N/A]\n"):
        trace = opened(tmp_path, columns, PARQUET_MAPPING + words)
        (run,) = trace.runs()
        assert (run.owner, gpu(run), trace.bad_count) == ("ann", "[[50.5, nan, 0.0, 7.0]]", 0)


@pytest.mark.parametrize(
    "use",
    [
        pyarrow.array([10, 0], pyarrow.int8()),
        pyarrow.array([10, 0], pyarrow.uint64()),
        pyarrow.array([10, 0], pyarrow.float32()),
        pyarrow.array([Decimal("10.000"), Decimal("0.000")]),
        pyarrow.array(["10", " 0 %"]),
        pyarrow.array([b"10", b"0"]),
        pyarrow.array(["10", "0"]).dictionary_encode(),
    ],
    ids=lambda one: str(one.type),
)
def test_a_value_of_any_type(tmp_path: Path, use: Any) -> None:
    trace = opened(tmp_path, {"at": minutes(2), "name": ["w", "w"], "user": ["ann", "ann"], "use": use})
    assert [gpu(run) for run in trace.runs()] == ["[[10.0, 0.0]]"]


def test_a_flag_may_be_a_truth_value(tmp_path: Path) -> None:
    mapping = PARQUET_MAPPING.replace("percent}}", "percent}, terminal: {column: keys, unit: flag}}")
    columns = {"at": minutes(3), "name": ["w"] * 3, "user": ["ann"] * 3, "use": [1, 1, 1], "keys": [True, False, None]}
    (run,) = opened(tmp_path, columns, mapping).runs()
    keys = next(one for one in run.series if one.signal is Signal.TERMINAL)
    assert repr(list(keys.minutes)) == "[1.0, 0.0, nan]"


def test_a_time_with_a_zone_has_it_and_one_without_is_of_the_zone_of_the_mapping(tmp_path: Path) -> None:
    rest = {"name": ["w"], "user": ["ann"], "use": [1]}
    berlin = PARQUET_MAPPING.replace("UTC", "Europe/Berlin")
    for kind, hour in ((AWARE, 8), (NAIVE, 7), (pyarrow.timestamp("ns"), 7), (pyarrow.timestamp("s"), 7)):
        scale = {"ns": 1000, "s": 1}.get(kind.unit, 1)
        at = EIGHT * scale if kind.unit != "s" else EIGHT // 1_000_000
        trace = opened(tmp_path, {"at": pyarrow.array([at], kind), **rest}, berlin)
        assert trace.begin == datetime(2026, 1, 5, hour, tzinfo=UTC), kind
    day = opened(tmp_path, {"at": pyarrow.array([20_458], pyarrow.date32()), **rest})
    assert day.begin == datetime(2026, 1, 5, tzinfo=UTC)


def test_a_time_is_read_by_its_type_and_text_by_the_format(tmp_path: Path) -> None:
    """The mapping of a CSV file with another format is the mapping of the same table in Parquet."""
    mapping = PARQUET_MAPPING.replace("zone: UTC", 'format: "%d.%m.%Y %H:%M", zone: UTC') + "start: start\n"
    columns = {"at": minutes(1), "name": ["w"], "user": ["ann"], "use": [1], "start": ["05.01.2026 06:30"]}
    (run,) = opened(tmp_path, columns, mapping).runs()
    assert (run.started, run.series[0].start) == (
        datetime(2026, 1, 5, 6, 30, tzinfo=UTC),
        datetime(2026, 1, 5, 8, tzinfo=UTC),
    )
    seconds = {**columns, "at": pyarrow.array([EIGHT // 1_000_000])}
    epoch = PARQUET_MAPPING.replace("zone: UTC", "format: epoch")
    assert opened(tmp_path, seconds, epoch).begin == datetime(2026, 1, 5, 8, tzinfo=UTC)


def test_a_bad_row_is_counted_and_named_by_its_number(tmp_path: Path) -> None:
    count = ROWS + 3  # numbers go on over batches
    at, name = minutes(count).to_pylist(), ["w"] * count
    use: list[float | None] = [1.0] * count
    use[1], use[ROWS + 1] = 400.0, float("inf")
    at[3], name[4] = None, None
    at[5] = datetime(1950, 1, 1, tzinfo=UTC)
    columns = {"at": pyarrow.array(at, AWARE), "name": name, "user": ["ann"] * count, "use": use}
    trace = opened(tmp_path, columns, row_group_size=1000)
    assert (trace.rows, trace.bad_count) == (count, 5)
    assert [one.words for one in trace.bad] == [
        "row 2: '400.0' in column use is above 100 percent",
        "row 4: '' in column at is not a time",
        "row 5: it has no workload",
        "row 6: '1950-01-01T00:00:00+00:00' in column at is not between 1970 and 2100",
        f"row {ROWS + 2}: 'inf' in column use is not a number",
    ]


def test_a_time_that_no_calendar_has_and_one_without_a_zone_are_bad_rows(tmp_path: Path) -> None:
    rest = {"name": ["w", "w"], "user": ["ann", "ann"], "use": [1, 1]}
    trace = opened(tmp_path, {"at": pyarrow.array([EIGHT, 2**62], AWARE), **rest})
    assert [one.words for one in trace.bad] == [f"row 2: '{2**62} microseconds' in column at is not a time"]
    no_zone = PARQUET_MAPPING.replace(", zone: UTC", "")
    with pytest.raises(
        UsageError, match=r"no row that can be used \(2 rows\). The first bad one: row 1: .* no time zone"
    ):
        opened(tmp_path, {"at": minutes(2, NAIVE), **rest}, no_zone)


def test_text_that_is_not_utf8_stays_visible(tmp_path: Path) -> None:
    raw = pyarrow.array([b"ann\xff"], pyarrow.binary())
    (run,) = opened(tmp_path, {"at": minutes(1), "name": ["w"], "user": raw, "use": [1]}).runs()
    assert run.owner == "ann\\xff"


def test_columns_that_do_not_fit_are_named(tmp_path: Path) -> None:
    rest = {"at": minutes(1), "name": ["w"], "user": ["ann"]}
    with pytest.raises(UsageError, match=r"`values.gpu.column` names 'use'.*It has: at, name, user\."):
        opened(tmp_path, rest)
    with pytest.raises(UsageError, match=r"Column 'use' of .* is of type list<.*>: no text, number or time"):
        opened(tmp_path, {**rest, "use": pyarrow.array([[1.0, 2.0]])})
    path = tmp_path / "twice.parquet"
    arrays = [*map(pyarrow.array, rest.values()), pyarrow.array([1]), pyarrow.array([2])]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, names=["at", "name", "user", "use", "use"]), path)
    with pytest.raises(UsageError, match="more than one column 'use'"):
        open_parquet(path, parse_mapping(PARQUET_MAPPING, "m"))


def test_a_file_that_is_damaged_or_no_parquet_is_an_error(tmp_path: Path) -> None:
    mapping, path = parse_mapping(PARQUET_MAPPING, "m"), tmp_path / "trace.parquet"
    count = 5000
    use = [float(n % 101) for n in range(count)]
    columns = {"at": minutes(count), "name": ["w"] * count, "user": ["ann"] * count, "use": use}
    good = as_parquet(columns, write_page_checksum=True, compression="none", use_dictionary=False)
    half = len(good) // 2
    flipped = good[:half] + bytes([good[half] ^ 0xFF]) + good[half + 1 :]
    for content in (b"", b"PAR1", b"at,name,user,use\n1,w,ann,1\n" * 9, good[:half], flipped):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"cannot be read: it is not a Parquet file, or it is damaged or not comp"):
            open_parquet(path, mapping)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        open_parquet(tmp_path / "none.parquet", mapping)


def test_a_mapping_of_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`shape: dcgmi-dmon`, which is text"):
        opened(tmp_path, {"at": minutes(1)}, PARQUET_MAPPING + "shape: dcgmi-dmon\n")


def test_without_the_extra_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    with pytest.raises(UsageError, match=r"needs an extra. .*pip install 'gpukeeper\[parquet\]'"):
        open_parquet(tmp_path / "trace.parquet", parse_mapping(PARQUET_MAPPING, "m"))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Even if all of it is one row group. What pyarrow allocates; the rows themselves are spooled."""
    peaks = []
    before = pyarrow.default_memory_pool()
    for count in (40_000, 400_000):
        columns = {
            "at": pyarrow.array([EIGHT + (n % 1000) * 60_000_000 for n in range(count)], AWARE),
            "name": [f"w{n // 1000}" for n in range(count)],
            "user": ["ann"] * count,
            "use": [n % 10007 / 100.07 for n in range(count)],
        }
        path = tmp_path / "trace.parquet"
        path.write_bytes(as_parquet(columns, row_group_size=count))
        pool = pyarrow.proxy_memory_pool(before)
        pyarrow.set_memory_pool(pool)
        try:
            assert open_parquet(path, parse_mapping(PARQUET_MAPPING, "m")).rows == count
        finally:
            pyarrow.set_memory_pool(before)
        peaks.append(pool.max_memory())
    assert 0 < peaks[1] < 2 * peaks[0]


def test_the_ending_of_the_name_says_that_it_is_parquet(tmp_path: Path) -> None:
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(PARQUET_MAPPING)
    for name in ("a.parquet", "a.pq"):
        path = tmp_path / name
        path.write_bytes(as_parquet({"at": minutes(2), "name": ["w"] * 2, "user": ["ann"] * 2, "use": [1, 2]}))
        assert [run.name for run in open_trace(str(path), mapping).runs()] == ["w"]
