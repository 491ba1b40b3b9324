"""Resetting one GPU with nvidia-smi. Off unless the policy enables it, and only after the checks of lifecycle/reset.

Never without -i and a whole GPU's uuid: without it nvidia-smi resets every GPU of the machine.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta

from gpukeeper.blocking import in_thread
from gpukeeper.devices.condition import condition
from gpukeeper.model.condition import Condition
from gpukeeper.model.decision import Accepted, Refused
from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown

DEADLINE, A_MOMENT = timedelta(minutes=2), timedelta(seconds=5)
NVIDIA_SMI = ("nvidia-smi",)
_WHOLE_GPU = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CODES = {3: "not available on this GPU", 4: "not permitted", 15: "the GPU fell off the bus"}
_LAST_WORDS = 200


async def reset_unheld(
    uuid: str,
    look: Callable[[str, datetime], Awaitable[Condition | Unknown]] = condition,
    program: Sequence[str] = NVIDIA_SMI,
) -> Accepted | Refused | Unknown:
    """One more check at the last moment: a process that opened the GPU since the previous check would lose everything
    on it.
    """
    found = await look(uuid, datetime.now(UTC))
    if isinstance(found, Unknown):
        return Refused(f"it could not be read just before ({found.why}); nothing was reset")
    if found.sliced is not False:
        return Refused("it is, or may be, split into slices; nothing was reset")
    if found.unread or found.holders:
        who = ", ".join(f"pid {one.pid} ({one.comm})" for one in found.holders) or "a process, perhaps,"
        return Refused(f"{who} has it open; nothing was reset")
    return await reset(uuid, program=program)


async def reset(
    uuid: str, deadline: timedelta = DEADLINE, program: Sequence[str] = NVIDIA_SMI
) -> Accepted | Refused | Unknown:
    """One GPU, by its uuid. Accepted is the result of nvidia-smi; only a read shows whether the GPU works again."""
    if not _WHOLE_GPU.fullmatch(uuid):
        return Refused(f"{uuid!r} is not the uuid of a whole GPU; nothing was reset")
    try:
        return await in_thread(lambda: _run((*program, "-r", "-i", uuid), deadline), deadline + A_MOMENT)
    except TimeoutError:
        return Unknown(f"nvidia-smi did not end within {in_words(deadline)}")


def _run(command: Sequence[str], deadline: timedelta) -> Accepted | Refused | Unknown:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=deadline.total_seconds(),
            check=False,
        )
    except OSError as error:
        return Refused(f"nvidia-smi could not be started: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Unknown(f"nvidia-smi did not end within {in_words(deadline)}")
    if done.returncode == 0:
        return Accepted()
    output = " ".join(done.stdout.decode("utf-8", "replace").split())[:_LAST_WORDS]
    meaning = f", {_CODES[done.returncode]}" if done.returncode in _CODES else ""
    return Refused(f"nvidia-smi refused (exit {done.returncode}{meaning}): {output}")
