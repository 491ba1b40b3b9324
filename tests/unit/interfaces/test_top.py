"""`top` gathers in the background: what hangs or fails there freezes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpukeeper.interfaces.cli.top import Gather, Gathering
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.policy import Mode
from gpukeeper.views.fleet import TopView
from tests.patience import PATIENCE
from tests.unit.lifecycle.examples import NOW

VIEW = TopView(at=NOW, mode=Mode.ENFORCE, gpus=())


class Woken:
    """Counts, and lets a test wait for the next."""

    def __init__(self) -> None:
        self._calls = threading.Semaphore(0)

    def __call__(self) -> None:
        self._calls.release()

    def wait(self) -> None:
        assert self._calls.acquire(timeout=PATIENCE), "nothing was gathered"


def gathering(gather: Callable[[], TopView], woken: Woken) -> Gathering:
    @contextmanager
    def source() -> Iterator[Gather]:
        yield gather

    found = Gathering(source, 0.01, woken)
    found.start()
    return found


def test_a_source_that_hangs_leaves_the_last_data_with_its_age() -> None:
    answered, hangs, goes_on = threading.Event(), threading.Event(), threading.Event()

    def gather() -> TopView:
        if answered.is_set():
            hangs.set()
            goes_on.wait(PATIENCE)
        answered.set()
        return VIEW

    woken = Woken()
    one = gathering(gather, woken)
    woken.wait()
    assert hangs.wait(PATIENCE)
    assert one.view() is VIEW
    assert one.age().data is not None
    assert one.age().gathering is not None
    goes_on.set()
    woken.wait()
    one.leave(0)


def test_the_first_failure_is_raised_where_the_screen_is() -> None:
    def gather() -> TopView:
        raise UsageError("no such platform")

    woken = Woken()
    one = gathering(gather, woken)
    woken.wait()
    with pytest.raises(UsageError, match="no such platform"):
        one.view()


def test_a_later_failure_is_a_note_until_it_is_over() -> None:
    answers: list[TopView | KeeperError] = [VIEW, KeeperError("the daemon did not answer\nsee the log"), VIEW]
    steps = [threading.Event() for _ in answers]

    def gather() -> TopView:
        if not answers:
            threading.Event().wait(PATIENCE)
        steps[len(steps) - len(answers)].wait(PATIENCE)
        answer = answers.pop(0)
        if isinstance(answer, KeeperError):
            raise answer
        return answer

    woken = Woken()
    one = gathering(gather, woken)
    problems = []
    for step in steps:
        step.set()
        woken.wait()
        problems.append(one.age().problem)
    assert problems == ["", "the daemon did not answer", ""]
    assert one.view() is VIEW
