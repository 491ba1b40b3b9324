"""Starts and ends of Slurm jobs, joined with what a table measured of them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from gpukeeper.model.errors import UsageError
from gpukeeper.traces.open import open_trace
from gpukeeper.traces.sacct import read_sacct
from gpukeeper.traces.spool import Spool

EXAMPLES = Path(__file__).parents[3] / "examples" / "traces"
HEADER = "JobID|User|Partition|Start|End|State|AllocTRES\n"


def at(hour: int, minute: int, second: int = 0) -> datetime:
    return datetime(2026, 1, 5, hour, minute, second, tzinfo=UTC)


def test_jobs_and_their_measurements() -> None:
    trace = open_trace(str(EXAMPLES / "slurm.csv"), EXAMPLES / "slurm.yaml")
    ended, runs, unmeasured = trace.runs()
    assert (ended.name, ended.owner, dict(ended.labels)) == ("7", "ann", {"partition": "gpu"})
    assert (ended.started, ended.ended, ended.devices) == (at(8, 0), at(8, 4, 30), ("g1/0",))
    assert (list(ended.series[0].minutes[:2]), len(ended.series[0].minutes)) == ([88.0, 90.0], 5)
    assert (runs.name, runs.started, runs.ended) == ("8_2", at(7, 30), None)
    assert (unmeasured.name, unmeasured.series, len(unmeasured.devices)) == ("11", (), 4)
    assert [(bad.line, bad.why) for bad in trace.bad] == [
        (7, "slurm-sacct.txt: job 10 has no start (PENDING)"),
        (9, "slurm-sacct.txt: job 12 has no end, and its state is FAILED"),
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("7|ann|gpu|x", "it has 4 fields, the header has 7"),
        ("job|ann|gpu|1|2|COMPLETED|gres/gpu=1", "'job' is not the id of a job"),
        ("7|ann|gpu|soon|2|COMPLETED|gres/gpu=1", "'soon' in column Start is not a time"),
        ("7|ann|gpu|200|100|COMPLETED|gres/gpu=1", "job 7 ends before it starts"),
        ("7|ann|gpu|2026-10-25T02:30:00|Unknown|RUNNING|gres/gpu=1", "'2026-10-25T02:30:00' in column Start is ambig"),
        ("1|eve|gpu|100|200|COMPLETED|gres/gpu=1", "job 1 has another user than in an earlier row"),
    ],
)
def test_a_bad_line_is_named(line: str, why: str) -> None:
    spool = Spool()
    lines = [HEADER, "1|ann|gpu|60|120|COMPLETED|gres/gpu=1\n", line + "\n"]
    assert read_sacct(lines, ZoneInfo("Europe/Berlin"), spool, "jobs") == 1
    assert [bad.line for bad in spool.bad.kept] == [3]
    assert spool.bad.kept[0].why.startswith(f"jobs: {why}")
    spool.close()


def test_missing_columns_and_a_missing_file_say_the_command(tmp_path: Path) -> None:
    spool = Spool()
    with pytest.raises(UsageError, match=r"does not have the columns User, Start.* Write it with: sacct --allusers"):
        read_sacct(["JobID|End|State|AllocTRES\n"], UTC, spool, "jobs")
    spool.close()
    (tmp_path / "slurm.yaml").write_text((EXAMPLES / "slurm.yaml").read_text())
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        open_trace(str(EXAMPLES / "slurm.csv"), tmp_path / "slurm.yaml")
