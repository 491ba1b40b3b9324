"""Sends messages: to an owner over every owner channel at once, to admins over every admin channel in the background.

To an owner the caller waits, because what follows depends on whether it was delivered. To admins it never waits, and
nothing that goes wrong here reaches a pass. A channel that fails is logged once, and once when it works again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from gpukeeper.model.durations import in_words
from gpukeeper.model.message import Delivered, Message, MessageKind, NotDelivered
from gpukeeper.notify.channel import Channel
from gpukeeper.notify.repeats import Repeats

TO_OWNER = timedelta(seconds=15)  # for one channel
TO_ADMINS = timedelta(seconds=30)
AT_END = timedelta(seconds=5)  # for what is still being sent when the program ends
WAITING = 100  # messages; more are left out, the oldest first
_ERROR_MAX = 300  # characters of an exception


class Messages:
    def __init__(self, owners: Sequence[Channel], log: Callable[[str], None] = lambda words: None) -> None:
        self.owners = tuple(owners)
        self.admins: tuple[Channel, ...] = ()  # none: messages to admins are dropped
        self.log = log
        self._repeats = Repeats()
        self._failing: set[str] = set()  # names of channels
        self._waiting: deque[Message] = deque(maxlen=WAITING)
        self._sending: asyncio.Task[None] | None = None

    async def to_owner(self, message: Message) -> tuple[str, ...]:
        """The names of the channels that delivered it. Empty: it was not delivered."""
        delivered = []
        for channel in self.owners:
            answer = await self._send(channel, message, TO_OWNER)
            if isinstance(answer, _Failed):  # that a terminal takes no message is no failure of a channel
                self._failed(channel, answer.why)
                continue
            self._works(channel)
            if isinstance(answer, Delivered):
                delivered.append(channel.name)
        return tuple(delivered)

    def to_admins(self, message: Message) -> None:
        """Returns at once. Called inside the event loop."""
        if not self.admins:
            return
        admitted = self._repeats.admit(message, asyncio.get_running_loop().time())
        if admitted is None:
            return
        self._waiting.append(admitted)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_waiting())

    def is_over(self, kind: MessageKind, key: str) -> None:
        self._repeats.over(kind.value, key)

    async def close(self) -> None:
        if self._sending is None:
            return
        await asyncio.wait([self._sending], timeout=AT_END.total_seconds())
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)

    async def _send_waiting(self) -> None:
        while self._waiting:
            message = self._waiting.popleft()
            await asyncio.gather(*(self._to_admin(channel, message) for channel in self.admins))

    async def _to_admin(self, channel: Channel, message: Message) -> None:
        answer = await self._send(channel, message, TO_ADMINS)
        if isinstance(answer, NotDelivered):
            self._failed(channel, answer.why)
        else:
            self._works(channel)

    async def _send(self, channel: Channel, message: Message, deadline: timedelta) -> Delivered | NotDelivered:
        """Delivered only if the channel itself answered so, in time."""
        try:
            async with asyncio.timeout(deadline.total_seconds()):
                answer: object = await channel.send(message)
        except TimeoutError:
            return _Failed(f"it timed out after {in_words(deadline)}")
        except Exception as error:  # a bug in a channel stops no pass
            return _Failed(
                f"this is a bug in gpukeeper, please report it: {type(error).__name__}: {error}"[:_ERROR_MAX]
            )
        if isinstance(answer, Delivered | NotDelivered):
            return answer
        return _Failed("this is a bug in gpukeeper, please report it: it reported neither success nor failure")

    def _failed(self, channel: Channel, why: str) -> None:
        if channel.name not in self._failing:
            self._failing.add(channel.name)
            self.log(f"the channel {channel.name} fails: {why}. This is logged once, until it works again.")

    def _works(self, channel: Channel) -> None:
        if channel.name in self._failing:
            self._failing.discard(channel.name)
            self.log(f"the channel {channel.name} works again.")


class _Failed(NotDelivered, frozen=True):
    """By the channel's own fault."""
