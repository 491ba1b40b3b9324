"""Notices collected into one message for each owner. Pure: when it is sent is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from gpukeeper.model.message import Message, MessageKind

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
