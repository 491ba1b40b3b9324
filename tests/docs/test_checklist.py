"""The checklist is a list that tests can be held to."""

from __future__ import annotations

from tests.docs.checklist import LEVELS, items, named_in_tests, table


def test_every_item_named_by_a_test_is_in_the_list() -> None:
    known = {one.id for one in items()}
    strangers = {item: files for item, files in named_in_tests().items() if item not in known}
    assert not strangers, f"not in docs/reference/checklist.md: {strangers}"


def test_the_list_is_whole_and_in_order() -> None:
    found = items()
    assert {one.level for one in found} == set(LEVELS)
    chapters = list(dict.fromkeys(one.chapter.split()[0] for one in found))
    assert chapters == [f"C{number}" for number in range(1, 18)]
    for chapter in chapters:
        numbers = [int(one.id.split(".")[1]) for one in found if one.id.startswith(f"{chapter}.")]
        assert sorted(set(numbers)) == list(range(1, max(numbers) + 1)), f"{chapter} has a gap"


def test_an_item_stands_twice_only_with_two_levels() -> None:
    pairs = [(one.id, one.level) for one in items()]
    assert len(pairs) == len(set(pairs))


def test_the_table_counts_what_is_named_and_lists_what_is_not() -> None:
    found = [one for one in items() if one.chapter.startswith("C5 ")]
    some = found[0].id
    first, chapter, together = table(found, [some]).splitlines()
    assert first.split()[-3:] == ["not", "named", "yet"]
    assert "1 / 5" in chapter
    assert some not in chapter.split()
    assert found[1].id in chapter.split()
    assert together.startswith("together")
