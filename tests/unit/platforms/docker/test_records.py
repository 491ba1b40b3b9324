"""What is remembered between two looks, and when it is asked about anew."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
import pytest

from gpukeeper.clients.docker import AT_ONCE, EngineError, EngineEvent, EngineSilent
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.records import REMEMBERED, Records
from tests.unit.platforms.docker.examples import ID, OTHER_ID, container, ended, told
from tests.unit.platforms.docker.fake_engine import FakeEngine, event, served

T = TypeVar("T")
INSPECT = f"GET /containers/{ID}/json"
IMAGE, GONE = "sha256:" + "7" * 64, "sha256:" + "8" * 64


def play(fake: FakeEngine, what: Callable[[Records], Awaitable[T]], *, hasty: bool = False) -> T:
    async def run() -> T:
        async with served(fake, hasty=hasty) as engine:
            return await what(Records(engine))

    return asyncio.run(run())


def record_event(records: Records, id_: str, action: str, **attributes: str) -> None:
    records.record_event(msgspec.convert(event(id_, action, **attributes), EngineEvent))


def inspected(fake: FakeEngine) -> int:
    return fake.asked.count(INSPECT)


def test_without_events_everything_is_checked_at_every_read() -> None:
    fake = FakeEngine(told())

    async def looks(records: Records) -> None:
        await records.refresh()
        await records.refresh()

    play(fake, looks)
    assert inspected(fake) == 2


def test_while_events_are_heard_only_what_changed_is_checked() -> None:
    fake = FakeEngine(told(), told(id=OTHER_ID, name="/other"))

    async def looks(records: Records) -> list[int]:
        records.hearing = True
        counts = []
        await records.refresh()
        await records.refresh()
        counts.append(inspected(fake))
        record_event(records, ID, "restart")
        await records.refresh()
        counts.append(inspected(fake))
        return counts

    assert play(fake, looks) == [1, 2]
    assert fake.asked.count(f"GET /containers/{OTHER_ID}/json") == 1


def test_a_difference_in_the_list_is_checked_though_no_event_was_heard() -> None:
    fake = FakeEngine(told())

    async def looks(records: Records) -> str:
        records.hearing = True
        await records.refresh()
        fake.end(ID)
        (one,), _unseen = await records.refresh()
        return one.state.status

    assert play(fake, looks) == "exited"


def test_after_a_gap_everything_is_checked_again() -> None:
    fake = FakeEngine(told())

    async def looks(records: Records) -> None:
        records.hearing = True
        await records.refresh()
        records.forget()
        records.hearing = True
        await records.refresh()

    play(fake, looks)
    assert inspected(fake) == 2


def test_what_changes_while_it_is_checked_is_checked_again() -> None:
    fake = FakeEngine(told())

    async def looks(records: Records) -> None:
        records.hearing = True
        fake.before = lambda call: (
            record_event(records, ID, "die") if call == INSPECT and inspected(fake) == 1 else None
        )
        await records.refresh()
        await records.refresh()
        await records.refresh()

    play(fake, looks)
    assert inspected(fake) == 2


def test_a_failed_query_is_repeated() -> None:
    fake = FakeEngine(told())

    async def looks(records: Records) -> None:
        records.hearing = True
        await records.refresh()
        fake.answers[INSPECT] = (500, "busy")
        assert isinstance(await records.inspect(ID), Unknown)
        del fake.answers[INSPECT]
        await records.refresh()

    play(fake, looks)
    assert inspected(fake) == 3


def test_a_query_without_an_answer_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an event reported is not forgotten because the engine was silent when it was queried."""
    fake = FakeEngine(told())

    async def silent(*_: object, **__: object) -> None:
        raise EngineSilent("the engine did not answer")

    async def looks(records: Records) -> None:
        records.hearing = True
        await records.refresh()
        record_event(records, ID, "update")
        with monkeypatch.context() as now:
            now.setattr(records._engine, "get", silent)
            assert isinstance(await records.inspect(ID), Unknown)
        fake.containers[ID]["HostConfig"]["RestartPolicy"]["Name"] = "always"  # no list shows it
        (found,), _ = await records.refresh()
        assert found.host_config.restart_policy is not None
        assert found.host_config.restart_policy.name == "always"

    play(fake, looks)
    assert inspected(fake) == 2


def test_a_stuck_container_stalls_nothing_else() -> None:
    fake = FakeEngine(told(), told(id=OTHER_ID, name="/other"))
    fake.stuck.add(INSPECT)
    found, unseen = play(fake, lambda records: records.refresh(), hasty=True)
    assert [one.plain_name for one in found] == ["other"]
    assert [one.what for one in unseen] == ["eval"]


def test_an_engine_that_answers_nothing_is_not_asked_about_every_container() -> None:
    many = [told(id=f"{number:064x}", name=f"/x{number}") for number in range(AT_ONCE * 4)]
    fake = FakeEngine(*many)
    fake.stuck |= {f"GET /containers/{one['Id']}/json" for one in many}
    found, unseen = play(fake, lambda records: records.refresh(), hasty=True)
    assert found == []
    assert len(unseen) == len(many)
    assert sum(call.endswith("/json") for call in fake.asked) < len(many)


