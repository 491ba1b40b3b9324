"""`gpukeeper policy schedule`: the setting `schedule` for cron, a systemd timer or a Kubernetes CronJob."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from gpukeeper.config import timers
from gpukeeper.config.load import load_policy
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.model.errors import UsageError

LOCALTIME, ZONES = Path("/etc/localtime"), "zoneinfo/"
SHOWN = 3  # skipped times


class TimerFormat(StrEnum):
    CRONTAB = "crontab"
    SYSTEMD = "systemd"
    CRONJOB = "cronjob"


Format = Annotated[
    TimerFormat,
    typer.Option(
        "--format",
        help="crontab: a line of /etc/cron.d; systemd: a service and its timer; cronjob: a Kubernetes CronJob.",
    ),
]
Zone = Annotated[
    str | None,
    typer.Option(
        "--zone", metavar="ZONE", help="Time zone of schedule.at: Europe/Berlin, … Default: that of this machine."
    ),
]


def schedule(*, policy: o.PolicyFile = None, format: Format = TimerFormat.CRONTAB, zone: Zone = None) -> None:  # noqa: A002
    """Print the schedule for cron, systemd or a CronJob. They start single passes (`apply`) instead of a daemon."""
    setting = load_policy(policy).policy.schedule
    file = None if policy is None else str(policy.absolute())
    if format is TimerFormat.CRONTAB:
        if zone is not None:
            raise UsageError(
                "crontab has no time zones: cron runs in the zone of its machine. Nothing was printed. Omit --zone, "
                "or use --format systemd."
            )
        typer.echo(timers.crontab(setting, file), nl=False)
        return
    name = zone or (timers.UTC_NAME if setting.at is None else local_zone())
    found = _zone(name)
    made = timers.systemd(setting, name, file) if format is TimerFormat.SYSTEMD else timers.cronjob(setting, name)
    typer.echo(made, nl=False)
    for at in list(timers.skipped_times(setting, found, datetime.now(UTC)))[:SHOWN]:
        typer.echo(
            f"warning: {at:%Y-%m-%d %H:%M} does not exist in {name}, because the clocks change: this pass is skipped. "
            "gpukeeper serve runs it after the change.",
            err=True,
        )


def local_zone() -> str:
    """The name of the zone of this machine: TZ, else what /etc/localtime links to."""
    given = os.environ.get("TZ", "").removeprefix(":")
    if given and not given.startswith("/"):
        return given
    target = given or (os.path.realpath(LOCALTIME) if LOCALTIME.exists() else "")
    if ZONES in target:
        return target.partition(ZONES)[2]
    if not target:
        return timers.UTC_NAME
    raise UsageError(f"the name of this machine's time zone is unknown ({target}). Name it: --zone Europe/Berlin")


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(
            f'"{name}" is not a time zone that this machine knows. Write it like Europe/Berlin.'
        ) from error
