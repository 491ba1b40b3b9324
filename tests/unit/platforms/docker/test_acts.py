"""The order of what is asked of an engine when something is stopped, removed or brought back."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import pytest

from gpukeeper.clients.docker import CacheEntry, ImageSummary, Inspected
from gpukeeper.config.load import load_text
from gpukeeper.devices.holders import Holder
from gpukeeper.model.decision import Accepted, Changed, Evidence, Refused, Unseen
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.policy import BuildCache, Images, Policy
from gpukeeper.model.subject import Ref, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.acts import ContainerActions
from gpukeeper.platforms.docker.leftovers import Leftovers
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import cache_subject, container_subject, image_subject
from tests.unit.platforms.docker.examples import AT, ID, NOW, StillClock, decoded, ended, facts, told
from tests.unit.platforms.docker.fake_engine import FakeEngine, served

T = TypeVar("T")
ALWAYS = {"RestartPolicy": {"Name": "always", "MaximumRetryCount": 0}}
GRACE = timedelta(seconds=20)
CACHE = Policy(build_cache=BuildCache(unused=timedelta(days=7)))
STOP, UPDATE, REMOVE = f"POST /containers/{ID}/stop", f"POST /containers/{ID}/update", f"DELETE /containers/{ID}"


async def nobody(_container: Inspected) -> Sequence[Holder]:
    return ()


def act(
    fake: FakeEngine,
    what: Callable[[ContainerActions], Awaitable[T]],
    holders: Callable[[Inspected], Awaitable[Sequence[Holder]]] = nobody,
) -> T:
    async def run() -> T:
        async with served(fake) as engine:
            return await what(ContainerActions(engine, Records(engine), holders))

    return asyncio.run(run())


def seen(one: dict[str, Any]) -> Subject:
    return container_subject(decoded(one), facts(), AT)


def stop(fake: FakeEngine, fresh: Subject, holders: Callable[[Inspected], Awaitable[Sequence[Holder]]] = nobody) -> Any:
    return act(fake, lambda acts: acts.stop(fresh, GRACE), holders)


def policy_of(fake: FakeEngine) -> str:
    name: str = fake.containers[ID]["HostConfig"]["RestartPolicy"]["Name"]
    return name


def test_the_restart_policy_goes_before_any_signal() -> None:
    fake = FakeEngine(told(host=ALWAYS))
    calls_when_asked_for_holders: list[list[str]] = []

    async def holders(_container: Inspected) -> Sequence[Holder]:
        calls_when_asked_for_holders.append(fake.acts())
        return ()

    assert stop(fake, seen(told(host=ALWAYS)), holders) == Accepted()
    assert calls_when_asked_for_holders == [[UPDATE]]
    assert fake.acts() == [UPDATE, f"{STOP}?t=20"]
    assert policy_of(fake) == "no"


def test_without_a_restart_policy_nothing_is_changed() -> None:
    fake = FakeEngine(told())
    assert stop(fake, seen(told())) == Accepted()
    assert fake.acts() == [f"{STOP}?t=20"]


@pytest.mark.parametrize("preset", ["shared-host", "ds01"])
def test_the_engine_waits_a_minute_between_its_signal_and_the_forced_end(preset: str) -> None:
    """C9.2: with the grace that the policy gives every class that can be stopped."""
    policy = load_text(f"preset: {preset}\nscope: {{docker: {{}}}}\n").policy
    for grace in {one.stop_grace for one in policy.classes.values() if not one.untouchable}:
        fake = FakeEngine(told())
        assert act(fake, lambda acts, grace=grace: acts.stop(seen(told()), grace)) == Accepted()  # type: ignore[misc]
        assert fake.acts() == [f"{STOP}?t=60"]


def test_a_policy_that_cannot_be_switched_off_stops_the_stop() -> None:
    fake = FakeEngine(told(host=ALWAYS))
    fake.answers[UPDATE] = (404, "page not found")  # as Podman answers
    assert isinstance(stop(fake, seen(told(host=ALWAYS))), Refused)
    assert fake.acts() == [UPDATE]


def test_who_was_started_again_before_is_not_touched() -> None:
    fake = FakeEngine(told(host=ALWAYS))
    fake.restart(ID)
    assert isinstance(stop(fake, seen(told(host=ALWAYS))), Changed)
    assert fake.acts() == []


def test_who_is_started_again_during_the_grace_keeps_running_and_its_policy() -> None:
    fake = FakeEngine(told(host=ALWAYS))

    async def holders(_container: Inspected) -> Sequence[Holder]:
        fake.restart(ID)
        return ()

    assert isinstance(stop(fake, seen(told(host=ALWAYS)), holders), Changed)
    assert fake.acts() == [UPDATE, UPDATE]
    assert policy_of(fake) == "always"


def test_who_is_restarted_during_the_engines_stop_keeps_its_policy() -> None:
    fake = FakeEngine(told(host=ALWAYS))
    fake.answers[STOP] = (204, "")
    fake.before = lambda call: fake.restart(ID) if call == STOP else None
    assert stop(fake, seen(told(host=ALWAYS))) == Accepted()
    assert policy_of(fake) == "always"


def test_who_was_restarted_just_before_the_engines_stop_is_started_again() -> None:
    """The engine stops whatever runs under that id; the user's new run was not meant."""
    fake = FakeEngine(told(host=ALWAYS))
    fake.before = lambda call: fake.restart(ID) if call == STOP else None
    assert isinstance(stop(fake, seen(told(host=ALWAYS))), Changed)
    assert fake.acts()[:3] == [UPDATE, f"{STOP}?t=20", f"POST /containers/{ID}/start"]
    assert policy_of(fake) == "always"


