"""The client against a real socket: deadlines, refusals, garbage, versions, streams that break."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from gpukeeper.clients import docker as connect
from gpukeeper.clients.docker import Engine, EngineError, EngineEvent, EngineSilent, Info, cannot_connect, find, part
from gpukeeper.model.errors import UsageError
from tests.unit.platforms.docker.examples import ID, OTHER_ID, told
from tests.unit.platforms.docker.fake_engine import FakeEngine, event, served

T = TypeVar("T")


def ask(fake: FakeEngine, what: Callable[[Engine], Awaitable[T]]) -> T:
    async def run() -> T:
        async with served(fake) as engine:
            return await what(engine)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("spoken", "expected"), [("1.24", (1, 24)), ("1.41", (1, 41)), ("1.99", (1, 48)), ("2.0", (1, 48))]
)
def test_the_newest_version_both_know_is_spoken(spoken: str, expected: tuple[int, int]) -> None:
    async def version(engine: Engine) -> tuple[int, int]:
        return engine.version

    assert ask(FakeEngine(version=spoken), version) == expected


@pytest.mark.parametrize("spoken", ["", "x.y", "1"])
def test_what_is_no_engine_is_reported(spoken: str) -> None:
    with pytest.raises(EngineSilent, match="not a container engine"):
        ask(FakeEngine(version=spoken), lambda engine: engine.get("/info", Info))


@pytest.mark.parametrize("status", [304, 404, 409, 500])
def test_a_refusal_has_its_number_and_words(status: int) -> None:
    fake = FakeEngine()
    fake.answers["POST /x"] = (status, "" if status == 304 else '{"message": "because"}')
    with pytest.raises(EngineError) as caught:
        ask(fake, lambda engine: engine.post("/x"))
    assert caught.value.status == status
    assert caught.value.words == ("" if status == 304 else "because")


def test_a_refusal_in_other_words_is_told_as_it_is() -> None:
    fake = FakeEngine()
    fake.answers["GET /info"] = (502, "<html>bad gateway</html>")
    with pytest.raises(EngineError, match="bad gateway"):
        ask(fake, lambda engine: engine.get("/info", Info))


@pytest.mark.parametrize("words", ["", "garbage", "[]", '{"Name": 5}', '{"Name": "cut'])
def test_an_answer_that_cannot_be_read_is_silence(words: str) -> None:
    fake = FakeEngine()
    fake.answers["GET /info"] = (200, words)
    with pytest.raises(EngineSilent, match="cannot be read"):
        ask(fake, lambda engine: engine.get("/info", Info))


def test_an_answer_without_end_is_cut() -> None:
    fake = FakeEngine()
    fake.answers["GET /x"] = (200, "a" * 100_000)
    assert ask(fake, lambda engine: engine.raw("/x", most=70_000)) == b"a" * 70_000


def test_a_deadline_is_kept_and_reported() -> None:
    fake = FakeEngine()
    fake.stuck.add("GET /info")
    with pytest.raises(EngineSilent, match="did not answer GET /info within"):
        ask(fake, lambda engine: engine.get("/info", Info, deadline=timedelta(milliseconds=50)))


def test_no_socket_shows_what_to_do(tmp_path: Path) -> None:
    async def run() -> None:
        async with Engine(f"unix://{tmp_path}/none").opened():
            pass

    with pytest.raises(EngineSilent, match="is it running"):
        asyncio.run(run())


def test_a_socket_nobody_listens_on_shows_what_to_do(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "s"))

    async def run() -> None:
        async with Engine(f"unix://{tmp_path}/s").opened():
            pass

    with pytest.raises(EngineSilent, match="is it running"):
        asyncio.run(run())


def test_a_missing_right_shows_what_to_do() -> None:
    words = str(cannot_connect("unix:///var/run/docker.sock", os.strerror(13)))
    assert "run as root" in words


@pytest.mark.parametrize("address", ["ssh://host", "host:2375", "unix://", "fd://"])
def test_an_address_nobody_can_speak_to_is_the_users(address: str) -> None:
    with pytest.raises(UsageError):
        Engine(address)


def test_an_engine_elsewhere_is_not_local() -> None:
    assert Engine("unix:///s").local
    assert not Engine("tcp://gpu-7:2375").local
    assert Engine("tcp://gpu-7:2375").host == "gpu-7"


def test_where_an_engine_is(tmp_path: Path) -> None:
    assert find({"DOCKER_HOST": "tcp://gpu-7:2375"}) == "tcp://gpu-7:2375"
    # Named and not there: unknown, not absent. Asking it will say so.
    assert find({"DOCKER_HOST": f"unix://{tmp_path}/none"}) == f"unix://{tmp_path}/none"


def test_no_engine_is_where_nobody_names_one_and_the_usual_socket_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "none"):
        monkeypatch.setattr(connect, "SOCKET", str(tmp_path / name))
        assert find({}) is None


@pytest.mark.parametrize("name", ["a/b", "a?force=1", "a#b", "ü", "a b", "%2e"])
def test_a_name_stays_one_part_of_the_path(name: str) -> None:
    fake = FakeEngine()
    fake.answers[f"GET /containers/{name}/json"] = (200, '{"Id": "x"}')
    assert ask(fake, lambda engine: engine.raw(f"/containers/{part(name)}/json")) == b'{"Id": "x"}'


async def heard(engine: Engine, number: int) -> list[EngineEvent]:
    found: list[EngineEvent] = []
    stream = engine.events({"type": ["container"]}, until="1")
    try:
        async for one in stream:
            found.append(one)
            if len(found) == number:
                break
    finally:
        await stream.aclose()
    return found


def test_events_are_heard_in_order() -> None:
    fake = FakeEngine()
    fake.past = [event(ID, "die"), event(OTHER_ID, "start")]
    assert [one.action for one in ask(fake, lambda engine: heard(engine, 2))] == ["die", "start"]


def test_an_event_with_a_megabyte_of_labels_does_not_end_the_stream() -> None:
    fake = FakeEngine()
    fake.past = [event(ID, "die", label="x" * 2**20), event(OTHER_ID, "start")]
    assert [one.action for one in ask(fake, lambda engine: heard(engine, 2))] == ["die", "start"]


def test_garbage_among_events_is_silence_not_a_crash() -> None:
    fake = FakeEngine()
    fake.answers["GET /events"] = (200, "garbage\n")
    with pytest.raises(EngineSilent, match="events ended"):
        ask(fake, lambda engine: heard(engine, 1))


def test_refused_events_are_reported() -> None:
    fake = FakeEngine()
    fake.answers["GET /events"] = (403, "forbidden")
    with pytest.raises(EngineError, match="forbidden"):
        ask(fake, lambda engine: heard(engine, 1))


def test_the_last_to_go_closes_and_the_next_opens_again() -> None:
    async def twice(engine: Engine) -> str:
        async with engine.opened():
            pass
        return (await engine.get("/info", Info)).name

    assert ask(FakeEngine(told()), twice) == "node-3"
