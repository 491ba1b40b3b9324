"""The lines between a client and the process that calls the driver: one request, one reply, both JSON.

A reply carries the id of its request, so that a late reply to an earlier request is never taken for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import msgspec

from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.model.condition import NOT_QUERIED
from gpukeeper.model.gpu import Reading
from gpukeeper.model.unknown import Unknown

FactGroup: TypeAlias = Literal["inventory", "condition", "usage", "identity", "health", "readings"]
SUBJECTS: tuple[str, ...] = get_args(FactGroup)
State: TypeAlias = Literal["answered", "no driver", "failed"]  # no driver: the library or the kernel module is missing
NO_ID = 0  # of a reply to an invalid line


class DriverRequest(msgspec.Struct, frozen=True):
    id: int
    about: str  # a Subject; a newer client may request another one


class DriverReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    state: State
    why: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    readings: tuple[Reading, ...] = ()  # of `readings`: sampled since the previous request
    topology: Mapping[str, Mapping[str, str]] = {}  # of `identity`
    driver: str | Unknown = NOT_QUERIED  # of `identity`
    cuda_driver: str | Unknown = NOT_QUERIED  # of `identity`
