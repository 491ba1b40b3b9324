"""Which lines of a pass were printed already: each is printed once, as soon as it exists."""

from __future__ import annotations

from gpukeeper.engine.reclaim import PassReport
from gpukeeper.model.event import Closed, WarningSent


class UnreportedLines:
    def __init__(self) -> None:
        self._reported: dict[tuple[str, str], tuple[PassReport, int, int, int]] = {}  # by place: of the current pass

    def new(self, report: PassReport, *, over: bool) -> tuple[list[Closed], list[WarningSent]]:
        """Outcomes and warnings since the last call for this pass. `over`: nothing more will come of it."""
        place = report.survey.platform.name, report.survey.platform.place
        before, settled, outcomes, warnings = self._reported.pop(place, (report, 0, 0, 0))
        if before is not report:
            settled = outcomes = warnings = 0
        if not over:
            self._reported[place] = (report, len(report.settled), len(report.outcomes), len(report.warnings))
        return [*report.settled[settled:], *report.outcomes[outcomes:]], report.warnings[warnings:]
