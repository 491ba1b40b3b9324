"""Processes that hold a GPU although their container ended. Pure, except for one read of /proc.

Only a container that this engine was seen to have is a proof: other engines write the same kind of id into the same
kind of cgroup, and their containers run and are not ours to judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

from gpukeeper.devices.holders import Holder, text_of
from gpukeeper.model.subject import State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.translate import state_of
from gpukeeper.platforms.docker.wire import Inspected, when

CLOCKS = timedelta(seconds=2)  # start times count in hundredths of a second since boot; the boot time is a whole second


def proof_of(
    holder: Holder, started: datetime, container: Inspected | Unknown | None, once_had: Mapping[str, Inspected]
) -> str | Unknown | None:
    """What connects it to a container that ended. None: nothing."""
    id_ = str(holder.container)
    if isinstance(container, Unknown):
        return Unknown(f"whether its container is still running is unknown ({container.why})")
    if container is None:
        before = once_had.get(id_)
        return f"its cgroup names {before.plain_name} ({id_[:12]}), which was removed" if before is not None else None
    if state_of(container) is not State.ENDED:
        return None
    ended = when(container.state.finished_at)
    if not isinstance(ended, datetime) or started > ended + CLOCKS:
        return None
    return f"its cgroup names {container.plain_name} ({id_[:12]}), which ended at {ended:%Y-%m-%d %H:%M:%S} UTC"


def is_another_engines(holder: Holder, proc: str = "/proc") -> bool:
    """A pod's, or Podman's: reported by the platform that manages those."""
    try:
        cgroup = text_of(Path(proc, str(holder.pid), "cgroup"))
    except OSError:
        return True
    return "kubepods" in cgroup or "libpod" in cgroup
