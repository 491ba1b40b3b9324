"""Real time. Blocking work (a driver, a disk) in a thread of its own that can be abandoned: nothing may block the
event loop. And the clock of this machine.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

T = TypeVar("T")
A_MOMENT = timedelta(seconds=5)  # extra time for work with its own deadline to report the timeout itself
LEFT_BEHIND_MAX = 4  # threads of one kind of work that timed out; with that many no more are started
_left_behind: defaultdict[object, set[threading.Thread]] = defaultdict(
    set
)  # by the code that they run, and its purpose


def real_seconds(seconds: float) -> float:
    """So many seconds of a real clock, in seconds of the running loop: in the demo the loop's time is compressed, and a
    disk does not become faster by that."""
    return seconds * float(getattr(asyncio.get_running_loop(), "pace", 1.0))


def real_span(span: timedelta) -> timedelta:
    """The same for a span."""
    return timedelta(seconds=real_seconds(span.total_seconds()))


async def in_thread(work: Callable[[], T], deadline: timedelta, *, purpose: str = "") -> T:
    """TimeoutError if it takes longer; the thread is then abandoned. Also, at once, if too many threads of the same
    work and purpose are: a disk that hangs must not prevent other work.

    Not asyncio.to_thread: its threads are waited for when the program ends, and a thread inside a dead network
    filesystem never ends.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(give: Callable[[], None]) -> None:
        if not answer.done():
            give()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # it belongs to the caller that awaits the result
            failure = error
            give: Callable[[], None] = lambda: answer.set_exception(failure)  # noqa: E731
        else:
            give = lambda: answer.set_result(result)  # noqa: E731
        try:
            loop.call_soon_threadsafe(tell, give)
        except RuntimeError:
            return  # the loop is closed: there is no caller any more

    left = _left_behind[getattr(work, "__code__", type(work)), purpose]
    left.difference_update([one for one in left if not one.is_alive()])
    if len(left) >= LEFT_BEHIND_MAX:
        raise TimeoutError(f"{LEFT_BEHIND_MAX} earlier calls have not returned; no more are started until they do")
    thread = threading.Thread(target=run, name="gpukeeper-blocking", daemon=True)
    thread.start()
    try:
        async with asyncio.timeout(real_seconds(deadline.total_seconds())):
            return await answer
    except (TimeoutError, asyncio.CancelledError):  # the deadline of the caller may be shorter
        if not answer.done() or answer.cancelled():
            left.add(thread)
        raise


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)
