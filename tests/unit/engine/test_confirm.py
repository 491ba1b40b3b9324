"""Confirmations: one person, one thing, one action, once, and not for long."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpukeeper.engine.memory import (
    CONFIRMATION_LASTS,
    MOST_CONFIRMATIONS,
    MOST_CONFIRMATIONS_EACH,
    Asker,
    Confirmations,
    revision_of,
)
from gpukeeper.model.decision import Action
from gpukeeper.model.subject import Ref, Seen

NOW = datetime(2026, 3, 2, 8, tzinfo=UTC)
ANN = Asker("ann", 1001)
SEEN = Seen(Ref("host", "node-1", "tree", "/tmp/x", "1:2"), "2:77", "2:77", NOW)


def test_it_works_once() -> None:
    pending = Confirmations()
    token = pending.ask(ANN, SEEN, Action.REMOVE, NOW)
    found = pending.take(token, ANN, Action.REMOVE, NOW)
    assert found is not None
    assert found.seen == SEEN
    assert pending.take(token, ANN, Action.REMOVE, NOW) is None


@pytest.mark.parametrize(
    "other", [Asker("bob", 1002), Asker("ann", 2001), Asker("ann"), Asker("uid 1001", 1001)], ids=repr
)
def test_it_is_of_one_person_by_uid_and_name(other: Asker) -> None:
    pending = Confirmations()
    token = pending.ask(ANN, SEEN, Action.REMOVE, NOW)
    assert pending.take(token, other, Action.REMOVE, NOW) is None
    assert pending.take(token, ANN, Action.STOP, NOW) is None
    assert pending.take(token, ANN, Action.REMOVE, NOW) is not None, "who tries does not use it up"


@pytest.mark.parametrize("later", [CONFIRMATION_LASTS, timedelta(days=1), timedelta(seconds=-1)])
def test_it_does_not_last_whatever_the_clock_does(later: timedelta) -> None:
    pending = Confirmations()
    token = pending.ask(ANN, SEEN, Action.REMOVE, NOW)
    assert pending.take(token, ANN, Action.REMOVE, NOW + later) is None


def test_nobody_keeps_many_and_nobody_pushes_out_anothers() -> None:
    pending = Confirmations()
    first = pending.ask(ANN, SEEN, Action.REMOVE, NOW)
    eve = Asker("eve", 1003)
    tokens = [pending.ask(eve, SEEN, Action.REMOVE, NOW) for _ in range(MOST_CONFIRMATIONS)]
    assert pending.take(first, ANN, Action.REMOVE, NOW) is not None
    left = [token for token in tokens if pending.take(token, eve, Action.REMOVE, NOW) is not None]
    assert left == tokens[-MOST_CONFIRMATIONS_EACH:]


def test_a_revision_is_of_one_object_and_one_run_of_it() -> None:
    again = Seen(SEEN.ref, "2:78", SEEN.version, NOW)
    other = Seen(Ref("host", "node-1", "tree", "/tmp/x", "1:3"), SEEN.incarnation, SEEN.version, NOW)
    later = Seen(SEEN.ref, SEEN.incarnation, "another version", NOW + timedelta(hours=1))
    assert len({revision_of(one) for one in (SEEN, again, other)}) == 3
    assert revision_of(later) == revision_of(SEEN)
