"""Removes a job: stops it, waits until Ray has ended everything of it, deletes its record, and reads again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import msgspec

from gpukeeper.rayjobs.api import OVER, RayApi, RayJob

STOPPING: Final = timedelta(seconds=40)  # Ray waits 3 s, then kills


class Pauses(msgspec.Struct, frozen=True):
    sleep: float = 0.3  # seconds between two looks at a job that is to end
    settle: timedelta = timedelta(seconds=2)  # Ray looks at a job every second, and may not have noticed its end


async def remove_job(api: RayApi, job: RayJob, is_same: Callable[[RayJob], bool], pauses: Pauses) -> str:
    """Why it is still there; empty: it is gone. `is_same`: another job may have got its name meanwhile."""
    if job.status not in OVER:
        await api.stop(job.name)
    if left := await _last_left(api, job, pauses):
        return left
    await asyncio.sleep(pauses.settle.total_seconds())
    now = await api.job(job.name)
    if now is not None and is_same(now):
        await api.delete(job.name)
        if await _comes_back(api, job.name, pauses):
            return "still there after it was removed"
    return ""


async def _comes_back(api: RayApi, name: str, pauses: Pauses) -> bool:
    """Ray watches a job until its supervisor is gone, and writes a new, empty record if the job was deleted before it
    noticed. What has just been deleted and comes back without metadata is that."""
    for _ in range(2):
        await asyncio.sleep(pauses.settle.total_seconds() / 2)
        again = await api.job(name)
        if again is None:
            return False
        if again.metadata or again.status not in OVER:
            return True
        await api.delete(name)
    return await api.job(name) is not None


async def _last_left(api: RayApi, job: RayJob, pauses: Pauses) -> str:
    """Ray ends actors after their driver, in a moment."""
    late = asyncio.get_running_loop().time() + STOPPING.total_seconds()
    while True:
        left = await _left(api, job)
        if not left or asyncio.get_running_loop().time() > late:
            return left
        await asyncio.sleep(pauses.sleep)


async def _left(api: RayApi, job: RayJob) -> str:
    """Why its record may not be deleted yet; empty: nothing of it runs."""
    now = await api.job(job.name)
    if now is not None and now.status not in OVER:
        return f"it was stopped and is still {now.status.lower()}"
    parts = await api.parts(job.name, (now or job).job_id or job.job_id)
    return f"Ray has not ended {', '.join(parts[:5])}" if parts else ""
