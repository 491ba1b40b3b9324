"""How often admins hear of the same thing, and how much of everything."""

from __future__ import annotations

from datetime import UTC, datetime

from gpukeeper.model.ports import Message, MessageKind
from gpukeeper.notify.messages import HOUR, PER_HOUR, REMEMBERED, REPEATED_AFTER, Repeats


def message(key: str, kind: MessageKind = MessageKind.COMPLAINT) -> Message:
    return Message(kind=kind, about="w", text=f"about {key}", at=datetime(2026, 5, 1, tzinfo=UTC), key=key)


def test_what_repeats_is_sent_once_a_day() -> None:
    repeats, day = Repeats(), REPEATED_AFTER.total_seconds()
    sent = [repeats.admit(message("a"), now) is not None for now in (0, 60, day - 1, day, day + 1)]
    assert sent == [True, False, False, True, False]


def test_another_kind_or_key_is_another_message() -> None:
    repeats = Repeats()
    assert repeats.admit(message("a"), 0)
    assert repeats.admit(message("b"), 0)
    assert repeats.admit(message("a", MessageKind.GPU), 0)


def test_what_was_over_is_news_again() -> None:
    repeats = Repeats()
    assert repeats.admit(message("a", MessageKind.BREAKER), 0)
    repeats.over("breaker", "a")
    assert repeats.admit(message("a", MessageKind.BREAKER), 1)


def test_no_more_than_so_many_an_hour_and_the_next_one_counts_the_others() -> None:
    repeats, hour = Repeats(), HOUR.total_seconds()
    sent = [repeats.admit(message(f"{number}"), 0) for number in range(PER_HOUR + 5)]
    assert sum(one is not None for one in sent) == PER_HOUR
    later = repeats.admit(message(f"{PER_HOUR}"), hour)  # left out before, so it is still news
    assert later is not None
    assert "5 other messages were not sent" in later.text


def test_what_is_remembered_is_bounded() -> None:
    repeats, hour = Repeats(), HOUR.total_seconds()
    for number in range(3 * REMEMBERED):
        repeats.admit(message(f"{number}"), number * hour)
    assert len(repeats._sent) == REMEMBERED
