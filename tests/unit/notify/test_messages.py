"""Who is sent what: owners over every owner channel, admins in the background, and no channel can harm a pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from gpukeeper.model.ports import Delivered, Message, MessageKind, NotDelivered
from gpukeeper.notify import messages as sending
from gpukeeper.notify.messages import Messages
from gpukeeper.platforms.simulated.world import VirtualLoop, run_virtually

WARNING = Message(kind=MessageKind.WARNING, about="w", text="idle", at=datetime(2026, 5, 1, tzinfo=UTC), owner="ann")


class Recorded:
    """Answers as it was told, and remembers what it was sent."""

    def __init__(self, name: str, answer: object = None, *, takes: timedelta = timedelta()) -> None:
        self.name, self.answer, self.takes = name, answer or Delivered(), takes
        self.sent: list[str] = []

    async def send(self, message: Message) -> Delivered | NotDelivered:
        await asyncio.sleep(self.takes.total_seconds())
        self.sent.append(message.text)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


def problem(text: str, key: str | None = None) -> Message:
    return Message(kind=MessageKind.COMPLAINT, about="w", text=text, at=WARNING.at, key=text if key is None else key)


def play(story: Callable[[], Awaitable[None]]) -> None:
    run_virtually(story(), VirtualLoop())


def to_owner(*channels: Recorded, log: list[str] | None = None) -> tuple[str, ...]:
    found: list[tuple[str, ...]] = []

    async def story() -> None:
        messages = Messages(channels, [].append if log is None else log.append)
        found.append((await messages.to_owner(WARNING)).channels)

    play(story)
    return found[0]


def test_an_owner_is_sent_a_warning_over_every_channel() -> None:
    first, second = Recorded("first"), Recorded("second")
    assert to_owner(first, second) == ("first", "second")
    assert first.sent == second.sent == ["idle"]


def test_one_channel_that_delivers_is_enough() -> None:
    assert to_owner(Recorded("first", NotDelivered("no")), Recorded("second")) == ("second",)


def test_delivered_is_only_what_a_channel_itself_calls_so() -> None:
    """Promise 9: nothing else may count as a warning that was heard."""
    log: list[str] = []
    slow = Recorded("slow", takes=2 * sending.TO_OWNER)
    others = [Recorded("broken", ValueError("x")), Recorded("says yes", True), Recorded("no", NotDelivered("why"))]
    assert to_owner(slow, *others, log=log) == ()
    assert to_owner() == ()
    assert [words.partition(" fails: ")[0] for words in log] == [
        "the channel slow",
        "the channel broken",
        "the channel says yes",
    ]


def test_admins_are_sent_a_message_over_every_channel_without_waiting() -> None:
    slow, quick = Recorded("slow", takes=timedelta(seconds=20)), Recorded("quick")

    async def story() -> None:
        messages, begun = Messages(()), asyncio.get_running_loop().time()
        messages.admins = (slow, quick)
        messages.to_admins(problem("a"))
        assert asyncio.get_running_loop().time() == begun
        await asyncio.sleep(1)
        assert (slow.sent, quick.sent) == ([], ["a"])
        await asyncio.sleep(20)
        assert slow.sent == ["a"]

    play(story)


def test_without_channels_for_admins_nothing_is_sent_and_nothing_waits() -> None:
    async def story() -> None:
        messages = Messages(())
        messages.to_admins(problem("a"))
        await messages.close()

    play(story)


def test_a_channel_that_fails_is_logged_once_and_others_go_on() -> None:
    log: list[str] = []
    failing, sound = Recorded("mail", NotDelivered("the server refused it")), Recorded("log")

    async def story() -> None:
        messages = Messages((), log.append)
        messages.admins = (failing, sound)
        for text in ("a", "b"):
            messages.to_admins(problem(text))
        await asyncio.sleep(1)
        failing.answer = Delivered()
        for text in ("c", "d"):
            messages.to_admins(problem(text))
        await asyncio.sleep(1)

    play(story)
    assert sound.sent == failing.sent == ["a", "b", "c", "d"]
    assert log == [
        "the channel mail fails: the server refused it. This is logged once, until it works again.",
        "the channel mail works again.",
    ]


def test_a_channel_that_hangs_is_given_up() -> None:
    log: list[str] = []
    stuck = Recorded("stuck", takes=timedelta(days=1))

    async def story() -> None:
        messages = Messages((), log.append)
        messages.admins = (stuck,)
        messages.to_admins(problem("a"))
        await asyncio.sleep(sending.TO_ADMINS.total_seconds() + 1)

    play(story)
    assert log == ["the channel stuck fails: it timed out after 30s. This is logged once, until it works again."]


def test_a_flood_is_bounded() -> None:
    channel = Recorded("log", takes=timedelta(seconds=1))

    async def story() -> None:
        messages = Messages(())
        messages.admins = (channel,)
        for number in range(10_000):
            messages.to_admins(problem(f"{number}"))
        assert len(messages._waiting) <= sending.WAITING
        await messages.close()

    play(story)
    assert len(channel.sent) < 10


def test_the_end_waits_a_moment_for_what_is_being_sent() -> None:
    quick, stuck = Recorded("quick", takes=timedelta(seconds=1)), Recorded("stuck", takes=timedelta(days=1))

    async def story() -> None:
        messages, begun = Messages(()), asyncio.get_running_loop().time()
        messages.admins = (quick, stuck)
        messages.to_admins(problem("a"))
        await messages.close()
        assert asyncio.get_running_loop().time() - begun <= sending.AT_END.total_seconds()

    play(story)
    assert (quick.sent, stuck.sent) == (["a"], [])
