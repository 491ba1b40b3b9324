"""The lines between a client and the program that calls the driver: one question, one answer, both JSON.

An answer carries the id of its question, so that a late answer to an earlier question is never taken for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import msgspec

from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.model.condition import NOT_ASKED
from gpukeeper.model.gpu import Reading
from gpukeeper.model.unknown import Unknown

Subject: TypeAlias = Literal["inventory", "condition", "usage", "identity", "health", "readings"]
SUBJECTS: tuple[str, ...] = get_args(Subject)
State: TypeAlias = Literal["answered", "no driver", "failed"]  # no driver: the library or the kernel module is missing
NO_ID = 0  # of an answer to a line that was no question


class Question(msgspec.Struct, frozen=True):
    id: int
    about: str  # a Subject; a newer client may ask for another one


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    state: State
    why: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    readings: tuple[Reading, ...] = ()  # of `readings`: sampled since the question before
    topology: Mapping[str, Mapping[str, str]] = {}  # of `identity`
    driver: str | Unknown = NOT_ASKED  # of `identity`
    cuda_driver: str | Unknown = NOT_ASKED  # of `identity`
