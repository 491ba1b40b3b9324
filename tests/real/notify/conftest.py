"""Receivers that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.real.notify.receiver import Receiver


@pytest.fixture
def start() -> Iterator[Callable[[str], Receiver]]:
    started: list[Receiver] = []

    def one(kind: str) -> Receiver:
        started.append(Receiver(kind))
        return started[-1]

    yield one
    for receiver in started:
        if receiver.process.returncode is None:
            receiver.close()
