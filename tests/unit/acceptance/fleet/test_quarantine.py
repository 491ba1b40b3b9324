"""A quarantine of a node of a cluster, and its end, as plans."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpukeeper.acceptance.fleet.marks import (
    DETAILS,
    LABEL,
    QUARANTINE,
    QUARANTINE_CONDITION,
    QUARANTINE_DETAILS,
    TAINT,
    Change,
    MarkPlan,
    NodeCondition,
    NodeMarks,
    Quarantine,
    done,
    plan_quarantine,
    plan_return,
    quarantine_of,
    state_of,
)
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Amount, MarkSettings

NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)
WANTED = Quarantine(by="ann", at=NOW, reason="fans are loud")
FAILED = {LABEL: "failed"}
DETAILS_OF_R1 = {DETAILS: '{"run":"r1","at":"2026-01-04T12:00:00Z","verdict":"FAIL","code":"gemm-below-floor"}'}


def marks(index: int, **fields: object) -> NodeMarks:
    return msgspec.convert({"node": f"n{index}", "uid": f"u{index}", "version": "1", **fields}, NodeMarks)


def nodes(count: int = 10, **first: object) -> list[NodeMarks]:
    return [marks(0, **first), *(marks(index) for index in range(1, count))]


def quarantine(
    found: list[NodeMarks], wanted: Quarantine = WANTED, settings: MarkSettings | None = None, node: str = "n0"
) -> MarkPlan:
    return plan_quarantine(node, wanted, found, settings or MarkSettings(), NOW)


def after(change: Change, before: NodeMarks) -> NodeMarks:
    """As the server stores it."""

    def changed(there: object, wanted: object) -> dict[str, str]:
        merged = {**there, **wanted}  # type: ignore[dict-item]
        return {key: value for key, value in merged.items() if value is not None}

    others = tuple(one for one in before.conditions if one.type != change.condition.type)
    return msgspec.structs.replace(
        before,
        labels=changed(before.labels, change.labels),
        annotations=changed(before.annotations, change.annotations),
        taints=changed(before.taints, change.taints),
        conditions=(*others, *([change.condition] if change.condition.status else [])),
    )


def quarantined(wanted: Quarantine = WANTED, **first: object) -> NodeMarks:
    (change,) = quarantine(nodes(**first), wanted).changes
    return msgspec.structs.replace(after(change, marks(0, **first)), out="with our taint")


def test_a_quarantine_says_who_since_when_and_why() -> None:
    until = msgspec.structs.replace(WANTED, until=NOW + timedelta(days=7))
    (change,) = quarantine(nodes(), until).changes
    assert (change.labels, change.taints) == ({QUARANTINE: "yes"}, {QUARANTINE: "20260105-120000"})
    assert change.condition.type == QUARANTINE_CONDITION
    assert change.condition.message == "by ann since 2026-01-05 12:00Z until 2026-01-12 12:00Z: fans are loud"
    assert quarantine_of(after(change, marks(0))) == until


def test_return_takes_back_exactly_what_a_quarantine_set() -> None:
    ready = NodeCondition(type="Ready", status="True")
    foreign = {"labels": {"team": "a"}, "annotations": {"x": "y"}}
    before = marks(0, conditions=(ready,), **foreign)
    (change,) = quarantine([before, *nodes()[1:]]).changes
    out = after(change, before)
    (back,) = plan_return(["n0"], [out, *nodes()[1:]], MarkSettings(), NOW, force=False).changes
    assert after(back, out) == before


@pytest.mark.parametrize("missing", ["labels", "annotations", "taints", "conditions"])
def test_an_incomplete_quarantine_is_completed_and_can_be_returned(missing: str) -> None:
    """An interruption, or somebody removed one of the marks."""
    part = msgspec.structs.replace(quarantined(), **{missing: () if missing == "conditions" else {}})
    (change,) = quarantine([part, *nodes()[1:]], Quarantine(by="bob", at=NOW)).changes
    complete = after(change, part)
    assert done(change, complete) == ""
    by = "ann" if missing != "annotations" else "bob"
    found = quarantine_of(complete)
    assert found is not None
    assert found.by == by
    (back,) = plan_return(["n0"], [part], MarkSettings(), NOW, force=False).changes
    assert not state_of(after(back, part), NOW).quarantined


def test_a_second_quarantine_is_refused_unless_it_changes_something() -> None:
    there = quarantined()
    with pytest.raises(UsageError, match="n0 is quarantined already, by ann since 2026-01-05 12:00Z: fans are loud"):
        quarantine([there, *nodes()[1:]], Quarantine(by="bob", at=NOW))
    longer = Quarantine(by="bob", at=NOW, until=NOW + timedelta(days=14))
    (change,) = quarantine([there, *nodes()[1:]], longer).changes
    assert not change.takes_out  # its taint is there
    assert "by bob since" in change.condition.message
    assert "fans are loud" in change.condition.message


def test_beyond_the_limit_nothing_is_changed() -> None:
    full = [*nodes(9), marks(9, out="not ready")]
    found = quarantine(full)
    assert found.changes == ()
    assert found.kept[0].why == "1 of 10 GPU nodes are out (1 not ready); at most 1 may be"
    assert quarantine(full, settings=MarkSettings(max_out=Amount(count=2))).changes


def test_a_node_that_is_out_already_may_be_quarantined_beyond_the_limit() -> None:
    found = quarantine([marks(0, out="not ready"), marks(1, out="cordoned"), marks(2)])
    assert found.changes[0].takes_out


def test_when_most_nodes_are_out_no_limit_takes_out_another() -> None:
    out = [marks(index, out="not ready") for index in range(1, 7)]
    found = quarantine([marks(0), *out, marks(8), marks(9)], settings=MarkSettings(max_out=Amount(share=1.0)))
    assert found.changes == ()
    assert found.breaker == ("6 of 9 GPU nodes are out (6 not ready): a common cause is likely, no node is taken out")


def test_a_node_whose_last_acceptance_failed_is_not_returned_without_force() -> None:
    failed = quarantined(labels=FAILED, annotations=DETAILS_OF_R1, taints={TAINT: "r1"})
    found = plan_return(["n0"], [failed], MarkSettings(), NOW, force=False)
    assert found.changes == ()
    assert found.kept[0].why.startswith(
        "its last acceptance failed (run r1, 2026-01-04 12:00Z, gemm-below-floor). Repair it"
    )
    (change,) = plan_return(["n0"], [failed], MarkSettings(), NOW, force=True).changes
    back = after(change, failed)
    assert back.taints == {}
    assert back.labels == FAILED  # it says what was measured


def test_what_is_not_quarantined_is_not_returned() -> None:
    with pytest.raises(UsageError, match="n0 is not quarantined; nothing was changed"):
        plan_return(["n0"], nodes(), MarkSettings(), NOW, force=True)
    with pytest.raises(UsageError, match='the cluster has no node "n77"'):
        plan_return(["n77"], nodes(), MarkSettings(), NOW, force=False)
    with pytest.raises(UsageError, match='the cluster has no node "n77"'):
        quarantine(nodes(), node="n77")


def test_expired_selects_those_whose_time_is_over() -> None:
    week = quarantined(msgspec.structs.replace(WANTED, until=NOW + timedelta(days=7)))
    forever = msgspec.structs.replace(quarantined(), node="n1", uid="u1")
    both = [week, forever]
    assert plan_return(None, both, MarkSettings(), NOW, force=False).changes == ()
    later = NOW + timedelta(days=7)
    assert [one.node for one in plan_return(None, both, MarkSettings(), later, force=False).changes] == ["n0"]
    assert [state_of(one, later).expired for one in both] == [True, False]


@pytest.mark.parametrize("text", ["{", "{}", '{"by":"ann","at":"2026-01-05T12:00:00"}'])
def test_an_annotation_that_cannot_be_read_is_said_and_never_expires(text: str) -> None:
    broken = msgspec.structs.replace(quarantined(), annotations={QUARANTINE_DETAILS: text})
    state = state_of(broken, NOW + timedelta(days=999))
    assert (state.quarantined, state.expired) == (True, False)
    assert "cannot be read" in state.quarantine
    assert plan_return(None, [broken], MarkSettings(), NOW, force=False).changes == ()
