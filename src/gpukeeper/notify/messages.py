"""Sends messages: to an owner over every owner channel at once, to admins over every admin channel in the background.

For a warning or a loss the caller waits, because what follows may depend on whether it was delivered; further attempts
are made in the background. For everything else it never waits, and nothing that goes wrong here reaches a pass. A
channel that fails is logged once, and once when it works again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.model.durations import in_words
from gpukeeper.model.identity import Ref
from gpukeeper.model.message import Delivered, Delivery, Message, MessageKind, NotDelivered
from gpukeeper.model.printable import plain
from gpukeeper.notify.channel import Channel
from gpukeeper.notify.digest import DIGEST, digest_of
from gpukeeper.notify.log import Log
from gpukeeper.notify.outbox import Outbox
from gpukeeper.notify.quiet import QuietHours
from gpukeeper.notify.repeats import Repeats

TO_OWNER = timedelta(seconds=15)  # for one channel
TO_ADMINS = timedelta(seconds=30)
AT_END = timedelta(seconds=5)  # for what is still being sent when the program ends
WAITING = 100  # messages; more are left out, the oldest first
QUIET = "quiet hours"
_ERROR_MAX = 300  # characters of an exception
_WHY_MAX = 300  # characters of one reason in the ledger

Record = Callable[[Message, Delivery], Awaitable[None]]


async def _no_record(message: Message, delivery: Delivery) -> None:
    """Where there is no ledger."""


class Messages:
    """`owners`: terminals, always. `services`: mail and chat for owners, as configured."""

    def __init__(self, owners: Sequence[Channel], log: Callable[[str], None] = lambda words: None) -> None:
        self.owners = tuple(owners)
        self.services: tuple[Channel, ...] = ()
        self.admins: tuple[Channel, ...] = ()  # none: messages to admins are dropped
        self.log = log
        self.link_of: Callable[[Ref], str] = lambda ref: ""
        self.host = ""
        self.quiet: QuietHours | None = None
        self.digest: timedelta | None = None  # None: notices are sent at once
        self.record: Record = _no_record  # of what was sent in the background
        self.now: Callable[[], datetime] | None = None
        self._repeats = Repeats()
        self._failing: set[str] = set()  # names of channels
        self._waiting: deque[Message] = deque(maxlen=WAITING)
        self._sending: asyncio.Task[None] | None = None
        self._outbox = Outbox(self._to_service, self._report)
        self._notices: dict[str, list[Message]] = {}  # by owner, until the digest is sent
        self._digests: set[asyncio.Task[None]] = set()

    async def to_owner(self, message: Message) -> Delivery:
        """Without channels: it was not delivered. In quiet hours nothing counts as delivered."""
        message = self._linked(message)
        if message.kind is MessageKind.NOTICE and self._collect(message):
            return Delivery(failed=(DIGEST,))
        quiet = self.quiet is not None and self.quiet.contain(message.at)
        answers = [(channel, await self._to_terminals(channel, message)) for channel in self.owners]
        if quiet:
            self._after_quiet_hours(message)
            waits = NotDelivered(f"it is not counted in {QUIET}")
            answers = [(one, answer if isinstance(answer, NotDelivered) else waits) for one, answer in answers]
            answers += [(one, NotDelivered(QUIET)) for one in self.services]
        else:
            sent = await asyncio.gather(*(self._to_service(one, message, TO_OWNER) for one in self.services))
            for channel, answer in zip(self.services, sent, strict=True):
                answers.append((channel, answer))
                if isinstance(answer, NotDelivered) and answer.transient:
                    self._outbox.put(channel, message, wait=TO_OWNER)
        return _delivery(answers)

    def later(self, message: Message) -> None:
        """To an owner, over mail and chat. Returns at once. Called inside the event loop."""
        message = self._linked(message)
        if self.quiet is not None and self.quiet.contain(message.at):
            self._after_quiet_hours(message)
            return
        for channel in self.services:
            self._outbox.put(channel, message)

    def to_admins(self, message: Message) -> None:
        """Returns at once. Called inside the event loop."""
        if not self.admins:
            return
        admitted = self._repeats.admit(self._linked(message), asyncio.get_running_loop().time())
        if admitted is None:
            return
        self._waiting.append(admitted)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_waiting())

    def is_over(self, kind: MessageKind, key: str) -> None:
        self._repeats.over(kind.value, key)

    def was_sent(self, kind: str, key: str, ago: timedelta) -> None:
        """To admins, by an earlier process. Called inside the event loop."""
        self._repeats.note(kind, key, asyncio.get_running_loop().time() - ago.total_seconds())

    def recollect(self, notices: Iterable[Message]) -> None:
        """Those that an earlier process collected and did not send. Called inside the event loop."""
        for notice in notices:
            self._collect(self._linked(notice))

    async def close(self, grace: timedelta = AT_END) -> None:
        for task in self._digests:  # what is collected is in the ledger
            task.cancel()
        await asyncio.gather(*self._digests, return_exceptions=True)
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=grace.total_seconds())
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        await self._outbox.close(grace)
        for channel in (*self.services, *self.admins):
            await end_channel(channel)

    def _linked(self, message: Message) -> Message:
        if message.ref is None or message.host:
            return message
        return msgspec.structs.replace(message, host=self.host, link=message.link or self.link_of(message.ref))

    def _after_quiet_hours(self, message: Message) -> None:
        assert self.quiet is not None
        for channel in self.services:
            self._outbox.put(channel, message, wait=self.quiet.end_after(message.at) - message.at)

    def _collect(self, notice: Message) -> bool:
        """False: it is not collected, but sent at once."""
        if self.digest is None or notice.owner is None or not self.services:
            return False
        known = notice.owner in self._notices
        self._notices.setdefault(notice.owner, []).append(notice)
        if not known:
            task = asyncio.create_task(self._send_digest(notice.owner, self.digest))
            self._digests.add(task)
            task.add_done_callback(self._digests.discard)
        return True

    async def _send_digest(self, owner: str, interval: timedelta) -> None:
        await asyncio.sleep(interval.total_seconds())
        notices = self._notices.pop(owner)
        now = notices[0].at + interval if self.now is None else self.now()
        self.later(digest_of(owner, notices, now))

    async def _to_terminals(self, channel: Channel, message: Message) -> Delivered | NotDelivered:
        answer = await send_in_time(channel, _on_one_line(message), TO_OWNER)
        if isinstance(answer, _Failed):  # that a terminal takes no message is no failure of a channel
            self._failed(channel, answer.why)
        else:
            self._works(channel)
        return answer

    async def _to_service(
        self, channel: Channel, message: Message, deadline: timedelta = TO_ADMINS
    ) -> Delivered | NotDelivered:
        answer = await send_in_time(channel, message, deadline)
        if isinstance(answer, Delivered):
            self._works(channel)
        elif not answer.recipient:
            self._failed(channel, answer.why)
        return answer

    async def _report(self, message: Message, channel: Channel, answer: Delivered | NotDelivered) -> None:
        await self.record(message, _delivery([(channel, answer)]))

    async def _send_waiting(self) -> None:
        while self._waiting:
            message = self._waiting.popleft()
            await asyncio.gather(*(self._to_admin(channel, message) for channel in self.admins))

    async def _to_admin(self, channel: Channel, message: Message) -> None:
        answer = await self._to_service(channel, message)
        if isinstance(answer, NotDelivered) and answer.transient:
            self._outbox.put(channel, message, wait=TO_ADMINS)
        elif channel.name != Log.name:
            await self._report(message, channel, answer)

    def _failed(self, channel: Channel, why: str) -> None:
        if channel.name not in self._failing:
            self._failing.add(channel.name)
            self.log(f"the channel {channel.name} fails: {why}. This is logged once, until it works again.")

    def _works(self, channel: Channel) -> None:
        if channel.name in self._failing:
            self._failing.discard(channel.name)
            self.log(f"the channel {channel.name} works again.")


async def send_in_time(channel: Channel, message: Message, deadline: timedelta) -> Delivered | NotDelivered:
    """Delivered only if the channel itself answered so, in time."""
    try:
        async with asyncio.timeout(deadline.total_seconds()):
            answer: object = await channel.send(message)
    except TimeoutError:
        return _Failed(f"it timed out after {in_words(deadline)}")
    except Exception as error:  # a bug in a channel stops no pass
        return _Failed(f"this is a bug in gpukeeper, please report it: {type(error).__name__}: {error}"[:_ERROR_MAX])
    if isinstance(answer, Delivered | NotDelivered):
        return answer
    return _Failed("this is a bug in gpukeeper, please report it: it reported neither success nor failure")


async def end_channel(channel: Channel) -> None:
    """Some have a process of their own."""
    close = getattr(channel, "close", None)
    if close is not None:
        await close()


def _on_one_line(message: Message) -> Message:
    """With its link, for a terminal or a program."""
    return msgspec.structs.replace(message, text=f"{message.text} {message.link}") if message.link else message


def _delivery(answers: Sequence[tuple[Channel, Delivered | NotDelivered]]) -> Delivery:
    return Delivery(
        tuple(channel.name for channel, answer in answers if isinstance(answer, Delivered)),
        tuple(
            plain(f"{channel.name}: {answer.why}")[:_WHY_MAX]
            for channel, answer in answers
            if isinstance(answer, NotDelivered)
        ),
    )


class _Failed(NotDelivered, frozen=True):
    """By the channel's own fault."""
