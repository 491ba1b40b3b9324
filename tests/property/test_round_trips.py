"""Values are their own JSON: what is written is what is read."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.model.decision import Decision, Plan, Snapshot
from gpukeeper.model.event import Event
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import Memory, Ref, Subject
from gpukeeper.model.words import in_words
from tests.effort import examples
from tests.property.strategies import any_of

LINES = get_args(Event)


@pytest.mark.parametrize("kind", [Subject, Decision, Memory, Plan, Snapshot, Policy], ids=lambda kind: kind.__name__)
@examples(0.25)
@given(data=st.data())
def test_a_value_survives_json(kind: Any, data: st.DataObject) -> None:
    value = data.draw(any_of(kind))
    assert msgspec.json.decode(msgspec.json.encode(value), type=kind) == value


@pytest.mark.parametrize("kind", LINES, ids=lambda kind: kind.__name__)
@examples(0.25)
@given(data=st.data())
def test_a_line_of_the_journal_survives_json_and_keeps_its_type(kind: Any, data: st.DataObject) -> None:
    line = data.draw(any_of(kind))
    again = msgspec.json.decode(msgspec.json.encode(line), type=Event)
    assert type(again) is kind
    assert again == line


@given(span=st.timedeltas(timedelta(days=-9999), timedelta(days=9999)))
def test_a_span_in_words_is_short_and_close(span: timedelta) -> None:
    words = in_words(span)
    assert len(words) <= 9
    assert words.startswith("-") == (span < timedelta() and words != "0s")


WORD = st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True)


@given(parts=st.lists(WORD, min_size=5, max_size=5), namespace=st.one_of(st.just(""), WORD), cut=st.integers(0, 4))
def test_every_ending_of_a_path_on_a_word_boundary_names_its_thing(parts: list[str], namespace: str, cut: int) -> None:
    ref = Ref(*parts, namespace=namespace)
    words = ref.path.split("/")
    assert ref.ends_with("/".join(words[min(cut, len(words) - 1) :]))
    assert ref.ends_with(ref.uid)
    assert not ref.ends_with("x" + ref.path)
