"""What pages ask a daemon, and which one."""

from __future__ import annotations

from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import BUG, NO_COPY, NOT_COPIED
from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError

T = TypeVar("T")
# By exit code; all others are the fault of the request.
STATUS = {NOT_COPIED: 404, NO_COPY: 503, BUG: 500, KeeperError.exit_code: 503}
LATER = {"retry-after": "10"}  # seconds


def machine_named(site: Site, name: str) -> str:
    """The one that was named, or the only one."""
    known = site.source.machines
    if name and name not in known:
        raise HTTPException(404, f'There is no machine "{name[:60]}".')
    if not name and len(known) != 1:
        raise HTTPException(400, "Name the machine: there is more than one." if known else "No machine is known yet.")
    return name or next(iter(known))


def machine_of(site: Site, request: HttpRequest) -> str:
    """For a page about one machine: the one in its address, or the first."""
    known = sorted(site.source.machines)
    name = request.query_params.get("machine", "")
    return machine_named(site, name or (known[0] if known else ""))


def machine_or_all(site: Site, name: str) -> str:
    """For what can be summed up over machines: empty for all of a fleet."""
    return "" if site.source.settings.fleet and not name else machine_named(site, name)


async def ask_for(site: Site, visitor: Visitor, machine: str, kind: type[T], request: Request, refused: int = 400) -> T:
    answer = await site.ask(visitor, machine, request)
    if not answer.done:
        status = STATUS.get(answer.exit_code, refused)
        raise HTTPException(status, answer.words, headers=LATER if status == 503 else None)
    return reading.decode(answer.body, type=kind)
