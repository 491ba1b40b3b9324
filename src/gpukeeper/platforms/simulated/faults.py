"""Faults of the simulated world, as probabilities per call. All zero is a world without faults."""

from __future__ import annotations

import msgspec


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    change: float = 0.0  # something changes just before a call
    snatch: float = 0.0  # the object itself changes between our last read and our act
    silent: float = 0.0  # a listing is not answered at all
    partial: float = 0.0  # a listing is incomplete and reports that
    blind: float = 0.0  # a read returns unknown
    vague: float = 0.0  # one fact of a subject is unknown
    mute: float = 0.0  # share of the time in which nodes do not report whether work runs on them
    lost: float = 0.0  # a command is accepted and has no effect
    halfway: float = 0.0  # the removal of a tree stops halfway, often together with gpukeeper
    garbled: float = 0.0  # a command's answer is lost; it was executed or not
    refused: float = 0.0
    late: float = 0.0  # an answer takes up to a minute
    uncaptured: float = 0.0  # evidence cannot be captured
    unmeasured: float = 0.0  # a meter reading fails
    undelivered: float = 0.0  # a warning is not delivered
    bug: float = 0.0  # the adapter raises an exception that the port does not allow
    crash: float = 0.0  # gpukeeper dies at this call
    jump: float = 0.0  # the clock is wrong for some minutes
    jumps: tuple[float, ...] = (-5, 3, 30)  # by how many hours


CALM = Faults()
