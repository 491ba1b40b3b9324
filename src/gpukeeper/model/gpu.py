"""A GPU as the driver describes it: what it is, how it is, how it was used at one moment. Facts, no judgement."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TypeAlias

import msgspec

from gpukeeper.model.condition import NOT_QUERIED, Xid
from gpukeeper.model.unknown import Unknown

NO_SERIALS = ("", "N/A", "[N/A]")  # without zeros: what boards without a serial number have in its place
Fact: TypeAlias = bool | int | float | str | Unknown | None  # None: does not exist here


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or a slice of one, that is to be tested. In CPU mode: the CPU in its place."""

    uuid: str
    index: int
    name: str | Unknown = NOT_QUERIED
    serial: str | Unknown = NOT_QUERIED  # what its history is kept by; the uuid where it has none
    pci: str | Unknown = NOT_QUERIED
    memory_mib: int | Unknown = NOT_QUERIED
    part_of: str | None = None  # the uuid of the whole GPU, of a slice
    profile: str | None = None  # of a slice: 1g.18gb
    facts: Mapping[str, Fact] = {}  # vbios, numa, power limits, links, … whatever is worth a line

    @property
    def identity(self) -> str:
        """What stays the same when it is moved to another machine."""
        if isinstance(self.serial, Unknown) or self.serial.strip("0") in NO_SERIALS:
            return self.uuid
        return self.serial


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as of one read. `counters` only rise, and are judged by their change; `states` are as of now."""

    uuid: str
    at: datetime
    counters: Mapping[str, int | Unknown | None] = {}
    states: Mapping[str, Fact] = {}
    xids: tuple[Xid, ...] | Unknown = ()
    foreign: tuple[int, ...] | Unknown = ()  # pids that are not ours and were on it since the previous read
    named: Mapping[int, str] = {}  # by pid of `foreign`: whose process it is, and its command


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU at one moment of the run. None: not measured."""

    uuid: str
    at: float  # seconds since the run began
    check: str = ""  # what ran then
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilisation: float | None = None  # percent
    reasons: int | None = None  # why its clocks are held back: the driver's bits
    pcie_generation: int | None = None
    pcie_width: int | None = None