def test_no_list_is_an_error_and_not_an_empty_machine() -> None:
    fake = FakeEngine(told())
    fake.answers["GET /containers/json"] = (500, "database is locked")
    with pytest.raises(EngineError):
        play(fake, lambda records: records.refresh())


def test_a_name_that_is_given_to_another_container_is_another_container() -> None:
    fake = FakeEngine(told())

    async def looks(records: Records) -> list[str]:
        records.hearing = True
        await records.refresh()
        fake.containers = {OTHER_ID: told(id=OTHER_ID)}
        found, _unseen = await records.refresh()
        return [one.id for one in found]

    assert play(fake, looks) == [OTHER_ID]


def test_what_ended_and_vanished_was_once_here() -> None:
    fake = FakeEngine(told(state=ended()))

    async def looks(records: Records) -> bool:
        await records.refresh()
        fake.containers.clear()
        await records.refresh()
        return ID in records.once_had

    assert play(fake, looks)


def test_what_ran_and_is_not_listed_any_more_is_not_taken_for_removed() -> None:
    """An engine that was given another folder knows nothing of what still runs."""
    fake = FakeEngine(told())

    async def looks(records: Records) -> bool:
        await records.refresh()
        fake.containers.clear()
        await records.refresh()
        return ID in records.once_had

    assert not play(fake, looks)


@pytest.mark.parametrize("when", ["before", "after", "past"])
def test_whose_removal_was_heard_of_was_removed(when: str) -> None:
    fake = FakeEngine(told())

    async def looks(records: Records) -> bool:
        await records.refresh()
        if when == "before":
            record_event(records, ID, "destroy")
        elif when == "past":
            fake.past = [event(ID, "destroy")]
        fake.containers.clear()
        await records.refresh()
        if when == "after":
            record_event(records, ID, "destroy")
        return ID in records.once_had

    assert play(fake, looks)


def test_stops_of_the_past_are_learned_once_and_a_start_ends_them() -> None:
    fake = FakeEngine(told())
    fake.past = [event(ID, "kill", signal="15"), event(ID, "die"), event(ID, "stop"), event(ID, "exec_start: sh")]

    async def looks(records: Records) -> bool:
        await records.refresh()
        assert records.stopped_at(container(id=ID)) is not None
        record_event(records, ID, "start")
        return records.stopped_at(container(id=ID)) is None

    assert play(fake, looks)


def test_a_stop_counts_from_its_signal_not_from_when_it_was_reported() -> None:
    """The engine reports a stop after the end: by that time, every end would look like one on request."""

    async def looks(records: Records) -> datetime | None:
        for second, (action, attributes) in enumerate((("kill", {"signal": "15"}), ("die", {}), ("stop", {}))):
            one = event(ID, action, **attributes)
            one["timeNano"] += second * 10**9
            records.record_event(msgspec.convert(one, EngineEvent))
        return records.stopped_at(container(id=ID))

    signal = event(ID, "kill")["timeNano"] / 1e9
    assert play(FakeEngine(), looks) == datetime.fromtimestamp(signal, UTC)


ALWAYS = {"RestartPolicy": {"Name": "always", "MaximumRetryCount": 0}}
LOOPS = msgspec.structs.replace(container(host=ALWAYS), restart_count=40)


def crash(records: Records, second: int, code: str = "1", action: str = "die") -> None:
    one = event(ID, action, exitCode=code) if action == "die" else event(ID, action, signal="15")
    one["timeNano"] += second * 10**9
    records.record_event(msgspec.convert(one, EngineEvent))


def test_failures_in_a_row_are_counted_once_though_the_engine_repeats_its_events() -> None:
    async def looks(records: Records) -> tuple[int, float]:
        for second in (*range(0, 300, 60), *range(0, 300, 60)):
            crash(records, second)
        found = records.crashes(LOOPS)
        assert found is not None
        return found.count, (found.last - found.first).total_seconds()

    assert play(FakeEngine(), looks) == (5, 240)


@pytest.mark.parametrize(
    ("then", "count"),
    [
        ((900, "1", "die"), 1),  # it ran for long in between
        ((301, "0", "die"), 0),  # it succeeded: it runs again and again on purpose
        ((301, "", "kill"), 0),  # a person, or gpukeeper, ended it
        ((301, "137", "die"), 6),
    ],
)
def test_a_long_run_a_success_or_a_stop_ends_a_row_of_failures(then: tuple[int, str, str], count: int) -> None:
    async def looks(records: Records) -> int:
        for second in range(0, 300, 60):
            crash(records, second)
        crash(records, *then)
        found = records.crashes(LOOPS)
        return 0 if found is None else found.count

    assert play(FakeEngine(), looks) == count


def test_what_a_person_starts_again_and_again_is_in_no_loop() -> None:
    async def looks(records: Records) -> tuple[object, object]:
        for second in range(0, 300, 60):
            crash(records, second)
        by_policy = msgspec.structs.replace(LOOPS, restart_count=0)
        return records.crashes(container()), records.crashes(by_policy)

    assert play(FakeEngine(), looks) == (None, None)


