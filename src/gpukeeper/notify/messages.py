"""Sends messages: to an owner over every owner channel at once, to admins over every admin channel in the background,
with retries; not in quiet hours, not the same one all the time, several notices as one digest.

For a warning or a loss the caller waits, because what follows may depend on its delivery. For everything else it
never waits, and nothing that goes wrong here reaches a pass.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from gpukeeper.model.ports import Delivered, Delivery, Message, MessageKind, NotDelivered
from gpukeeper.model.subject import Ref
from gpukeeper.model.words import in_words, plain
from gpukeeper.notify.catalog import Channel, Log

QUIET_EXAMPLE = "22:00-07:00 Europe/Berlin"
_SHAPE = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d) ([A-Za-z0-9_+/-]{1,64})", re.ASCII)


@dataclass(frozen=True)
class QuietHours:
    begin: time
    end: time
    zone: ZoneInfo

    def contain(self, at: datetime) -> bool:
        now = at.astimezone(self.zone).time()
        if self.begin < self.end:
            return self.begin <= now < self.end
        return now >= self.begin or now < self.end

    def end_after(self, at: datetime) -> datetime:
        """When the quiet hours that contain `at` are over."""
        local = at.astimezone(self.zone)
        day = local.date() if local.time() < self.end else local.date() + timedelta(days=1)
        return datetime.combine(day, self.end, self.zone).astimezone(UTC)


def read_quiet_hours(words: str) -> QuietHours:
    """Raises ValueError with a sentence."""
    found = _SHAPE.fullmatch(words)
    if found is None:
        raise ValueError(f"these are no quiet hours. Write them like {QUIET_EXAMPLE}.")
    hours = [int(part) for part in found.groups()[:4]]
    try:
        begin, end = time(hours[0], hours[1]), time(hours[2], hours[3])
    except ValueError:
        raise ValueError(f"this is no time of a day. Write quiet hours like {QUIET_EXAMPLE}.") from None
    if begin == end:
        raise ValueError(f"quiet hours begin and end at the same time. Write them like {QUIET_EXAMPLE}.")
    try:
        return QuietHours(begin, end, ZoneInfo(found[5]))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f'the time zone "{found[5]}" is unknown. Write quiet hours like {QUIET_EXAMPLE}.') from None


REPEATED_AFTER = timedelta(days=1)  # what repeats is sent again after this
HOUR = timedelta(hours=1)
PER_HOUR = 30
REMEMBERED = 1000  # kinds and keys


@dataclass
class Repeats:
    """Which messages to admins are sent: not the same one all the time, and not too many of all."""

    _sent: dict[tuple[str, str], float] = field(default_factory=dict)  # by kind and key: when; in that order
    _lately: deque[float] = field(default_factory=deque)
    _left_out: int = 0

    def admit(self, message: Message, now: float) -> Message | None:
        """The message as it is sent; None: not now. `now` in seconds of a steady clock."""
        what = (message.kind.value, message.key)
        last = self._sent.get(what)
        if last is not None and now - last < REPEATED_AFTER.total_seconds():
            return None
        while self._lately and now - self._lately[0] >= HOUR.total_seconds():
            self._lately.popleft()
        if len(self._lately) >= PER_HOUR:
            self._left_out += 1  # not noted as sent: it may come later
            return None
        self._lately.append(now)
        self._sent.pop(what, None)
        self._sent[what] = now
        while len(self._sent) > REMEMBERED:
            del self._sent[next(iter(self._sent))]
        left_out, self._left_out = self._left_out, 0
        if not left_out:
            return message
        more = f" ({left_out} other messages were not sent; see `gpukeeper ledger list`.)"
        return msgspec.structs.replace(message, text=message.text + more)

    def note(self, kind: str, key: str, at: float) -> None:
        """Sent at this time, by an earlier process."""
        self._sent.setdefault((kind, key), at)

    def over(self, kind: str, key: str) -> None:
        """It is not so any more: the next time is news."""
        self._sent.pop((kind, key), None)


DIGEST = "collected for the digest"  # why a notice was not delivered at once, in the ledger
SHOWN = 50  # notices


def digest_of(owner: str, notices: Sequence[Message], now: datetime) -> Message:
    """One message. The newest notice of each workload counts."""
    newest = {notice.about: notice for notice in notices}
    shown = list(newest.values())[-SHOWN:]
    lines = [f"{notice.text} {notice.link}".strip() for notice in shown]
    left_out = len(newest) - len(shown)
    more = f" And {left_out} more." if left_out else ""
    if len(newest) == 1:
        about, text, link = shown[0].about, shown[0].text, shown[0].link
    else:
        about, text, link = f"{len(newest)} workloads", " · ".join(lines) + more, ""
    key = f"digest {now:%Y-%m-%dT%H:%M:%SZ}"
    return Message(kind=MessageKind.NOTICE, about=about, text=text, at=now, key=key, owner=owner, link=link)


FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=30), timedelta(minutes=15)
USEFUL = timedelta(hours=1)  # for what has no end of its own
WAITING_TO_BE_SENT = 500  # messages; more are not accepted

Sender = Callable[[Channel, Message], Awaitable[Delivered | NotDelivered]]
Report = Callable[[Message, Channel, Delivered | NotDelivered], Awaitable[None]]


class Outbox:
    """Messages that are sent in the background, one channel after its own queue, with retries while they are of use.
    Nothing here delays a pass or raises into one. How each message ended is reported once.
    """

    def __init__(self, send: Sender, report: Report) -> None:
        self._send = send
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Lock] = {}

    def put(self, channel: Channel, message: Message, wait: timedelta = timedelta()) -> None:
        """Returns at once. `wait`: before the first attempt."""
        full = len(self._tasks) >= WAITING_TO_BE_SENT
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
        await self._report(message, channel, NotDelivered(f"{WAITING_TO_BE_SENT} messages are waiting already"))

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
    """`owners`: terminals, always. `services`: mail and chat for owners, as configured.

    A channel that fails is logged once, and once when it works again.
    """

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
