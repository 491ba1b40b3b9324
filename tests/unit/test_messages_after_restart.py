"""After a restart nothing is sent twice, and what was not sent is sent: from the ledger."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpukeeper.ledger.journal import open_ledger
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Event, Notified, WarningSent
from gpukeeper.model.policy import Policy, Web
from gpukeeper.model.ports import Delivered, Message, MessageKind
from gpukeeper.model.subject import Ref
from gpukeeper.notify.messages import DIGEST, Messages
from gpukeeper.wiring.messages import configure, continue_messages

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
TRAIN = Ref("docker", "node-1", "container", "train", "c0ffee")


class Mail:
    name = "apprise mail"

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.got = asyncio.Event()

    async def send(self, message: Message) -> Delivered:
        self.sent.append(message)
        self.got.set()
        return Delivered()


def stop(step: str, ago: timedelta) -> Closed:
    given = {"action": Action.STOP, "rule": "idle", "result": Result.RECLAIMED, "reason": "idle"}
    return Closed(at=NOW - ago, ref=TRAIN, owner="ann", step=step, **given)  # type: ignore[arg-type]


def notified(kind: str, key: str, owner: str | None, ago: timedelta = 5 * MINUTE) -> Notified:
    return Notified(at=NOW - ago, owner=owner, kind=kind, key=key, message="x", delivered=True)


def notice(ago: timedelta) -> WarningSent:
    return WarningSent(
        at=NOW - ago,
        ref=TRAIN,
        owner="ann",
        rule="idle",
        stage=1,
        incarnation="1",
        limit=timedelta(),
        delivered=False,
        channel="",
        message=f"idle {ago}",
        why_not=DIGEST,
    )


def after(tmp_path: Path, lines: list[Event], *alerts: Message, digest: timedelta | None = None) -> tuple[Mail, Mail]:
    mail, pager = Mail(), Mail()

    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        try:
            await ledger.append(lines)
            messages = Messages(())
            messages.services, messages.admins, messages.digest = (mail,), (Mail(), pager), digest
            await continue_messages(messages, ledger, NOW)
            for alert in alerts:
                messages.to_admins(alert)
            if digest is not None:
                await mail.got.wait()
            await messages.close()
        finally:
            ledger.close()

    asyncio.run(story())
    return mail, pager


def test_a_stop_whose_message_was_not_sent_is_reported_and_only_that(tmp_path: Path) -> None:
    lines: list[Event] = [stop("old", 90 * MINUTE), stop("sent", 9 * MINUTE), notified("stopped", "sent", "ann")]
    mail, _ = after(tmp_path, [*lines, stop("killed", 2 * MINUTE)])
    assert [message.key for message in mail.sent] == ["killed"]


def test_admins_are_not_sent_the_same_again(tmp_path: Path) -> None:
    alerts = [Message(kind=MessageKind.BREAKER, about=p, text="open", at=NOW, key=p) for p in ("a", "b")]
    _, pager = after(tmp_path, [notified("breaker", "a", None)], *alerts)
    assert [message.key for message in pager.sent] == ["b"]


def test_notices_that_were_collected_are_still_sent_once(tmp_path: Path) -> None:
    lines: list[Event] = [notice(50 * MINUTE), notified("notice", "digest", "ann", 30 * MINUTE), notice(10 * MINUTE)]
    mail, _ = after(tmp_path, lines, digest=timedelta())
    assert [message.text for message in mail.sent] == ["idle 0:10:00"]


def test_a_link_leads_to_the_page_of_the_workload() -> None:
    messages = Messages(())
    configure(messages, Policy(), "node-1")
    assert messages.link_of(TRAIN) == ""
    configure(messages, Policy(web=Web(url="https://gpu.example")), "node-1")
    assert messages.host == "node-1"
    assert messages.link_of(TRAIN) == f"https://gpu.example/find?uid={TRAIN.uid}&machine=node-1"
