"""Metrics as a file, for the textfile collector of a node_exporter: for use with cron instead of the daemon.

Readers see the file before or the file after, never a half of one. Counters go on from where the file stands.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.telemetry.machine import MachineFacts
from gpukeeper.interfaces.telemetry.metrics import Metrics
from gpukeeper.interfaces.telemetry.series import COUNTED_BY
from gpukeeper.model.errors import UsageError
from gpukeeper.wiring.session import Session

SUFFIX = ".prom"  # a node_exporter reads no other
EVERYBODY_READS = 0o644


def check(path: Path) -> None:
    """Checked first, so that a wrong path does not fail only after the pass."""
    if path.suffix != SUFFIX:
        raise UsageError(
            f"--textfile {path}: node_exporter reads only files with the suffix {SUFFIX}. Nothing was done."
        )
    if not path.parent.is_dir():
        raise UsageError(f"--textfile {path}: the directory {path.parent} does not exist. Nothing was done.")


def write(path: Path, session: Session, reports: Iterable[PassReport], machine: MachineFacts | None = None) -> None:
    metrics = Metrics(session.keeper.clock, session.keeper.platforms, elects=False, process=False)
    _go_on_from(path, metrics)
    for report in reports:
        metrics.passed(report)
    metrics.machine = machine
    try:
        _replace(path, metrics.text())
    except OSError as error:
        raise UsageError(f"--textfile {path} could not be written: {error}. The pass itself was completed.") from error


def _go_on_from(path: Path, metrics: Metrics) -> None:
    """If the file cannot be read, counters start at 0, as after a restart."""
    with contextlib.suppress(OSError, ValueError):
        before = list(text_string_to_metric_families(path.read_text()))
        for sample in (one for family in before for one in family.samples):
            labels = COUNTED_BY.get(sample.name)
            if labels is not None and set(sample.labels) == set(labels):
                metrics.add(sample.name, *(sample.labels[label] for label in labels), by=sample.value)


def _replace(path: Path, text: bytes) -> None:
    number, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), EVERYBODY_READS)
        os.replace(made, path)  # noqa: PTH105 - both are names
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(made)  # noqa: PTH108
        raise
