"""Pictures: what is drawn is where it belongs, also at the edges of the data."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from gpukeeper.acceptance.reports import plots
from gpukeeper.model.gpu import Grade, Reading
from tests.unit.acceptance.reports import examples

GOOD = plots.PlotRow("GPU 0", (10.0, 11.0, 12.0), 11.0, Grade.PASS)


def bars(picture: str) -> list[float]:
    return [float(x) for x in re.findall(r'<rect x="([\d.]+)"[^>]*class="value', picture)]


def test_a_slower_gpu_is_drawn_further_left_and_below_its_floor() -> None:
    slow = plots.PlotRow("GPU 1", (7.0,), 7.0, Grade.FAIL)
    picture = plots.strips("gemm", "TFLOP/s", [GOOD, slow], {"floor": 9.0})
    good, bad = bars(picture)
    floor = float(re.findall(r'x1="([\d.]+)"[^>]*class="mark floor"', picture)[0])
    assert bad < floor < good


@pytest.mark.parametrize(
    "picture",
    [
        plots.strips("one figure", "", [plots.PlotRow("x", (), 0.0, Grade.PASS)], {}),
        plots.strips("all equal", "GB/s", [GOOD, GOOD], {"floor": 11.0}),
        plots.strips("not a number", "GB/s", [GOOD], {"floor": float("nan"), "reference": float("inf")}),
        plots.matrix("none", [], [], {}, "GB/s"),
        plots.matrix("one", ["a"], ["b"], {(0, 0): 5.0}, "GB/s"),
        plots.curves("one size", "GB/s", {"all_reduce": [(8.0, 0.0)]}),
        plots.steps("no steps", {}, "ms"),
        plots.steps("of different length", {"0": [1.0, 2.0, 3.0], "1": [1.0], "2": []}, "ms"),
        plots.timeline("nothing measured", [Reading(uuid="x", at=0.0), Reading(uuid="x", at=0.0)]),
        plots.timeline("as usual", examples.readings("x", hot=True)),
    ],
    ids=lambda picture: re.search("<title>(.*?)</title>", picture)[1],  # type: ignore[index]
)
def test_every_picture_is_well_formed_with_no_point_outside_the_numbers(picture: str) -> None:
    ET.fromstring(picture)
    assert "nan" not in re.sub("<(title|desc).*?</", "", picture).replace('aria-label="not a number', "")
    assert 'aria-label="' in picture


def test_moments_with_slowed_clocks_are_striped_and_counted() -> None:
    hot = examples.readings("x", hot=True)
    assert plots.held_back(hot)["hardware thermal slowdown"] == pytest.approx(15.5, abs=1)
    assert 'class="held bad"' in plots.timeline("hot", hot)
    assert 'class="held bad"' not in plots.timeline("cool", examples.readings("x"))


def test_the_gravest_reason_names_the_moment() -> None:
    assert plots.reason_of(0x44) == ("hardware thermal slowdown", "bad")
    assert plots.reason_of(0x4) == ("power cap", "cap")
    assert plots.reason_of(0x1) == ("", ""), "an idle GPU is not held back"
    assert plots.reason_of(None) == ("", "")


def test_a_peak_is_not_lost_when_a_day_is_drawn() -> None:
    day = [Reading(uuid="x", at=float(n), temperature_c=90.0 if n == 40_001 else 50.0) for n in range(86_400)]
    picture = plots.timeline("a day", day)
    assert "50 to" in picture
    assert "90 °C" in picture
    heights = {pair.split(",")[1] for path in re.findall('points="(.*?)"', picture) for pair in path.split()}
    assert len(heights) > 1
    assert len(picture) < 60_000
