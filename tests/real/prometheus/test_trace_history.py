"""Fourteen hours of history in a real Prometheus, read as a trace: old and new names of DCGM, a gap, and the end of a
workload. The history is written as blocks; nothing is scraped."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from math import isnan
from pathlib import Path

import pytest

from gpukeeper.traces.open import open_trace
from tests.engines import has_prometheus, require
from tests.real.prometheus.test_dashboards import prometheus

HOURS, EVERY = 14, 30  # seconds between two samples
BUSY, GAP, ENDED = 8 * 60, range(100, 110), 10 * 60  # minutes


def history(begin: datetime) -> str:
    """Of `old` with the old names, busy at first; of `new` with the new names, which ends."""
    lines: dict[str, list[str]] = {}
    for number in range(HOURS * 3600 // EVERY):
        at, minute = begin.timestamp() + number * EVERY, number * EVERY // 60
        if minute in GAP:
            continue
        old = '{instance="n1:9400",UUID="GPU-1",namespace="lab",pod="old"}'
        rows = {"DCGM_FI_DEV_GPU_UTIL": 93 if minute < BUSY else 0, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 9 * number}
        for name, value in rows.items():
            lines.setdefault(name, []).append(f"{name}{old} {value} {at:.3f}\n")
        if minute < ENDED:
            new = '{instance="n2:9400",UUID="GPU-2",exported_namespace="lab",exported_pod="new",pod="exporter"}'
            rows = {"DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": 0.5, "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL": 9 * number}
            for name, value in rows.items():
                lines.setdefault(name, []).append(f"{name}{new} {value} {at:.3f}\n")
    return "".join(line for family in lines.values() for line in family) + "# EOF\n"


def wait_until_ready(url: str, log: Path) -> None:
    for _try in range(300):
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.mark.smoke
def test_history_is_read_in_slices_as_runs(tmp_path: Path) -> None:
    require("prometheus", has_prometheus())
    begin = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=HOURS + 2)
    (tmp_path / "history.om").write_text(history(begin))
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", tmp_path / "history.om", tmp_path / "data"]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    with prometheus(tmp_path) as url:
        wait_until_ready(url, tmp_path / "log")
        trace = open_trace(f"prometheus/1:{url}")
    new, old = sorted(trace.runs(), key=lambda run: run.name)
    assert (trace.begin, trace.end) == (begin, begin + timedelta(hours=HOURS))
    assert (old.name, old.started, old.ended, old.devices) == ("lab/old", begin, None, ("GPU-1",))
    minutes = old.series[0].minutes
    assert {value for value in minutes[:BUSY] if not isnan(value)} == {93.0}
    assert all(isnan(minutes[minute]) for minute in GAP)
    assert {value for value in minutes[BUSY + 10 :] if not isnan(value)} == {0.0}
    assert sum(map(isnan, minutes)) < len(GAP) + 10, "nothing is lost where two slices meet"
    assert (new.name, new.ended) == ("lab/new", begin + timedelta(minutes=ENDED))
    assert {value for value in new.series[0].minutes if not isnan(value)} == {50.0}
