"""The checklist is a list that tests can be held to."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.docs.checklist import LEVELS, OPEN_PAGE, Item, items, missing, named_in_tests, open_page, parts, table


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


def test_every_item_within_the_scope_has_parts_and_every_part_an_item() -> None:
    known = {one.id: one.level for one in items()}
    divided = {one.item for one in parts()}
    assert divided <= set(known), "parts of items that docs/reference/checklist.md does not have"
    assert {item for item, level in known.items() if level != "later"} <= divided, "items without parts"


def test_a_part_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(one.id for one in parts()).items() if count > 1] == []


def test_every_test_of_a_part_exists() -> None:
    assert [problem for part in parts() for test in part.tests if (problem := missing(test))] == []


def test_an_open_part_gives_the_reason() -> None:
    assert [one.id for one in parts() if not one.proven and not one.why_open.strip()] == []


def test_the_page_of_open_parts_matches_the_file() -> None:
    advice = "docs/reference/checklist-open.md is stale. Write it anew: python -m tests.docs.generate"
    assert OPEN_PAGE.read_text() == open_page(), advice


@pytest.mark.parametrize(
    "reference",
    [
        "tests/docs/no_such_file.py::test_x",
        "tests/docs/test_checklist.py::test_that_is_not_there",
        "tests/docs/test_checklist.py",
        "tests/cases/idle/no_such_case.json",
        "docs/index.md",
    ],
)
def test_a_reference_to_no_test_is_noticed(reference: str) -> None:
    assert missing(reference)


def test_a_reference_to_a_function_or_a_case_is_found() -> None:
    assert not missing("tests/docs/test_checklist.py::test_a_part_has_a_name_of_its_own")
    assert not missing("tests/cases/idle/active_cpu_keeps.json")


@pytest.mark.parametrize("line", ["C1.1 | no slug | tests/a.py::b", "C1.1/x | no proof |", "C1.1/x only words"])
def test_a_line_that_is_no_part_is_quoted(line: str) -> None:
    with pytest.raises(ValueError, match="not a part of the checklist"):
        parts(line)


def test_the_table_counts_what_is_proven_and_lists_what_is_open() -> None:
    both = [Item("C1.1", "must", "a", "C1 First"), Item("C1.2", "should", "b", "C1 First")]
    some = parts("C1.1/a | x | tests/a.py::test_a\nC1.2/b | y | tests/b.py::test_b\nC1.2/c | z | open: not built yet")
    first, chapter, together = table(both, some).splitlines()
    assert first.split()[-1] == "open"
    assert chapter.split() == ["C1", "First", "1", "/", "1", "0", "/", "1", "2", "/", "3", "C1.2/c"]
    assert together.split()[:4] == ["together", "1", "/", "1"]
