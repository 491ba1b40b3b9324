"""Damaged inputs: what is slow and what ends its process is named, with the seed that repeats it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.property.parsers import Parser
from tests.simulation import inputs


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was parsed is kept after a failure."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def busy(seconds: float) -> Callable[[bytes], object]:
    """Of processor time."""

    def read(data: bytes) -> None:
        end = os.times().user + seconds
        while data != b"a sample" and os.times().user < end:
            pass

    return read


def crashes(data: bytes) -> None:
    if data != b"a sample":
        os.kill(os.getpid(), signal.SIGSEGV)


def test_every_seed_of_every_parser_is_read_once_in_the_same_order_after_an_interruption() -> None:
    parsers = (Parser("slow", len, (b"a",), weight=1), Parser("fast", len, (b"a",), weight=10))
    chunks = list(inputs._chunks(11_000, 7, parsers))
    seeds = {place: [seed for which, some in chunks if which == place for seed in some] for place in (0, 1)}
    assert seeds == {0: list(range(7, 1007)), 1: list(range(7, 10_007))}
    assert {place for place, _ in chunks[:3]} == {0, 1}


def test_an_input_that_takes_a_second_fails_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LONGEST_S", 0.05)
    [failure] = inputs.read_all(2, 40, parsers=(Parser("sluggish", busy(0.2), (b"a sample",)),))
    assert failure.startswith("sluggish, seed 40: 0.")


def test_an_input_that_never_ends_is_given_up_and_named_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "GIVEN_UP_S", 0.3)
    [failure] = inputs.read_all(2, 40, parsers=(Parser("endless", busy(1e9), (b"a sample",)),))
    assert "endless, seed 40" in failure
    assert "in read" in failure


def test_an_input_that_ends_its_process_is_named() -> None:
    [failure] = inputs.read_all(2, 40, parsers=(Parser("fatal", crashes, (b"a sample",)),))
    assert "fatal, seed 40" in failure
    assert "Segmentation fault" in failure


def test_an_exception_that_is_not_declared_fails() -> None:
    def read(data: bytes) -> None:
        if data != b"a sample":
            raise ZeroDivisionError

    assert "ZeroDivisionError" in inputs.read_all(2, 40, parsers=(Parser("broken", read, (b"a sample",)),))[0]