def test_nobody_is_stopped_whose_jobs_could_not_be_told() -> None:
    fake = FakeEngine(told(host=ALWAYS))

    async def blind(_container: Inspected) -> Sequence[Holder]:
        raise PlatformError("the processes that hold its GPUs are unknown")

    with pytest.raises(PlatformError):
        stop(fake, seen(told(host=ALWAYS)), blind)
    assert fake.acts() == [UPDATE, UPDATE]
    assert policy_of(fake) == "always"


def test_who_could_not_be_stopped_keeps_its_policy() -> None:
    fake = FakeEngine(told(host=ALWAYS))
    fake.answers[STOP] = (500, '{"message": "cannot kill container"}')
    assert stop(fake, seen(told(host=ALWAYS))) == Refused("cannot kill container")
    assert policy_of(fake) == "always"


@pytest.mark.parametrize(
    ("policy", "state", "calls"),
    [
        ("no", {}, [UPDATE]),  # killed between switching it off and the stop
        ("always", {}, []),  # killed before
        ("no", ended(), []),  # somebody stopped it: it must not come back at the engine's next start
    ],
)
def test_a_policy_that_an_interruption_left_off_is_given_back(
    policy: str, state: dict[str, Any], calls: list[str]
) -> None:
    fake = FakeEngine(told(host={"RestartPolicy": {"Name": policy, "MaximumRetryCount": 0}}, state=state))
    evidence = Evidence({"manifest.json": json.dumps(told(host=ALWAYS)).encode()})
    act(fake, lambda acts: acts.revert_stop(Ref("docker", "here", "container", "eval", ID), evidence))
    assert fake.acts() == calls
    assert policy_of(fake) == ("always" if calls or policy == "always" else "no")


def test_who_is_waited_for_when_we_end_keeps_its_policy() -> None:
    fake = FakeEngine(told(host=ALWAYS))

    async def cancelled(acts: ContainerActions) -> None:
        with pytest.raises(asyncio.CancelledError):
            await acts.stop(seen(told(host=ALWAYS)), GRACE)

    async def holders(_container: Inspected) -> Sequence[Holder]:
        raise asyncio.CancelledError

    act(fake, cancelled, holders)
    assert fake.acts() == [UPDATE, UPDATE]
    assert policy_of(fake) == "always"


def test_who_ended_during_the_grace_is_a_success() -> None:
    fake = FakeEngine(told(host=ALWAYS))

    async def holders(_container: Inspected) -> Sequence[Holder]:
        fake.end(ID)
        return ()

    assert stop(fake, seen(told(host=ALWAYS)), holders) == Accepted()
    assert policy_of(fake) == "no"


def test_who_is_gone_or_ended_is_not_stopped() -> None:
    assert isinstance(stop(FakeEngine(), seen(told())), Changed)
    fake = FakeEngine(told(state=ended()))
    assert isinstance(stop(fake, seen(told(state=ended()))), Changed)
    assert fake.acts() == []


def test_a_stop_of_what_vanished_meanwhile_is_a_change() -> None:
    fake = FakeEngine(told())
    fake.answers[STOP] = (404, '{"message": "No such container"}')
    assert stop(fake, seen(told())) == Changed("it is gone")


