"""The first page: filters, order, summary of many GPUs, and states that say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from gpukeeper.interfaces.web.app import coming, moment
from gpukeeper.interfaces.web.pages.fleet import SUMMARY_FROM
from gpukeeper.lifecycle.forecast import NOT_UNATTENDED, STAYS_IDLE, NextStep
from gpukeeper.model.decision import Unseen, Verdict
from gpukeeper.model.policy import Mode
from gpukeeper.views.live import Delta, GpuState, GpuTile, MachineView, ShownHold
from tests.unit.interfaces.web.sites import Dashboard, dashboard


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path) as made:
        yield made


def view_of(site: Dashboard) -> MachineView:
    (view,) = site.app.state.site.source.machines.values()
    assert isinstance(view, MachineView)
    return view


def shows(site: Dashboard, view: MachineView) -> None:
    """This from now on, whatever the daemon has."""
    site.app.state.site.source.publishes = False
    head = msgspec.structs.replace(view, gpus=(), workloads=())
    site.call(lambda: site.app.state.site.source.change(Delta(head=head), view))


def many(view: MachineView, count: int) -> MachineView:
    (tile,) = view.gpus
    states = (GpuState.FREE, GpuState.HELD, GpuState.IDLE)
    tiles = tuple(
        msgspec.structs.replace(
            tile,
            id=f"{number:018x}",
            name=f"gpu-{number}",
            place=f"node-{number % 3}",
            owner=("ann", "bob", None)[number % 3],
            state=states[number % 3],
            use=float(number % 100),
        )
        for number in range(count)
    )
    return msgspec.structs.replace(view, gpus=tiles)


def names(page: str) -> list[str]:
    return re.findall(r'<span class="name" title="([^"]+)"', page)


def test_a_tile_has_holder_since_the_next_step_with_a_countdown_and_the_sentence(site: Dashboard) -> None:
    page = site.get("/", "ann").text
    for words in (">train</a>", ">ann</a>", 'data-mode="for"', 'class="next"', 'data-mode="in"', 'class="reason"'):
        assert words in page, words
    assert "shown only to" in site.get("/", "bob").text


def test_many_gpus_are_summarised_by_place_and_opened_one_by_one(site: Dashboard) -> None:
    shows(site, many(view_of(site), SUMMARY_FROM + 100))
    page = site.get("/", "root").text
    assert names(page) == []
    assert "Select one to see its GPUs" in page
    for place in ("node-0", "node-1", "node-2"):
        assert f"place={place}" in page
    assert "Select one to see its GPUs" in site.get("/fleet", "root").text, "what an open page reloads"
    opened = site.get("/?place=node-1", "root").text
    assert len(names(opened)) == 100
    assert "300</b> GPUs, 100 match" in opened


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("owner=ann", 2),
        ("owner=unknown", 2),
        ("state=idle", 2),
        ("platform=docker", 6),
        ("platform=ray", 0),
        ("q=gpu-4", 1),
        ("class=docker", 6),
        ("owner=ann&state=idle", 0),
    ],
)
def test_filters(site: Dashboard, query: str, count: int) -> None:
    shows(site, many(view_of(site), 6))
    page = site.get(f"/?{query}", "root").text
    assert len(names(page)) == count
    assert len(names(site.get(f"/fleet?{query}", "root").text)) == count, "what an open page reloads"
    assert ("No GPU matches these filters" in page) == (count == 0)
    for name, value in (pair.split("=") for pair in query.split("&") if not pair.startswith("q=")):
        if count:
            assert f"<option selected>{value}</option>" in page.partition(f'name="{name}"')[2].partition("</select>")[0]


def test_order(site: Dashboard) -> None:
    shows(site, many(view_of(site), 6))
    assert names(site.get("/?sort=use", "root").text) == [f"gpu-{number}" for number in (5, 4, 3, 2, 1, 0)]
    assert site.get("/?sort=size", "root").status_code == 400
    assert site.get("/?state=gone", "root").status_code == 400
    assert site.get("/?page=0", "root").status_code == 400


def test_many_gpus_can_be_ordered(site: Dashboard) -> None:
    shows(site, many(view_of(site), SUMMARY_FROM + 1))
    assert names(site.get("/?sort=use", "root").text)[0] == "gpu-199"


def test_states_say_what_to_do(site: Dashboard) -> None:
    view = view_of(site)
    place = msgspec.structs.replace(
        view.places[0], unseen=(Unseen("docker/node-1", "did not answer"),), breaker="41 of 60 at once"
    )
    shows(site, msgspec.structs.replace(view, paused="move", places=(place,), gpus=()))
    page = site.get("/", "root").text
    for words in ("gpukeeper resume", "gpukeeper doctor", "Read the plan", "No GPU is known here", "could not be read"):
        assert words in page, words


def test_what_is_not_measured_is_said_with_what_to_do(site: Dashboard) -> None:
    page = site.get("/", "root").text
    assert "The use of 1 held GPU is not measured" in page
    assert "not measured</span>" in page


def test_before_the_first_pass_the_page_says_so(site: Dashboard) -> None:
    site.app.state.site.source.machines.clear()
    for address in ("/", "/workloads"):
        assert "The daemon has not sent anything yet" in site.get(address).text, address


def test_a_tile_without_a_next_step_says_so(site: Dashboard) -> None:
    view = view_of(site)
    (tile,) = view.gpus
    shows(site, msgspec.structs.replace(view, gpus=(msgspec.structs.replace(tile, steps=()),)))
    assert isinstance(tile, GpuTile)
    assert "no action is planned" in site.get("/", "root").text


def test_all_pages_say_what_comes_on_which_condition_and_that_mode_plan_does_nothing(site: Dashboard) -> None:
    view = view_of(site)
    stop = NextStep("stop", view.at + timedelta(hours=3), "idle", STAYS_IDLE, would=True)
    warn = msgspec.structs.replace(stop, action="warn", at=None)
    (tile,), rows = view.gpus, view.workloads
    lines = tuple(msgspec.structs.replace(one, steps=(warn, stop)) if one.key == tile.key else one for one in rows)
    plan = msgspec.structs.replace(view.policy, mode=Mode.PLAN)
    shown = msgspec.structs.replace(view, policy=plan, workloads=lines)
    shows(site, msgspec.structs.replace(shown, gpus=(msgspec.structs.replace(tile, steps=(warn, stop)),)))
    words = str(coming((warn, stop)))
    assert "would be warned" in words
    for address in ("/", "/workloads", f"/workload/{tile.workload}"):
        assert words in site.get(address, "ann").text, address
    assert NOT_UNATTENDED.replace("'", "&#39;") in site.get(f"/workload/{tile.workload}", "ann").text


def test_pages_name_each_time_once_because_those_in_a_reason_are_of_the_last_pass(site: Dashboard) -> None:
    view = view_of(site)
    warn = NextStep("warn", None, "idle", STAYS_IDLE)
    why = "idle for 1h1m, allowed 5h; will be stopped at 2026-03-10 13:00 UTC (in 3h59m), then deleted 1d later. Use it"
    rows = tuple(msgspec.structs.replace(one, steps=(warn,), next="warn", reason=why) for one in view.workloads)
    tiles = tuple(msgspec.structs.replace(one, steps=(warn,), reason=why) for one in view.gpus)
    shows(site, msgspec.structs.replace(view, gpus=tiles, workloads=rows))
    for address in ("/", "/workloads", "/plan", f"/workload/{tiles[0].workload}"):
        page = site.get(address, "ann").text
        assert "idle for 1h1m, allowed 5h" in page, address
        assert "in 3h59m" not in page, address


def test_the_plan_page_has_what_is_only_reported_as_the_command_has(site: Dashboard) -> None:
    view = view_of(site)
    assert "Only reported" not in site.get("/plan", "ann").text
    facts = {"next": "report", "verdict": Verdict.REPORT, "rule": "max_runtime", "reason": "ran for 3d, allowed 2d"}
    rows = tuple(msgspec.structs.replace(one, steps=(), **facts) for one in view.workloads)
    shows(site, msgspec.structs.replace(view, workloads=rows))
    table = site.get("/plan", "ann").text.partition("<caption>Only reported</caption>")[2].partition("</table>")[0]
    assert rows[0].path in table
    assert "<td>max_runtime</td><td>ran for 3d, allowed 2d</td>" in table


def test_tile_and_workload_page_show_the_hold_and_what_it_does_not_suspend(site: Dashboard) -> None:
    view = view_of(site)
    (tile,), until = view.gpus, view.at + timedelta(hours=3)
    held = {"held_by": "eve", "hold_until": until, "hold_but_max_runtime": True}
    rows = tuple(msgspec.structs.replace(one, **held) if one.key == tile.key else one for one in view.workloads)
    tiles = (msgspec.structs.replace(tile, hold=ShownHold("eve", until, True)),)
    shows(site, msgspec.structs.replace(view, gpus=tiles, workloads=rows))
    words = f"held by eve until {moment(until)}"
    assert f"{words}; this does not suspend the maximum runtime" in site.get("/", "ann").text
    page = site.get(f"/workload/{tile.workload}", "ann").text
    assert f"H{words[1:]}. A hold does not suspend the maximum runtime of its class." in page
    only = {**held, "hold_only": ("max_runtime",)}
    rows = tuple(msgspec.structs.replace(one, **only) if one.key == tile.key else one for one in view.workloads)
    tiles = (msgspec.structs.replace(tile, hold=ShownHold("eve", until, True, ("max_runtime",))),)
    shows(site, msgspec.structs.replace(view, gpus=tiles, workloads=rows))
    assert f"{words}; this suspends max_runtime only" in site.get("/", "ann").text
    assert f"H{words[1:]}. It suspends max_runtime only." in site.get(f"/workload/{tile.workload}", "ann").text
    assert ", held" not in site.get("/workloads", "ann").text


@pytest.mark.parametrize("state", [GpuState.DIRTY, GpuState.QUARANTINED, GpuState.OUTSIDE])
def test_a_gpu_that_needs_an_admin_is_shown_and_selected_by_its_state(site: Dashboard, state: GpuState) -> None:
    """C11.2"""
    tiles = many(view_of(site), 6).gpus
    ill = msgspec.structs.replace(tiles[0], state=state, key="", holder="", steps=(), reason="900 MiB in use by nobody")
    shows(site, msgspec.structs.replace(view_of(site), gpus=(ill, *tiles[1:])))
    page = site.get(f"/?state={state}", "root").text
    assert names(page) == [ill.name]
    assert f'class="chip s-{state}"' in page
    assert "900 MiB in use by nobody" in page
