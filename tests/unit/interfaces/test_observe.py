"""`observe` over two platforms of one machine: the host with its GPUs, and the workloads on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.view import observe_fleet
from gpukeeper.interfaces.cli import observe
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.decision import Action, Guard, Snapshot, Unseen
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.event import Event, Quarantined, Returned
from gpukeeper.model.policy import PlaceScope
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import when_in_words
from tests.unit.lifecycle.examples import BOOK, HOUR, MINUTE, NOW, ended, subject
from tests.unit.lifecycle.test_claims import bare, device, named


class Listed:
    """A place where these things are. Looks only, but for the verbs it is given."""

    def __init__(self, name: str, *subjects: Subject, verbs: tuple[Action, ...] = (), unseen: str = "") -> None:
        self.name, self.place = name, "node-3"
        self.guards = dict.fromkeys(verbs, Guard.LOOKED)
        self._page = Snapshot(
            name, "node-3", NOW, subjects, (Unseen(unseen, "the driver is silent"),) if unseen else ()
        )

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        yield self._page


class Silent(Listed):
    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        raise PlatformError(f"{self.name} did not answer")
        yield


class Stopped:
    def now(self) -> Any:
        return NOW


def session(*platforms: Any, lines: tuple[Event, ...] = (), samples: tuple[Sample, ...] = ()) -> Any:
    ledger, signals = InMemoryLedger(), InMemorySignals()
    asyncio.run(ledger.append(lines))
    asyncio.run(signals.add(samples))
    nobody: Any = None
    keeper = Keeper(platforms, ledger, signals, InMemoryEvidence(), nobody, Stopped())
    return SimpleNamespace(keeper=keeper, book=BOOK)


def host(*more: Subject, **facts: Any) -> Listed:
    return Listed("host", *(device(n).subject for n in range(3)), *more, **facts)


def docker(*subjects: Subject) -> Listed:
    return Listed("docker", *subjects, verbs=(Action.STOP,))


def shown(one: Any, capsys: pytest.CaptureFixture[str], narrow: Narrow = Narrow()) -> tuple[list[list[str]], str]:  # noqa: B008 - frozen
    found = asyncio.run(observe_fleet(one.keeper, one.book))
    observe.print_view(observe.view_of(one, found, narrow, gpus=True), quiet=False)
    printed = capsys.readouterr()
    return [line.split(maxsplit=6) for line in printed.out.splitlines()[1:]], printed.err


def test_the_gpus_of_a_machine_and_who_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    """C11.4: workloads, somebody outside any, and what is free; the inventory of one platform, the claims of two."""
    eval_, python = named("eval", "GPU-0").subject, bare("python-77", "GPU-1").subject
    use = Sample(eval_.ref.key, Signal.GPU, "GPU-0", NOW - 6 * MINUTE, 83.0)
    rows, said = shown(session(host(python), docker(eval_), samples=(use,)), capsys)
    assert rows[0][:5] == ["running", "host/node-3/gpu-0", "docker/node-3/eval", "ann", "3h"]
    assert rows[0][5:] == ["83", "% 6m ago  " + rows[0][6].partition("ago  ")[2]]
    assert rows[1][:4] == ["outside", "host/node-3/gpu-1", "host/node-3/python-77", "eve"]
    assert rows[2][:3] == ["free", "host/node-3/gpu-2", "-"]
    assert "finding" not in said


def test_one_persons_gpus_are_no_free_ones(capsys: pytest.CaptureFixture[str]) -> None:
    one = session(host(), docker(named("eval", "GPU-0").subject, named("train", "GPU-1", owner="bob").subject))
    rows, _ = shown(one, capsys, Narrow(owner="bob"))
    assert [row[2] for row in rows] == ["docker/node-3/train"]


def test_a_gpu_in_quarantine_is_reported_until_it_is_returned(capsys: pytest.CaptureFixture[str]) -> None:
    ref = device(1).subject.ref
    out = Quarantined(at=NOW - 5 * MINUTE, ref=ref, reason="memory stays in use")
    rows, _ = shown(session(host(), lines=(out,)), capsys)
    assert [row[0] for row in rows] == ["free", "quarantine", "free"]
    assert "memory stays in use" in " ".join(rows[1])
    rows, _ = shown(session(host(), lines=(out, Returned(at=NOW, ref=ref))), capsys)
    assert [row[0] for row in rows] == ["free", "free", "free"]


def test_findings_join_platforms_and_doubt_what_was_not_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """C13.2"""
    workloads = docker(named("eval", "GPU-7").subject)
    _, said = shown(session(host(), workloads), capsys)
    assert "finding: docker/node-3/eval: it claims GPU-7, and node-3 has no such GPU" in said
    _, said = shown(session(host(unseen="slices of GPU 2"), workloads), capsys)
    assert "finding" not in said
    assert "host/node-3: slices of GPU 2 could not be read (the driver is silent)" in said


def test_a_place_that_does_not_answer_hides_nothing_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    rows, said = shown(session(Silent("host"), docker(named("eval", "GPU-0").subject)), capsys)
    assert [row[:3] for row in rows] == [["running", "GPU-0", "docker/node-3/eval"]]
    assert "host/node-3 could not be read (host did not answer)" in said
    assert "incomplete: some could not be read" in said


def test_the_row_of_a_thing_has_its_latest_known_time_and_no_zero_for_what_is_unknown() -> None:
    row = observe.subject_row(msgspec.structs.replace(ended(2 * HOUR), devices=Unknown("not measured")))
    assert (row[0], *row[4:]) == ("ended", "?", "?", "2h ago")
    assert observe.subject_row(subject())[-1] == "3h ago"
    assert observe.subject_row(device(0, model="H200").subject)[3:] == ("H200", "-", "-", "-")
    tree = msgspec.structs.replace(subject(), shape=Shape.TREE, last_used=NOW + 20 * HOUR, started=None)
    assert observe.subject_row(tree)[-1] == when_in_words(tree.created, NOW), "read since; nothing begins in the future"