def remove(fake: FakeEngine, fresh: Subject) -> Any:
    return act(fake, lambda acts: acts.remove(fresh))


def test_a_removal_is_unforced_and_keeps_volumes() -> None:
    fake = FakeEngine(told(state=ended()))
    assert isinstance(remove(fake, seen(told(state=ended()))), Accepted)
    (call,) = fake.acts()
    assert call.startswith(f"{REMOVE}?")
    assert parse_qs(urlsplit(call).query) == {"force": ["false"], "v": ["false"]}


@pytest.mark.parametrize(("ahead", "lost"), [(-60, False), (60, True)])
def test_a_start_after_our_look_is_reported_as_lost(ahead: int, lost: bool) -> None:
    """The start of the run that we saw may be in the events, too; and those of others are."""
    fake = FakeEngine(told(state=ended()))
    at = datetime.now(UTC) + timedelta(seconds=ahead)
    fake.past = [
        {"Type": "container", "Action": "start", "Actor": {"ID": "b" * 64}, "timeNano": int(2e18)},
        {"Type": "container", "Action": "start", "Actor": {"ID": ID}, "timeNano": int(at.timestamp() * 1e9)},
    ]
    answer = remove(fake, seen(told(state=ended())))
    assert isinstance(answer, Accepted)
    assert ("it was started at the same time" in answer.missed) is lost


@pytest.mark.parametrize("change", [{"name": "/other"}, {"state": ended(FinishedAt="2026-11-15T10:30:00Z")}])
def test_what_changed_since_the_read_is_not_removed(change: dict[str, Any]) -> None:
    fake = FakeEngine(told(**{"state": ended(), **change}))
    assert isinstance(remove(fake, seen(told(state=ended()))), Changed)
    assert fake.acts() == []


@pytest.mark.parametrize("status", [404, 409])
def test_a_user_who_was_faster_wins(status: int) -> None:
    fake = FakeEngine(told(state=ended()))
    fake.answers[REMOVE] = (status, '{"message": "no"}')
    assert remove(fake, seen(told(state=ended()))) == Changed("no")


def test_a_refusal_is_reported() -> None:
    fake = FakeEngine(told(state=ended()))
    fake.answers[REMOVE] = (500, '{"message": "driver failed to remove root filesystem"}')
    assert remove(fake, seen(told(state=ended()))) == Refused("driver failed to remove root filesystem")


def test_a_container_whose_name_is_another_ones_id_is_not_mistaken_for_it() -> None:
    other = told(id="b" * 64, name=f"/{ID}", state=ended())
    fake = FakeEngine(other)
    fake.answers[f"GET /containers/{ID}/json"] = (200, json.dumps(other))  # the engine finds by name, too
    assert remove(fake, seen(told(state=ended()))) == Changed("it is gone")
    assert fake.acts() == []


REF = Ref("docker", "node-3", "container", "eval", ID)


def manifest(**parts: Any) -> Evidence:
    return Evidence({"manifest.json": json.dumps(told(state=ended(), **parts)).encode()})


def restore(fake: FakeEngine, evidence: Evidence | None) -> Any:
    return act(fake, lambda acts: acts.restore(REF, evidence))


def test_what_was_removed_is_made_again_and_not_started() -> None:
    fake = FakeEngine()
    fake.images["lab:1"] = {"Id": "sha256:" + "1" * 64}
    assert restore(fake, manifest(host=ALWAYS)) == Accepted()
    assert fake.acts() == ["POST /containers/create?name=eval"]
    assert fake.bodies[-1]["Image"] == "lab:1"
    assert fake.bodies[-1]["HostConfig"]["RestartPolicy"]["Name"] == "always"


def test_it_is_made_from_the_image_it_had_not_from_what_has_its_name_now() -> None:
    fake = FakeEngine()
    fake.images["lab:1"] = {"Id": "sha256:" + "2" * 64}
    restore(fake, manifest())
    assert fake.bodies[-1]["Image"] == "sha256:" + "1" * 64


def test_it_joins_its_networks_by_its_new_id() -> None:
    fake = FakeEngine()
    fake.answers["POST /networks/lab/connect"] = (200, "")
    evidence = json.loads(manifest().files["manifest.json"])
    evidence["NetworkSettings"] = {"Networks": {"lab": {"Aliases": ["x"]}}}
    assert restore(fake, Evidence({"manifest.json": json.dumps(evidence).encode()})) == Accepted()
    assert fake.bodies[-1]["Container"] == "e" * 64


