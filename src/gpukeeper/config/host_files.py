"""The files of one server: the units for systemd, or a line for cron, and a policy, from a few answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from gpukeeper.config.timers import crontab, systemd
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Schedule

POLICY: Final = Path("/etc/gpukeeper/policy.yaml")
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
    return {POLICY: policy, TMPFILES: TMPFILES_TEXT, **_starters(answers)}


def unit_to_enable(answers: HostAnswers) -> str:
    """Empty: cron reads its directory by itself."""
    if answers.cron:
        return ""
    return (SERVICE if answers.every is None else TIMER).name


def _starters(answers: HostAnswers) -> dict[Path, str]:
    if answers.every is None:
        return {SERVICE: service(answers)}
    if answers.cron:
        return {CRON: _NOTE + crontab(answers.every, str(POLICY)).replace(_USUAL, answers.program)}
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
ExecStart={answers.program} serve --policy {POLICY}{metrics}
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
    text = systemd(every, "Etc/UTC", str(POLICY)).replace(_USUAL, answers.program)
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
