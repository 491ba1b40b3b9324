"""The trace that a word or a path names."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpukeeper.clients.prometheus import Prometheus
from gpukeeper.ledger.files import LEDGER_FILE, ledger_path
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.series import Trace
from gpukeeper.traces.parquet import SUFFIXES, open_parquet
from gpukeeper.traces.prometheus import read_prometheus
from gpukeeper.traces.recorded import RecordedTrace
from gpukeeper.traces.sacct import add_jobs
from gpukeeper.traces.spool import Spool
from gpukeeper.traces.synthetic import SyntheticTrace
from gpukeeper.traces.table import open_table, read_mapping

SYNTHETIC, LEDGER, PROMETHEUS = "synthetic", "ledger", "prometheus"
DAYS = 14  # of a Prometheus
SLOW = timedelta(minutes=1)  # for one slice of its history
KNOWN = (
    "Known are tables (CSV, Parquet) with a mapping file, such as minutes.csv --mapping minutes.yaml; ledger, or "
    "ledger:DIRECTORY; prometheus:URL, or prometheus/DAYS:URL; and synthetic:SEED."
)


def open_trace(spec: str, mapping: Path | None = None) -> Trace:
    """Raises UsageError for what is no trace."""
    word, _, rest = spec.partition(":")
    kind, _, more = word.partition("/")
    if kind in {SYNTHETIC, LEDGER, PROMETHEUS} and mapping is not None:
        raise UsageError(f"A trace from {kind} needs no mapping. Nothing was read. Leave {mapping} out.")
    if word == SYNTHETIC:
        return _synthetic(rest)
    if word == LEDGER:
        return RecordedTrace(Path(rest) / LEDGER_FILE if rest else ledger_path())
    if kind == PROMETHEUS and rest:
        return _prometheus(more, rest)
    path = Path(spec)
    if path.exists():
        return _table(path, mapping)
    raise UsageError(f'"{spec}" is not a trace: there is no such file. {KNOWN}')


def _table(path: Path, mapping: Path | None) -> Trace:
    if mapping is None:
        raise UsageError(
            f"{path} needs --mapping FILE, which says what its columns mean. See docs/reference/traces.md; "
            "examples/traces has files to begin with."
        )
    read, spool = read_mapping(mapping), Spool()
    if read.sacct is not None:
        add_jobs(spool, mapping, read.sacct)
    return (open_parquet if path.suffix in SUFFIXES else open_table)(path, read, spool)


def _prometheus(days: str, url: str) -> Trace:
    """The last days, until now. Not within an event loop."""
    try:
        count = reading.whole(days) if days else DAYS
    except ValueError:
        count = 0
    if not 1 <= count <= 3660:
        raise UsageError(f'"{days}" is no number of days. Nothing was read. Write prometheus/30:URL for 30 days.')
    until = datetime.now(UTC)
    history = Prometheus(url, os.environ, deadline=SLOW)
    return asyncio.run(read_prometheus(history, url.rpartition("@")[2], until - timedelta(days=count), until))


def _synthetic(words: str) -> SyntheticTrace:
    """SEED, or SEED/WORKLOADS/DAYS."""
    try:
        numbers = [reading.whole(one) for one in words.split("/")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3:
        raise UsageError(
            f'"synthetic:{words}" needs a seed: synthetic:1, or with workloads and days: synthetic:1/500/30.'
        )
    return SyntheticTrace(*numbers)
