"""Tables by a mapping file: what becomes of rows, gaps, bad rows, and of mappings that cannot be used."""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from math import isnan
from pathlib import Path

import pytest

from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.series import RecordedRun, Signal, Trace
from gpukeeper.traces import spool as spools
from gpukeeper.traces.spool import SpooledTrace
from gpukeeper.traces.table import LINE_MAX, open_table, parse_mapping, read_mapping

EXAMPLES = Path(__file__).parents[3] / "examples" / "traces"
MAPPING = """\
time: {column: at, format: epoch}
workload: name
owner: user
values: {gpu: {column: use, unit: percent}}
new_run_after: 1h
"""
NAN = float("nan")


def at(text: str) -> datetime:
    return reading.moment(f"2026-01-05T{text}Z")


def example(name: str) -> SpooledTrace:
    path = EXAMPLES / name
    return open_table(path, read_mapping(path.with_suffix(".yaml")))


def table(folder: Path, *lines: str, mapping: str = MAPPING) -> SpooledTrace:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return open_table(path, parse_mapping(mapping, "mapping.yaml"))


def gpu(run: RecordedRun) -> dict[str, list[float]]:
    return {one.device: list(one.minutes) for one in run.series if one.signal is Signal.GPU}


def same(found: Mapping[str, list[float]], wanted: Mapping[str, list[float]]) -> bool:
    return repr(found) == repr(wanted)  # NaN is not equal to itself


def test_minutes_of_jobs() -> None:
    trace: Trace = example("job-minutes.csv")
    first, second, again = trace.runs()
    assert (first.name, first.owner, first.devices) == ("j1", "ann", ("m1/0", "m1/1"))
    assert same(gpu(first), {"m1/0": [97.5, 98.5, NAN, 3.0], "m1/1": [96.0, NAN, NAN, NAN]})
    assert (first.started, first.ended) == (at("16:00"), at("16:04"))
    assert same(gpu(second), {"m2/0": [0.0, NAN, NAN, 41.0]})
    assert (again.name, again.ended, again.first_start) == ("j2#2", None, at("16:00"))
    assert (trace.rows, trace.bad_count) == (9, 1)
    assert [(bad.line, bad.why) for bad in trace.bad] == [(9, "'forty' in column gpu_util is not a number")]
    assert [run.name for run in trace.runs()] == ["j1", "j2", "j2#2"], "a second time"


def test_duty_cycles_of_containers_with_start_and_end() -> None:
    trace = example("duty-cycle.csv")
    train, chat = trace.runs()
    assert trace.signals == {Signal.GPU, Signal.CPU, Signal.NETWORK}
    assert (train.name, train.class_, train.namespace, dict(train.labels)) == (
        "lab/train-a",
        "managed",
        "lab",
        {"team": "vision"},
    )
    assert (train.started, train.ended) == (at("08:00"), at("08:25"))
    gpus, cpus, network = (list(one.minutes) for one in train.series)
    assert gpus[:10] == [93.0] * 5 + [0.0] * 5
    assert all(isnan(value) for value in gpus[10:])
    assert (cpus[0], network[0], network[5]) == (350.0, 100_000.0, 10.0)
    assert (chat.started, chat.ended) == (datetime(2026, 1, 5, 7, 43, 20, tzinfo=UTC), None)
    assert chat.series[0].start == at("08:00"), "the trace begins with its first row"
    assert [bad.why for bad in trace.bad] == ["'1.7' in column duty_cycle is above 100 percent"]


def test_a_dump_of_nvidia_smi() -> None:
    trace = example("nvidia-smi.csv")
    busy, free = trace.runs()
    assert busy.started == at("08:00")
    assert same(gpu(busy), {busy.name: [90.0, NAN, 7.0]})
    assert same(gpu(free), {free.name: [NAN, NAN, 0.0]}), "a reading that is no number: the minute is not measured"
    assert [bad.line for bad in trace.bad] == [9], "a repeated header is not bad, half a line is"


def test_a_dump_of_dcgmi() -> None:
    trace = example("dcgmi-dmon.txt")
    first, second = trace.runs()
    assert same(gpu(first), {"GPU 0": [50.0, 0.0]})
    assert same(gpu(second), {"GPU 1": [NAN, NAN]})
    assert [(bad.line, bad.why) for bad in trace.bad] == [(10, "it has 3 fields, the header has 4")]


