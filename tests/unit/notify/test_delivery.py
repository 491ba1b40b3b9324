"""What is sent in the background: retries, quiet hours, digests, and how each is recorded."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import msgspec

from gpukeeper.model.ports import Delivered, Delivery, Message, MessageKind, NotDelivered
from gpukeeper.model.subject import Ref
from gpukeeper.notify.catalog import Log
from gpukeeper.notify.messages import DIGEST, Messages, read_quiet_hours
from gpukeeper.platforms.simulated.world import VirtualLoop, run_virtually

AT = datetime(2026, 5, 1, 12, tzinfo=UTC)
TRAIN = Ref("docker", "node-1", "container", "train", "c0ffee")
HOUR = timedelta(hours=1)
WARNING = Message(kind=MessageKind.WARNING, about="w", text="idle", at=AT, owner="ann", ref=TRAIN, until=AT + HOUR)
NOTICE = Message(kind=MessageKind.NOTICE, about="w", text="idle, no action", at=AT, owner="ann", ref=TRAIN)
STOPPED = Message(kind=MessageKind.STOPPED, about="w", text="stopped", at=AT, owner="ann", ref=TRAIN, key="s1")
BUSY = NotDelivered("busy", transient=True)


class Mail:
    name = "apprise mail"

    def __init__(self, *answers: Delivered | NotDelivered) -> None:
        self.answers = list(answers)
        self.sent: list[tuple[float, Message]] = []

    async def send(self, message: Message) -> Delivered | NotDelivered:
        self.sent.append((asyncio.get_running_loop().time(), message))
        return self.answers.pop(0) if self.answers else Delivered()


class Terminal(Mail):
    name = "terminal"


class Post:
    """Messages with one mail channel, and what was recorded of them."""

    def __init__(self, mail: Mail, *terminals: Mail) -> None:
        self.mail = mail
        self.recorded: list[tuple[str, Delivery]] = []
        self.messages = Messages(terminals)
        self.messages.services = (mail,)
        self.messages.record = self._record

    async def _record(self, message: Message, delivery: Delivery) -> None:
        self.recorded.append((message.text, delivery))

    def play(self, story: Callable[[], Awaitable[None]]) -> None:
        run_virtually(story(), VirtualLoop())


def test_a_warning_over_mail_is_delivered_and_has_a_link() -> None:
    post = Post(Mail(), terminal := Terminal())
    post.messages.link_of = lambda ref: f"https://gpu.example/find?uid={ref.uid}"

    async def story() -> None:
        assert await post.messages.to_owner(WARNING) == Delivery(("terminal", "apprise mail"))

    post.play(story)
    assert post.mail.sent[0][1].link == "https://gpu.example/find?uid=c0ffee"
    assert terminal.sent[0][1].text == "idle https://gpu.example/find?uid=c0ffee"


def test_a_transient_failure_is_retried_with_growing_pauses_while_the_warning_is_of_use() -> None:
    post = Post(Mail(BUSY, BUSY, BUSY))

    async def story() -> None:
        assert await post.messages.to_owner(WARNING) == Delivery((), ("apprise mail: busy",))
        await asyncio.sleep(3600)

    post.play(story)
    times = [at for at, _ in post.mail.sent]
    assert [round(b - a) for a, b in itertools.pairwise(times)] == [15, 30, 60]
    assert post.recorded == [("idle", Delivery(("apprise mail",)))]


def test_retries_end_with_the_time_of_the_warning() -> None:
    post = Post(Mail(*[BUSY] * 100))
    short = msgspec.structs.replace(WARNING, until=AT + timedelta(minutes=5))

    async def story() -> None:
        await post.messages.to_owner(short)
        await asyncio.sleep(7200)

    post.play(story)
    assert post.mail.sent[-1][0] - post.mail.sent[0][0] <= 300
    assert [delivery.failed for _, delivery in post.recorded] == [("apprise mail: busy",)]


def test_what_is_refused_for_good_is_not_retried() -> None:
    post = Post(Mail(NotDelivered("no such user")))

    async def story() -> None:
        await post.messages.to_owner(WARNING)
        await asyncio.sleep(7200)

    post.play(story)
    assert len(post.mail.sent) == 1


def test_a_warning_in_quiet_hours_counts_as_not_delivered_even_on_a_terminal() -> None:
    post = Post(Mail(), terminal := Terminal())
    post.messages.quiet = read_quiet_hours("11:00-12:30 UTC")

    async def story() -> None:
        found = await post.messages.to_owner(WARNING)
        assert found.channels == ()
        assert [why.partition(":")[0] for why in found.failed] == ["terminal", "apprise mail"]
        assert "quiet hours" in found.why_not
        assert len(terminal.sent) == 1
        await asyncio.sleep(29 * 60)
        assert post.mail.sent == []
        await asyncio.sleep(2 * 60)
        assert len(post.mail.sent) == 1  # after the quiet hours, while it is of use

    post.play(story)


def test_a_warning_that_is_over_before_the_quiet_hours_is_not_sent() -> None:
    post = Post(Mail())
    post.messages.quiet = read_quiet_hours("11:00-18:00 UTC")

    async def story() -> None:
        await post.messages.to_owner(WARNING)
        await asyncio.sleep(24 * 3600)

    post.play(story)
    assert post.mail.sent == []
    assert post.recorded == [("idle", Delivery((), ("apprise mail: it would have been sent too late",)))]


def test_notices_are_collected_into_one_message() -> None:
    post = Post(Mail())
    post.messages.digest = 24 * HOUR

    async def story() -> None:
        for about in ("a", "b", "a"):
            notice = msgspec.structs.replace(NOTICE, about=about, text=f"{about} is idle")
            assert await post.messages.to_owner(notice) == Delivery(failed=(DIGEST,))
        assert post.mail.sent == []
        await asyncio.sleep(25 * 3600)

    post.play(story)
    assert [message.text for _, message in post.mail.sent] == ["a is idle · b is idle"]
    assert [delivery.channels for _, delivery in post.recorded] == [("apprise mail",)]


def test_a_warning_is_never_collected() -> None:
    post = Post(Mail())
    post.messages.digest = 24 * HOUR

    async def story() -> None:
        assert (await post.messages.to_owner(WARNING)).channels == ("apprise mail",)

    post.play(story)


def test_a_stop_is_reported_without_waiting_and_what_is_not_sent_at_the_end_is_recorded() -> None:
    post = Post(Mail(*[BUSY] * 100))

    async def story() -> None:
        begun = asyncio.get_running_loop().time()
        post.messages.later(STOPPED)
        assert asyncio.get_running_loop().time() == begun
        await asyncio.sleep(1)
        await post.messages.close()

    post.play(story)
    assert post.recorded == [("stopped", Delivery((), ("apprise mail: busy",)))]


def test_messages_to_admins_that_an_earlier_process_sent_are_not_sent_again() -> None:
    post = Post(Mail())
    post.messages.admins = (Log(lambda words: None), pager := Mail())
    alert = Message(kind=MessageKind.BREAKER, about="p", text="open", at=AT, key="p")

    async def story() -> None:
        post.messages.was_sent("breaker", "p", timedelta(hours=2))
        post.messages.to_admins(alert)
        await asyncio.sleep(1)
        assert pager.sent == []
        post.messages.is_over(MessageKind.BREAKER, "p")
        post.messages.to_admins(alert)
        await asyncio.sleep(1)

    post.play(story)
    assert len(pager.sent) == 1
    assert post.recorded == [("open", Delivery(("apprise mail",)))]
