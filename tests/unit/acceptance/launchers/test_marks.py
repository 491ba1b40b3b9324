"""Marks on the nodes of a cluster in memory, also while another program marks at the same time."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, TypeVar

import msgspec
import pytest

from gpukeeper.acceptance.fleet.marks import (
    ACCEPTANCE_CONDITION,
    DETAILS,
    LABEL,
    QUARANTINE,
    TAINT,
    NodeResult,
    plan_marks,
)
from gpukeeper.acceptance.launchers.marks import Applied, Marked, Replan, Turn, Work, marks_of, planned
from gpukeeper.clients.kubernetes.api import NODES, Listing, Manifest, PatchType, Resource
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Node
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.policy import MarkSettings
from tests.unit.clients.kubernetes.memory_api import MemoryApi

T = TypeVar("T")
NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)
LATER = NOW + timedelta(hours=2)
TAINTING = MarkSettings(taint=True)


class Nodes(MemoryApi):
    """With conditions, merged by type. `pauses`: lets another program run between two requests."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.pauses: Random | None = None
        self.written: list[tuple[str, str]] = []  # node and what: metadata, status, taint, no-taint
        self.refused_turn: str | None = None  # why no node may be taken out
        self._lock = asyncio.Lock()
        self.before: Callable[[str, str], None] = lambda node, what: None  # of each patch
        self.after: Callable[[str, str], None] = lambda node, what: None
        for index in range(count):
            self.add(
                NODES,
                {
                    "metadata": {"name": f"n{index}"},
                    "spec": {},
                    "status": {
                        "conditions": [{"type": "Ready", "status": "True"}],
                        "capacity": {"nvidia.com/gpu": "8"},
                    },
                },
            )

    async def list(
        self, resource: Resource, type_: type[T], *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> Listing[T]:
        await self._pause()
        return await super().list(resource, type_, namespace=namespace, labels=labels, fields=fields)

    async def patch(
        self,
        resource: Resource,
        name: str,
        patch: Manifest | Sequence[Manifest],
        type_: type[T],
        *,
        namespace: str = "",
        how: PatchType = "merge",
        subresource: str = "",
    ) -> T:
        await self._pause()
        assert isinstance(patch, dict)
        what = subresource or ("metadata" if "spec" not in patch else _taint_of(patch))
        assert set(patch["metadata"]) >= {"uid", "resourceVersion"}
        self.before(name, what)
        if subresource == "status":
            assert how == "strategic"
            stored = self.node(name)["status"]["conditions"]
            new = patch["status"]["conditions"]
            types = {one["type"] for one in new}
            there = [one for one in new if one.get("$patch") != "delete"]
            patch = {**patch, "status": {"conditions": [one for one in stored if one["type"] not in types] + there}}
        answer = await super().patch(resource, name, patch, type_)
        self.written.append((name, what))
        self.after(name, what)
        return answer

    async def _pause(self) -> None:
        if self.pauses is not None:
            for _ in range(self.pauses.randrange(4)):
                await asyncio.sleep(0)

    def touch(self, name: str) -> None:
        """As a heartbeat of the kubelet does."""
        self.node(name)["metadata"]["resourceVersion"] = str(next(self._numbers))

    def node(self, name: str) -> dict[str, Any]:
        return next(one for one in self.of(NODES) if one["metadata"]["name"] == name)

    def out(self) -> set[str]:
        found = (marks_of(msgspec.convert(one, Node), MarkSettings()) for one in self.of(NODES))
        return {one.node for one in found if one.out}

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """One program after the other, as with a lease."""
        async with self._lock:
            yield _Turn(self.refused_turn)


class _Turn:
    def __init__(self, why: str | None) -> None:
        self.why = why

    def why_not(self) -> str | None:
        return self.why


def _taint_of(patch: Mapping[str, Any]) -> str:
    ours = any(one["key"] in (TAINT, QUARANTINE) for one in patch["spec"]["taints"])
    return "taint" if ours else "no-taint"


def result(index: int, verdict: Grade = Grade.FAIL, run: str = "r1") -> NodeResult:
    return NodeResult(node=f"n{index}", run=run, at=NOW, verdict=verdict, code="gemm-below-floor", message="too slow")


def results_of(bad: set[int], count: int, run: str = "r1") -> list[NodeResult]:
    return [result(one, Grade.FAIL if one in bad else Grade.PASS, run) for one in range(count)]


def replan(results: Sequence[NodeResult], settings: MarkSettings = TAINTING) -> Replan:
    return lambda nodes: plan_marks(results, nodes, settings, LATER)


def work(api: Nodes, wanted: Replan, settings: MarkSettings = TAINTING) -> Work:
    return Work(api=api, replan=wanted, settings=settings, now=NOW, turn=api.turn)


def whole(api: Nodes, results: Sequence[NodeResult]) -> Applied:
    return asyncio.run(work(api, replan(results)).apply())


def applied(api: Nodes, results: Sequence[NodeResult]) -> tuple[Marked, ...]:
    return whole(api, results).nodes


def test_a_failed_node_has_label_taint_and_condition_and_is_not_cordoned() -> None:
    api = Nodes(4)
    api.node("n1")["spec"]["taints"] = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    found = applied(api, results_of({1}, 4))
    assert found[1] == Marked(node="n1", acceptance="failed", tainted=True, changed=True)
    node = api.node("n1")
    assert [one["key"] for one in node["spec"]["taints"]] == ["nvidia.com/gpu", TAINT]
    assert "unschedulable" not in node["spec"]
    conditions = {one["type"]: one for one in node["status"]["conditions"]}
    assert conditions["Ready"]["status"] == "True"
    assert (conditions[ACCEPTANCE_CONDITION]["status"], conditions[ACCEPTANCE_CONDITION]["reason"]) == (
        "False",
        "GemmBelowFloor",
    )
    assert api.node("n0")["metadata"]["labels"][LABEL] == "passed"


def test_a_plan_writes_nothing() -> None:
    api = Nodes(4)
    assert len(asyncio.run(planned(api, replan(results_of({1}, 4)), TAINTING)).changes) == 4
    assert api.asked["patch"] == 0


def test_not_more_than_the_budget_is_taken_out_and_the_rest_is_said() -> None:
    api = Nodes(20)
    found = applied(api, results_of({1, 2, 3}, 20))
    assert api.out() == {"n1", "n2"}
    third = next(one for one in found if one.node == "n3")
    assert third.deferred == "2 of 20 GPU nodes are out; at most 2 may be"
    assert (third.acceptance, third.tainted) == ("failed", False)


def test_when_most_fail_none_is_taken_out() -> None:
    api = Nodes(4)
    assert all("common cause" in one.deferred for one in applied(api, results_of({0, 1, 2, 3}, 4)))
    assert api.out() == set()


def test_a_node_that_changes_at_the_same_time_is_read_again() -> None:
    api = Nodes(4)
    once = iter([ApiError(409, "Conflict", "changed")])
    api.fail = lambda verb, resource, name: next(once, None) if verb == "patch" else None
    assert applied(api, results_of({1}, 4))[1].problem == ""
    assert api.out() == {"n1"}


def test_a_refusal_is_a_problem_of_that_node() -> None:
    api = Nodes(4)
    api.fail = lambda verb, resource, name: (
        ApiError(403, "Forbidden", "may not patch") if (verb, name) == ("patch", "n1") else None
    )
    found = applied(api, results_of({1}, 4))
    assert "may not patch" in found[1].problem
    assert found[0].problem == ""


def test_an_incomplete_list_marks_nothing() -> None:
    class Gap(Nodes):
        async def list(self, resource: Resource, type_: type[T], **_: str) -> Listing[T]:
            return Listing(items=(), complete=False)

    with pytest.raises(PlatformError, match="not complete"):
        applied(Gap(4), results_of({1}, 4))


@pytest.mark.parametrize("seed", range(40))
def test_two_programs_at_once_end_within_the_budget(seed: int) -> None:
    api = Nodes(20)
    api.pauses = Random(seed)

    async def both() -> None:
        first, second = results_of({1, 3, 5}, 20), results_of({2, 4, 6}, 20, "r2")
        await asyncio.gather(work(api, replan(first)).apply(), work(api, replan(second[::-1])).apply())

    most = 0

    def count(node: str, written: str) -> None:
        nonlocal most
        most = max(most, len(api.out()))

    api.after = count
    asyncio.run(both())
    assert most == 2  # at no moment more


def test_a_run_that_did_not_test_the_gpus_writes_nothing() -> None:
    api = Nodes(4)
    void = [msgspec.structs.replace(one, void="a self-test") for one in results_of({1}, 4)]
    before = copy.deepcopy(api.objects)
    assert applied(api, void) == ()
    assert (api.written, api.objects) == ([], before)


def test_the_taint_is_written_last() -> None:
    api = Nodes(4)
    applied(api, [result(1)])
    assert api.written == [("n1", "status"), ("n1", "taint")]
    assert api.node("n1")["metadata"]["labels"][LABEL] == "failed"  # in the same request as the taint


def test_a_pass_removes_the_taint_with_the_label() -> None:
    api = Nodes(4)
    applied(api, [result(1)])
    api.written.clear()
    newer = msgspec.structs.replace(result(1, Grade.PASS, "r2"), at=NOW + timedelta(hours=1))
    (found,) = applied(api, [newer])
    assert found == Marked(node="n1", acceptance="passed", changed=True)
    assert api.written == [("n1", "status"), ("n1", "no-taint")]


@pytest.mark.parametrize("what", ["taint", "status"])
def test_without_label_or_condition_there_is_no_taint(what: str) -> None:
    api = Nodes(4)

    def refuse(node: str, written: str) -> None:
        if written == what:
            raise ApiError(403, "Forbidden", "may not patch")

    api.before = refuse
    (found,) = applied(api, [result(1)])
    assert "may not patch" in found.problem
    assert "taint" not in {one for _, one in api.written}
    assert api.out() == set()


@pytest.mark.parametrize("what", ["status", "taint"])
def test_each_write_is_refused_when_the_node_has_changed_since_it_was_read(what: str) -> None:
    api = Nodes(4)
    once = iter([True])

    def heartbeat(node: str, written: str) -> None:
        if written == what and next(once, False):
            api.touch(node)

    api.before = heartbeat
    assert applied(api, [result(1)]) == (Marked(node="n1", acceptance="failed", tainted=True, changed=True),)
    assert [one for _, one in api.written] == ["status", "taint"]


def test_a_newer_run_between_the_condition_and_the_taint_prevents_the_taint() -> None:
    api = Nodes(4)

    def newer(node: str, written: str) -> None:
        if written == "status":
            details = {"run": "r2", "at": NOW + timedelta(hours=1), "verdict": "PASS", "code": "x"}
            api.node(node)["metadata"]["annotations"] = {DETAILS: msgspec.json.encode(details).decode()}
            api.touch(node)

    api.after = newer
    (found,) = applied(api, [result(1)])
    assert found.problem == "it changed: run r2 is newer (2026-01-05 13:00Z)"
    assert api.out() == set()


def test_the_budget_is_counted_when_it_is_our_turn() -> None:
    """The plan had room; while this program waited for its turn, a node was cordoned."""
    api = Nodes(4)

    @asynccontextmanager
    async def waited() -> AsyncIterator[Turn]:
        async with api.turn() as turn:
            api.node("n3")["spec"]["unschedulable"] = True
            yield turn

    wanted = work(api, replan([result(1)]))
    wanted.turn = waited
    (found,) = asyncio.run(wanted.apply()).nodes
    assert (found.tainted, found.deferred) == (False, "1 of 4 GPU nodes are out (1 cordoned); at most 1 may be")
    assert "taint" not in {one for _, one in api.written}


def test_without_its_turn_a_program_takes_no_node_out_and_says_why() -> None:
    api = Nodes(4)
    api.refused_turn = "another instance holds the lease"
    (found,) = applied(api, [result(1)])
    assert (found.acceptance, found.tainted, found.deferred) == ("failed", False, "another instance holds the lease")
    assert api.out() == set()


@pytest.mark.parametrize(("nodes", "marked", "failed"), [(20, 20, 1), (200, 20, 1), (200, 200, 5)])
def test_the_number_of_requests_grows_with_the_marked_nodes_only(nodes: int, marked: int, failed: int) -> None:
    """Three lists, and two writes for each marked node."""
    api = Nodes(nodes)
    applied(api, results_of(set(range(failed)), marked))
    assert dict(api.asked) == {"list": 3, "patch": 2 * marked}
    api.asked.clear()
    applied(api, results_of(set(range(failed)), marked))  # again: there is nothing to write
    assert dict(api.asked) == {"list": 1}


def test_ctrl_c_completes_a_node_and_the_same_command_completes_the_rest() -> None:
    api = Nodes(4)
    begun = work(api, replan(results_of({1}, 4)))
    api.after = lambda node, what: begun.stop.set()
    found = asyncio.run(begun.apply())
    assert (found.interrupted, begun.written, api.out()) == (True, {"n1"}, {"n1"})
    assert {one.node: one.problem for one in found.nodes} == {
        "n1": "",
        **dict.fromkeys(("n0", "n2", "n3"), "interrupted before it was begun. The same command completes it"),
    }
    api.after = lambda node, what: None
    assert not any(one.problem or one.deferred for one in applied(api, results_of({1}, 4)))
    assert [api.node(f"n{index}")["metadata"]["labels"][LABEL] for index in range(4)] == [
        *("passed", "failed", "passed", "passed")
    ]


@pytest.mark.parametrize("end", range(8))
def test_a_program_that_is_killed_after_any_write_is_completed_by_the_next(end: int) -> None:
    api = Nodes(4)
    sent = iter(range(100))

    def die(node: str, what: str) -> None:
        if next(sent) == end:
            raise KeyboardInterrupt

    api.after = die
    begun = work(api, replan(results_of({1}, 4)))
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(begun.apply())
    assert len(api.out()) <= 1
    api.after = lambda node, what: None
    assert not any(one.problem or one.deferred for one in applied(api, results_of({1}, 4)))
    assert api.out() == {"n1"}


def test_a_cluster_that_does_not_answer_any_more_is_not_asked_for_every_node() -> None:
    api = Nodes(20)
    api.fail = lambda verb, resource, name: PlatformError("no answer") if (verb, name) == ("patch", "n5") else None
    found = {one.node: one for one in applied(api, results_of(set(), 20))}
    ended = [one for one in found.values() if not one.problem]
    assert all("no answer. The same command completes it" in one.problem for one in found.values() if one.problem)
    assert 0 < len(ended) < 20
    assert {one.node for one in ended} == {node for node, _ in api.written}


@pytest.mark.parametrize(
    ("taint", "out"),
    [
        ({"key": "dedicated", "effect": "NoSchedule"}, True),
        ({"key": "dedicated", "effect": "NoExecute"}, True),
        ({"key": "dedicated", "effect": "PreferNoSchedule"}, False),
        ({"key": "nvidia.com/gpu", "effect": "NoSchedule"}, False),
        ({"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}, True),
    ],
)
def test_a_node_that_others_tainted_is_out(taint: dict[str, str], out: bool) -> None:
    api = Nodes(1)
    api.node("n0")["spec"]["taints"] = [taint]
    assert bool(api.out()) == out


def test_the_budget_is_counted_again_after_a_taint_that_was_refused() -> None:
    api = Nodes(4)

    def cordon(node: str, written: str) -> None:
        if written == "taint":
            api.node("n3")["spec"]["unschedulable"] = True
            raise ApiError(409, "Conflict", "changed")

    api.before = cordon
    (found,) = applied(api, [result(1)])
    assert (found.tainted, found.deferred) == (False, "1 of 4 GPU nodes are out (1 cordoned); at most 1 may be")
    assert api.out() == {"n3"}


def test_a_taint_beyond_the_budget_is_removed_again_and_said() -> None:
    api = Nodes(4)

    def cordon(node: str, written: str) -> None:
        if written == "taint":
            api.node("n3")["spec"]["unschedulable"] = True

    api.after = cordon
    (found,) = applied(api, [result(1)])
    assert api.out() == {"n3"}
    assert (found.acceptance, found.tainted, found.problem) == ("failed", False, "")
    assert "2 out, 1 allowed. Its taint was removed again" in found.deferred


def test_a_taint_that_cannot_be_removed_again_is_a_problem_with_the_command() -> None:
    api = Nodes(4)

    def cordon(node: str, written: str) -> None:
        if written == "taint":
            api.node("n3")["spec"]["unschedulable"] = True

    def refuse(node: str, written: str) -> None:
        if written == "no-taint":
            raise ApiError(403, "Forbidden", "may not patch")

    api.after, api.before = cordon, refuse
    (found,) = applied(api, [result(1)])
    assert found.tainted
    assert f"kubectl taint node n1 {TAINT}-" in found.problem


def test_a_taint_is_removed_again_when_the_nodes_cannot_be_counted() -> None:
    api = Nodes(4)
    tainted = list[bool]()
    api.after = lambda node, written: tainted.append(True) if written == "taint" else None
    api.fail = lambda verb, resource, name: PlatformError("no answer") if verb == "list" and tainted else None
    (found,) = applied(api, [result(1)])
    assert "could not be counted again: no answer. Its taint was removed again" in found.deferred
    assert api.out() == set()


@pytest.mark.parametrize("error", [PlatformError("no answer"), ApiError(504, "Timeout", "timeout")])
def test_a_taint_without_an_answer_is_removed_again(error: PlatformError) -> None:
    api = Nodes(4)

    def silent(node: str, written: str) -> None:
        if written == "taint":
            raise error

    api.after = silent
    (found,) = applied(api, [result(1)])
    assert "Its taint was removed again" in found.deferred
    assert api.out() == set()


def test_the_taint_of_another_run_stays() -> None:
    api = Nodes(4)

    def other(node: str, written: str) -> None:
        if written == "taint":
            api.node(node)["spec"]["taints"] = [{"key": TAINT, "value": "r9", "effect": "NoSchedule"}]
            api.node("n3")["spec"]["unschedulable"] = True

    api.after = other
    (found,) = applied(api, [result(1)])
    assert "It has no taint of this run" in found.deferred
    assert found.tainted


def test_a_cordoned_node_is_tainted_although_the_budget_is_used_up() -> None:
    """It is out already: the taint takes nothing more out."""
    api = Nodes(4)
    for name in ("n1", "n2"):
        api.node(name)["spec"]["unschedulable"] = True
    assert applied(api, [result(1)]) == (Marked(node="n1", acceptance="failed", tainted=True, changed=True),)


def test_a_node_whose_readiness_is_unknown_counts_as_out() -> None:
    api = Nodes(1)
    api.node("n0")["status"]["conditions"] = []
    assert api.out() == {"n0"}


@pytest.mark.parametrize("field", ["name", "uid", "resourceVersion"])
def test_nodes_that_cannot_be_told_apart_or_written_conditionally_are_not_marked(field: str) -> None:
    """Nodes without a name count as one, and an empty resourceVersion is no condition."""
    api = Nodes(2)
    api.node("n1")["metadata"][field] = ""
    with pytest.raises(PlatformError, match="a node without a name, uid or resourceVersion"):
        asyncio.run(planned(api, replan(results_of({1}, 2)), TAINTING))
