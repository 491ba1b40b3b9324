"""How the GPUs are while they are tested, through one program that keeps the driver open (health_child). Looks only.

A program that does not answer is ended and the answer is Unknown; the next question starts another. What it sampled and
nobody asked for is lost with it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal, TypeAlias, TypeVar

import msgspec

from gpukeeper.devices.leash import Ended, Leashed
from gpukeeper.devices.nvml import CHILD as INVENTORY_CHILD
from gpukeeper.model import reading
from gpukeeper.model.condition import NOT_ASKED, Xid
from gpukeeper.model.durations import in_words
from gpukeeper.model.gpu import Fact, Gpu, Health, Reading
from gpukeeper.model.unknown import Unknown

CHILD = (*INVENTORY_CHILD[:-1], "gpukeeper.devices.health_child")
DEADLINE = timedelta(seconds=20)
TO_OPEN = 3  # deadlines for the first answer: without persistence a driver wakes its GPUs one after the other
NO_SERIAL = Unknown("a slice of a GPU has no serial number", by_design=True)
_PROFILE = re.compile(r"\bMIG (\S+)")

Listed: TypeAlias = tuple[int, ...] | Unknown


class SliceFacts(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    name: str | Unknown = NOT_ASKED
    gpu_instance: int | Unknown = NOT_ASKED
    compute_instance: int | Unknown = NOT_ASKED
    memory_mib: int | Unknown = NOT_ASKED
    sms: int | Unknown = NOT_ASKED


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU without a known uuid is there and does not answer."""

    index: int
    uuid: str | Unknown
    name: str | Unknown = NOT_ASKED
    serial: str | Unknown = NOT_ASKED
    pci: str | Unknown = NOT_ASKED
    minor: int | Unknown = NOT_ASKED
    memory_mib: int | Unknown = NOT_ASKED
    facts: Mapping[str, Fact] = {}
    sliced: bool | Unknown = NOT_ASKED
    slices: tuple[SliceFacts, ...] | Unknown = ()


