"""The ledger and the GPUs of a machine for readers, as values."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from gpukeeper.ledger.tables import Reclaimed, Totals
from gpukeeper.model.event import Complaint, Held, NodeMarked, Paused, WarningSent
from gpukeeper.model.gpu import GpuMemory
from gpukeeper.model.subject import Hold
from gpukeeper.views.history import line_row, lines_view, totals_rows
from gpukeeper.views.nodes import gpu_condition
from tests.unit.lifecycle.examples import EVAL, HOUR, NOW


def test_a_line_in_a_row_says_by_whom_and_why() -> None:
    held = Held(at=NOW, ref=EVAL, by="ann", hold=Hold("ann", NOW, NOW + HOUR, reason="demo"))
    row = line_row(7, held)
    assert (row.seq, row.type, row.where) == (7, "hold", "docker/node-3/eval")
    assert row.words == f"by ann until {NOW + timedelta(hours=1):%Y-%m-%d %H:%M} UTC: demo"
    assert line_row(1, Paused(at=NOW, by="bob", reason="upgrade")).words == "by bob: upgrade"
    facts = {"incarnation": "run-1", "limit": HOUR, "channel": "terminal", "message": "stop soon"}
    warned = WarningSent(at=NOW, ref=EVAL, rule="idle", stage=1, delivered=False, **facts)
    assert line_row(1, warned).words == "not delivered: stop soon"
    marked = NodeMarked(at=NOW, ref=EVAL, by="ann", step="s", action="quarantine", result="done", reason="loud fans")
    assert line_row(1, marked).result == "done"
    assert line_row(1, marked).words == "quarantine by ann: loud fans"
    assert line_row(1, Complaint(at=NOW, ref=EVAL, what="two owners")).words == "two owners"


def test_lines_as_documents_have_their_number() -> None:
    (document,) = lines_view([(7, Paused(at=NOW, by="bob"))]).lines
    assert (document["seq"], document["by"]) == (7, "bob")


def test_totals_add_up_what_was_not_measured_apart() -> None:
    sums = Reclaimed(steps=3, gpus=2, gpu_hours=1.5, bytes=10, unmeasured_gpus=1, unmeasured_bytes=2)
    rows = list(totals_rows(Totals(whole=sums, owners={"bob": sums, "": sums}, rules={}, platforms={"docker": sums})))
    assert [(row.by, row.name) for row in rows] == [
        ("all", ""),
        ("owner", "unknown"),
        ("owner", "bob"),
        ("platform", "docker"),
    ]
    assert (rows[0].gpus, rows[0].unmeasured) == (2, 3)


def test_a_gpu_that_was_never_recorded_has_no_condition() -> None:
    fresh = gpu_condition("GPU-1", 1, None)
    assert set(msgspec.structs.asdict(fresh).values()) == {"GPU-1", 1, None}
    out = gpu_condition("GPU-1", None, GpuMemory(quarantined=NOW, quarantine_reason="Xid 79", quarantined_by="ann"))
    assert (out.quarantined, out.quarantine_reason, out.quarantined_by) == (NOW, "Xid 79", "ann")
