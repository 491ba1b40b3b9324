"""Filters, order and pages from the query of an address; and charts of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.interfaces.web.charts import sparkline, stacked
from gpukeeper.interfaces.web.pages.fleet import PAGE, SORTS, STATES, Selection, paged, read_selection

words = st.text(max_size=20).map(str.strip)


@given(
    st.builds(
        Selection,
        machine=words,
        place=words,
        owner=words,
        class_=words,
        text=words,
        state=st.sampled_from(["", *STATES]),
        sort=st.sampled_from(SORTS),
        page=st.integers(1, 9999),
    )
)
def test_a_selection_survives_its_query(wanted: Selection) -> None:
    from urllib.parse import parse_qsl

    assert read_selection(dict(parse_qsl(wanted.query()[1:]))) == wanted


@pytest.mark.parametrize("query", [{"page": "0"}, {"page": "x"}, {"page": "²"}, {"sort": "size"}, {"state": "gone"}])
def test_what_is_not_valid_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is not"):
        read_selection(query)


@given(st.integers(1, 9999), st.integers(0, 20 * PAGE))
def test_every_page_has_rows_if_there_are_any(page: int, total: int) -> None:
    wanted, rows, pages = paged(Selection(page=page), total)
    shown = len(range(total)[rows])
    assert (shown > 0) == (total > 0)
    assert 1 <= wanted.page <= pages
    assert wanted.page == page or (wanted.page == pages < page), "only a number behind the last page is changed"


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False)))
def test_a_sparkline_stays_inside_its_picture(values: list[float | None]) -> None:
    picture = sparkline(values, width=100, height=20)
    points = [pair for part in picture.split('points="')[1:] for pair in part.split('"')[0].split()]
    for pair in points:
        x, y = map(float, pair.split(","))
        assert 0 <= x <= 100
        assert 0 <= y <= 20
    assert ("not measured" in picture) == all(one is None for one in values)


def test_a_stacked_bar_fills_its_width_and_escapes_names() -> None:
    picture = stacked([("free", 1.0), ("<b>", 3.0), ("none", 0.0)], label='a "label"')
    assert 'width="25.000"' in picture
    assert 'width="75.000"' in picture
    assert "<b>" not in picture
    assert picture.count("<rect") == 2
