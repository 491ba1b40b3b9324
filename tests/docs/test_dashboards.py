"""The Grafana dashboards in deploy/grafana: as generated, complete, and about series that exist."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import pytest

from gpukeeper.interfaces.telemetry.series import COUNTERS, GAUGES
from tests.docs.markdown import ROOT

FOLDER = ROOT / "deploy" / "grafana"


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("dashboards", FOLDER / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DASHBOARDS = generator()


@pytest.mark.parametrize("name", DASHBOARDS.DASHBOARDS)
def test_the_file_is_as_generated(name: str) -> None:
    advice = "write it again: python deploy/grafana/dashboards.py"
    assert (FOLDER / f"{name}.json").read_text() == DASHBOARDS.text(name), advice


def test_there_are_four_and_no_other() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {"fleet", "ray-and-disk", "acceptance", "gpukeeper"}


@pytest.mark.parametrize("name", DASHBOARDS.DASHBOARDS)
def test_panels_do_not_overlap_and_ask_for_series_that_exist(name: str) -> None:
    panels = json.loads((FOLDER / f"{name}.json").read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    asked = {
        found for panel in panels for one in panel["targets"] for found in re.findall(r"\bgpukeeper_\w+", one["expr"])
    }
    assert asked <= set(GAUGES) | set(COUNTERS)
    assert all(panel["description"].endswith(".") and panel["title"] for panel in panels)
