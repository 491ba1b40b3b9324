"""Looking at a place: what was seen, what was not, what is missing, what is noted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec

from gpukeeper.engine.observe import PendingLines, changed_decisions, survey
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.engine.view import notice
from gpukeeper.ledger.in_memory import RecalledSignals
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.decision import Action, Verdict
from gpukeeper.model.event import Complaint, Decided, Noticed, Vanished
from gpukeeper.model.fold import remember
from gpukeeper.model.policy import ClassSettings, PlaceScope
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import EMPTY, Marks, Memory, Outcome, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.world import CALM, Faults
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, virtual
from tests.unit.lifecycle.examples import NOW, subject


class Forgetful(SimulatedPlatform):
    """Its list lacks things that a look still finds."""

    hidden: frozenset[str] = frozenset()

    async def observe(self, scope: Any) -> Any:
        async for page in super().observe(scope):
            yield msgspec.structs.replace(
                page, subjects=tuple(s for s in page.subjects if s.ref.name not in self.hidden)
            )


class ReadOnly(SimulatedPlatform):
    guards = {}  # noqa: RUF012


@virtual
async def test_what_is_there_is_seen_counted_and_decided(b: Harness) -> None:
    b.running("train")
    b.ended("eval")
    b.device(0)
    found = await survey(b.keeper, b.platform, b.book)
    assert (found.counts.seen, found.counts.running, found.counts.before, found.unseen) == (2, 1, 0, [])
    assert [one.ref.name for one in found.live] == ["train"]
    assert [one.seen.ref.name for one in found.due] == ["eval"]


@virtual
async def test_looking_writes_nothing(b: Harness) -> None:
    b.running("train")
    found = await survey(b.keeper, b.platform, b.book)
    assert [type(line) for line in found.to_write.lines] == [Noticed]
    assert b.ledger.lines == []


@virtual
async def test_a_platform_out_of_scope_is_not_read(b: Harness) -> None:
    b.ended("eval")
    b.set_policy(scope={})
    assert (await survey(b.keeper, b.platform, b.book)).counts.seen == 0
    assert [entry.kind for entry in b.world.log] == ["person"]


@virtual
async def test_a_silent_platform_is_unseen_and_nothing_is_missing(b: Harness) -> None:
    b.running("train")
    await reclaim(b.keeper, b.platform, b.book)
    b.world.faults = Faults(silent=1)
    found = await survey(b.keeper, b.platform, b.book)
    assert (found.counts.seen, found.counts.before, found.missing) == (0, 1, [])
    assert "did not answer within 10 s" in found.unseen[0].why


@virtual
async def test_a_partial_list_cannot_tell_what_is_missing(b: Harness) -> None:
    for n in range(4):
        b.running(f"job-{n}", devices=())
    await reclaim(b.keeper, b.platform, b.book)
    b.world.faults = Faults(partial=1)
    found = await survey(b.keeper, b.platform, b.book)
    assert (found.counts.seen, found.missing) == (2, [])


@virtual
async def test_what_is_missing_from_a_complete_list_is_searched_before_it_counts_as_gone(b: Harness) -> None:
    b.platform = Forgetful(b.world, HERE)
    there, gone = b.running("there"), b.running("gone")
    await reclaim(b.keeper, b.platform, b.book)
    b.platform.hidden = frozenset({"there"})
    b.world.remove(gone)
    report = await reclaim(b.keeper, b.platform, b.book)
    assert {ref.name for ref in report.survey.missing} == {"there", "gone"}
    assert [line.ref for line in b.lines(Vanished)] == [gone.ref]
    assert there.ref.key in await b.ledger.present("docker", "node-3")


@virtual
async def test_a_narrower_scope_is_not_taken_for_things_that_vanished(b: Harness) -> None:
    """What the policy does not cover any more is not missing; else the breaker would stay open for ever."""
    for n in range(5):
        b.running(f"job-{n}", space="private", devices=())
    due = b.ended("eval", space="research")
    await reclaim(b.keeper, b.platform, b.book, act=False)
    b.set_policy(scope={"docker": PlaceScope(namespaces=("research",))})
    report = await reclaim(b.keeper, b.platform, b.book)
    assert report.plan.breaker is None
    assert b.world.find(due.ref) is None


@virtual
async def test_a_verb_the_platform_does_not_offer_is_reported_only(b: Harness) -> None:
    b.platform = ReadOnly(b.world, HERE)
    b.ended("eval")
    made = (await b.decide())["eval"]
    assert (made.action, made.verdict) == (Action.KEEP, Verdict.REPORT)
    assert made.reason.endswith("docker offers no remove, so it is reported only")


@virtual
async def test_nobody_is_warned_of_a_stop_the_platform_does_not_offer(b: Harness) -> None:
    b.platform = ReadOnly(b.world, HERE)
    b.running("train", 100 * MINUTE)
    made = (await b.decide())["train"]
    assert (made.action, made.verdict, made.stage) == (Action.KEEP, Verdict.REPORT, 0)


@virtual
async def test_narrowing_drops_decisions_not_what_was_counted(b: Harness) -> None:
    b.ended("eval")
    b.ended("other", owner="bob")
    found = await survey(b.keeper, b.platform, b.book, Narrow(owner="bob"))
    assert [one.seen.ref.name for one in found.decisions] == ["other"]
    assert found.counts.seen == 2


@virtual
async def test_a_child_is_not_counted_as_running_work(b: Harness) -> None:
    root = b.running("run")
    b.running("run-0", root=root.ref, devices=("GPU-0",))
    found = await survey(b.keeper, b.platform, b.book)
    assert (found.counts.seen, found.counts.running, len(found.live)) == (2, 1, 1)


@virtual
async def test_what_changed_is_noted_once(b: Harness) -> None:
    thing = b.running("train", devices=())
    for _ in range(3):
        await reclaim(b.keeper, b.platform, b.book)
    thing.end(b.now(), Outcome.FAILED)
    for _ in range(3):
        await reclaim(b.keeper, b.platform, b.book)
    assert [line.state for line in b.lines(Noticed)] == [State.RUNNING, State.ENDED]


def test_an_unknown_state_is_no_news() -> None:
    assert notice(subject(state=Unknown("inspect timed out")), EMPTY, NOW) is None
    assert notice(subject(shape=Shape.TREE), EMPTY, NOW) is None


def test_a_class_is_noticed_when_it_becomes_known_and_not_when_it_is_lost() -> None:
    """A GPU that it opens later, and closes again."""
    before = remember(EMPTY, told(subject(class_="without-gpu"), EMPTY)) or EMPTY
    opened = told(subject(class_="docker"), before)
    assert opened.class_ == "docker"
    after = remember(before, opened) or EMPTY
    assert notice(subject(class_="docker"), after, NOW) is None
    assert notice(subject(class_="without-gpu"), after, NOW) is None


def test_an_image_of_which_the_engine_forgot_the_use_is_no_news() -> None:
    known = {"shape": Shape.IMAGE, "state": State.ENDED, "in_use": False}
    used = subject(**known, incarnation="sha256:7 10:00", last_used=NOW)
    memory = remember(EMPTY, told(used, EMPTY)) or EMPTY
    assert notice(subject(**known, incarnation="sha256:7"), memory, NOW + HOUR) is None
    assert notice(subject(**known, incarnation="sha256:7 09:00", last_used=NOW - HOUR), memory, NOW + HOUR) is None
    again = notice(subject(**known, incarnation="sha256:7 10:30", last_used=NOW + HOUR / 2), memory, NOW + HOUR)
    assert again is not None


def told(one: Subject, memory: Memory) -> Noticed:
    line = notice(one, memory, NOW)
    assert line is not None
    return line


def test_unknown_facts_of_a_noticed_thing_are_not_recorded_as_facts() -> None:
    lost = Unknown("inspect timed out")
    line = notice(subject(owner=lost, started=lost, outcome=lost), EMPTY, NOW)
    assert line is not None
    assert (line.owner, line.started, line.outcome) == (None, None, None)


@virtual
async def test_decisions_are_recorded_when_they_change_and_complaints_with_them(b: Harness) -> None:
    b.ended("eval", marks=Marks(ttl=Unknown("soon is no span")))
    for _ in range(2):
        made = list((await b.decide()).values())
        await b.ledger.append(await changed_decisions(b.keeper, PendingLines(), made, b.now()))
    assert [(line.rule, line.verdict, line.owner) for line in b.lines(Decided)] == [("own_ttl", "unknown", "ann")]
    assert ["soon is no span" in line.what for line in b.lines(Complaint)] == [True]


@virtual
async def test_a_silent_decision_is_not_recorded(b: Harness) -> None:
    b.running("api", class_="api", devices=())
    made = list((await b.decide()).values())
    assert await changed_decisions(b.keeper, PendingLines(), made, b.now()) == []


async def demand(b: Harness) -> bool:
    await survey(b.keeper, b.platform, b.book)
    return b.keeper.pressure.gpus_are_scarce(("docker", "node-3"))


@virtual
async def test_demand_is_high_after_five_minutes_over_the_mark_and_until_below_the_lower_one(b: Harness) -> None:
    """C8.6: count GPUs, not containers; on at 80 % for 5 min, off below 70 %."""
    for n in range(10):
        b.device(n)
    thing = b.running("train", devices=tuple(f"GPU-{n}" for n in range(8)))
    assert not await demand(b)
    await asyncio.sleep(299)
    assert not await demand(b)
    await asyncio.sleep(1)
    assert await demand(b)
    thing.devices = thing.devices[:7]
    assert await demand(b), "70 % is not below the lower mark"
    thing.devices = thing.devices[:6]
    assert not await demand(b)


@virtual
async def test_a_moment_over_the_mark_does_not_count_later(b: Harness) -> None:
    """It must be over the mark for five minutes on end; between the marks that time begins anew."""
    for n in range(10):
        b.device(n)
    thing = b.running("train", devices=tuple(f"GPU-{n}" for n in range(8)))
    assert not await demand(b)
    thing.devices = thing.devices[:7]
    await asyncio.sleep(60)
    assert not await demand(b)
    await asyncio.sleep(HOUR.total_seconds())
    thing.devices = (*thing.devices, "GPU-7")
    assert not await demand(b)


@virtual
async def test_high_demand_shortens_idle_times_of_workloads_only(b: Harness) -> None:
    b.device(0)
    b.running("train")
    b.add("/tmp/tmp1", shape=Shape.TREE, state=State.ENDED)
    b.set_policy(classes={"docker": ClassSettings(idle=HOUR)})
    await demand(b)
    await asyncio.sleep(301)
    assert await demand(b)
    made = await b.decide()
    assert made["train"].reason.startswith("GPU use was not measured yet: needs `gpukeeper serve` running for 30m")
    assert b.world.faults is CALM


@virtual
async def test_a_process_that_nothing_ties_to_this_place_is_shown_and_neither_counted_nor_remembered(
    b: Harness,
) -> None:
    """Another engine on the same machine: its coming and going is no sign of a broken world."""
    b.add("strange", shape=Shape.ORPHAN, state=State.RUNNING, proof=None)
    b.add("left", shape=Shape.ORPHAN, state=State.RUNNING, proof="its cgroup is that of the ended container")
    found = await survey(b.keeper, b.platform, b.book)
    assert {d.seen.ref.name: d.verdict for d in found.decisions}["strange"] is Verdict.REPORT
    assert found.counts.seen == 1
    assert [line.ref.name for line in found.to_write.lines if isinstance(line, Noticed) and line.ref] == ["left"]


class Past:
    """Knows what happened in the last forty minutes, as somebody else measured it."""

    def __init__(self, b: Harness) -> None:
        self.b, self.asked = b, 0

    async def read(self, subjects: Sequence[Subject]) -> list[Sample]:
        self.asked += 1
        now = self.b.now()
        read = ((Signal.GPU, "GPU-0"), (Signal.CPU, ""))
        return [
            Sample(one.ref.key, signal, device, now - minutes * MINUTE, 0.0, since=now - (minutes + 1) * MINUTE)
            for one in subjects
            for signal, device in read
            for minutes in range(40)
        ]


@virtual
async def test_a_single_look_judges_by_what_others_measured(b: Harness) -> None:
    thing = b.running("train")
    assert (await b.decide())[thing.ref.name].verdict is Verdict.UNKNOWN, "nobody measured it here"
    past = Past(b)
    b.change_ports(recall=past, signals=RecalledSignals(b.signals))
    found = (await b.decide())[thing.ref.name]
    assert (found.rule, found.action) == ("idle", Action.WARN)
    assert past.asked == 1
    assert await b.signals.series([thing.ref.key], b.now() - HOUR, b.now()) == {}, "nothing was written"


@virtual
async def test_a_daemon_measures_by_itself(b: Harness) -> None:
    b.running("train")
    past = Past(b)
    b.change_ports(recall=past)
    b.keeper.uptime.serving = True
    await b.decide()
    assert past.asked == 0


def test_another_end_under_the_same_identity_is_noticed_and_counted() -> None:
    """A loop whose runs no pass sees: it is always found ended, each time a little later."""
    first = subject(state=State.ENDED, outcome=Outcome.FAILED, ended=NOW - HOUR, ends_for_good=True)
    line = notice(first, EMPTY, NOW)
    assert line is not None
    memory = remember(EMPTY, line)
    assert memory is not None
    assert notice(first, memory, NOW) is None, "the same end"
    jitter = msgspec.structs.replace(first, ended=NOW - HOUR + timedelta(seconds=2))
    assert notice(jitter, memory, NOW) is None, "the same end by another clock"
    later = msgspec.structs.replace(first, ended=NOW - HOUR / 2)
    line = notice(later, memory, NOW)
    assert line is not None
    memory = remember(memory, line)
    assert memory is not None
    assert memory.ends_seen == 2
    assert notice(msgspec.structs.replace(later, ends_for_good=False, ended=NOW), memory, NOW) is None


@virtual
async def test_running_work_is_counted_by_what_the_idle_rule_does_with_it(b: Harness) -> None:
    """C8.8: monitored, or skipped: no GPU, monitoring, grace, dev container, not known."""
    classes = {"infrastructure": ClassSettings(untouchable=True), "devcontainer": ClassSettings(max_runtime=HOUR)}
    b.set_policy(classes={**b.policy.classes, **classes})
    b.running("watched", class_="docker")
    b.running("no-gpu", class_="docker", devices=())
    b.running("exporter", class_="infrastructure")
    b.running("editor", class_="devcontainer")
    b.running("new", MINUTE, class_="docker")
    b.ended("over", class_="docker")
    found = await survey(b.keeper, b.platform, b.book)
    assert found.counts.idle == {
        ("monitored", "docker"): 1,
        ("no_gpu", "docker"): 1,
        ("never_touched", "infrastructure"): 1,
        ("no_idle_time", "devcontainer"): 1,
        ("grace", "docker"): 1,
    }
