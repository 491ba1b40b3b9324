"""`gpukeeper report`: usage and savings as text, JSON, CSV and one HTML file; with and without a daemon."""

from __future__ import annotations

import asyncio
import csv
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.ledger.files import make_private, usage_path
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.usage import open_usage
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Restored
from gpukeeper.model.series import WHOLE_HOUR, DevicePresence, Holder, HourUse, UsageFold, minute_of
from gpukeeper.model.subject import Ref
from tests.cli.fleet import POLICY, Fleet
from tests.cli.terminal import on_terminal

PRICES = 'prices: {currency: EUR, per_gpu_hour: {"*H100*": 2.5}}\n'
OCTOBER = datetime(2026, 10, 5, 9, tzinfo=UTC)  # a Monday
HALF = (1 << 30) - 1
MONTH = ("report", "--month", "2026-10", "--zone", "UTC")


def holder(owner: str, class_: str = "docker") -> Holder:
    return Holder(key=f"docker/node-1/{owner}", path=f"docker/node-1/{owner}", owner=owner, class_=class_)


@pytest.fixture
def used(fleet: Fleet) -> Fleet:
    """Three hours of one GPU: ann works and idles, bob idles, free; then an hour without a daemon."""
    fleet.write_policy(POLICY + PRICES)
    ledger = fleet.state / "ledger.db"
    make_private(fleet.state)
    usage, hour = open_usage(usage_path(ledger), write=True), minute_of(OCTOBER) // 60
    device = DevicePresence(
        place="node-1", device="GPU-0", since=hour * 60, until=hour * 60 + 240, model="NVIDIA H100 80GB HBM3"
    )
    base: dict[str, Any] = {"place": "node-1", "device": "GPU-0"}
    hours = (
        HourUse(hour=hour, holder=holder("ann"), active=HALF, idle=WHOLE_HOUR & ~HALF, **base),
        HourUse(hour=hour + 1, holder=holder("bob", "managed"), idle=WHOLE_HOUR, **base),
        HourUse(hour=hour + 2, free=WHOLE_HOUR, **base),
    )
    asyncio.run(usage.record(UsageFold(devices=(device,), hours=hours, absent=(("node-1", "GPU-0"),))))
    usage.close()
    ref = Ref("docker", "node-1", "container", "train", "uid-1")
    closed = Closed(
        at=OCTOBER,
        ref=ref,
        owner="bob",
        step="s1",
        action=Action.STOP,
        rule="idle",
        result=Result.RECLAIMED,
        reason="idle",
        gpus_back=1,
        gpu_hours=4.0,
        bytes_back=2048,
    )
    undone = Restored(at=OCTOBER + timedelta(hours=2), ref=ref, owner="bob", evidence="", result="restored")
    journal = open_ledger(ledger, write=True)
    asyncio.run(journal.append([closed, undone]))
    journal.close()
    return fleet


def test_a_month_as_tables(used: Fleet) -> None:
    ran = used.run(*MONTH)
    assert ran.code == 0, ran.err
    assert "recorded since 2026-10-05 09:00 UTC" in ran.err
    rows = [line.split() for line in ran.out.splitlines()]
    for row in (
        ["in", "use", "0.5", "12%"],
        ["held", "but", "idle", "1.5", "38%"],
        ["free", "1.0", "25%"],
        ["not", "measured", "1.0", "25%"],
        ["ann", "0.5", "0.5", "0.0", "1.25"],
        ["bob", "managed", "1.0", "100%", "2.50"],
        ["idle", "1", "4.0", "2.0", "KiB"],
    ):
        assert row in rows, f"{row} in\n{ran.out}"
    assert "1 step stopped or removed work; 1 of them was undone within a day." in ran.out
    assert "given back 10.00 EUR" in ran.out


def test_refused_and_failed_steps_and_who_asked(used: Fleet) -> None:
    """One process for text, JSON and Markdown would not do: each is a way that people read it."""
    ref = Ref("docker", "node-1", "container", "eval", "uid-2")
    base: dict[str, Any] = {"ref": ref, "owner": "a|b*", "action": Action.REMOVE, "rule": "retention", "reason": "old"}
    asked = {**base, "ref": Ref("docker", "node-1", "container", "mine", "uid-3"), "rule": "request"}
    journal = open_ledger(used.state / "ledger.db", write=True)
    lines = [
        Closed(at=OCTOBER, step="s2", result=Result.REFUSED, **base),
        Closed(at=OCTOBER + timedelta(hours=1), step="s3", result=Result.REFUSED, **base),
        Closed(at=OCTOBER + timedelta(hours=2), step="s4", result=Result.RECLAIMED, requested_by="eve", **asked),
    ]
    asyncio.run(journal.append(lines))
    journal.close()
    text = used.run(*MONTH, "--markdown").out
    assert "| a\\|b\\* | retention | refused | 2 | 1 | 1 |" in text
    assert "| eve | 1 | 0.0 | 0 B |" in text
    assert "- 2 steps were refused or failed." in text
    assert "\n> The ledger begins at 2026-10-05 09:00 UTC; what was given back before is not in this report." in text
    assert used.run(*MONTH, "--markdown", "--by", "day").code == 2


def test_one_table(used: Fleet) -> None:
    out = used.run(*MONTH, "--by", "day").out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("2026")] == ["2026-10-05"]
    assert "By owner" not in out
    assert used.run(*MONTH, "--by", "planet").code == 2


def test_one_owner(used: Fleet) -> None:
    found = used.run(*MONTH, "--owner", "bob", "--json").json()
    assert [row["name"] for row in found["owners"]] == ["bob"]
    assert found["total"] == {"active": 0.0, "idle": 1.0, "free": 0.0, "unknown": 0.0}
    assert found["savings"]["total"]["gpu_hours"] == 4.0
    assert used.run(*MONTH, "--owner", "ann", "--json").json()["savings"]["total"]["steps"] == 0


