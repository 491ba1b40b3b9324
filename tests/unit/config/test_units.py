"""Durations, sizes and percentages: what is written can be read, and what cannot be read says what to write."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.config import units


@given(st.timedeltas(min_value=timedelta(), max_value=units.LONGEST))
def test_reading_a_written_duration_gives_it_back(span: timedelta) -> None:
    assert units.read_span(units.span_in_words(span)) == span


@given(st.integers(min_value=0, max_value=units.LARGEST))
def test_reading_a_written_size_gives_it_back(size: int) -> None:
    assert units.read_size(units.size_in_words(size)) == size


@given(st.decimals(min_value="0.01", max_value=100, places=2))
def test_reading_a_written_share_gives_it_back(percent) -> None:
    share = units.read_share(f"{percent}%")
    assert units.read_share(units.share_in_words(share)) == share


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_with_a_sentence(text: str) -> None:
    for read in (units.read_span, units.read_size, units.read_percent, units.read_share):
        assert "Write it like" in (_refusal(read, text) or "Write it like")


def _refusal(read: Callable[[object], object], text: str) -> str | None:
    try:
        read(text)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("30m", timedelta(minutes=30)),
        ("1h30m", timedelta(hours=1, minutes=30)),
        ("1.5h", timedelta(hours=1, minutes=30)),
        ("7d", timedelta(days=7)),
        ("2w", timedelta(days=14)),
        ("168h", timedelta(days=7)),
        ("250ms", timedelta(milliseconds=250)),
        ("0", timedelta()),
        ("0s", timedelta()),
        (0, timedelta()),
    ],
)
def test_durations(text: object, span: timedelta) -> None:
    assert units.read_span(text) == span


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2 hour", '"2 hour" is not a duration.'),
        ("5m,3h", '"5m,3h" is not a duration.'),
        ("30mm", '"30mm" is not a duration.'),
        ("1e3s", '"1e3s" is not a duration.'),
        ("", '"" is not a duration.'),
        ("-5m", '"-5m" is negative.'),
        (-5, "-5 is negative."),
        (30, "30 has no unit."),
        (1.5, "1.5 has no unit."),
        (False, "false is not a duration."),
        (["1h"], "a list is not a duration."),
        ("36501d", '"36501d" is longer than 100 years.'),
        ("9" * 18 + "d", "is longer than 100 years."),
        ("9" * 400 + "d", "is not a duration."),
    ],
)
def test_what_is_not_a_duration(text: object, why: str) -> None:
    with pytest.raises(ValueError, match="Write it like 30m, 2h or 7d") as caught:
        units.read_span(text)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("100kB", 10**5),
        ("1.5KiB", 1536),
        ("7B", 7),
        ("5 GB", 5 * 10**9),
        (0, 0),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert units.read_size(text) == size


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("80%", '"80%" is not a size.'),
        ("5KB", '"5KB" is not a size.'),
        ("5G", '"5G" is not a size.'),
        ("-5GB", '"-5GB" is negative.'),
        (5, "5 has no unit."),
        ("9000PiB", "is too large."),
    ],
)
def test_what_is_not_a_size(text: object, why: str) -> None:
    with pytest.raises(ValueError, match="Write it like 500MB, 5GB or 20GiB") as caught:
        units.read_size(text)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (0.8, "0.8 has no unit."),
        ("80", '"80" is not a percentage.'),
        ("-1%", '"-1%" is negative.'),
        ("0%", '"0%" is not above 0% and at most 100%.'),
        ("101%", '"101%" is not above 0% and at most 100%.'),
    ],
)
def test_what_is_not_a_share(text: object, why: str) -> None:
    with pytest.raises(ValueError, match="Write it like 80%") as caught:
        units.read_share(text)
    assert why in str(caught.value)


@pytest.mark.parametrize(("size", "words"), [(5 * 10**9, "5GB"), (20 * 2**30, "20GiB"), (2**20, "1MiB"), (0, "0B")])
def test_a_size_keeps_the_unit_it_was_written_in(size: int, words: str) -> None:
    assert units.size_in_words(size) == words


def test_shares_are_written_without_noise() -> None:
    assert [units.share_in_words(share) for share in (0.8, 0.005, 1.0, 0.07)] == ["80%", "0.5%", "100%", "7%"]