def test_what_was_stopped_is_started_with_the_policy_from_before_the_stop() -> None:
    fake = FakeEngine(told(state=ended()))
    before = json.dumps(told(host=ALWAYS)).encode()
    after = json.dumps(told(state=ended())).encode()
    assert restore(fake, Evidence({"stop/manifest.json": before, "manifest.json": after})) == Accepted()
    assert fake.acts() == [UPDATE, f"POST /containers/{ID}/start"]
    assert policy_of(fake) == "always"


@pytest.mark.parametrize("evidence", [None, Evidence({}), Evidence({"manifest.json": b"[]"})])
def test_what_cannot_be_made_again_is_refused(evidence: Evidence | None) -> None:
    fake = FakeEngine()
    assert isinstance(restore(fake, evidence), Refused)
    assert fake.acts() == []


def leftovers(fake: FakeEngine, what: Callable[[Leftovers], Awaitable[T]]) -> T:
    async def run() -> T:
        async with served(fake) as engine:
            return await what(Leftovers(Records(engine), engine, StillClock(), lambda: AT, CACHE))

    return asyncio.run(run())


def cache(unused: timedelta) -> Subject:
    used = (NOW - unused).isoformat()
    return cache_subject(CacheEntry("abc", created_at=used, last_used_at=used), AT)


def whole(fake: FakeEngine, times: int = 1) -> tuple[Subject, ...]:
    """What a look shows of the cache when the policy does not remove it; the last of several."""

    async def looks(one: Leftovers) -> tuple[Subject, ...]:
        one.follow(Policy())
        for _ in range(times):
            found, unseen = await one.observe(Counter())
        assert unseen == ()
        return tuple(subject for subject in found if subject.ref.kind == "build cache")

    return leftovers(fake, looks)


def test_cache_that_is_only_reported_is_one_thing_listed_once_an_hour() -> None:
    fake = FakeEngine()
    used = NOW.isoformat()
    pieces = [{"ID": name, "Size": 5, "CreatedAt": used, "InUse": name == "c"} for name in "abc"]
    fake.usage = {"BuildCache": pieces}
    (found,) = whole(fake, times=3)
    assert (found.ref.name, found.size, found.labels) == ("build-cache", 10, {"pieces": "2"})
    asked = [call for call in fake.asked if "/system/df" in call]
    assert len(asked) == 1
    assert "type=build-cache" in asked[0]
    fake.usage = {"BuildCache": []}
    assert whole(fake) == ()


def test_cache_that_cannot_be_listed_is_unknown_and_hides_nothing_else() -> None:
    fake = FakeEngine()
    fake.answers["GET /system/df"] = (500, '{"message": "disk is busy"}')
    (found,) = whole(fake)
    assert isinstance(found.size, Unknown)
    assert isinstance(found.last_used, Unknown)
    answer = leftovers(fake, lambda one: one.remove_cache(found))
    assert isinstance(answer, Refused)
    assert fake.acts() == []


PRUNE = "POST /build/prune"
PRUNED = (200, '{"CachesDeleted": ["abc"], "SpaceReclaimed": 5}')


def test_one_piece_of_cache_goes_by_its_id_and_only_unused() -> None:
    fake = FakeEngine()
    fake.answers[PRUNE] = PRUNED
    assert leftovers(fake, lambda one: one.remove_cache(cache(timedelta(hours=2)))) == Accepted(bytes_back=5)
    (call,) = fake.acts()
    query = parse_qs(urlsplit(call).query)
    assert json.loads(query["filters"][0]) == {"id": ["abc"], "until": ["7140s"]}


def test_cache_that_was_used_just_now_is_left_alone() -> None:
    fake = FakeEngine()
    fake.answers[PRUNE] = PRUNED
    assert isinstance(leftovers(fake, lambda one: one.remove_cache(cache(timedelta(seconds=30)))), Changed)
    assert fake.acts() == []


def test_an_engine_that_would_ignore_the_filter_is_never_asked() -> None:
    """Before 1.39 the same call removes the whole cache."""
    fake = FakeEngine(version="1.38")
    fake.answers[PRUNE] = PRUNED
    assert isinstance(leftovers(fake, lambda one: one.remove_cache(cache(timedelta(hours=2)))), Refused)
    assert fake.acts() == []


