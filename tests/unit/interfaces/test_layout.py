"""Rows and sentences in the width of a terminal: nothing is cut, and no line is too long unless a single word is."""

from __future__ import annotations

import random

from gpukeeper.interfaces.terminal.messages import laid_out, wrapped

HEAD = ("next", "workload", "owner", "because")
ROWS = (
    ("remove", "docker/node-1/train-llama-8b", "ann", "succeeded 2d ago, kept for 1d"),
    ("kept", "docker/node-1/eval", "-", "held by ann for 3h more: a paper"),
)


def text(width: int | None, rows: tuple[tuple[str, ...], ...] = ROWS, head: tuple[str, ...] = HEAD) -> list[str]:
    return [line for row in laid_out(rows, head, width) for line in row]


def test_without_a_terminal_each_row_is_one_line() -> None:
    assert text(None) == [
        "NEXT    WORKLOAD                      OWNER  BECAUSE",
        "remove  docker/node-1/train-llama-8b  ann    succeeded 2d ago, kept for 1d",
        "kept    docker/node-1/eval            -      held by ann for 3h more: a paper",
    ]
    assert text(200) == text(None)


def test_the_last_column_is_wrapped_where_there_is_room_for_a_sentence() -> None:
    assert text(70) == [
        "NEXT    WORKLOAD                      OWNER  BECAUSE",
        "remove  docker/node-1/train-llama-8b  ann    succeeded 2d ago, kept",
        "                                             for 1d",
        "kept    docker/node-1/eval            -      held by ann for 3h more:",
        "                                             a paper",
    ]


def test_what_does_not_fit_beside_goes_below_with_its_name() -> None:
    """What is obvious needs no name, and what there is nothing to say of is left out."""
    assert text(40) == [
        "NEXT    WORKLOAD",
        "remove  docker/node-1/train-llama-8b",
        "        owner ann",
        "        succeeded 2d ago, kept for 1d",
        "kept    docker/node-1/eval",
        "        held by ann for 3h more: a paper",
    ]


def test_a_name_that_fits_beside_nothing_has_a_line_of_its_own() -> None:
    assert text(32) == [
        "NEXT",
        "remove",
        "  docker/node-1/train-llama-8b",
        "  owner ann",
        "  succeeded 2d ago, kept for 1d",
        "kept",
        "  docker/node-1/eval",
        "  held by ann for 3h more: a",
        "  paper",
    ]


def test_a_word_longer_than_the_line_is_left_whole() -> None:
    """The terminal breaks it, and it can be copied."""
    assert "  docker/node-1/train-llama-8b" in text(20)


def test_one_column_is_a_list_of_sentences() -> None:
    rows = (("use the GPU above 5 %",), ("keep it for a while: gpukeeper workload hold eval",))
    assert text(40, rows, ()) == [
        "use the GPU above 5 %",
        "keep it for a while: gpukeeper workload",
        "hold eval",
    ]
    assert text(40, (("",),), ()) == [""]


def test_a_sentence_keeps_its_indentation() -> None:
    assert wrapped("  idle for 2h, allowed 30m", 20) == ["  idle for 2h,", "  allowed 30m"]
    assert wrapped("a sentence", None) == ["a sentence"]
    assert wrapped("", 20) == [""]


def test_no_line_is_too_long_and_no_word_is_lost() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        count, width = rng.randint(1, 7), rng.randint(30, 120)
        head = tuple(f"h{n}" for n in range(count)) if rng.random() < 0.5 else ()
        rows = tuple(tuple(_cell(rng, width) for _ in range(count)) for _ in range(rng.randint(1, 5)))
        found = laid_out(rows, head, width)
        assert max(len(line) for row in found for line in row) <= width, f"seed {seed}"
        for row, lines in zip(rows, found[1:] if head else found, strict=True):
            shown = set(" ".join(lines).split())
            assert all(cell == "-" or set(cell.split()) <= shown for cell in row), f"seed {seed}: {row}"


def _cell(rng: random.Random, width: int) -> str:
    words = [
        rng.choice("abcde") * rng.randint(1, width - 6 if rng.random() < 0.1 else 9) for _ in range(rng.randint(0, 9))
    ]
    return " ".join(words) if rng.random() < 0.8 else "-"
