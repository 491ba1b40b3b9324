"""One setting, three programs that start passes: cron, systemd and Kubernetes. What one cannot express is refused."""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from ruamel.yaml import YAML

from gpukeeper.config import timers
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Schedule
from tests import engines
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
BERLIN = "Europe/Berlin"
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
SPRING = datetime(2026, 3, 28, 12, tzinfo=UTC)  # the day before the clocks go forward in Berlin
DAILY = Schedule(at="0 2 * * *")
INTERVALS = {
    5 * MINUTE: ("*/5 * * * *", "*-*-* *:00/5:00 UTC"),
    30 * MINUTE: ("*/30 * * * *", "*-*-* *:00/30:00 UTC"),
    HOUR: ("0 * * * *", "*-*-* *:00:00 UTC"),
    2 * HOUR: ("0 */2 * * *", "*-*-* 00/2:00:00 UTC"),
    DAY: ("0 0 * * *", "*-*-* 00:00:00 UTC"),
    MINUTE: ("* * * * *", "*-*-* *:00/1:00 UTC"),
}


def cron_line(text: str) -> str:
    (line,) = [one for one in text.splitlines() if not one.startswith("#")]
    return " ".join(line.split()[:5])


def calendar(text: str) -> list[str]:
    return re.findall(r"^OnCalendar=(.+)$", text, re.MULTILINE)


def elapses(expression: str, begin: datetime, count: int) -> list[datetime]:
    """When systemd itself would start it."""
    engines.require("systemd", engines.has_systemd_analyze())
    words = ["systemd-analyze", "calendar", f"--base-time={begin:%Y-%m-%d %H:%M:%S} UTC", f"--iterations={count}"]
    done = subprocess.run(
        [*words, expression],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
        env={"TZ": "UTC", "LC_ALL": "C"},
    )
    found = re.findall(r"(?:Next elapse|Iter. #\d+): \w+ (\S+ \S+) UTC", done.stdout)
    return [datetime.fromisoformat(one).replace(tzinfo=UTC) for one in found]


@pytest.mark.parametrize("every", INTERVALS)
def test_an_interval_in_each_format(every: timedelta) -> None:
    cron, when = INTERVALS[every]
    schedule = Schedule(every=every)
    assert cron_line(timers.crontab(schedule)) == cron
    assert calendar(timers.systemd(schedule, BERLIN)) == [when]
    job = YAML(typ="safe").load(timers.cronjob(schedule, BERLIN))["spec"]
    assert (job["schedule"], job["timeZone"]) == (cron, "Etc/UTC")


@pytest.mark.parametrize("every", INTERVALS)
def test_cron_and_systemd_keep_the_interval_also_when_the_clocks_change(every: timedelta) -> None:
    cron, when = INTERVALS[every]
    moments = list(islice(CronSim(cron, SPRING), 30))
    assert {b - a for a, b in pairwise(moments)} == {every}
    assert elapses(when, SPRING, 30) == moments


def test_daily_at_two_in_a_zone_with_a_clock_change() -> None:
    assert cron_line(timers.crontab(DAILY)) == "0 2 * * *"
    (when,) = calendar(timers.systemd(DAILY, BERLIN))
    assert when == "*-*-* 02:00:00 Europe/Berlin"
    job = YAML(typ="safe").load(timers.cronjob(DAILY, BERLIN))["spec"]
    assert (job["schedule"], job["timeZone"]) == ("0 2 * * *", BERLIN)
    # In autumn 02:00 comes twice, and only the first counts. In spring there is none, and systemd skips it.
    autumn = elapses(when, datetime(2026, 10, 24, 12, tzinfo=UTC), 2)
    assert autumn == [datetime(2026, 10, 25, 0, tzinfo=UTC), datetime(2026, 10, 26, 1, tzinfo=UTC)]
    assert elapses(when, SPRING, 1) == [datetime(2026, 3, 30, 0, tzinfo=UTC)]


