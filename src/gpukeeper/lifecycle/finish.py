"""When a workload ended: as the platform says, else when we first saw it ended, which is later and so keeps longer."""

from __future__ import annotations

from datetime import datetime

from gpukeeper.model.decision import View


def finish_of(view: View, now: datetime) -> datetime:
    if isinstance(view.subject.ended, datetime):
        return view.subject.ended
    return view.memory.first_seen_ended or now
