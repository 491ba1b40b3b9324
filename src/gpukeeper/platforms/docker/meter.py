"""Counters of a container, by its cgroup: all processes in it, no matter which user started them."""

from __future__ import annotations

from gpukeeper.devices.counters import Counters, read_counters
from gpukeeper.model.subject import Subject
from gpukeeper.platforms.docker.host_facts import belongs
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import incarnation


def count(subject: Subject, records: Records, proc: str = "/proc") -> Counters | None:
    """None: it is not the run that was read, or its processes are not on this machine."""
    container = records.known(subject.ref.uid)
    if container is None or incarnation(container) != subject.seen.incarnation or not container.state.pid:
        return None
    pid = container.state.pid
    if not belongs(pid, container.id, proc):
        return None
    return read_counters(pid, proc=proc, host_network=container.host_config.network_mode == "host")
