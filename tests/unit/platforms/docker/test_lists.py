"""A list of the engine with an entry that cannot be read: that one is not seen, the others are."""

from __future__ import annotations

import json

import pytest

from gpukeeper.clients.docker import ContainerSummary, EngineSilent, ImageSummary, read_list

GOOD = {"Id": "a" * 64, "Names": ["/eval"], "Labels": {"a": "b"}}


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({"Id": "b" * 64, "Names": "eval"}, f"container {'b' * 64}"),
        ({"Id": "c" * 64, "Labels": {"a": 5}}, f"container {'c' * 64}"),
        ({"Id": 7}, "container 7"),
        ("x", "container number 2 of 3"),
        (None, "container number 2 of 3"),
    ],
)
def test_one_entry_that_cannot_be_read_is_one_that_was_not_seen(entry: object, what: str) -> None:
    found, unseen = read_list(
        json.dumps([GOOD, entry, GOOD]).encode(), ContainerSummary, "container", "/containers/json"
    )
    assert [one.id for one in found] == ["a" * 64] * 2
    assert [one.what for one in unseen] == [what]
    assert "cannot be read" in unseen[0].why


def test_one_that_is_no_utf8_is_one_that_was_not_seen() -> None:
    good = json.dumps({"Id": "sha256:1"}).encode()
    found, unseen = read_list(b'[%s,{"Id":"\xff"}]' % good, ImageSummary, "image", "/images/json")
    assert ([one.id for one in found], len(unseen)) == (["sha256:1"], 1)


@pytest.mark.parametrize("answer", [b"", b"{}", b"[" * 100_000, b'[{"Id": "a"}', b"null", b"\xff"])
def test_what_is_no_list_is_no_answer(answer: bytes) -> None:
    with pytest.raises(EngineSilent):
        read_list(answer, ContainerSummary, "container", "/containers/json")
