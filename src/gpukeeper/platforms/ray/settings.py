"""Settings of the policy that only this platform reads. Set by config."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum

from gpukeeper.model.direct import direct
from gpukeeper.model.policy import DAY, HOUR, MINUTE, Policy, Value


@direct
class Counted(StrEnum):
    """What is compared with `above` on a Ray node."""

    NAMED = "named"  # trees of the names that may go
    ALL = "all"  # everything in its temporary directories, sessions included


class RaySettings(Value, frozen=True, kw_only=True):
    """Ray nodes on this machine, in containers and beside them."""

    workers: tuple[str, ...] = ("ray-worker*",)  # containers that are nodes, by name, or by label as key=value
    dashboard: str | None = None  # None: as the cluster itself reports it
    roots: tuple[str, ...] = ("/tmp",)  # noqa: S108 - of each node, as it sees them itself
    names: tuple[str, ...] = (
        *("ray_tmp_*", "pip-*", "tmp*", "pymp-*"),
        *("checkpoint_tmp_*", "ray_shuffle_disk_*", "lightning_checkpoints-job_id=*"),
    )
    keep: tuple[str, ...] = ()
    above: int = 5_000_000_000
    above_counts: Counted = Counted.NAMED
    older_than: timedelta = HOUR
    under_pressure: timedelta = 10 * MINUTE
    cpu: float = 5.0  # percent of one core, of everything except Ray itself; more is busy
    window: timedelta = timedelta(seconds=10)  # measured at least this long
    sessions: timedelta | None = DAY  # dead ones, by the newest file inside; never less than an hour
    logs: timedelta | None = 7 * DAY  # of processes that ended


DEFAULT = RaySettings()


def settings_of(policy: Policy) -> RaySettings:
    found = policy.platforms.get("ray", DEFAULT)
    assert isinstance(found, RaySettings)
    return found
