"""What would be done now, and why; what is deferred; what is only reported; the breaker."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.pages.fleet import readable
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.views.live import MachineView, WorkloadLine

KEPT = ("kept", "unknown")
MOST = 50  # rows of a table


async def show(site: Site, request: HttpRequest, visitor: Visitor) -> Response:
    views = readable(site, visitor)
    return site.page(request, visitor, "plan.html", machines_=[(view, *_parts(view)) for view in views])


def _parts(view: MachineView) -> tuple[list[WorkloadLine], ...]:
    """Due now, deferred, next, each in the order in which it comes; and what is only reported."""
    by_key = {one.key: one for one in view.workloads}
    deferred = [by_key[key] for place in view.places for key in place.deferred if key in by_key]
    later = {one.key for one in deferred}
    due = [one for one in view.workloads if one.next not in (*KEPT, "report") and one.key not in later]
    soon = sorted(
        (one for one in view.workloads if one.next in (*KEPT, "report") and one.steps),
        key=lambda one: (one.steps[0].at or view.at, one.path),
    )
    reported = [one for one in view.workloads if one.next == "report"]
    return due, deferred, soon[:MOST], reported[:MOST]