def test_cache_that_the_engine_kept_is_a_change() -> None:
    fake = FakeEngine()
    fake.answers[PRUNE] = (200, '{"CachesDeleted": null, "SpaceReclaimed": 0}')
    assert isinstance(leftovers(fake, lambda one: one.remove_cache(cache(timedelta(hours=2)))), Changed)


IMAGE = "sha256:" + "1" * 64


def image(fake: FakeEngine) -> Any:
    fake.images[IMAGE] = {"Id": IMAGE, "RepoTags": ["lab:1"]}
    fresh = image_subject(ImageSummary(IMAGE, repo_tags=["lab:1"]), 0, None, None, AT)
    return leftovers(fake, lambda one: one.remove_image(fresh))


def test_an_image_goes_by_its_id_unforced() -> None:
    fake = FakeEngine()
    assert isinstance(image(fake), Accepted)
    (call,) = fake.acts()
    assert call.startswith(f"DELETE /images/{IMAGE}?")
    assert parse_qs(urlsplit(call).query) == {"force": ["false"], "noprune": ["true"]}


def test_an_image_that_a_container_was_made_from_meanwhile_stays() -> None:
    fake = FakeEngine(told(image=IMAGE))
    assert isinstance(image(fake), Changed)
    assert fake.acts() == []


def test_an_image_with_another_name_meanwhile_stays() -> None:
    fake = FakeEngine()
    fake.usage = {"LayersSize": 0, "Images": [{"Id": IMAGE, "RepoTags": ["lab:1", "lab:2"]}]}
    assert isinstance(image(fake), Changed)
    assert fake.acts() == []


@pytest.mark.parametrize("fails", [False, True])
def test_with_a_limit_of_bytes_only_what_no_other_image_shares_counts(fails: bool) -> None:
    """Measured once an hour; what is not measured is unknown, and makes no list incomplete."""
    fake = FakeEngine()
    fake.images = {name: {"Id": name, "Size": 100} for name in ("sha256:a", "sha256:b")}
    fake.usage = {"Images": [{"Id": "sha256:a", "Size": 100, "SharedSize": 90}]}
    if fails:
        fake.answers["GET /system/df"] = (500, "no")

    async def looks(one: Leftovers) -> tuple[tuple[Subject, ...], tuple[Unseen, ...]]:
        one.follow(Policy(images=Images(above=1)))
        await one._shared()
        return await one.observe(Counter())

    subjects, unseen = leftovers(fake, looks)
    sizes = {one.ref.uid: one.size for one in subjects if one.ref.kind == "image"}
    assert isinstance(sizes.pop("sha256:b"), Unknown)
    assert isinstance(sizes["sha256:a"], Unknown) if fails else sizes == {"sha256:a": 10}
    assert unseen == ()
    assert len([call for call in fake.asked if "/system/df" in call]) == 2  # one for the build cache


def test_without_a_limit_of_bytes_no_disk_is_walked_for_images() -> None:
    fake = FakeEngine()
    fake.images = {"sha256:a": {"Id": "sha256:a", "Size": 100}}
    subjects, _ = leftovers(fake, lambda one: one.observe(Counter()))
    assert [(one.size, one.disk) for one in subjects if one.ref.kind == "image"] == [(100, None)]


def test_an_image_that_another_one_is_built_on_is_not_tried() -> None:
    fake = FakeEngine()
    fake.usage = {
        "LayersSize": 0,
        "Images": [{"Id": IMAGE, "RepoTags": ["lab:1"]}, {"Id": "sha256:2", "RepoTags": ["lab:2"], "ParentId": IMAGE}],
    }
    assert image(fake) == Changed("lab:2 is built on it")
    assert fake.acts() == []


def test_a_refusal_that_will_not_change_is_none_of_the_last_moment() -> None:
    """So that it is not tried again in every pass."""
    fake = FakeEngine()
    words = f"conflict: unable to delete {IMAGE} (cannot be forced) - image has dependent child images"
    fake.answers[f"DELETE /images/{IMAGE}"] = (409, json.dumps({"message": words}))
    assert image(fake) == Refused("intermediate images of a build, which are not listed, are built on it")


def test_a_silent_engine_gives_no_answer_to_act_on() -> None:
    fake = FakeEngine(told(state=ended()))
    fake.answers[f"GET /containers/{ID}/json"] = (200, "garbage")
    assert isinstance(remove(fake, seen(told(state=ended()))), Unknown)
    assert fake.acts() == []
