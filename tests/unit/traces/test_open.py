"""Which source a word means."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.ledger.journal import open_ledger
from gpukeeper.model.errors import UsageError
from gpukeeper.traces.open import open_trace

EXAMPLES = Path(__file__).parents[3] / "examples" / "traces"


def test_each_known_word_opens_its_source() -> None:
    assert open_trace("synthetic:7/3/2").source == "synthetic:7 (3 workloads, 2 days)"
    table = open_trace(str(EXAMPLES / "duty-cycle.csv"), EXAMPLES / "duty-cycle.yaml")
    assert [run.name for run in table.runs()] == ["lab/train-a", "web/chat"]


@pytest.mark.parametrize(
    ("spec", "mapping", "words"),
    [
        ("synthetic:soon", None, '"synthetic:soon" needs a seed'),
        ("synthetic:1", Path("x.yaml"), "A trace from synthetic needs no mapping"),
        (str(EXAMPLES / "duty-cycle.csv"), None, "duty-cycle.csv needs --mapping FILE"),
        (str(EXAMPLES / "duty-cycle.csv"), Path("no.yaml"), "The mapping file no.yaml cannot be read: No such file"),
        (str(EXAMPLES), EXAMPLES / "duty-cycle.yaml", "traces cannot be read: Is a directory"),
        ("prometheus/many:http://prometheus:9090", None, '"many" is no number of days'),
        ("prometheus:http://x", Path("x.yaml"), "A trace from prometheus needs no mapping"),
        ("a.parquet", None, '"a.parquet" is not a trace: there is no such file'),
        ("carrier pigeon", None, '"carrier pigeon" is not a trace: there is no such file. Known are tables'),
    ],
)
def test_anything_else_is_explained(spec: str, mapping: Path | None, words: str) -> None:
    with pytest.raises(UsageError) as error:
        open_trace(spec, mapping)
    assert words in str(error.value)


def test_a_ledger_without_measurements_says_who_records_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    open_ledger(tmp_path / "ledger.db", write=True).close()
    with pytest.raises(UsageError, match="has no measurements of GPUs"):
        open_trace(f"ledger:{tmp_path}")