def test_sunday_at_two_in_each_format_is_the_same_moment_every_week() -> None:
    """C10.8: as systemd, cron and Kubernetes read it, also over a change of the clocks."""
    weekly = Schedule(at="0 2 * * SUN")
    line = cron_line(timers.crontab(weekly))
    assert line == "0 2 * * 0"
    job = YAML(typ="safe").load(timers.cronjob(weekly, BERLIN))["spec"]
    assert (job["schedule"], job["timeZone"]) == (line, BERLIN)
    (when,) = calendar(timers.systemd(weekly, BERLIN))
    assert when == "Sun *-*-* 02:00:00 Europe/Berlin"
    begin = datetime(2026, 10, 20, tzinfo=UTC)
    sundays = [datetime(2026, 10, 25, 0, tzinfo=UTC), datetime(2026, 11, 1, 1, tzinfo=UTC)]
    assert elapses(when, begin, 2) == sundays
    local = islice(CronSim(line, begin.astimezone(ZoneInfo(BERLIN))), 2)
    assert [one.astimezone(UTC) for one in local] == sundays


def test_times_that_the_clocks_skip_are_named() -> None:
    found = list(timers.skipped_times(DAILY, ZoneInfo(BERLIN), SPRING))
    assert found == [datetime(2026, 3, 29, 2), datetime(2027, 3, 28, 2)]  # noqa: DTZ001 - local times
    assert list(timers.skipped_times(DAILY, ZoneInfo("Etc/UTC"), SPRING)) == []
    assert list(timers.skipped_times(Schedule(at="0 3 * * *"), ZoneInfo(BERLIN), SPRING)) == []
    assert list(timers.skipped_times(Schedule(every=HOUR), ZoneInfo(BERLIN), SPRING)) == []


@pytest.mark.parametrize("every", [7 * MINUTE, 90 * MINUTE, 5 * HOUR, 36 * HOUR, timedelta(seconds=30)])
@pytest.mark.parametrize("name", ["crontab", "cronjob"])
def test_an_interval_that_cron_cannot_express_is_refused(every: timedelta, name: str) -> None:
    with pytest.raises(UsageError, match=f"which {name} cannot express"):
        timers.crontab(Schedule(every=every)) if name == "crontab" else timers.cronjob(Schedule(every=every), BERLIN)


def test_systemd_counts_such_an_interval_from_the_last_start() -> None:
    text = timers.systemd(Schedule(every=7 * MINUTE), BERLIN)
    assert calendar(text) == []
    assert "OnActiveSec=0\nOnUnitActiveSec=420s\n" in text


@pytest.mark.parametrize("at", ["0 2 L * *", "0 2 * * 5#1", "0 2 * * 5L", "0 0 2 * * *"])
def test_times_that_only_serve_knows_are_refused(at: str) -> None:
    for make in (timers.crontab, lambda one: timers.systemd(one, BERLIN), lambda one: timers.cronjob(one, BERLIN)):
        with pytest.raises(UsageError, match="cannot express"):
            make(Schedule(at=at))


def test_sunday_has_one_number_and_days_are_either_of_both() -> None:
    both = Schedule(at="30 2 1,15 * 5-7")
    assert cron_line(timers.crontab(both)) == "30 2 1,15 * 0,5,6"
    found = calendar(timers.systemd(both, "UTC"))
    assert found == ["*-*-01,15 02:30:00 UTC", "Sun,Fri,Sat *-*-* 02:30:00 UTC"]
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    started = sorted({at for one in found for at in elapses(one, begin, 20)})[:15]
    assert started == list(islice(CronSim(both.at or "", begin), 15))


def test_a_policy_file_is_named_as_the_formats_need_it() -> None:
    assert r"apply --yes --policy '/srv/a b/50\%.yaml'" in timers.crontab(DAILY, "/srv/a b/50%.yaml")
    assert "apply --yes --policy '/srv/a b/50%%.yaml'" in timers.systemd(DAILY, BERLIN, "/srv/a b/50%.yaml")


def test_the_cron_job_is_the_one_of_the_examples() -> None:
    shipped = YAML(typ="safe").load_all(ROOT / "examples" / "kubernetes" / "cronjob.yaml")
    (job,) = [one for one in shipped if one["kind"] == "CronJob"]
    assert YAML(typ="safe").load(timers.cronjob(Schedule(every=HOUR), "Etc/UTC")) == job
    assert job["spec"]["concurrencyPolicy"] == "Forbid"
    assert (job["spec"]["successfulJobsHistoryLimit"], job["spec"]["failedJobsHistoryLimit"]) == (3, 3)
