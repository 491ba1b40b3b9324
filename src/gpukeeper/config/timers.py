"""The setting `schedule` for programs that start one pass after the other: cron, a systemd timer, a Kubernetes
CronJob; and the files of one server, from a few answers. Pure.

What a program cannot express is refused, never rounded. An interval is written in UTC where a zone can be given: it
has the same length on the days on which the clocks change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from shlex import quote
from typing import Final

import msgspec
from cronsim import CronSim

from gpukeeper.config.load import SITE_FILE
from gpukeeper.config.units import span_in_words
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Schedule

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
FIELDS = 5  # of a cron expression without seconds
UTC_NAME = "Etc/UTC"
WEEKDAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
COMMAND = "apply --yes"
A_YEAR = 366 * 24  # hours
NO_DIGEST = "0" * 64  # to be replaced
PERCENT_OF_CRON = r"\%"


def crontab(schedule: Schedule, policy: str | None = None) -> str:
    """A line of /etc/cron.d. cron has no zones: it runs in the zone of the machine, as `serve` does."""
    expression = _plain_cron(schedule.at, "crontab") if schedule.at is not None else _cron_of(schedule.every, "crontab")
    return f"""\
# /etc/cron.d/gpukeeper: {_words(schedule)}, in the time zone of this machine.
{expression} root /usr/local/bin/gpukeeper {COMMAND}{_with(policy, PERCENT_OF_CRON)}
"""


def systemd(schedule: Schedule, zone: str, policy: str | None = None) -> str:
    """A service and its timer, one after the other."""
    times = _on_calendar(schedule.at, zone) if schedule.at is not None else _interval(schedule.every)
    lines = "\n".join(times)
    return f"""\
# /etc/systemd/system/gpukeeper-pass.service
[Unit]
Description=gpukeeper pass

[Service]
Type=oneshot
ExecStart=/usr/local/bin/gpukeeper {COMMAND}{_with(policy, "%%")}
# Exit code 3: some work was deferred by the budget, or could not be read.
SuccessExitStatus=3
Nice=10
IOSchedulingClass=idle

# /etc/systemd/system/gpukeeper-pass.timer
[Unit]
Description=gpukeeper pass, {_words(schedule)}

[Timer]
{lines}
Persistent=true
AccuracySec=1s

[Install]
WantedBy=timers.target
"""


def cronjob(schedule: Schedule, zone: str) -> str:
    if schedule.at is not None:
        expression = _plain_cron(schedule.at, "cronjob")
    else:
        expression, zone = _cron_of(schedule.every, "cronjob"), UTC_NAME
    return f"""\
# {_words(schedule).capitalize()}. The rest of the objects, and the image to set: examples/kubernetes/cronjob.yaml.
apiVersion: batch/v1
kind: CronJob
metadata:
  name: gpukeeper
  namespace: gpukeeper
  labels: {{app.kubernetes.io/name: gpukeeper}}
spec:
  schedule: "{expression}"
  timeZone: {zone}
  concurrencyPolicy: Forbid
  startingDeadlineSeconds: 600
  successfulJobsHistoryLimit: 3
  failedJobsHistoryLimit: 3
  jobTemplate:
    metadata:
      labels: {{app.kubernetes.io/name: gpukeeper}}
    spec:
      backoffLimit: 0
      activeDeadlineSeconds: 3000
      template:
        metadata:
          labels: {{app.kubernetes.io/name: gpukeeper}}
        spec:
          restartPolicy: Never
          serviceAccountName: gpukeeper
          terminationGracePeriodSeconds: 120
          securityContext:
            runAsNonRoot: true
            runAsUser: 65532
            runAsGroup: 65532
            fsGroup: 65532
            seccompProfile: {{type: RuntimeDefault}}
          containers:
            - name: gpukeeper
              image: registry.lab/gpukeeper:0.1.0@sha256:{NO_DIGEST}
              args: [apply, --yes, --platform, kubernetes]
              env:
                - {{name: GPUKEEPER_STATE, value: /var/lib/gpukeeper}}
              resources:
                requests: {{cpu: 100m, memory: 128Mi}}
                limits: {{memory: 512Mi}}
              securityContext:
                {{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {{drop: [ALL]}}}}
              volumeMounts:
                - {{name: policy, mountPath: /etc/gpukeeper, readOnly: true}}
                - {{name: ledger, mountPath: /var/lib/gpukeeper}}
                - {{name: tmp, mountPath: /tmp}}
          volumes:
            - {{name: policy, configMap: {{name: gpukeeper-cron-policy}}}}
            - {{name: ledger, persistentVolumeClaim: {{claimName: gpukeeper-ledger}}}}
            - {{name: tmp, emptyDir: {{}}}}