@pytest.mark.parametrize(
    ("engine_started", "exit_code", "stopped"),
    [
        ("2026-11-15T10:00:02Z", 0, True),
        ("2026-11-15T10:20:00Z", 0, False),  # it ended long before
        ("2026-11-15T09:59:00Z", 0, False),  # the engine ran already
        ("2026-11-15T10:00:02Z", 1, False),  # a failure is kept longer
    ],
)
def test_what_succeeded_as_the_engine_shut_down_was_stopped_by_it(
    engine_started: str, exit_code: int, stopped: bool
) -> None:
    fake = FakeEngine(told(state=ended(ExitCode=exit_code)))
    fake.answers["GET /networks/bridge"] = (200, json.dumps({"Name": "bridge", "Created": engine_started}))

    async def looks(records: Records) -> bool:
        (found,), _ = await records.refresh()
        return records.stopped_at(found) is not None

    assert play(fake, looks) is stopped


def test_what_was_seen_to_succeed_was_not_stopped_by_the_engine() -> None:
    fake = FakeEngine(told(state=ended(ExitCode=0, FinishedAt="2026-11-15T10:00:00Z")))
    fake.answers["GET /networks/bridge"] = (200, json.dumps({"Created": "2026-11-15T10:00:02Z"}))
    fake.past = [event(ID, "die", exitCode="0")]

    async def looks(records: Records) -> bool:
        (found,), _ = await records.refresh()
        return records.stopped_at(found) is None

    assert play(fake, looks)


def test_a_signal_that_ends_nothing_is_no_stop() -> None:
    async def looks(records: Records) -> bool:
        record_event(records, ID, "kill", signal="1")
        return records.stopped_at(container(id=ID)) is None

    assert play(FakeEngine(), looks)


def test_broken_events_of_the_past_only_cost_knowledge() -> None:
    fake = FakeEngine(told())
    fake.answers["GET /events"] = (200, "garbage\n")
    found, unseen = play(fake, lambda records: records.refresh())
    assert len(found) == 1
    assert unseen == []


def test_while_a_line_of_the_list_cannot_be_read_no_image_is_known_to_be_unused() -> None:
    fake = FakeEngine(told())

    async def looks(records: Records) -> None:
        await records.refresh()
        assert not isinstance(records.images_in_use(), Unknown)
        fake.answers["GET /containers/json"] = (200, json.dumps([fake._line(told()), {"Id": 7, "ImageID": IMAGE}]))
        _, unseen = await records.refresh()
        assert len(unseen) == 1
        assert isinstance(records.images_in_use(), Unknown)

    play(fake, looks)


def test_an_image_is_in_use_though_its_container_is_stuck() -> None:
    fake = FakeEngine(told())
    fake.stuck.add(INSPECT)

    async def looks(records: Records) -> int:
        await records.refresh()
        return records.images_in_use()[told()["Image"]]

    assert play(fake, looks, hasty=True) == 1


@pytest.mark.parametrize("words", ["page not found", "<html>404</html>", "not here"])
def test_a_404_without_the_engines_own_words_proves_nothing(words: str) -> None:
    fake = FakeEngine(told())
    fake.answers[INSPECT] = (404, words)

    async def read(records: Records) -> object:
        return await records.inspect(ID)

    assert isinstance(play(fake, read), Unknown)


@pytest.mark.parametrize("called", ["lab:1", "lab", IMAGE, IMAGE.removeprefix("sha256:")[:12]])
def test_a_container_that_came_and_went_used_its_image(called: str) -> None:
    async def told_of(records: Records) -> tuple[object, object]:
        before = records.image_used_at(IMAGE, ["lab:1", "lab:latest"])
        record_event(records, ID, "die", image=called)
        return before, records.image_used_at(IMAGE, ["lab:1", "lab:latest"])

    before, after = play(FakeEngine(), told_of)
    assert before is None
    assert after is not None


def test_what_is_remembered_of_images_and_stops_follows_the_containers() -> None:
    """A host that builds an image for each run has thousands of them in a month."""
    fake = FakeEngine(told(image=IMAGE), told(id=OTHER_ID, name="/other", image=GONE))
    for image in (IMAGE, GONE):
        fake.images[image] = {"Id": image, "Config": {"Labels": {"a": "b"}}}

    async def looks(records: Records) -> tuple[set[str], int, int]:
        records.hearing = True
        for image in (IMAGE, GONE):
            await records.image_labels(image)
        for number in range(REMEMBERED + 50):
            record_event(records, f"{number:064x}", "stop")
        record_event(records, ID, "kill", signal="15")
        heard = len(records._stops)
        fake.containers.pop(OTHER_ID)
        await records.refresh()
        assert records.stopped_at(container(id=ID)) is not None
        return set(records._labels), heard, len(records._stops)

    assert play(fake, looks) == ({IMAGE}, REMEMBERED + 51, REMEMBERED + 1)
