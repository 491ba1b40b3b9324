"""gpukeeper that kills itself with SIGKILL at a named point of one step:

    python -m tests.halt POINT NAME apply --yes

`NAME` is the name of the workload whose step is interrupted. The ports are wrapped here, after wiring has made them;
gpukeeper itself has no such switch. The points, in the order in which a step reaches them, are POINTS.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpukeeper.model.event import Captured, Closed, Event, Intended
from gpukeeper.model.subject import Ref
from gpukeeper.wiring import session as wiring_session

CAPTURED = "captured"  # the evidence was read, nothing is saved
SAVED = "evidence saved"  # the evidence is in its folder, the journal does not know
NOTED = "evidence recorded"  # the journal knows; no intent yet
INTENDED = "intent recorded"
LOOKED = "looked"  # the fresh look after the intent
ACTED = "acted"  # the platform answered the command
VERIFIED = "verified"  # the first look after the command
CLOSED = "outcome recorded"
POINTS = (CAPTURED, SAVED, NOTED, INTENDED, LOOKED, ACTED, VERIFIED, CLOSED)
BEFORE_THE_INTENT = (CAPTURED, SAVED, NOTED)
BEFORE_THE_ACT = (INTENDED, LOOKED)
BEFORE_THE_OUTCOME = (ACTED, VERIFIED)
PYTHONPATH = str(Path(__file__).parents[1])  # where this program is found, from any folder
SIGNAL = "GPUKEEPER_TEST_SIGNAL"  # the name of another signal than SIGKILL
_RECORDED = {Captured: NOTED, Intended: INTENDED, Closed: CLOSED}


@dataclass
class Halt:
    point: str
    name: str
    signal: int = signal.SIGKILL
    passed: set[str] = field(default_factory=set)  # points that the step on it has passed

    def reached(self, point: str, ref: Ref | None) -> None:
        if ref is None or ref.name != self.name:
            return
        self.passed.add(point)
        if point == self.point:
            os.kill(os.getpid(), self.signal)

    def looked(self, ref: Ref) -> None:
        if ACTED in self.passed:
            self.reached(VERIFIED, ref)
        elif INTENDED in self.passed:
            self.reached(LOOKED, ref)


class _Wrapped:
    """Everything that is not wrapped is the port's own."""

    def __init__(self, port: Any, halt: Halt) -> None:
        self._port, self._halt = port, halt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


class HaltingPlatform(_Wrapped):
    def at_once(self, kind: str) -> int:
        """On this machine one step at a time: what else was under way at that moment would be chance."""
        return 1 if self._port.local else int(self._port.at_once(kind))

    async def read(self, ref: Ref) -> Any:
        found = await self._port.read(ref)
        self._halt.looked(ref)
        return found

    async def capture(self, subject: Any, what: Sequence[str]) -> Any:
        taken = await self._port.capture(subject, what)
        self._halt.reached(CAPTURED, subject.ref)
        return taken

    async def act(self, step: Any, fresh: Any) -> Any:
        answer = await self._port.act(step, fresh)
        self._halt.reached(ACTED, fresh.ref)
        return answer


class HaltingEvidence(_Wrapped):
    async def save(self, ref: Ref, *rest: Any) -> Any:
        name = await self._port.save(ref, *rest)
        self._halt.reached(SAVED, ref)
        return name


class HaltingLedger(_Wrapped):
    async def append(self, lines: Sequence[Event]) -> None:
        await self._port.append(lines)
        for line in lines:
            if type(line) in _RECORDED:
                self._halt.reached(_RECORDED[type(line)], line.ref)


def halt_at(point: str, name: str) -> None:
    """From now on a session of this process halts there."""
    assert point in POINTS, f"{point!r} is none of {POINTS}"
    open_session, halt = (
        wiring_session.open_session,
        Halt(point, name, getattr(signal, os.environ.get(SIGNAL, "SIGKILL"))),
    )

    def opened(*args: Any, **kwargs: Any) -> wiring_session.Session:
        session = open_session(*args, **kwargs)
        ports: Any = session.keeper
        session.keeper = replace(
            ports,
            platforms=tuple(HaltingPlatform(one, halt) for one in ports.platforms),
            ledger=HaltingLedger(ports.ledger, halt),
            evidence=HaltingEvidence(ports.evidence, halt),
        )
        return session

    wiring_session.open_session = opened


if __name__ == "__main__":
    from gpukeeper.__main__ import run

    halt_at(*sys.argv[1:3])
    sys.argv[:] = ["gpukeeper", *sys.argv[3:]]
    run()