def test_rows_in_any_order_and_more_than_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "CHUNK", 7)
    rows = [f"{minute * 60},w{work},ann,{work + minute % 50}" for minute in range(40) for work in range(3)]
    trace = table(tmp_path, "at,name,user,use", *reversed(rows))
    runs = {run.name: gpu(run) for run in trace.runs()}
    assert runs == {f"w{w}": {f"w{w}/0": [float(w + m) for m in range(40)]} for w in range(3)}


@pytest.mark.parametrize("ends", [("", "120"), ("120", ""), ("120", "", ""), ("240", "", "120")])
def test_a_row_without_an_end_does_not_hide_an_end_that_another_row_has(tmp_path: Path, ends: tuple[str, ...]) -> None:
    """As where a job was exported while it ran and again when it was over. Of two ends the later counts."""
    mapping = MAPPING + "start: begin\nend: end\n"
    rows = [f"{60 * number},a,ann,50,0,{end}" for number, end in enumerate(ends)]
    trace = table(tmp_path, "at,name,user,use,begin,end", *rows, "300,b,ann,1,0,", mapping=mapping)
    first, other = trace.runs()
    assert (first.name, first.ended) == ("a", datetime.fromtimestamp(max(int(end) for end in ends if end), UTC))
    assert (other.name, other.ended) == ("b", None)


def test_one_row_for_each_signal(tmp_path: Path) -> None:
    mapping = """\
time: {column: at, format: epoch}
workload: name
signal: what
values:
  gpu: {column: value, unit: ratio, when: duty}
  terminal: {column: value, unit: flag, when: keys}
"""
    rows = ("60,a,duty,0.5", "60,a,keys,3", "60,a,fan,77", "120,a,duty,0")
    assert table(tmp_path, "at,name,what,value", rows[0], mapping=mapping).signals == {Signal.GPU}
    (run,) = table(tmp_path, "at,name,what,value", *rows, mapping=mapping).runs()
    assert [(one.signal, one.device, len(one.minutes)) for one in run.series] == [
        (Signal.GPU, "a/0", 2),
        (Signal.TERMINAL, "", 2),
    ]
    assert (list(run.series[0].minutes), run.series[1].minutes[0]) == ([50.0, 0.0], 1.0)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("60,a,ann", "it has 3 fields, the header has 4"),
        ("soon,a,ann,1", "'soon' in column at is not a number"),
        ("-60,a,ann,1", "'-60' in column at is not between 1970 and 2100"),
        ("60,,ann,1", "it has no workload"),
        ("60,a,ann,-1", "'-1' in column use is negative"),
        ("60,a,ann,101", "'101' in column use is above 100 percent"),
        ("60,a,ann,1e999", "'1e999' in column use is out of range"),
        ('60,"a,ann,1', "its quotes cannot be read: unexpected end of data"),
        ("60,good,bob,1", "'good' is of 'bob' here and of 'ann' in an earlier row; "),
        (f"60,{'a' * LINE_MAX},ann,1", f"it has more than {LINE_MAX} characters"),
    ],
)
def test_a_bad_row_is_named_and_costs_only_itself(tmp_path: Path, row: str, why: str) -> None:
    trace = table(tmp_path, "at,name,user,use", "0,good,ann,1", row, "60,good,ann,2")
    assert trace.bad_count == 1
    assert trace.bad[0].line == 3
    assert trace.bad[0].why.startswith(why)
    assert [gpu(run) for run in trace.runs()] == [{"good/0": [1.0, 2.0]}]


def test_a_row_with_a_huge_label_is_bad_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    """20,000 such rows, 18 MB when packed, took all memory."""
    rows = (
        "name,user,at,use,team",
        "a,ann,1767610800,5,nlp",
        f"a,ann,1767610860,5,{'x' * 1001}",
        f"b,ann,1767610860,5,{'x' * 1001}",
    )
    found = table(tmp_path, *rows, mapping=MAPPING + "labels: {team: team}\n")
    assert [row.words for row in found.bad] == [
        f"line {number}: its label team has more than 1000 characters" for number in (3, 4)
    ]
    assert [run.name for run in found.runs()] == ["a"]


def test_each_of_the_many_runs_of_one_workload_has_a_name_of_its_own() -> None:
    taken = {"a", "a#3"}
    assert [spools.unique("a", taken, number) for number in (2, 3, 4)] == ["a#2", "a#4", "a#5"]