def test_the_zone_decides_the_hour_and_the_day(used: Fleet) -> None:
    found = used.run("report", "--month", "2026-10", "--zone", "Asia/Kolkata", "--json").json()
    monday = found["heat"][0]
    assert monday["day"] == "Monday"
    assert [monday["hours"][hour]["active"] for hour in (14, 15)] == [0.5, 0.0]  # 14:30 to 15:00
    assert [monday["hours"][hour]["idle"] for hour in (14, 15, 16)] == [0.0, 1.0, 0.5]


def test_csv_has_a_line_for_each_day_owner_class_group_and_model(used: Fleet, tmp_path: Path) -> None:
    assert used.run(*MONTH, "--csv", str(tmp_path / "r.csv")).code == 0
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [(row["owner"], row["idle_gpu_hours"], row["held"]) for row in rows] == [
        ("ann", "0.5000", "yes"),
        ("bob", "1.0000", "yes"),
        ("", "0.0000", "no"),
    ]


def test_the_page_is_one_file_without_scripts_and_loads_nothing(used: Fleet, tmp_path: Path) -> None:
    ran = used.run(*MONTH, "--html", str(tmp_path / "r.html"))
    assert (ran.code, ran.out) == (0, ""), ran.err
    page = (tmp_path / "r.html").read_text()
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)|https?://", page)
    assert page.count("<svg") == 3
    assert "default-src &#x27;none&#x27;" in page
    assert "not measured" in page


def test_a_name_with_markup_is_escaped(used: Fleet, tmp_path: Path) -> None:
    usage = open_usage(usage_path(used.state / "ledger.db"), write=True)
    hour = minute_of(OCTOBER) // 60
    evil = Holder(key="x", owner="<b>=1+1</b>", class_="=cmd")
    device = DevicePresence(place="node-2", device="GPU-9", since=hour * 60, until=hour * 60 + 60)
    fold = UsageFold(
        devices=(device,), hours=(HourUse(hour=hour, place="node-2", device="GPU-9", holder=evil, idle=1),)
    )
    asyncio.run(usage.record(fold))
    usage.close()
    used.run(*MONTH, "--html", str(tmp_path / "r.html"), "--csv", str(tmp_path / "r.csv"))
    assert "<b>" not in (tmp_path / "r.html").read_text()
    assert "'=cmd" in (tmp_path / "r.csv").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("--month", "10/2026"),
        ("--month", "2026-10", "--since", "7d"),
        ("--until", "2026-10-01"),
        ("--since", "2026-10-99"),
        ("--since", "soon"),
        ("--month", "2199-01"),
        ("--zone", "Nowhere/Land"),
        ("--zone", "../../etc/passwd"),
        ("--csv", "/nowhere/at/all.csv"),
    ],
)
def test_what_cannot_be_reported_is_refused_with_a_sentence(fleet: Fleet, words: tuple[str, ...]) -> None:
    ran = fleet.run("report", *words)
    assert (ran.code, ran.out) == (2, ""), ran.err
    assert len(ran.err.splitlines()) <= 2
    assert "Traceback" not in ran.err


def test_days_are_inclusive(used: Fleet) -> None:
    words = ("report", "--zone", "UTC", "--json")
    assert used.run(*words, "--since", "2026-10-05", "--until", "2026-10-05").json()["total"]["idle"] == 1.5
    assert used.run(*words, "--since", "2026-10-06", "--until", "2026-10-07").json()["total"]["idle"] == 0.0


def test_without_a_record_the_report_says_how_to_get_one(fleet: Fleet) -> None:
    ran = fleet.run("report")
    assert ran.code == 0
    assert "gpukeeper serve" in ran.err
    assert not (fleet.state / "usage.db").exists()


def test_every_line_fits_into_sixty_columns(used: Fleet) -> None:
    _, shown = on_terminal([*MONTH], used.env(TERM="xterm", COLUMNS="60"), 60)
    assert max(len(line.rstrip()) for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()) <= 60


def test_another_user_gets_own_figures_and_totals_from_the_daemon(used: Fleet) -> None:
    from gpukeeper.config.load import load_policy
    from gpukeeper.engine.requests import DataReply, Request
    from gpukeeper.interfaces.daemon.queries import Queries
    from gpukeeper.views.usage_report import UsageReport
    from gpukeeper.wiring.session import open_session

    session = open_session(used.policy, write=False, environ=used.env())
    assert load_policy(used.policy).policy.prices.currency == "EUR"
    queries = Queries(session)
    span = {"since": OCTOBER - timedelta(days=1), "until": OCTOBER + timedelta(days=2), "zone": "UTC"}

    async def ask(who: str, **more: Any) -> Any:
        return await queries.answer(who, Request(verb="report", **span, **more))

    try:
        reply = asyncio.run(ask("ann"))
        assert isinstance(reply, DataReply), reply
        mine = msgspec.json.decode(bytes(reply.body), type=UsageReport)
        refused = asyncio.run(ask("ann", owner="bob"))
        everything = msgspec.json.decode(bytes(asyncio.run(ask("root")).body), type=UsageReport)
    finally:
        queries.close()
        session.close()
    assert [row.name for row in mine.owners] == ["ann", "others"]
    assert [row.owner for row in mine.waste] == ["ann"]
    assert mine.savings.regrets == ()
    assert mine.total == everything.total
    assert {row.name for row in everything.owners} == {"ann", "bob"}
    assert (refused.done, refused.exit_code) == (False, 2)
    assert "own figures" in refused.words
