"""Messages that are sent in the background, one channel after its own queue, with retries while they are of use.

Nothing here delays a pass or raises into one. How each message ended is reported once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from gpukeeper.model.message import Delivered, Message, NotDelivered
from gpukeeper.notify.channel import Channel

FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=30), timedelta(minutes=15)
USEFUL = timedelta(hours=1)  # for what has no end of its own
WAITING = 500  # messages; more are not accepted

Sender = Callable[[Channel, Message], Awaitable[Delivered | NotDelivered]]
Report = Callable[[Message, Channel, Delivered | NotDelivered], Awaitable[None]]


class Outbox:
    def __init__(self, send: Sender, report: Report) -> None:
        self._send = send
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Lock] = {}

    def put(self, channel: Channel, message: Message, wait: timedelta = timedelta()) -> None:
        """Returns at once. `wait`: before the first attempt."""
        full = len(self._tasks) >= WAITING
        sending = self._refuse(channel, message) if full else self._deliver(channel, message, wait)
        task = asyncio.create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, grace: timedelta) -> None:
        """What is not sent by then is reported as not delivered."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace.total_seconds())
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _refuse(self, channel: Channel, message: Message) -> None:
        await self._report(message, channel, NotDelivered(f"{WAITING} messages are waiting already"))

    async def _deliver(self, channel: Channel, message: Message, wait: timedelta) -> None:
        loop = asyncio.get_running_loop()
        useful = wait + USEFUL if message.until is None else message.until - message.at
        ends, pause = loop.time() + useful.total_seconds(), FIRST_PAUSE
        if wait > useful:
            await self._report(message, channel, NotDelivered("it would have been sent too late"))
            return
        answer: Delivered | NotDelivered = NotDelivered("gpukeeper ended before it was sent")
        try:
            await asyncio.sleep(wait.total_seconds())
            while True:
                async with self._turns.setdefault(channel.name, asyncio.Lock()):
                    answer = await self._send(channel, message)
                if isinstance(answer, Delivered) or not answer.transient or loop.time() + pause.total_seconds() > ends:
                    break
                await asyncio.sleep(pause.total_seconds())
                pause = min(2 * pause, LONGEST_PAUSE)
        except asyncio.CancelledError:
            pass  # the program ends: what is known is reported
        await self._report(message, channel, answer)