def test_all_bad_rows_are_counted_and_the_first_hundred_kept(tmp_path: Path) -> None:
    trace = table(tmp_path, "at,name,user,use", "0,a,ann,1", *["60,a,ann,?"] * 250)
    assert (trace.bad_count, len(trace.bad), trace.bad[-1].line) == (250, 100, 102)


def test_an_hour_that_happens_twice_is_not_guessed(tmp_path: Path) -> None:
    mapping = MAPPING.replace("format: epoch", 'format: "%Y-%m-%d %H:%M", zone: Europe/Berlin')
    rows = ("2026-10-25 01:59,a,ann,1", "2026-10-25 02:30,a,ann,1", "2026-10-25 03:00,a,ann,1")
    trace = table(tmp_path, "at,name,user,use", *rows, mapping=mapping)
    assert [bad.why for bad in trace.bad] == [
        "'2026-10-25 02:30' in column at is ambiguous: the clock was changed in that hour"
    ]
    assert trace.end - trace.begin == timedelta(minutes=122), "two hours and two minutes"


def test_gzip_and_rows_outside_of_the_wanted_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(b"at,name,user,use\n0,a,ann,1\n86400,a,ann,2\n172800,a,ann,3\n"))
    mapping = MAPPING + "since: 1970-01-02T00:00:00Z\nuntil: 1970-01-03T00:00:00Z\n"
    trace = open_table(path, parse_mapping(mapping, "mapping.yaml"))
    assert ([gpu(run) for run in trace.runs()], trace.bad_count) == ([{"a/0": [2.0]}], 2)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UsageError, match="it is not complete, or not gzip"):
        open_table(path, parse_mapping(mapping, "mapping.yaml"))


def test_the_spool_is_private_and_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trace = table(tmp_path, "at,name,user,use", "0,a,ann,1")
    (folder,) = tmp_path.glob("gpukeeper-trace-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    child = os.fork()
    if child == 0:  # reads on its own connection, and removes nothing
        found = [run.name for run in trace.runs()]
        trace.close()
        os._exit(0 if found == ["a"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [run.name for run in trace.runs()] == ["a"]
    trace.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("workload: name", "workload: nameless"),
            "`workload` names 'nameless'. Nothing was read. It has: at, name, user, use",
        ),
        (("unit: percent", "unit: bytes"), "`values.gpu.unit` must be percent or ratio, not bytes"),
        (("unit: percent", "unit: furlong"), "Invalid enum value 'furlong' - at `values.SIGNAL.unit`"),
        (("owner: user", "owned: user"), "Object contains unknown field `owned`"),
        (("gpu:", "cpu:"), "`values` has no `gpu`"),
        (
            ("format: epoch", "format: '%H:%M', zone: UTC"),
            "`time.format` '%H:%M' is not a format of strptime with a date",
        ),
        (("format: epoch", "format: '%Y-%m-%d %H:%M'"), "`time.zone` is missing"),
        (("format: epoch", "format: iso, zone: Mars/Olympus"), "`time.zone` 'Mars/Olympus' is not known"),
        (("1h", "soon"), "`new_run_after` is not a duration"),
        (("1h", "1h\nevery: 90s"), "`every` must be whole minutes"),
        (("1h", "1h\nsignal: user"), "`values.gpu.when` and `signal` must both be there"),
        (("1h", "1h\nuntil: tomorrow"), "`until` is not a time"),
        (("time:", "time: ["), "mapping.yaml:2: this is not valid YAML"),
    ],
)
def test_a_mapping_that_cannot_be_used_is_explained(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(UsageError) as error:
        table(tmp_path, "at,name,user,use", "0,a,ann,1", mapping=MAPPING.replace(*change, 1))
    assert words in str(error.value)


def test_a_table_without_a_usable_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no row that can be used \(1 rows\). The first bad one: line 2: '\?' in"):
        table(tmp_path, "at,name,user,use", "0,a,ann,?")


def test_a_wrong_year_is_an_error_and_not_a_long_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="from 1970-01-01 to 2026-01-05; some have a wrong time"):
        table(tmp_path, "at,name,user,use", "0,a,ann,1", f"{at('00:00').timestamp():.0f},a,ann,1")
