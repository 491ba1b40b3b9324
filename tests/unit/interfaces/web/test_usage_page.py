"""Usage and savings: each table of the page, the waste report as page, CSV and month, money where a price is set."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Restored
from gpukeeper.model.series import WHOLE_HOUR, DevicePresence, Holder, HourUse, UsageFold, minute_of
from gpukeeper.model.subject import Ref
from tests.unit.interfaces.web.sites import POLICY, Dashboard, dashboard

PRICES = POLICY + 'prices: {currency: EUR, per_gpu_hour: {"*H100*": 2.5}}\n'
OCTOBER = datetime(2026, 10, 5, 9, tzinfo=UTC)
MONTH = "month=2026-10&zone=UTC"
HALF = (1 << 30) - 1
GIB = 1024**3


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    """ann works half an hour and is idle half an hour, bob is idle for one; bob's work was stopped and restored."""
    with dashboard(tmp_path, policy=PRICES) as made:
        made.call(lambda: record(made))
        yield made


def holder(owner: str, class_: str) -> Holder:
    return Holder(key=f"docker/node-1/{owner}", path=f"docker/node-1/{owner}", owner=owner, class_=class_)


async def record(site: Dashboard) -> None:
    hour = minute_of(OCTOBER) // 60
    device = DevicePresence(
        place="node-1", device="GPU-0", since=hour * 60, until=hour * 60 + 120, model="NVIDIA H100 80GB HBM3"
    )
    base: dict[str, Any] = {"place": "node-1", "device": "GPU-0"}
    hours = (
        HourUse(hour=hour, holder=holder("ann", "docker"), active=HALF, idle=WHOLE_HOUR & ~HALF, **base),
        HourUse(hour=hour + 1, holder=holder("bob", "managed"), idle=WHOLE_HOUR, **base),
    )
    assert site.session.hours is not None
    await site.session.hours.record(UsageFold(devices=(device,), hours=hours, absent=(("node-1", "GPU-0"),)))
    ref = Ref("docker", "node-1", "container", "=old", "uid-1")
    closed = Closed(
        at=OCTOBER,
        ref=ref,
        owner="bob",
        step="s1",
        action=Action.STOP,
        rule="idle",
        result=Result.RECLAIMED,
        reason="idle for 9h",
        incarnation="1",
        gpus_back=1,
        gpu_hours=9.0,
        bytes_back=3 * GIB,
    )
    restored = Restored(at=OCTOBER + timedelta(hours=2), ref=ref, owner="bob", result="restored", evidence="e")
    await site.session.keeper.ledger.append([closed, restored])


def section(page: str, name: str) -> str:
    return page.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def test_what_came_back_is_split_by_day_owner_rule_and_platform_with_bytes_and_money(site: Dashboard) -> None:
    page = site.get(f"/usage?{MONTH}", "root").text
    assert "1 step gave back 9.0 GPU-hours and 3.0 GiB." in page
    for by, name in (("day", "2026-10-05"), ("owner", "bob"), ("rule", "idle"), ("platform", "docker")):
        table = section(page, f"back-{by}")
        for words in (name, "9.0", "3.0 GiB", "EUR", "22.50"):
            assert words in table, (by, words)


def test_money_regret_and_the_split_of_hours_are_there(site: Dashboard) -> None:
    page = site.get(f"/usage?{MONTH}", "root").text
    assert "Cost: in use 1.25 EUR, held but idle 3.75 EUR" in page
    assert "1 of them was undone within a day" in page
    assert "restored after 2h" in page
    for words in ("By owner", "By class", "By GPU model", "Hours of the week", "held but idle"):
        assert words in page, words


def test_the_waste_report_is_a_section_a_csv_and_a_month(site: Dashboard) -> None:
    page = site.get(f"/usage?{MONTH}", "root").text
    waste = section(page, "waste")
    assert "Updated every 5 minutes, never acted on." in waste
    assert "/usage?month=" in waste
    assert "table=waste" in waste
    for words in ("ann", "bob", "docker", "managed"):
        assert words in waste, words
    reply = site.get(f"/usage.csv?{MONTH}&table=waste", "root")
    rows = list(csv.DictReader(reply.text.splitlines()))
    assert {(one["owner"], one["class"], one["idle_gpu_hours"], one["idle_cost"]) for one in rows} == {
        ("ann", "docker", "0.5000", "1.25"),
        ("bob", "managed", "1.0000", "2.50"),
    }
    assert 'filename="gpu-waste-2026-10-01-to-' in reply.headers["content-disposition"]


def test_what_came_back_is_a_csv(site: Dashboard) -> None:
    rows = list(csv.DictReader(site.get(f"/usage.csv?{MONTH}&table=savings", "root").text.splitlines()))
    assert [(one["by"], one["name"], one["bytes"]) for one in rows] == [
        ("day", "2026-10-05", str(3 * GIB)),
        ("owner", "bob", str(3 * GIB)),
        ("rule", "idle", str(3 * GIB)),
        ("platform", "docker", str(3 * GIB)),
    ]


def test_others_are_shown_as_totals_only(site: Dashboard) -> None:
    page = site.get(f"/usage?{MONTH}", "ann").text
    assert "ann" in section(page, "waste")
    assert "bob" not in page
    assert "bob" not in site.get(f"/usage.csv?{MONTH}&table=waste", "ann").text
    assert "bob" not in site.get(f"/usage.csv?{MONTH}&table=savings", "ann").text
    assert "bob" not in site.get(f"/usage?{MONTH}").text
    assert site.get(f"/usage?{MONTH}&owner=bob", "ann").status_code == 400


def test_an_empty_month_says_so(site: Dashboard) -> None:
    page = site.get("/usage?month=2026-01&zone=UTC", "root").text
    for words in ("No use of GPUs is recorded", "Nothing was given back", "No GPU was held without use"):
        assert words in page, words


@pytest.mark.parametrize("query", ["table=nonsense", "table=%3Cb%3E"])
def test_an_unknown_table_is_refused(site: Dashboard, query: str) -> None:
    reply = site.get(f"/usage.csv?{query}", "root")
    assert reply.status_code == 400
    assert "Tables: hours, waste, savings" in reply.text
    assert "<b>" not in reply.text.partition("role=")[2].partition("</p>")[0]
