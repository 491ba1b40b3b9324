"""Work that does not come back is left behind, and not without end."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from gpukeeper.engine import blocking
from gpukeeper.engine.blocking import in_thread

AT_ONCE, A_WHILE = timedelta(milliseconds=10), timedelta(minutes=1)


def test_with_too_many_left_behind_nothing_more_is_begun_until_they_come_back() -> None:
    hangs, begun = threading.Event(), list[int]()
    before = {one for one in blocking._left_behind if one.is_alive()}  # of other tests in this process

    def work() -> int:
        begun.append(1)
        hangs.wait()
        return 7

    async def main() -> None:
        for _ in range(blocking.LEFT_BEHIND_MAX + 5):
            with pytest.raises(TimeoutError):
                await in_thread(work, AT_ONCE)
        assert len(blocking._left_behind) == blocking.LEFT_BEHIND_MAX
        hangs.set()
        for thread in blocking._left_behind - before:
            thread.join()
        assert len(begun) == blocking.LEFT_BEHIND_MAX - len(before)
        assert await in_thread(work, A_WHILE) == 7

    asyncio.run(main())
