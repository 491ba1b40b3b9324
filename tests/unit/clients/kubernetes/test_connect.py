"""The client against a real socket: pages, refusals, pace, deadlines, streams that break."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpukeeper.clients.kubernetes import auth, connect
from gpukeeper.clients.kubernetes.connect import Cluster, find
from gpukeeper.clients.kubernetes.exchange import (
    MOST,
    ApiError,
    ClusterUnavailable,
    ListPage,
    RateLimiter,
    ResponseTooLarge,
    WatchEvent,
    collector_off,
    read,
    refusal,
)
from gpukeeper.clients.kubernetes.wire import Pod, Root
from gpukeeper.model.errors import PlatformError, UsageError
from tests.unit.clients.kubernetes.scripted_api import (
    PODS,
    Reply,
    ScriptedApi,
    Time,
    ask,
    kubeconfig,
    listening,
    pods,
    refused,
    stream,
)

SOURCE = Path(connect.__file__).parents[2]
SHORT = timedelta(milliseconds=50)
LIST = f"GET {PODS}"
OPTIONS = {"propagationPolicy": "Background", "preconditions": {"uid": "u-1", "resourceVersion": "7"}}


async def listed(cluster: Cluster, **more: Any) -> list[ListPage[Pod]]:
    return [page async for page in cluster.pages(PODS, Pod, **more)]


def names(pages: list[ListPage[Pod]]) -> list[str]:
    return [one.metadata.name for page in pages for one in page.items]


def http_date(at: datetime) -> str:
    return format_datetime(at, usegmt=True)


# Lists


def test_a_list_is_read_page_by_page(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, Reply(pods("a", "b", more="t1")), Reply(pods("c", more="t2")), Reply(pods("d")))
    pages = ask(api, lambda cluster: listed(cluster, limit=2, resourceVersion="0", labelSelector="x=1"), tmp_path)
    assert names(pages) == ["a", "b", "c", "d"]
    assert {(page.version, page.inconsistent, page.problems) for page in pages} == {("7", False, ())}
    assert [one.query for one in api.asked] == [
        {"limit": "2", "resourceVersion": "0", "labelSelector": "x=1"},
        {"limit": "2", "labelSelector": "x=1", "continue": "t1"},  # a version beside a token is refused
        {"limit": "2", "labelSelector": "x=1", "continue": "t2"},
    ]


def test_an_empty_list_is_one_empty_page(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, Reply({**pods(), "items": None}))
    pages = ask(api, listed, tmp_path)
    assert [(list(page.items), page.version) for page in pages] == [([], "7")]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "garbage",
        "{}",
        "[]",
        "null",
        '{"items": []}',
        '{"kind": "PodList", "items": []}',
        '{"kind": "PodList", "items": [], "metadata": {}}',
        '{"kind": "PodList", "metadata": {"resourceVersion": "7"}}',
        '{"kind": "Status", "items": [], "metadata": {"resourceVersion": "7"}}',
        '{"kind": "PodList", "items": {}, "metadata": {"resourceVersion": "7"}}',
        '{"kind": "PodList", "items": [{"metadata": {"name": "cut',
    ],
)
def test_what_is_no_list_is_not_an_empty_one(body: str, tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, Reply(body))
    with pytest.raises(ClusterUnavailable, match=r"cannot be read|is not a list"):
        ask(api, listed, tmp_path)


def test_an_item_that_cannot_be_read_is_named_and_the_others_are_there(tmp_path: Path) -> None:
    page = pods("a", "b", "c")
    page["items"][1]["metadata"]["generation"] = "three"
    page["items"].append(5)
    api = ScriptedApi()
    api.says(LIST, Reply(page))
    (found,) = ask(api, listed, tmp_path)
    assert names([found]) == ["a", "c"]
    first, second = found.problems
    assert first.startswith("lab/b: ")
    assert "generation" in first
    assert second.startswith("item 3: ")


def test_a_list_that_expired_goes_on_and_reports_that_absence_is_not_proven(tmp_path: Path) -> None:
    api = ScriptedApi()
    expired = refused(410, "Expired", metadata={"continue": "fresh"})
    api.says(LIST, Reply(pods("a", more="old")), Reply(expired, 410), Reply(pods("b", more="t", version="9")))
    api.replies[LIST].append(Reply(pods("c", version="9")))
    pages = ask(api, listed, tmp_path)
    assert names(pages) == ["a", "b", "c"]
    assert [page.inconsistent for page in pages] == [False, True, True]
    assert [one.query.get("continue") for one in api.asked] == [None, "old", "fresh", "t"]


@pytest.mark.parametrize(
    "answers",
    [
        [Reply(pods("a", more="old")), Reply(refused(410, "Expired"), 410)],
        [Reply(refused(410, "Expired", metadata={"continue": "x"}), 410)],  # the first page has nothing to go on from
        [Reply(pods("a", more="old")), Reply(refused(410, "Expired", metadata={"continue": "x"}), 410)],  # for ever
    ],
)
def test_a_list_that_expired_without_a_way_on_fails(answers: list[Reply], tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, *answers)
    with pytest.raises(ApiError) as caught:
        ask(api, listed, tmp_path)
    assert caught.value.expired
    assert len(api.asked) <= 3


def test_a_server_that_repeats_a_page_does_not_keep_us_for_ever(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, Reply(pods("a", more="same")))
    with pytest.raises(ClusterUnavailable, match="repeats the same page"):
        ask(api, listed, tmp_path)


def test_a_page_that_is_too_large_is_requested_in_smaller_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.Response:
        number = int(request.query["limit"])
        return web.json_response(pods(*(f"p{'x' * 200}{one}" for one in range(number))))

    api = ScriptedApi()
    api.says(LIST, answer)

    async def read_less(answer: Any, most: int, cut: bool, what: str) -> bytearray:
        assert most == MOST > 20_000
        return await read(answer, 20_000, cut, what)

    monkeypatch.setattr(connect, "read", read_less)
    (page,) = ask(api, listed, tmp_path)
    assert len(page.items) == 31
    assert [one.query["limit"] for one in api.asked] == ["500", "125", "31"]


def test_one_object_without_end_is_reported(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /api/v1/x", Reply("a" * 100_000))
    with pytest.raises(ResponseTooLarge, match="longer than 70000 bytes"):
        ask(api, lambda cluster: cluster.raw("/api/v1/x", most=70_000), tmp_path)


def test_a_log_may_be_cut(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /log", Reply("a" * 100_000))
    assert ask(api, lambda cluster: cluster.raw("/log", most=70_000, tail_ok=True), tmp_path) == b"a" * 70_000
    assert ask(api, lambda cluster: cluster.raw("/log", most=100_000), tmp_path) == b"a" * 100_000


def test_the_collector_is_off_while_decoding_and_on_afterwards(tmp_path: Path) -> None:
    assert gc.isenabled()
    with collector_off():
        assert not gc.isenabled()
        with collector_off():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    api = ScriptedApi()
    api.says(LIST, Reply("garbage"))
    with pytest.raises(ClusterUnavailable):
        ask(api, listed, tmp_path)
    assert gc.isenabled()


# Tries and pace


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_read_is_retried(status: int, tmp_path: Path) -> None:
    api, time = ScriptedApi(), Time()
    api.says(LIST, Reply("busy", status), Reply("busy", status), Reply(pods("a")))
    assert names(ask(api, listed, tmp_path, time=time)) == ["a"]
    assert time.slept == [0.25, 0.5]


def test_a_server_whose_cache_is_behind_is_given_the_time_it_asks_for(tmp_path: Path) -> None:
    api, time = ScriptedApi(), Time()
    behind = refused(504, "Timeout", "Too large resource version: 9, current: 7", details={"retryAfterSeconds": 1})
    api.says(LIST, Reply(behind, 504), Reply(pods("a")))
    assert names(ask(api, listed, tmp_path, time=time)) == ["a"]
    assert time.slept == [1]


def test_a_read_is_not_retried_forever(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, Reply(refused(500, "InternalError", "etcd is away"), 500))
    with pytest.raises(ApiError, match="etcd is away"):
        ask(api, listed, tmp_path)
    assert len(api.asked) == 4


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422, 302])
def test_a_read_that_is_refused_is_sent_once(status: int, tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, Reply(refused(status, "Because"), status))
    with pytest.raises(ApiError) as caught:
        ask(api, listed, tmp_path)
    assert (caught.value.status, caught.value.words, len(api.asked)) == (status, "because", 1)


def test_a_list_whose_connection_is_cut_is_requested_again(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, Reply(pods("a", more="t")), Reply(pods("b"), cut=True), Reply(pods("b")))
    assert names(ask(api, listed, tmp_path)) == ["a", "b"]
    assert [one.query.get("continue") for one in api.asked] == [None, "t", "t"]


def test_a_list_that_is_always_cut_fails(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, Reply(pods("a"), cut=True))
    with pytest.raises(ClusterUnavailable, match="failed during GET /api/v1/pods"):
        ask(api, listed, tmp_path)
    assert len(api.asked) == 4


@pytest.mark.parametrize("status", [429, 503])
def test_a_retry_after_holds_every_caller_up(status: int, tmp_path: Path) -> None:
    api, time = ScriptedApi(), Time()
    seen: list[tuple[str, float]] = []

    async def busy_once(request: web.Request) -> web.Response:
        seen.append(("one", time.now))
        if len(seen) == 1:
            return web.Response(status=status, headers={"Retry-After": "4"})
        return web.json_response({"kind": "x"})

    async def other(request: web.Request) -> web.Response:
        seen.append(("two", time.now))
        return web.json_response({"kind": "x"})

    api.says("GET /one", busy_once)
    api.says("GET /two", other)

    async def both(cluster: Cluster) -> None:
        async def second() -> None:
            await time.sleeping.wait()
            await cluster.get("/two", Root)

        await asyncio.gather(cluster.get("/one", Root), second())

    ask(api, both, tmp_path, time=time)
    assert seen[0] == ("one", 100.0)
    assert sorted(seen[1:]) == [("one", 104.0), ("two", 104.0)]
    assert time.slept == [4, 4]  # the second came while the first waited


def test_a_pause_that_is_longer_than_our_deadline_is_told_and_nothing_is_queried(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /one", Reply("busy", 429, {"Retry-After": "60"}))

    async def twice(cluster: Cluster) -> None:
        with pytest.raises(ApiError) as caught:
            await cluster.get("/one", Root)
        assert caught.value.retry_after == 60
        with pytest.raises(ClusterUnavailable, match="a pause of another 1m"):
            await cluster.get("/two", Root)

    ask(api, twice, tmp_path)
    assert [one.path for one in api.asked] == ["/one"]


@pytest.mark.parametrize("skew", [timedelta(), timedelta(hours=-2), timedelta(minutes=7)])
def test_a_retry_after_may_be_a_time(skew: timedelta, tmp_path: Path) -> None:
    """By the clock of the server, however wrong that is."""
    api, time = ScriptedApi(), Time()
    theirs = time.utc() + skew
    told = {"Date": http_date(theirs), "Retry-After": http_date(theirs + timedelta(seconds=3))}
    api.says("GET /one", Reply("busy", 503, told), Reply({"kind": "x"}))
    assert ask(api, lambda cluster: cluster.get("/one", Root), tmp_path, time=time).kind == "x"
    assert time.slept == [3]


@pytest.mark.parametrize("said", ["soon", "-5", "nan", "", "1e9"])
def test_a_retry_after_that_says_nothing_is_our_own_back_off(said: str, tmp_path: Path) -> None:
    api, time = ScriptedApi(), Time()
    api.says("GET /one", Reply("busy", 429, {"Retry-After": said}), Reply({"kind": "x"}))
    assert ask(api, lambda cluster: cluster.get("/one", Root), tmp_path, time=time).kind == "x"
    assert time.slept == [0.25]


@pytest.mark.parametrize("method", ["post", "put", "patch", "delete"])
def test_a_write_without_an_answer_is_not_repeated(method: str, tmp_path: Path) -> None:
    for reply in (Reply("x" * 50, cut=True), Reply(refused(500, "InternalError"), 500), Reply("busy", 503)):
        api = ScriptedApi()
        api.says(f"{method.upper()} /x", reply)
        with pytest.raises(ClusterUnavailable if reply.cut else ApiError):
            ask(api, lambda cluster: wrote(cluster, method), tmp_path)
        assert len(api.asked) == 1


@pytest.mark.parametrize("method", ["post", "put", "patch", "delete"])
def test_a_write_that_was_throttled_is_repeated_because_nothing_happened(method: str, tmp_path: Path) -> None:
    api, time = ScriptedApi(), Time()
    api.says(f"{method.upper()} /x", Reply("busy", 429, {"Retry-After": "2"}), Reply({"kind": "x"}))
    assert b"x" in ask(api, lambda cluster: wrote(cluster, method), tmp_path, time=time)
    assert time.slept == [2]


def test_a_disruption_budget_is_an_answer_and_holds_nobody_up(tmp_path: Path) -> None:
    api, time = ScriptedApi(), Time()
    details = {"causes": [{"reason": "DisruptionBudget", "message": "needs 1"}], "retryAfterSeconds": 10}
    body = refused(429, "TooManyRequests", "would violate", details=details)
    api.says("POST /evict", Reply(body, 429, {"Retry-After": "10"}))
    with pytest.raises(ApiError) as caught:
        ask(api, lambda cluster: cluster.post("/evict", {"kind": "Eviction"}), tmp_path, time=time)
    assert caught.value.is_disruption_budget
    assert (len(api.asked), time.slept) == (1, [])


async def wrote(cluster: Cluster, method: str) -> bytes:
    if method == "patch":
        return await cluster.patch("/x", {"a": 1}, "merge")
    if method == "delete":
        return await cluster.delete("/x", OPTIONS)
    return await (cluster.post if method == "post" else cluster.put)("/x", {"a": 1})


def test_all_callers_share_one_pace(tmp_path: Path) -> None:
    api, time = ScriptedApi(), Time()
    api.says("GET /x", Reply({"kind": "x"}))

    async def many(cluster: Cluster) -> None:
        await asyncio.gather(*(cluster.get("/x", Root, deadline=timedelta(minutes=5)) for _ in range(50)))

    ask(api, many, tmp_path, time=time, requests=20, burst=30)
    assert len(api.asked) == 50
    assert sorted(time.slept) == pytest.approx([number / 20 for number in range(1, 21)])


def test_tokens_come_back_and_are_never_more_than_the_burst() -> None:
    time = Time()
    pace = RateLimiter(10, 3, time.clock, time.sleep)

    async def take(number: int) -> None:
        for _ in range(number):
            await pace.acquire(10)

    asyncio.run(take(3))
    assert time.slept == []
    time.now += 1000
    asyncio.run(take(5))
    assert time.slept == pytest.approx([0.1, 0.1])


def test_a_retry_after_that_comes_while_a_caller_waits_for_its_token_holds_it_up_too() -> None:
    time, began = Time(), 100.0
    pace = RateLimiter(10, 1, time.clock, time.sleep)

    async def both() -> float:
        await pace.acquire(10)
        waiting = asyncio.create_task(pace.acquire(10))
        await time.sleeping.wait()
        pace.pause(4)  # another caller was answered
        await waiting
        return time.now

    assert asyncio.run(both()) == pytest.approx(began + 4)


def test_a_retry_after_that_is_longer_than_a_waiting_caller_may_wait_ends_its_wait() -> None:
    time = Time()
    pace = RateLimiter(10, 1, time.clock, time.sleep)

    async def both() -> None:
        await pace.acquire(10)
        waiting = asyncio.create_task(pace.acquire(10))
        await time.sleeping.wait()
        pace.pause(60)
        with pytest.raises(ClusterUnavailable, match="no request was sent"):
            await waiting

    asyncio.run(both())


# Deadlines and refusals


@pytest.mark.parametrize("method", ["get", "post", "delete"])
def test_a_deadline_is_kept_and_reported(method: str, tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(f"{method.upper()} /x", Reply(stuck=True))

    async def stuck(cluster: Cluster, deadline: timedelta) -> None:
        if method == "get":
            await cluster.get("/x", Root, deadline=deadline)
        elif method == "post":
            await cluster.post("/x", {"a": 1}, deadline=deadline)
        else:
            await cluster.delete("/x", OPTIONS, deadline=deadline)

    async def run(cluster: Cluster) -> None:
        async for deadline in deadlines_until_asked(api):
            with pytest.raises(ClusterUnavailable, match=f"did not answer {method.upper()} /x within"):
                await stuck(cluster, deadline)

    ask(api, run, tmp_path)
    assert len(api.asked) == 1


async def deadlines_until_asked(api: ScriptedApi) -> AsyncIterator[timedelta]:
    """Longer and longer: on a crowded machine a short one is over before the request has arrived."""
    deadline = SHORT
    while not api.asked:
        yield deadline
        deadline *= 4
        await asyncio.sleep(SHORT.total_seconds())  # what was sent arrives


def test_a_stuck_request_does_not_cost_the_next_one(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /x", Reply(stuck=True), Reply({"kind": "x"}))

    async def twice(cluster: Cluster) -> str:
        async for deadline in deadlines_until_asked(api):
            with pytest.raises(ClusterUnavailable):
                await cluster.get("/x", Root, deadline=deadline)
        return (await cluster.get("/x", Root)).kind

    assert ask(api, twice, tmp_path) == "x"


def test_nobody_listening_shows_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    file = kubeconfig(tmp_path / "config", f"http://127.0.0.1:{port}")
    time = Time()
    cluster = Cluster(auth.from_files([file], None, {}, auth.utc_now), clock=time.clock, sleep=time.sleep)

    async def run() -> None:
        async with cluster.opened():
            await cluster.get("/version", Root)

    with pytest.raises(ClusterUnavailable, match=r"cluster lab at http.* cannot be reached: .*check that it runs"):
        asyncio.run(run())
    assert cluster.asked == {"GET": 4}


@pytest.mark.parametrize("body", ["", "garbage", "[]", '{"metadata": 5}', '{"metadata": {"name": "cut'])
def test_an_answer_that_cannot_be_read_is_silence(body: str, tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /x", Reply(body))
    with pytest.raises(ClusterUnavailable, match="cannot be read"):
        ask(api, lambda cluster: cluster.get("/x", Root), tmp_path)


def test_only_the_servers_own_words_say_that_a_thing_is_gone() -> None:
    named = refused(404, "NotFound", "pods x not found", details={"name": "x", "kind": "pods"})
    assert _refusal(404, named).is_not_found
    assert not _refusal(404, refused(404, "NotFound", details={})).is_not_found
    assert not _refusal(404, refused(404, "NotFound")).is_not_found
    assert not refusal(404, b"404 page not found").is_not_found
    assert not refusal(404, b"<html>not found</html>").is_not_found
    assert not refusal(404, b'{"reason": "NotFound", "details": {"name": "x"}}').is_not_found
    assert not _refusal(403, named).is_not_found


def test_what_reports_that_a_thing_changed() -> None:
    patch = "the server rejected our request due to an error in our request"
    assert _refusal(409, refused(409, "Conflict")).is_conflict
    assert not _refusal(409, refused(409, "AlreadyExists")).is_conflict
    assert not refusal(409, b"busy").is_conflict
    assert _refusal(422, refused(422, "Invalid", patch, details={})).is_conflict
    causes = {"name": "x", "causes": [{"reason": "FieldValueInvalid"}]}
    assert not _refusal(422, refused(422, "Invalid", "spec.x: Invalid value", details=causes)).is_conflict


def test_a_refusal_shows_what_to_do() -> None:
    assert "log in again" in str(_refusal(401, refused(401, "Unauthorized")))
    forbidden = _refusal(403, refused(403, "Forbidden", 'User "x" cannot list pods'))
    assert "cannot list pods" in str(forbidden)
    assert "can-i" in str(forbidden)
    assert forbidden.is_denied
    assert str(refusal(502, b"<html>  bad\n gateway</html>")) == "the cluster answered 502: <html> bad gateway</html>"


def _refusal(status: int, body: object) -> ApiError:
    import msgspec

    return refusal(status, msgspec.json.encode(body))


# Writes


def test_a_delete_carries_its_preconditions(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("DELETE /x", Reply({"kind": "Status", "status": "Success"}))
    ask(api, lambda cluster: cluster.delete("/x", OPTIONS), tmp_path)
    (one,) = api.asked
    assert (one.method, one.body) == ("DELETE", OPTIONS)
    assert one.header("Content-Type") == "application/json"


@pytest.mark.parametrize("body", [None, {}])
def test_a_delete_without_options_is_a_bug(body: object, tmp_path: Path) -> None:
    api = ScriptedApi()
    with pytest.raises(AssertionError, match="bug in gpukeeper"):
        ask(api, lambda cluster: cluster.delete("/x", body), tmp_path)
    assert api.asked == []


def test_each_way_to_patch_has_its_type(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("PATCH /x", Reply({}))

    async def patched(cluster: Cluster) -> None:
        await cluster.patch("/x", {"a": 1}, "merge")
        await cluster.patch("/x", [{"op": "test"}], "json", dryRun="All")
        await cluster.patch("/x", {"a": 1}, "strategic")
        await cluster.patch("/x", {"a": 1}, "apply", fieldManager="me", force=True)

    ask(api, patched, tmp_path)
    assert [one.header("Content-Type") for one in api.asked] == list(connect.PATCHES.values())
    assert [one.query for one in api.asked] == [
        {"fieldManager": "gpukeeper"},
        {"fieldManager": "gpukeeper", "dryRun": "All"},
        {"fieldManager": "gpukeeper"},
        {"fieldManager": "me", "force": "true"},
    ]


@pytest.mark.parametrize("path", ["x", "/a/../b", "/a/..", "/a/.", "/a//b", "/a?force=1", "/a#b", "/a b", "/%2e%2e/b"])
def test_a_name_cannot_lead_to_another_object(path: str, tmp_path: Path) -> None:
    api = ScriptedApi()
    with pytest.raises(PlatformError, match="not a valid API path"):
        ask(api, lambda cluster: cluster.delete(path, OPTIONS), tmp_path)
    assert api.asked == []


# Watches


def changed(type_: str, version: str, name: str = "a") -> dict[str, Any]:
    return {"type": type_, "object": {"kind": "Pod", "metadata": {"name": name, "resourceVersion": version}}}


async def heard(cluster: Cluster, into: list[tuple[str, str, str]], **more: Any) -> None:
    async for one in cluster.watch(PODS, "5", **more):
        assert isinstance(one, WatchEvent)
        into.append((one.type, one.object.metadata.name, one.version))


def test_a_watch_tells_changes_and_bookmarks_and_ends_with_the_server(tmp_path: Path) -> None:
    api = ScriptedApi()
    mark = {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "9"}}}
    api.says(LIST, stream(changed("ADDED", "6"), b"\n", changed("DELETED", "8", "b"), mark))
    found: list[tuple[str, str, str]] = []
    ask(api, lambda cluster: heard(cluster, found, labelSelector="x=1"), tmp_path)
    assert found == [("ADDED", "a", "6"), ("DELETED", "b", "8"), ("BOOKMARK", "", "9")]
    query = api.asked[0].query
    assert 360 <= int(query.pop("timeoutSeconds")) <= 600
    assert query == {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": "5", "labelSelector": "x=1"}


def test_lines_may_come_in_any_pieces(tmp_path: Path) -> None:
    whole = b"".join(_line(changed("ADDED", str(number))) for number in range(20))
    api = ScriptedApi()
    api.says(LIST, stream(*(whole[at : at + 7] for at in range(0, len(whole), 7))))
    found: list[tuple[str, str, str]] = []
    ask(api, lambda cluster: heard(cluster, found), tmp_path)
    assert [one[2] for one in found] == [str(number) for number in range(20)]


def _line(event: object) -> bytes:
    import msgspec

    return msgspec.json.encode(event) + b"\n"


@pytest.mark.parametrize(
    "answer",
    [
        Reply(refused(410, "Expired"), 410),
        stream(changed("ADDED", "6"), {"type": "ERROR", "object": refused(410, "Expired", "too old")}),
    ],
)
def test_a_version_that_is_too_old_ends_a_watch_as_410(answer: Any, tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, answer)
    with pytest.raises(ApiError) as caught:
        ask(api, lambda cluster: heard(cluster, []), tmp_path)
    assert caught.value.expired


def test_an_error_in_a_watch_that_is_no_410_is_reported(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, stream({"type": "ERROR", "object": refused(500, "InternalError", "etcd is away")}))
    with pytest.raises(ApiError, match="etcd is away") as caught:
        ask(api, lambda cluster: heard(cluster, []), tmp_path)
    assert not caught.value.expired


def test_a_watch_that_is_cut_is_silence(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, stream(changed("ADDED", "6"), cut=True))
    found: list[tuple[str, str, str]] = []
    with pytest.raises(ClusterUnavailable, match="the connection to the cluster failed during"):
        ask(api, lambda cluster: heard(cluster, found), tmp_path)
    assert [one[0] for one in found] == ["ADDED"]


@pytest.mark.parametrize(
    "garbage", [b"garbage\n", b'{"type": "ADDED"}\n', b'{"type": "ADDED", "object": {}}\n', b'{"ty']
)
def test_garbage_in_a_watch_is_silence(garbage: bytes, tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, stream(garbage))
    with pytest.raises(ClusterUnavailable, match="cannot be read"):
        ask(api, lambda cluster: heard(cluster, []), tmp_path)


def test_a_watch_that_says_nothing_for_too_long_is_silence(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, stream(changed("ADDED", "6"), open_after=True))
    found: list[tuple[str, str, str]] = []
    with pytest.raises(ClusterUnavailable, match="sent nothing for"):
        ask(api, lambda cluster: heard(cluster, found, inactive=SHORT), tmp_path)
    assert len(found) == 1


def test_an_event_without_end_is_not_kept(tmp_path: Path) -> None:
    api = ScriptedApi()
    piece = b"x" * (1024 * 1024)
    api.says(LIST, stream(*[piece] * 10))
    with pytest.raises(ResponseTooLarge, match="event of a watch"):
        ask(api, lambda cluster: heard(cluster, []), tmp_path)


def test_a_refused_watch_that_names_a_time_holds_everybody_up(tmp_path: Path) -> None:
    api, time = ScriptedApi(), Time()
    api.says(LIST, Reply("busy", 429, {"Retry-After": "3"}))
    api.says("GET /x", Reply({"kind": "x"}))

    async def both(cluster: Cluster) -> None:
        with pytest.raises(ApiError):
            await heard(cluster, [])
        await cluster.get("/x", Root)

    ask(api, both, tmp_path, time=time)
    assert time.slept == [3]


def test_who_leaves_a_watch_leaves_nothing_behind(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, stream(changed("ADDED", "6"), open_after=True))

    async def first(cluster: Cluster) -> str:
        events = cluster.watch(PODS, "5")
        try:
            return (await anext(events)).version
        finally:
            await events.aclose()

    assert ask(api, first, tmp_path) == "6"


@pytest.mark.slow
def test_connections_of_earlier_logins_are_closed_when_nothing_is_watched_over_them(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(LIST, stream(changed("ADDED", "6"), open_after=True))
    api.says("GET /x", Reply({"kind": "x"}))

    async def rotate(cluster: Cluster) -> tuple[int, int]:
        made, login = list[Any](), cluster._connections.login
        make = login.client

        def noted() -> Any:
            made.append(make())
            return made[-1]

        login.client = noted  # type: ignore[method-assign]
        long = cluster.watch(PODS, "5")  # goes on over the first login
        await anext(long)
        for _ in range(30):
            login._seen = (-1,)  # its files were written anew
            await cluster.get("/x", Root)
            short = cluster.watch(PODS, "5")
            await anext(short)
            await short.aclose()
        open_ = sum(not one.is_closed for one in made)
        await long.aclose()
        return open_, sum(not one.is_closed for one in made)

    # For questions the newest and the one before it, for watches the newest; and the first while it is watched over.
    assert ask(api, rotate, tmp_path) == (4, 3)


# Opening, counting, clocks


def test_the_last_to_go_closes_and_the_next_opens_again(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /x", Reply({"kind": "x"}))

    async def nested(cluster: Cluster) -> Cluster:
        async with cluster.opened():
            await cluster.get("/x", Root)
        await cluster.get("/x", Root)
        return cluster

    cluster = ask(api, nested, tmp_path)
    assert cluster._connections.client is None
    assert cluster.asked == {"GET": 2}


def test_asking_what_was_not_opened_is_a_bug(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path / "config", "http://127.0.0.1:1")
    cluster = Cluster(auth.from_files([file], None, {}, auth.utc_now))
    with pytest.raises(AssertionError, match="bug in gpukeeper"):
        asyncio.run(cluster.get("/x", Root))


def test_the_servers_clock_is_compared_with_ours(tmp_path: Path) -> None:
    api, time = ScriptedApi(), Time()
    api.says("GET /x", Reply({}, headers={"Date": http_date(time.utc() + timedelta(hours=1))}))
    api.says("GET /y", Reply({}, headers={"Date": "yesterday"}))

    async def both(cluster: Cluster) -> tuple[timedelta | None, timedelta | None]:
        await cluster.get("/x", Root)
        first = cluster.skew
        await cluster.get("/y", Root)
        return first, cluster.skew

    assert ask(api, both, tmp_path, time=time) == (timedelta(hours=1), None)


# Where a cluster is


def test_a_cluster_is_found_in_kubectls_order(tmp_path: Path) -> None:
    account, config = tmp_path / "account", tmp_path / "config"
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOME": str(tmp_path)}
    assert find({}, account) is None
    assert find(inside, account) is None
    account.mkdir()
    (account / "token").write_text("t")
    assert find(inside, account) == "in-cluster service account"
    assert find({"HOME": str(tmp_path)}, account) is None
    config.write_text("")
    assert find({**inside, "KUBECONFIG": f"{tmp_path}/none:{config}"}, account) == str(config)
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text("")
    assert find(inside, account) == str(tmp_path / ".kube" / "config")


def test_no_cluster_shows_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no kubeconfig found, and gpukeeper does not run inside a cluster"):
        Cluster.from_environment({"HOME": str(tmp_path)}, None, 20, 30, account=tmp_path)
    with pytest.raises(UsageError, match="KUBECONFIG is /none, which does not exist"):
        Cluster.from_environment({"KUBECONFIG": "/none"}, None, 20, 30, account=tmp_path)


def test_the_place_is_the_contexts_name(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path / "config", "http://127.0.0.1:1")
    cluster = Cluster.from_environment({"KUBECONFIG": str(file)}, None, 20, 30)
    assert (cluster.place, cluster.namespace, cluster.address) == ("lab", "research", "http://127.0.0.1:1")


# House rules


def test_lightkube_is_imported_in_two_modules_and_its_deletes_nowhere() -> None:
    allowed = {f"clients/kubernetes/{name}.py" for name in ("auth", "exchange")}
    typed = {"clients/kubernetes/connect.py"}  # it names httpx2's types alone
    importing = re.compile(r"^\s*(?:from|import) (?:lightkube|httpx2)\b", re.MULTILINE)
    found = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    assert {name for name, text in found.items() if importing.search(text)} == allowed | typed
    assert all(importing.findall(found[name]) == ["    import httpx2"] for name in typed)
    banned = re.compile(r"deletecollection|lightkube import .*Client|lightkube\.core\.(?:async_client|client)\b")
    assert [name for name, text in found.items() if banned.search(text)] == [], (
        "lightkube's deletes carry no preconditions: use Cluster.delete"
    )


def test_the_command_line_does_not_import_the_client() -> None:
    program = (
        "import sys, gpukeeper.interfaces.cli, gpukeeper.wiring.session, gpukeeper.clients.kubernetes.connect;"
        "print([name for name in ('httpx2', 'lightkube') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_server_may_be_behind_a_path(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /k8s/clusters/c-1/api/v1/pods", Reply(pods("a")))

    async def run() -> list[str]:
        async with listening(api):
            file = kubeconfig(tmp_path / "config", f"{api.address}/k8s/clusters/c-1")
            cluster = Cluster(auth.from_files([file], None, {}, auth.utc_now))
            async with cluster.opened():
                return names(await listed(cluster))

    assert asyncio.run(run()) == ["a"]
