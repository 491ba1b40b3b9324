"""How a request came here is noted on each line that it causes, and on no other."""

from __future__ import annotations

import msgspec

from gpukeeper.engine import requests
from gpukeeper.engine.keeper import with_origin
from gpukeeper.engine.requests import Request
from gpukeeper.model.event import Captured, Closed, Held, Intended
from tests.unit.engine.harness import Harness, virtual

WEB = "web, session c0ffee, from 10.0.0.5"


@virtual
async def test_a_hold_and_a_stop_have_the_person_and_the_login(b: Harness) -> None:
    b.running("train")
    keeper = with_origin(b.keeper, "ann", WEB)
    assert (await requests.fulfil(keeper, b.book, "ann", Request(verb="hold", workload="train"))).done
    assert [(line.by, line.via) for line in b.lines(Held)] == [("ann", WEB)]
    assert (await requests.fulfil(keeper, b.book, "ann", Request(verb="stop", workload="train"))).done
    steps: list[Intended | Closed] = [*b.lines(Intended), *b.lines(Closed)]
    assert [(line.by, line.requested_by, line.via) for line in steps] == [("gpukeeper", "ann", WEB)] * 2
    assert [line.via for line in b.lines(Captured)] == [msgspec.UNSET]
