"""Messages as the policy configures them, and what the ledger knows of those that an earlier process sent."""

from __future__ import annotations

from datetime import datetime, timedelta
from urllib.parse import urlencode

from gpukeeper.engine.messages import for_admins, notice_again, stopped_message
from gpukeeper.ledger.journal import SqliteLedger
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import Closed, Event, Notified, WarningSent
from gpukeeper.model.policy import Notify, Policy
from gpukeeper.model.ports import Clock, Delivery, Message, MessageKind, NotDelivered
from gpukeeper.model.subject import Ref
from gpukeeper.notify.catalog import admin_channels, owner_services
from gpukeeper.notify.messages import (
    DIGEST,
    REPEATED_AFTER,
    TO_ADMINS,
    Messages,
    end_channel,
    read_quiet_hours,
    send_in_time,
)

SEND_AT_END = timedelta(seconds=15)  # of a command, for messages that are being sent
STOPPED_WITHIN = timedelta(hours=1)  # an older stop is no news
LINES = 5000  # of one day, read at the start


def configure(messages: Messages, policy: Policy, machine: str) -> None:
    """As the policy says now."""
    url, settings = policy.web.url, policy.notify
    messages.services = owner_services(settings)
    messages.quiet = None if settings.quiet is None else read_quiet_hours(settings.quiet)

    def link_of(ref: Ref) -> str:
        """By the uid: a link in a mail is used after the workload is gone too, on the dashboard of this machine or of
        the fleet."""
        named = {"uid": ref.uid, "machine": policy.fleet.machine or machine}
        return "" if url is None else f"{url}/find?{urlencode(named)}"

    messages.link_of, messages.host = link_of, machine


async def record_message(ledger: SqliteLedger, clock: Clock, message: Message, delivery: Delivery) -> None:
    """A ledger that cannot be written is reported by the pass."""
    if not ledger.writable:
        return
    line = Notified(
        at=clock.now(),
        ref=message.ref,
        owner=message.owner,
        kind=message.kind.value,
        key=message.key,
        message=message.text,
        delivered=bool(delivery.channels),
        channel=", ".join(delivery.channels),
        why_not=delivery.why_not,
    )
    try:
        await ledger.append([line])
    except LedgerError:
        return


async def send_to_admins(settings: Notify, line: Event) -> list[str]:
    """By a program that does not stay, about one line that it wrote. Returns what was not delivered, and why."""
    message = for_admins(line)
    if message is None:
        return []
    failed = []
    for channel in admin_channels(settings, lambda words: None)[1:]:
        answer = await send_in_time(channel, message, TO_ADMINS)
        await end_channel(channel)
        if isinstance(answer, NotDelivered):
            failed.append(f"The admins were not notified over the channel {channel.name}: {answer.why}")
    return failed


async def continue_messages(messages: Messages, ledger: SqliteLedger, now: datetime) -> None:
    """After a restart nothing is sent twice, and what was not sent is sent."""
    types = tuple(_TYPES)
    found = [line for _, line in await ledger.lines(LineFilter(last=LINES, types=types, since=now - REPEATED_AFTER))]
    sent = {(line.kind, line.key) for line in found if isinstance(line, Notified)}
    for line in found:
        if isinstance(line, Notified) and line.owner is None:
            messages.was_sent(line.kind, line.key, now - line.at)
    messages.recollect(_collected(found))
    for line in found:
        message = stopped_message(line) if now - line.at < STOPPED_WITHIN else None
        if message is not None and (message.kind.value, message.key) not in sent:
            messages.later(message)


_TYPES = [str(kind.__struct_config__.tag) for kind in (Notified, Closed, WarningSent)]


def _collected(lines: list[Event]) -> list[Message]:
    """Notices for a digest that was not sent."""
    last = {
        line.owner: line.at for line in lines if isinstance(line, Notified) and line.kind == MessageKind.NOTICE.value
    }
    collected = [line for line in lines if isinstance(line, WarningSent) and line.why_not == DIGEST]
    return [notice_again(line) for line in collected if line.owner not in last or line.at > last[line.owner]]