class SliceLook(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    states: Mapping[str, Fact] = {}
    listed: Listed = NOT_ASKED


class GpuLook(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    uuid: str | Unknown
    counters: Mapping[str, int | Unknown | None] = {}
    states: Mapping[str, Fact] = {}
    listed: Listed = NOT_ASKED  # pids that the driver lists
    slices: tuple[SliceLook, ...] | Unknown = ()


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    state: Literal["answered", "no driver", "failed"]
    why: str = ""


class Facts(_Answer, frozen=True, kw_only=True):
    gpus: tuple[GpuFacts, ...] = ()
    topology: Mapping[str, Mapping[str, str]] = {}
    driver: str | Unknown = NOT_ASKED
    cuda_driver: str | Unknown = NOT_ASKED


class Looks(_Answer, frozen=True, kw_only=True):
    gpus: tuple[GpuLook, ...] = ()


class Readings(_Answer, frozen=True, kw_only=True):
    readings: tuple[Reading, ...] = ()


_A = TypeVar("_A", bound=_Answer)


class Driver:
    """The program and its end. `ask` one thing at a time; `close` when all is done."""

    def __init__(self, child: Sequence[str] = CHILD, deadline: timedelta = DEADLINE) -> None:
        self._command, self._deadline = child, deadline
        self._child: Leashed | None = None
        self._one_at_a_time = asyncio.Lock()

    async def facts(self) -> Facts | Unknown:
        """No driver is an answer: see its state."""
        return await self._ask("facts", Facts)

    async def look(self) -> tuple[GpuLook, ...] | Unknown:
        answer = await self._ask("look", Looks)
        return answer if isinstance(answer, Unknown) else answer.gpus if not answer.why else Unknown(answer.why)

    async def readings(self) -> tuple[Reading, ...]:
        """`at` as the machine's monotonic clock has it. Nothing, when the driver is silent: who looks hears why."""
        answer = await self._ask("readings", Readings)
        return () if isinstance(answer, Unknown) else answer.readings

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()

    async def _ask(self, question: str, kind: type[_A]) -> _A | Unknown:
        async with self._one_at_a_time:
            try:
                answer = await self._answer(question, kind)
            except BaseException:
                await self.close()  # somebody gave up on us: a late answer would be taken for that to the next question
                raise
            if isinstance(answer, Unknown) or answer.state == "failed":
                await self.close()  # what it opened may be stale: the driver was reloaded, a GPU was lost
            return answer

    async def _answer(self, question: str, kind: type[_A]) -> _A | Unknown:
        deadline = self._deadline if self._child is not None else self._deadline * TO_OPEN
        try:
            child = self._child = self._child or await Leashed.start(self._command)
            await child.send(question.encode())
            return reading.decode(await child.line(deadline.total_seconds()), type=kind)
        except TimeoutError:
            return Unknown(f"the NVIDIA driver did not answer within {in_words(deadline)}")
        except Ended:
            last = (await child.last_words()).strip().splitlines()[-1:]
            return Unknown(f"asking the NVIDIA driver failed: {''.join(last) or 'no word'}")
        except OSError as error:
            return Unknown(f"the program that asks the NVIDIA driver could not be started: {error.strerror}")
        except (msgspec.DecodeError, ValueError) as error:
            return Unknown(f"the program that asks the NVIDIA driver gave no record: {error}")


def gpus_of(facts: Sequence[GpuFacts]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """What can be tested: whole GPUs, and in the place of one that is cut its slices. And why the others cannot."""
    found: list[Gpu] = []
    silent: list[str] = []
    for one in facts:
        if isinstance(one.uuid, Unknown):
            silent.append(f"GPU {one.index} does not say which it is: {one.uuid.why}")
        elif isinstance(one.slices, Unknown):
            silent.append(f"GPU {one.index} ({one.uuid}) does not say how it is cut: {one.slices.why}")
        elif one.sliced is True and not one.slices:
            silent.append(
                f"GPU {one.index} ({one.uuid}) is to be cut into slices (MIG) and has none: nobody can use it"
            )
        elif one.slices:
            found += [_slice(part, one, one.uuid) for part in one.slices]
        else:
            found.append(_whole(one, one.uuid))
    return tuple(found), tuple(silent)


def _whole(one: GpuFacts, uuid: str) -> Gpu:
    return Gpu(
        uuid=uuid,
        index=one.index,
        name=one.name,
        serial=one.serial,
        pci=one.pci,
        memory_mib=one.memory_mib,
        facts=one.facts,
    )


def _slice(part: SliceFacts, whole: GpuFacts, uuid: str) -> Gpu:
    profile = None if isinstance(part.name, Unknown) else _PROFILE.search(part.name)
    return Gpu(
        uuid=part.uuid,
        index=whole.index,
        name=whole.name,
        serial=NO_SERIAL,
        pci=whole.pci,
        memory_mib=part.memory_mib,
        part_of=uuid,
        profile=profile[1] if profile else "not known",
        facts={**whole.facts, "sms": part.sms},
    )


def health_of(
    looks: Sequence[GpuLook],
    at: datetime,
    foreign: Callable[[str, Listed, Fact], tuple[int, ...] | Unknown],
    xids: Mapping[str, tuple[Xid, ...] | Unknown],
) -> dict[str, Health]:
    """By uuid. A slice shows the counters of its GPU: errors of the memory they share concern it, too."""
    found: dict[str, Health] = {}
    for one in looks:
        if isinstance(one.uuid, Unknown):
            continue
        parts: Sequence[SliceLook] = () if isinstance(one.slices, Unknown) else one.slices
        for part in parts or (SliceLook(uuid=one.uuid, listed=one.listed),):
            states = {**one.states, **part.states}
            found[part.uuid] = Health(
                uuid=part.uuid,
                at=at,
                counters=one.counters,
                states=states,
                xids=xids.get(one.uuid, Unknown("its PCI address is not known")),
                foreign=foreign(part.uuid, part.listed, states.get("memory_used_mib")),
            )
    return found
