"""An interrupted backtest: computed results are taken from the file, but only if nothing that decides them changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from gpukeeper.backtest.comparison import AT_ONCE, Judge, Where, compare
from gpukeeper.config.load import load_policy
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.lifecycle.replay import GIVEN, Variant
from gpukeeper.lifecycle.replay_outcome import Judging
from gpukeeper.model.errors import UsageError
from gpukeeper.model.series import RecordedRun
from gpukeeper.traces.synthetic import SyntheticTrace

VARIANTS = (GIVEN, Variant(timedelta(hours=5), 2.0))
RUNS = 3 * AT_ONCE
POLICY = load_policy(None).policy


class Interrupted(Exception):
    pass


class Stopping(SyntheticTrace):
    """Ends in the middle, as a terminal that is closed."""

    def runs(self) -> Iterator[RecordedRun]:
        for number, run in enumerate(super().runs()):
            if number == 2 * AT_ONCE:
                raise Interrupted
            yield run


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that were really replayed."""
    names: list[str] = []
    judged: Callable[..., object] = Judge.judged

    def counted(judge: Judge, run: RecordedRun) -> object:
        names.append(run.name)
        return judged(judge, run)

    monkeypatch.setattr(Judge, "judged", counted)
    return names


def trace(of: type[SyntheticTrace] = SyntheticTrace, seed: int = 7) -> SyntheticTrace:
    return of(seed, RUNS, 3)


def test_an_interrupted_backtest_goes_on_where_it_stopped(tmp_path: Path, replayed: list[str]) -> None:
    where = Where(resume=tmp_path / "half.results")
    expected = compare(trace(), POLICY, VARIANTS, Judging())
    with pytest.raises(Interrupted):
        compare(trace(Stopping), POLICY, VARIANTS, Judging(), where)
    replayed.clear()
    assert compare(trace(), POLICY, VARIANTS, Judging(), where) == expected
    assert replayed == [run.name for run in trace().runs()][2 * AT_ONCE :]
    replayed.clear()
    assert compare(trace(), POLICY, VARIANTS, Judging(), where) == expected
    assert replayed == []


@pytest.mark.parametrize("changed", ["policy", "variants", "judging", "trace"])
def test_other_results_are_not_taken(tmp_path: Path, replayed: list[str], changed: str) -> None:
    where = Where(resume=tmp_path / "results")
    compare(trace(), POLICY, VARIANTS, Judging(), where)
    replayed.clear()
    policy, variants, judging, other = POLICY, VARIANTS, Judging(), trace()
    match changed:
        case "policy":
            policy = msgspec.structs.replace(policy, activity=msgspec.structs.replace(policy.activity, gpu=9.0))
        case "variants":
            variants = (GIVEN, Variant(timedelta(hours=4), 2.0))
        case "judging":
            judging = Judging(horizon=timedelta(days=1))
        case _:
            other = trace(seed=8)
    found = compare(other, policy, variants, judging, where)
    assert len(replayed) == RUNS
    assert found == compare(other, policy, variants, judging)


def test_a_damaged_part_is_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "results"
    expected = compare(trace(), POLICY, VARIANTS, Judging(), Where(resume=path))
    with sqlite3.connect(path) as file:
        file.execute("UPDATE parts SET results = x'c1'")
    assert compare(trace(), POLICY, VARIANTS, Judging(), Where(resume=path)) == expected


def test_a_file_of_something_else_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a file of a user, of more than a few bytes, and not a database at all\n" * 50)
    (tmp_path / "state").mkdir(mode=0o700)
    open_ledger(tmp_path / "state" / "ledger", write=True).close()
    for path in (tmp_path / "text", tmp_path / "state" / "ledger"):
        before = path.read_bytes()
        with pytest.raises(UsageError, match="Name another file"):
            compare(trace(), POLICY, VARIANTS, Judging(), Where(resume=path))
        assert path.read_bytes() == before
    with pytest.raises(UsageError, match="cannot be used"):
        compare(trace(), POLICY, VARIANTS, Judging(), Where(resume=tmp_path / "none" / "results"))


def test_a_file_that_others_can_change_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results"
    compare(trace(), POLICY, VARIANTS, Judging(), Where(resume=path))
    path.chmod(0o666)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="can be changed by other users"):
        compare(trace(), POLICY, VARIANTS, Judging(), Where(resume=path))
    assert path.read_bytes() == before


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """SQLite reads a journal beside the file, whoever wrote it: results that were never computed."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(UsageError, match=r"can be changed by other users.*may be written to by others"):
        compare(trace(), POLICY, VARIANTS, Judging(), Where(resume=shared / "x"))
    assert not list(shared.iterdir())