"""


def skipped_times(schedule: Schedule, zone: tzinfo, now: datetime) -> Iterator[datetime]:
    """Local times of the next year at which a pass is due and which the clocks skip. A systemd timer and a CronJob do
    not run then; `serve` acts after the gap."""
    if schedule.at is None:
        return
    hour = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    for number in range(A_YEAR):
        before, after = ((hour + (number + n) * HOUR).astimezone(zone).utcoffset() for n in (0, 1))
        if before is None or after is None or after <= before:
            continue
        change = hour + (number + 1) * HOUR
        begin, end = ((change + offset).replace(tzinfo=None) for offset in (before, after))
        moment = next(iter(CronSim(schedule.at, begin - MINUTE)))
        if moment < end:
            yield moment


def _words(schedule: Schedule) -> str:
    return f"every {span_in_words(schedule.every)}" if schedule.at is None else f'at "{schedule.at}"'


def _with(policy: str | None, percent: str) -> str:
    """`percent`: how a percent sign is written, which means something else in both files."""
    return "" if policy is None else f" --policy {quote(policy)}".replace("%", percent)


def _cron_of(every: timedelta, format_: str) -> str:
    """Cron expressions start again at every full hour and every midnight: other intervals would have a shorter one."""
    if every < HOUR and every >= MINUTE and HOUR % every == timedelta() and every % MINUTE == timedelta():
        return "* * * * *" if every == MINUTE else f"*/{every // MINUTE} * * * *"
    if every >= HOUR and every % HOUR == timedelta() and DAY % every == timedelta():
        hours = every // HOUR
        return "0 * * * *" if hours == 1 else "0 0 * * *" if every == DAY else f"0 */{hours} * * *"
    raise UsageError(
        f"schedule.every is {span_in_words(every)}, which {format_} cannot express: intervals start again at "
        "every full hour and at midnight. Nothing was printed. Use an interval that divides an hour or a "
        "day (5m, 30m, 1h, 2h), or --format systemd."
    )


def _plain_cron(at: str, format_: str) -> str:
    """As cron and Kubernetes read it: five fields of numbers. Both number Sunday 0; Kubernetes does not know 7."""
    found = _parsed(at, format_)
    days = sorted({int(day) % 7 for day in found.weekdays if isinstance(day, int)})
    weekdays = "*" if len(days) == len(WEEKDAYS) else ",".join(map(str, days))
    minute, hour, day, month = found.parts[1:5]
    return f"{minute} {hour} {day} {month} {weekdays}".lower()


def _parsed(at: str, format_: str) -> CronSim:
    found = CronSim(at, datetime(2026, 1, 1, tzinfo=UTC))
    if len(at.split()) != FIELDS:
        raise UsageError(
            f'schedule.at is "{at}", which has a field for seconds. {format_} cannot express it. Nothing was printed. '
            "Use five fields."
        )
    if min(found.days) < 0 or any(not isinstance(day, int) for day in found.weekdays):
        raise UsageError(
            f'schedule.at is "{at}", and {format_} cannot express L, LW and #. Nothing was printed. '
            "Use days by number, or run gpukeeper serve."
        )
    return found


def _on_calendar(at: str, zone: str) -> Iterator[str]:
    """Where both days of the month and weekdays are restricted, cron means either of them: two lines."""
    found = _parsed(at, "systemd")
    days = sorted({int(day) % 7 for day in found.weekdays if isinstance(day, int)})
    weekdays = "" if len(days) == len(WEEKDAYS) else ",".join(WEEKDAYS[day] for day in days) + " "
    months, hours, minutes = (
        _list(values, full) for values, full in ((found.months, 12), (found.hours, 24), (found.minutes, 60))
    )
    dates, clock = _list(found.days, 31), f"{hours}:{minutes}:00 {zone}"
    if weekdays and dates != "*" and not found.day_and:
        yield f"OnCalendar=*-{months}-{dates} {clock}"
        yield f"OnCalendar={weekdays}*-{months}-* {clock}"
        return
    yield f"OnCalendar={weekdays}*-{months}-{dates} {clock}"


def _list(values: set[int], full: int) -> str:
    return "*" if len(values) == full else ",".join(f"{one:02}" for one in sorted(values))


def _interval(every: timedelta) -> Iterator[str]:
    """At fixed times where the interval divides an hour or a day, else counted from the last start."""
    minutes, hours = every // MINUTE, every // HOUR
    if every % MINUTE == timedelta() and minutes and HOUR % every == timedelta():
        yield f"OnCalendar=*-*-* *:{'00' if every == HOUR else f'00/{minutes}'}:00 UTC"
    elif every % HOUR == timedelta() and hours and DAY % every == timedelta():
        yield f"OnCalendar=*-*-* {'00' if every == DAY else f'00/{hours}'}:00:00 UTC"
    else:
        yield f"OnActiveSec=0\nOnUnitActiveSec={every.total_seconds():g}s"


SERVICE: Final = Path("/etc/systemd/system/gpukeeper.service")
PASS: Final = Path("/etc/systemd/system/gpukeeper-pass.service")
TIMER: Final = Path("/etc/systemd/system/gpukeeper-pass.timer")
CRON: Final = Path("/etc/cron.d/gpukeeper")
TMPFILES: Final = Path("/etc/tmpfiles.d/gpukeeper.conf")


class HostAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """`program`: absolute, as ExecStart needs it. `every` None: the daemon; else a timer instead of it, or cron.
    `policy`: the text of a policy, instead of a first one."""

    program: str
    preset: str = "shared-host"
    mode: str = "plan"
    platforms: tuple[str, ...] = ("host",)
    admins: tuple[str, ...] = ()
    metrics: str = ""
    every: Schedule | None = None
    cron: bool = False
    policy: str | None = None


def host_files(answers: HostAnswers) -> Mapping[Path, str]:
    if any(word in answers.program for word in (" ", "%", "\n", '"', "\\", "$")):
        raise UsageError(f"{answers.program!r} cannot be written in a unit file. Install gpukeeper in /opt/gpukeeper.")
    policy = first_policy(answers) if answers.policy is None else answers.policy
    return {SITE_FILE: policy, TMPFILES: TMPFILES_TEXT, **_starters(answers)}


def unit_to_enable(answers: HostAnswers) -> str:
    """Empty: cron reads its directory by itself."""
    if answers.cron:
        return ""
    return (SERVICE if answers.every is None else TIMER).name


def _starters(answers: HostAnswers) -> dict[Path, str]:
    if answers.every is None:
        return {SERVICE: service(answers)}
    if answers.cron:
        return {CRON: _NOTE + crontab(answers.every, str(SITE_FILE)).replace(_USUAL, answers.program)}
    return _timer_units(answers, answers.every)


def first_policy(answers: HostAnswers) -> str:
    """Dry first, unless asked otherwise."""
    scope = "".join(f"  {one}: {{}}\n" for one in answers.platforms)
    admins = f"admins: [{', '.join(answers.admins)}]\n" if answers.admins else ""
    return f"""\
