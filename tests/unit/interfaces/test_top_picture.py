"""`top` on terminals of different widths: every fact in its place, nothing wider or higher than the screen."""

from __future__ import annotations

from datetime import timedelta

import pytest
from rich.cells import cell_len

from gpukeeper.interfaces.terminal.top_screen import Age, Display, picture, scrolled
from gpukeeper.lifecycle.claims import ClaimState
from gpukeeper.lifecycle.forecast import NextStep
from gpukeeper.model.policy import Mode
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.fleet import TopView
from gpukeeper.views.live import GpuState, GpuTile
from tests.unit.lifecycle.examples import HOUR, MINUTE, NOW

AS_LISTED = Display()
FRESH = Age(timedelta(seconds=2))
TRAIN = GpuTile(
    id="w",
    platform="docker",
    state=GpuState.HELD,
    key="docker/node-3/c0ffee",
    name="host/node-3/gpu-0",
    device="GPU-0",
    place="node-3",
    how=ClaimState.RUNNING,
    holder="docker/node-3/train-7b",
    owner="ann",
    class_="devcontainer",
    since=NOW - 3 * HOUR,
    use=83.4,
    memory_used_mib=72_704,
    memory_total_mib=81_920,
    steps=(NextStep("warn", NOW + 10 * MINUTE, "idle"), NextStep("stop", NOW + 30 * MINUTE, "idle")),
    reason="idle for 20m, allowed 30m",
)
UNMEASURED = GpuTile(
    id="w",
    platform="docker",
    state=GpuState.HELD,
    key="docker/node-3/beef",
    name="host/node-3/gpu-1",
    device="GPU-1",
    place="node-3",
    how=ClaimState.RUNNING,
    holder="docker/node-3/eval",
    owner=Unknown("no label"),
    class_="docker",
    use=Unknown("the driver is silent"),
    reason="kept: GPU use was not measured yet",
)
FREE = GpuTile(
    id="f",
    platform="",
    state=GpuState.FREE,
    key="",
    name="host/node-3/gpu-2",
    device="GPU-2",
    place="node-3",
    how=ClaimState.FREE,
    memory_used_mib=4,
    memory_total_mib=81_920,
)
VIEW = TopView(at=NOW, mode=Mode.ENFORCE, gpus=(TRAIN, UNMEASURED, FREE))


def lines(
    view: TopView | None = VIEW, width: int = 80, height: int = 24, display: Display = AS_LISTED, age: Age = FRESH
) -> list[str]:
    found = picture(view, display, age, width, height).plain.split("\n")
    assert len(found) <= height
    assert all(cell_len(line) <= width for line in found), found
    return found


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_gpu_takes_two_lines_with_what_comes_below_it(width: int) -> None:
    found = lines(width=width)
    assert found[0] == "gpukeeper top  2s old  2 running, 1 free"
    assert found[1].split() == ["GPU", "USE", "MEM", "OWNER", "SINCE", "CLASS"]
    assert found[2].split() == ["gpu-0", "83%", "71/80G", "ann", "3h", "devcontainer"]
    whole = "  train-7b: will be warned in 9m58s, then stopped in 29m58s (idle): idle for 20m, allowed 30m"
    assert found[3] == (whole if width >= len(whole) else whole[: width - 1] + "…")
    assert found[4].split() == ["gpu-1", "?", "?", "?", "-", "docker"]
    assert found[5].startswith("  eval: kept: GPU use was not measured yet")
    assert found[6].split() == ["gpu-2", "-", "0/80G", "-", "-", "free"]
    assert found[-1] == "q quit  s sort (gpu)  r reverse  ↑↓ scroll"


def test_a_wide_terminal_has_one_line_for_each_gpu() -> None:
    found = lines(width=160)
    assert found[1].split()[-3:] == ["HELD", "BY", "NEXT"]
    assert found[2].split()[5:10] == ["devcontainer", "train-7b", "will", "be", "warned"]
    assert "then stopped in 29m58s (idle): idle for 20" in found[2]
    assert found[4].split() == ["gpu-2", "-", "0/80G", "-", "-", "free"]


def test_the_header_shows_how_old_the_data_is_and_that_gathering_hangs() -> None:
    late = Age(timedelta(minutes=3), timedelta(seconds=95), late=True)
    assert lines(age=late)[0].startswith("gpukeeper top  3m old, refreshing for 1m35s")
    assert (
        lines(None, age=Age(None, timedelta(seconds=12), late=True))[0] == "gpukeeper top  no data, refreshing for 12s"
    )
    assert lines(None, age=Age())[1] == "Reading data …"


def test_plan_mode_and_a_pause_are_in_the_header() -> None:
    view = TopView(at=NOW, mode=Mode.PLAN, gpus=(), paused="ann")
    found = lines(view)
    assert found[0] == "gpukeeper top  2s old  mode plan  paused"
    assert "No GPUs found." in found


def test_a_note_and_how_many_more_there_are() -> None:
    view = TopView(
        at=NOW, mode=Mode.ENFORCE, gpus=(FREE,), notes=("host/n: GPUs could not be read (silent)", "another")
    )
    assert lines(view)[-2] == "host/n: GPUs could not be read (silent) (+1: gpukeeper observe)"
    assert lines(view, age=FRESH._replace(problem="the ledger is locked"))[-2].startswith("the ledger is locked (+2")


def test_what_does_not_fit_is_counted_and_reached_by_scrolling() -> None:
    many = TopView(at=NOW, mode=Mode.ENFORCE, gpus=(FREE,) * 30)
    found = lines(many, height=10)
    assert len(found) == 10
    assert found[-1].endswith("0↑ 23↓")
    display = Display()
    for key in ("down", "page down", "up", "nothing"):
        display = scrolled(display, key, 30)
    assert display.first == 8
    assert lines(many, height=10, display=display)[-1].endswith("8↑ 15↓")
    assert scrolled(display, "home", 30).first == 0
    assert scrolled(display._replace(first=29), "page down", 30).first == 29
    assert len(lines(VIEW, height=5)) == 5
    assert lines(VIEW, height=1)


def test_an_old_measurement_is_marked_and_several_places_are_named() -> None:
    old = TopView(at=NOW, mode=Mode.ENFORCE, gpus=(_replaced(TRAIN, use_is_old=True), _replaced(FREE, place="node-4")))
    found = lines(old)
    assert found[2].split()[:2] == ["node-3/gpu-0", "~83%"]
    assert found[4].split()[0] == "node-4/gpu-2"


def test_a_due_act_comes_at_the_next_pass() -> None:
    due = _replaced(TRAIN, steps=(NextStep("stop", None, "max_runtime"),), reason="ran for 2d, allowed 1d")
    assert lines(TopView(at=NOW, mode=Mode.ENFORCE, gpus=(due,)), width=100)[3] == (
        "  train-7b: will be stopped at the next pass (max_runtime): ran for 2d, allowed 1d"
    )


def test_names_cannot_drive_the_terminal_and_wide_letters_keep_the_columns() -> None:
    evil = _replaced(TRAIN, holder="docker/node-3/a\x1b[2Jb", owner="学习学习学习")
    found = lines(TopView(at=NOW, mode=Mode.ENFORCE, gpus=(evil,)), width=60)
    assert "\x1b" not in "".join(found)
    assert cell_len(found[2].partition("3h")[0]) == cell_len(found[1].partition("SINCE")[0])


def _replaced(line: GpuTile, **facts: object) -> GpuTile:
    import msgspec

    return msgspec.structs.replace(line, **facts)
