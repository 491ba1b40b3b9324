"""Lines that gpukeeper 0.1 wrote are read, give the same memory, and are written in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.lines import decode
from gpukeeper.model.event import Checkpoint, Event
from tests.unit.ledger.examples import noticed, run

# Written by that version: every type of line; the last one has the memories that it had folded from those before.
STORED = Path(__file__).with_name("journal_0_1.jsonl").read_bytes().splitlines()


@pytest.fixture
def lines() -> list[Event]:
    return [decode(line, f"line {number}") for number, line in enumerate(STORED, 1)]


def test_the_record_has_every_type_of_line(lines: list[Event]) -> None:
    assert {type(line) for line in lines} == set(get_args(Event))


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: msgspec.json.decode(stored)["type"])
def test_a_line_is_written_as_it_was(stored: bytes) -> None:
    assert msgspec.json.encode(decode(stored, "a line")) == stored


def test_an_old_journal_is_folded_to_the_same_memories_and_continued(tmp_path: Path, lines: list[Event]) -> None:
    *before, checkpoint = lines
    assert isinstance(checkpoint, Checkpoint)
    tmp_path.chmod(0o700)
    ledger = open_ledger(tmp_path / "ledger.db", write=True)
    for line in before:
        run(ledger.append([line]))
    assert len(checkpoint.memories) > 5
    assert run(ledger.memories(checkpoint.memories)) == checkpoint.memories
    run(ledger.append([noticed()]))
    ledger.close()
    again = open_ledger(tmp_path / "ledger.db", write=False)
    assert [line for _, line in run(again.lines())] == [*before, noticed()]
    again.close()