# Written by `gpukeeper setup host`. All settings: gpukeeper policy show; problems: gpukeeper policy check.
preset: {answers.preset}
mode: {answers.mode}  # plan: nothing is stopped or removed; enforce: what `gpukeeper plan` shows is done
scope:
{scope}{admins}"""


def service(answers: HostAnswers) -> str:
    metrics = f" --metrics {answers.metrics}" if answers.metrics else ""
    return f"""\
# Written by `gpukeeper setup host`. For your own settings: systemctl edit gpukeeper
[Unit]
Description=gpukeeper: watches GPU workloads and reclaims what they leave behind
After=docker.service podman.service network-online.target
Wants=network-online.target

[Service]
Type=notify
ExecStart={answers.program} serve --policy {SITE_FILE}{metrics}
Restart=on-failure
RestartSec=10
# The ledger is written by root only.
StateDirectory=gpukeeper
StateDirectoryMode=0700
UMask=0077
# All users may connect to its socket; what they may do depends on who they are.
RuntimeDirectory=gpukeeper
RuntimeDirectoryMode=0755
# It yields to the work on this machine.
Nice=10
IOSchedulingClass=idle
{_LIMITS}
[Install]
WantedBy=multi-user.target
"""


def _timer_units(answers: HostAnswers, every: Schedule) -> dict[Path, str]:
    """As `policy schedule --format systemd` prints them, with the program of this machine."""
    text = systemd(every, "Etc/UTC", str(SITE_FILE)).replace(_USUAL, answers.program)
    heads = {PASS: f"# {PASS}\n", TIMER: f"# {TIMER}\n"}
    first, _, second = text.partition(heads[TIMER])
    return {PASS: _NOTE + first.removeprefix(heads[PASS]).rstrip() + "\n" + _LIMITS, TIMER: _NOTE + second}


_USUAL: Final = "/usr/local/bin/gpukeeper"
_NOTE: Final = "# Written by `gpukeeper setup host`.\n"
_LIMITS: Final = """\
# What root may do without these is not enough, and with all others too much:
# CAP_SYS_PTRACE         read which files and GPUs the processes of all users have open
# CAP_DAC_READ_SEARCH    read the trees of all users, to measure them and save evidence
# CAP_DAC_OVERRIDE       remove what is due in directories of other users
# CAP_FOWNER             the same in directories with the sticky bit, such as /tmp; read without changing access times
# CAP_KILL               end processes that a removed workload left on a GPU
# CAP_SYS_ADMIN          notice files that are opened during a removal (fanotify); see the mounts of containers (setns)
# CAP_SYS_CHROOT         the same (setns)
# CAP_SETUID CAP_SETGID  run the dashboard and message services as another user, without these rights
CapabilityBoundingSet=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH CAP_DAC_OVERRIDE CAP_FOWNER CAP_KILL
CapabilityBoundingSet=CAP_SYS_ADMIN CAP_SYS_CHROOT CAP_SETUID CAP_SETGID
# ProtectSystem, PrivateTmp, ProtectHome and the like are not set: each gives the service its own view of the mounts,
# and gpukeeper compares the mounts of this machine before it removes anything.
NoNewPrivileges=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
"""

TMPFILES_TEXT: Final = """\
# Written by `gpukeeper setup host`: the ledger is read and written by root only.
d /var/lib/gpukeeper 0700 root root -
"""
