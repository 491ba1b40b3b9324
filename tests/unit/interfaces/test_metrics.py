"""What Prometheus is told, from reports as passes make them; and that page, alerts and code name the same series."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from gpukeeper import __version__
from gpukeeper.disk.mounts import Usage
from gpukeeper.engine.live import LiveFact, LivePlace, LiveState, PlaceState
from gpukeeper.engine.observe import Counts, Survey, TreeCount
from gpukeeper.engine.reclaim import PassReport, reclaim
from gpukeeper.interfaces.telemetry import machine
from gpukeeper.interfaces.telemetry.machine import MachineFacts, StorageFacts
from gpukeeper.interfaces.telemetry.metrics import CountedEvidence, Metrics, overdue
from gpukeeper.interfaces.telemetry.series import COUNTERS, GAUGES
from gpukeeper.ledger.copy.admin import CopyState
from gpukeeper.ledger.in_memory import InMemoryEvidence
from gpukeeper.lifecycle.activity import Waste
from gpukeeper.lifecycle.claims import ClaimState
from gpukeeper.model.decision import Action, Decision, Evidence, Plan, Result, Unseen, Verdict
from gpukeeper.model.event import Closed, WarningSent
from gpukeeper.model.gpu import Grade, Past
from gpukeeper.model.ports import ImageBytes, StorageBytes, WorkloadBytes
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Gone, Ref, Seen, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.capture import LOG, MANIFEST
from gpukeeper.platforms.kubernetes.node_use import PodName, PodUse
from gpukeeper.views.live import GpuState, GpuTile
from tests.unit.engine.harness import Unwritable
from tests.unit.interfaces.workers import GIB, Workers, disk, node, session, tree
from tests.unit.interfaces.workers import passed as a_pass_over

ROOT = Path(__file__).resolve().parents[3]
NOW = datetime.fromisoformat("2026-03-02T08:00:00+00:00")
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
EMPTY_PLAN = Plan("", NOW, ())


class Ticking:
    at = NOW

    def now(self) -> datetime:
        return self.at


def ref(name: str, kind: str = "trainjob") -> Ref:
    return Ref("kubernetes", "lab", kind, name, f"uid-{name}", "team-a")


def decision(name: str, due: datetime | None = NOW - HOUR, **more: Any) -> Decision:
    known: dict[str, Any] = {"action": Action.REMOVE, "verdict": Verdict.DUE, "rule": "retention", "reason": "over"}
    return Decision(seen=Seen(ref(name), "1", "7", NOW), due=due, **(known | more))


def closed(name: str, result: Result = Result.RECLAIMED, **more: Any) -> Closed:
    known: dict[str, Any] = {"step": "1.1", "action": Action.REMOVE, "rule": "retention", "reason": ""}
    return Closed(at=NOW, ref=ref(name, more.pop("kind", "trainjob")), result=result, **(known | more))


def report(*decisions: Decision, plan: Plan = EMPTY_PLAN, survey: Any = None, **more: Any) -> PassReport:
    platform: Any = SimpleNamespace(name="kubernetes", place="lab")
    given = dict(survey or {})
    counts = Counts(
        **{name: given.pop(name) for name in ("kinds", "oldest", "idle", "trees", "decided") if name in given}
    )
    found = Survey(platform, NOW - MINUTE, decisions=list(decisions), counts=counts, **given)
    return PassReport(1, found, plan, **more)


def told(metrics: Metrics) -> dict[str, float]:
    """What a scrape gets, by name and labels as they are written."""
    lines = [line for line in metrics.text().decode().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.fixture
def clock() -> Ticking:
    return Ticking()


@pytest.fixture
def metrics(clock: Ticking) -> Metrics:
    made = Metrics(clock)
    made.lead(True)
    return made


def test_workloads_are_counted_by_kind_state_and_outcome_and_by_age(metrics: Metrics, clock: Ticking) -> None:
    """C7.4: number and age of finished TrainJobs."""
    counts = Counter(
        {
            ("trainjob", "ended", "failed", "<1d"): 2,
            ("trainjob", "ended", "failed", ">=30d"): 3,
            ("trainjob", "ended", "succeeded", "<1d"): 4,
            ("trainjob", "running", "", ""): 5,
            ("job", "ended", "", ""): 1,
        }
    )
    metrics.passed(report(survey={"kinds": counts, "oldest": {"trainjob": NOW - 40 * DAY}}))
    clock.at = NOW + HOUR
    seen = told(metrics)
    assert seen['gpukeeper_workloads{kind="trainjob",outcome="failed",state="ended"}'] == 5
    assert seen['gpukeeper_workloads{kind="trainjob",outcome="",state="running"}'] == 5
    assert seen['gpukeeper_finished{age="<1d",kind="trainjob"}'] == 6
    assert seen['gpukeeper_finished{age=">=30d",kind="trainjob"}'] == 3
    assert not [name for name in seen if name.startswith("gpukeeper_finished{") and 'kind="job"' in name]
    assert seen['gpukeeper_finished_age_seconds{kind="trainjob"}'] == (40 * DAY + HOUR).total_seconds()


def test_what_the_idle_rule_did_and_what_it_skipped_is_counted(metrics: Metrics) -> None:
    """C8.8: monitored, skipped with the reason, warned, stopped."""
    idle = Counter({("monitored", "docker"): 3, ("grace", "docker"): 2, ("no_idle_time", "devcontainer"): 1})
    warnings = [_warned("idle"), _warned("max_runtime")]
    stopped = [_closed("idle", Action.STOP), _closed("idle", Action.REMOVE), _closed("max_runtime", Action.STOP)]
    for _ in range(2):
        metrics.passed(report(survey={"idle": idle}, warnings=warnings, outcomes=stopped))
    seen = told(metrics)
    assert seen['gpukeeper_idle_workloads{class="docker",result="monitored"}'] == 3
    assert seen['gpukeeper_idle_workloads{class="docker",result="grace"}'] == 2
    assert seen['gpukeeper_idle_workloads{class="devcontainer",result="no_idle_time"}'] == 1
    assert (seen["gpukeeper_idle_warned_total"], seen["gpukeeper_idle_stopped_total"]) == (2, 2)
    assert seen['gpukeeper_idle_checks_total{class="docker",result="monitored"}'] == 6
    assert seen['gpukeeper_idle_checks_total{class="docker",result="grace"}'] == 4
    assert seen['gpukeeper_idle_checks_total{class="devcontainer",result="no_idle_time"}'] == 2


def _warned(rule: str) -> WarningSent:
    return WarningSent(
        at=NOW,
        ref=ref("run-7"),
        rule=rule,
        stage=1,
        incarnation="1",
        limit=HOUR,
        delivered=True,
        channel="terminal",
        message="",
    )


def _closed(rule: str, action: Action) -> Closed:
    return Closed(
        at=NOW, ref=ref("run-7"), step="1.1", action=action, rule=rule, result=Result.RECLAIMED, reason="over"
    )


def test_a_kind_that_is_gone_leaves_no_series_behind(metrics: Metrics) -> None:
    metrics.passed(report(survey={"kinds": Counter({("rayjob", "running", "", ""): 1})}))
    metrics.passed(report())
    assert not [name for name in told(metrics) if "rayjob" in name]


def test_overdue_is_what_is_due_and_was_not_seen_to_go(metrics: Metrics, clock: Ticking) -> None:
    decisions = [
        decision("gone"),
        decision("deferred", NOW - 3 * HOUR),
        decision("refused", NOW - 2 * HOUR, action=Action.KEEP, verdict=Verdict.REPORT),
        decision("waits", NOW + HOUR, action=Action.KEEP, verdict=Verdict.WAIT),
        decision("warned", action=Action.WARN),
        decision("idle", None, action=Action.KEEP, verdict=Verdict.REPORT),
        decision("held", NOW - HOUR, action=Action.KEEP, verdict=Verdict.PROTECT),
    ]
    plan = Plan("", NOW, (), deferred=(decisions[1],))
    metrics.passed(report(*decisions, plan=plan, outcomes=[closed("gone")]))
    clock.at = NOW + MINUTE
    seen = told(metrics)
    assert seen["gpukeeper_overdue"] == 2
    assert seen["gpukeeper_oldest_overdue_seconds"] == (3 * HOUR + MINUTE).total_seconds()
    assert seen["gpukeeper_backlog"] == 1


def test_a_read_of_what_changed_keeps_what_the_whole_read_found(metrics: Metrics, clock: Ticking) -> None:
    counts = Counter({("trainjob", "running", "", ""): 9})
    metrics.passed(report(decision("a"), decision("b"), decision("c"), survey={"kinds": counts}))
    clock.at = NOW + MINUTE
    part = report(
        decision("a"), decision("d"), survey={"whole": False, "gone": [Gone(ref("b"), NOW)]}, outcomes=[closed("a")]
    )
    metrics.passed(part)
    seen = told(metrics)
    assert seen['gpukeeper_workloads{kind="trainjob",outcome="",state="running"}'] == 9
    assert seen["gpukeeper_last_pass_timestamp_seconds"] == NOW.timestamp()
    assert seen["gpukeeper_overdue"] == 2
    assert set(overdue(part, {"kubernetes/lab/uid-c": NOW})) == {"kubernetes/lab/uid-c", "kubernetes/lab/uid-d"}
    assert seen['gpukeeper_reclaimed_total{action="remove",kind="trainjob",rule="retention"}'] == 1


def test_what_was_done_adds_up(metrics: Metrics) -> None:
    lines = [
        closed("a", gpu_hours=1.5),
        closed("b", gpu_hours=Unknown("not measured")),
        closed("c", Result.REFUSED, kind="job"),
        closed("d", Result.CHANGED),
        closed("e", Result.DEFERRED),
        closed("f", Result.STILL_THERE),
    ]
    warned = WarningSent(
        at=NOW, ref=ref("a"), rule="idle", stage=1, incarnation="1", limit=HOUR, delivered=True, channel="", message=""
    )
    metrics.passed(report(outcomes=lines[:3], settled=lines[3:], warnings=[warned]))
    metrics.passed(report(outcomes=[closed("g", gpu_hours=2.0)]))
    seen = told(metrics)
    assert seen['gpukeeper_reclaimed_total{action="remove",kind="trainjob",rule="retention"}'] == 3
    assert seen['gpukeeper_failed_total{kind="job",result="refused"}'] == 1
    assert seen['gpukeeper_failed_total{kind="trainjob",result="still there"}'] == 1
    assert len([name for name in seen if name.startswith("gpukeeper_failed_total")]) == 2
    assert seen["gpukeeper_gpu_hours_returned_total"] == 3.5
    assert seen['gpukeeper_warnings_total{delivered="true"}'] == 1


def test_what_was_refused_stays_overdue_until_it_is_tried_again(metrics: Metrics, clock: Ticking) -> None:
    """Its `due` is then that of the next try, up to a day ahead, so that GpukeeperOverdue never fired for it."""
    metrics.passed(report(decision("a")))
    metrics.passed(report(decision("a", due=NOW + 8 * HOUR, action=Action.KEEP, verdict=Verdict.REPORT)))
    seen = told(metrics)
    assert (seen["gpukeeper_overdue"], seen["gpukeeper_oldest_overdue_seconds"]) == (1, HOUR.total_seconds())
    metrics.passed(report(decision("a", due=NOW + 8 * HOUR, action=Action.KEEP, verdict=Verdict.WAIT)))
    assert told(metrics)["gpukeeper_overdue"] == 0, "held, or used again"


def test_a_pass_that_saw_little_or_refused_everything_reports_it(metrics: Metrics) -> None:
    plan = msgspec.structs.replace(EMPTY_PLAN, breaker="too many at once")
    metrics.passed(report(plan=plan, survey={"unseen": [Unseen("jobs", "403"), Unseen("pods", "silent")]}))
    seen = told(metrics)
    assert (seen["gpukeeper_breaker_open"], seen["gpukeeper_unseen"]) == (1, 2)
    assert seen["gpukeeper_pass_seconds"] == 60
    assert "gpukeeper_measured_apart_seconds" not in seen, "nothing runs that is measured"
    metrics.measured_apart = 150.0
    assert told(metrics)["gpukeeper_measured_apart_seconds"] == 150
    metrics.passed(report(paused="maintenance"))
    seen = told(metrics)
    assert (seen["gpukeeper_breaker_open"], seen["gpukeeper_unseen"], seen["gpukeeper_acting"]) == (0, 0, 0)


def test_who_stands_by_says_nothing_of_what_it_saw_before(metrics: Metrics) -> None:
    metrics.passed(report(decision("a"), outcomes=[closed("b")]))
    metrics.lead(False)
    gauges = {name for name in told(metrics) if name.partition("{")[0] in GAUGES}
    assert gauges == {f'gpukeeper_info{{version="{__version__}"}}', "gpukeeper_leader", "gpukeeper_lease_denied"}
    assert told(metrics)["gpukeeper_leader"] == 0
    assert told(metrics)['gpukeeper_reclaimed_total{action="remove",kind="trainjob",rule="retention"}'] == 1


def test_evidence_is_counted_when_it_was_saved(metrics: Metrics) -> None:
    """C15.1: logs by the names of Docker, Kubernetes and Ray; a pod named catalog has a manifest."""
    evidence = Evidence(
        {
            LOG: b"1",
            "logs/catalog-0/train.log": b"12",
            "logs/catalog-0/train.previous.log": b"123",
            "logs/old/worker-ab-01-7.out": b"1234",
            MANIFEST: b"12345",
            "pods/catalog-0.json": b"123456",
            "events.json": b"1234567",
        }
    )

    async def save() -> None:
        kept = CountedEvidence(InMemoryEvidence(), metrics)
        name = await kept.save(ref("a"), "1.1", NOW, evidence)
        assert isinstance(name, str)
        assert await kept.load(name) == evidence
        assert isinstance(await CountedEvidence(Unwritable(), metrics).save(ref("a"), "1.2", NOW, evidence), Unknown)

    asyncio.run(save())
    seen = told(metrics)
    assert seen['gpukeeper_captured_bytes_total{what="logs"}'] == 10
    assert seen['gpukeeper_captured_bytes_total{what="rest"}'] == 18


def test_names_of_workloads_are_no_labels(metrics: Metrics) -> None:
    metrics.passed(report(decision("secret-project"), outcomes=[closed("secret-project")]))
    assert b"secret-project" not in metrics.text()


# Several places, as a daemon has them


def at(platform: str, *decisions: Decision, **survey: Any) -> PassReport:
    made = report(*decisions, survey=survey)
    made.survey.platform = SimpleNamespace(name=platform, place="lab")  # type: ignore[assignment]
    return made


def a_daemons(clock: Ticking) -> Metrics:
    places: Any = [SimpleNamespace(name=name, place="lab") for name in ("kubernetes", "host")]
    return Metrics(clock, places, elects=False)


def test_a_daemon_leads_nobody(clock: Ticking) -> None:
    """Two hosts under one Prometheus are not two leaders."""
    metrics = a_daemons(clock)
    metrics.passed(report())
    assert "gpukeeper_leader" not in told(metrics)


def test_a_place_that_never_had_a_pass_is_late_whatever_the_others_do(clock: Ticking) -> None:
    metrics = a_daemons(clock)
    metrics.passed(at("kubernetes"))
    assert "gpukeeper_last_pass_timestamp_seconds" not in told(metrics)
    clock.at = NOW + HOUR
    metrics.passed(at("host"))
    clock.at = NOW + 2 * HOUR
    metrics.passed(at("host"))
    assert told(metrics)["gpukeeper_last_pass_timestamp_seconds"] == NOW.timestamp()


def test_places_add_up(clock: Ticking) -> None:
    metrics = a_daemons(clock)
    counts = Counter({("job", "running", "", ""): 2})
    metrics.passed(at("kubernetes", decision("a"), kinds=counts, unseen=[Unseen("jobs", "403")]))
    metrics.passed(at("host", kinds=counts, unseen=[Unseen("gpus", "silent")]))
    seen = told(metrics)
    assert seen['gpukeeper_workloads{kind="job",outcome="",state="running"}'] == 4
    assert seen["gpukeeper_unseen"] == 2
    assert seen["gpukeeper_overdue"] == 1, "a look at one place says nothing of another"
    metrics.passed(at("kubernetes"))
    assert told(metrics)["gpukeeper_overdue"] == 0


def test_a_breaker_that_is_open_anywhere_is_open(clock: Ticking) -> None:
    metrics = a_daemons(clock)
    one, other = at("kubernetes"), at("host")
    one.plan = msgspec.structs.replace(EMPTY_PLAN, breaker="too many at once")
    other.acted = False
    metrics.passed(one)
    metrics.passed(other)
    seen = told(metrics)
    assert (seen["gpukeeper_breaker_open"], seen["gpukeeper_acting"]) == (1, 0)


# Nodes, disks and trees


WORKER = 'node="worker-1",place="lab",platform="ray"'
DISK = f'disk="/",{WORKER}'


def test_a_node_tells_its_bytes_its_disk_and_whether_it_works(clock: Ticking) -> None:
    """C10.1, C15.2"""
    metrics = Metrics(clock, elects=False)
    metrics.passed(a_pass_over(Workers(node("worker-1", 35 * GIB, 0.75, busy="2 tasks run"), node("worker-2"))))
    seen = told(metrics)
    assert seen[f"gpukeeper_node_temporary_bytes{{{WORKER}}}"] == 35 * GIB
    assert seen[f"gpukeeper_node_busy{{{WORKER}}}"] == 1
    assert seen[f"gpukeeper_node_busy{{{WORKER.replace('1', '2')}}}"] == 0
    assert seen[f"gpukeeper_disk_size_bytes{{{DISK}}}"] == 100 * GIB
    assert seen[f"gpukeeper_disk_free_bytes{{{DISK}}}"] == 25 * GIB
    assert seen[f"gpukeeper_disk_used_ratio{{{DISK}}}"] == 0.75
    assert seen[f"gpukeeper_disk_inodes_used_ratio{{{DISK}}}"] == 0.1
    assert seen['gpukeeper_not_measured{what="busy"}'] == 0


def test_what_was_not_measured_is_absent_and_counted(clock: Ticking) -> None:
    """Unknown is never zero, never idle."""
    silent = Unknown("silent")
    metrics = Metrics(clock, elects=False)
    metrics.passed(
        a_pass_over(
            Workers(
                node("worker-1", silent, busy=silent, disk=None),
                tree("/tmp/ray/session_1", "worker-1", silent, in_use=True),
            )
        )
    )
    seen = told(metrics)
    assert not [name for name in seen if name.startswith(("gpukeeper_node", "gpukeeper_disk"))]
    for what in ("busy", "temporary bytes", "disk", "tree size"):
        assert seen[f'gpukeeper_not_measured{{what="{what}"}}'] == 1
    assert seen['gpukeeper_trees{category="dead-session"}'] == 1
    assert 'gpukeeper_tree_bytes{category="dead-session"}' not in seen


def test_a_session_that_lives_is_no_dead_one_and_is_not_measured_by_design(clock: Ticking) -> None:
    metrics = Metrics(clock, elects=False)
    lives = tree("/tmp/ray/session_1", "worker-1", Unknown("it lives", by_design=True), in_use=True)
    metrics.passed(a_pass_over(Workers(node("worker-1"), msgspec.structs.replace(lives, state=State.RUNNING))))
    seen = told(metrics)
    assert seen['gpukeeper_trees{category="live"}'] == 1
    assert 'gpukeeper_trees{category="dead-session"}' not in seen
    assert seen['gpukeeper_not_measured{what="tree size"}'] == 0


def test_a_disk_of_the_machine_is_nobodys_node(clock: Ticking) -> None:
    metrics = Metrics(clock, elects=False)
    metrics.passed(at("host", nodes=[disk("/", 0.81), disk("/data", 0.2, labels={})]))
    seen = told(metrics)
    where = 'disk="/",node="",place="node-3",platform="host"'
    assert seen[f"gpukeeper_disk_used_ratio{{{where}}}"] == 0.81
    assert seen[f"gpukeeper_held_open_bytes{{{where}}}"] == 3 * GIB
    assert not [name for name in seen if name.startswith("gpukeeper_node")]
    assert seen['gpukeeper_not_measured{what="held open"}'] == 1


def test_bytes_that_came_back_are_counted_by_rule(clock: Ticking) -> None:
    metrics = Metrics(clock, elects=False)
    here = Workers(
        node("worker-1", 3 * GIB),
        tree("/tmp/ray/session_1", "worker-1", 2 * GIB),
        tree("/tmp/ray/session_2", "worker-1", Unknown("silent")),
    )
    metrics.passed(a_pass_over(here))
    seen = told(metrics)
    assert seen['gpukeeper_bytes_returned_total{rule="leftover_tree"}'] == 2 * GIB
    assert seen['gpukeeper_reclaimed_total{action="remove",kind="session",rule="leftover_tree"}'] == 2


def test_a_pass_that_takes_long_is_told_while_it_runs_and_counted_once(clock: Ticking) -> None:
    """After its look, and after each step; the end adds nothing that was counted before."""
    metrics = Metrics(clock, elects=False)
    here = Workers(node("worker-1", 3 * GIB), *(tree(f"/tmp/ray/session_{n}", "worker-1", GIB) for n in range(3)))
    counted = 'gpukeeper_reclaimed_total{action="remove",kind="session",rule="leftover_tree"}'
    seen: list[tuple[float | None, float | None]] = []

    def under_way(report: PassReport) -> None:
        metrics.in_progress(report)
        now = told(metrics)
        seen.append((now.get('gpukeeper_trees{category="dead-session"}'), now.get(counted)))

    one = session(here)
    report = asyncio.run(reclaim(one.keeper, here, one.book, under_way=under_way))
    metrics.passed(report)
    assert seen == [(3, None), (3, 1), (3, 2), (3, 3)]
    assert told(metrics)[counted] == 3


def test_odd_names_break_no_line(clock: Ticking) -> None:
    metrics = Metrics(clock, elects=False)
    metrics.passed(a_pass_over(Workers(node('a"b\n\udce4\\'))))
    assert len([line for line in metrics.text().splitlines() if line.startswith(b"gpukeeper_node_busy{")]) == 1


# The page, the alerts and the code


def unused(name: str, *devices: str, class_: str | Unknown = "serving") -> Waste:
    return Waste(ref=ref(name), owner="ann", class_=class_, devices=devices, since=NOW - HOUR, at_least=False)


def test_gpus_that_are_held_and_not_used_are_counted_by_class(metrics: Metrics) -> None:
    """C8.11"""
    found = [unused("a", "GPU-0"), unused("b", "GPU-1", "GPU-2"), unused("c", "GPU-3", class_=Unknown("not told"))]
    metrics.passed(report(survey={"wasted": found}))
    seen = told(metrics)
    assert {name: value for name, value in seen.items() if name.startswith("gpukeeper_wasted")} == {
        'gpukeeper_wasted_gpus{class="serving"}': 3,
        'gpukeeper_wasted_gpus{class=""}': 1,
    }


def tile(name: str = "gpu-0", state: GpuState = GpuState.HELD, **more: Any) -> GpuTile:
    known: dict[str, Any] = {
        "key": "docker/node-1/container/x",
        "device": f"GPU-{name}",
        "how": ClaimState.RUNNING,
        "platform": "docker",
        "class_": "docker",
        "owner": "ann",
        "use": 40.0,
        "memory_used_mib": 20,
        "memory_total_mib": 80,
        "model": "H200",
    }
    return GpuTile(id=name, name=f"host/node-1/{name}", place="node-1", state=state, **(known | more))


def past(identity: str, verdict: Grade, at: datetime = NOW) -> Past:
    return Past(at=at, run="r", identity=identity, verdict=verdict, values={})


def stored() -> StorageBytes:
    image, workload = ImageBytes("torch", 300), WorkloadBytes("train", 20, 3)
    return StorageBytes(at=NOW, layers=900, images=(image,), workloads=(workload,), cache=7)


def everything_told(metrics: Metrics) -> None:
    metrics.measured_apart = 30.0
    metrics.machine = MachineFacts(
        (tile(), tile("gpu-1", GpuState.IDLE, idle_since=NOW - HOUR)),
        (past("serial-1", Grade.PASS),),
        CopyState(machine="node-1", connected=True, lag=3.0, unsent=2),
        {"ann": 1.5},
        {"outcome": 3},
        (StorageFacts(("docker", "node-1"), stored(), MINUTE),),
        Usage(device=1, mount_point="/", size=100, taken=75, free=25, inodes=None, inodes_free=None),
    )
    metrics.node_use = PodUse(at=NOW, uses={}, logs={PodName("lab", "train-0", "uid"): 1})
    metrics.passed(report(stopped="the pass on kubernetes/lab stopped"))
    counts = Counter({("trainjob", "ended", "failed", "<1d"): 2})
    warned = WarningSent(
        at=NOW, ref=ref("a"), rule="idle", stage=1, incarnation="1", limit=HOUR, delivered=True, channel="", message=""
    )
    metrics.captured({"log.txt": b"1"})
    done = [closed("a"), closed("b", Result.REFUSED)]
    there = {"nodes": [node("worker-1"), disk()], "trees": {("report", False): TreeCount(1, 7, sized=1)}}
    seen = {
        "kinds": counts,
        "oldest": {"trainjob": NOW},
        "wasted": [unused("a", "GPU-0")],
        "idle": Counter({("monitored", "docker"): 1}),
        "decided": Counter({("docker", "keep", "wait", "idle"): 1}),
        **there,
    }
    metrics.passed(report(survey=seen, outcomes=done, warnings=[warned]))


def test_a_pass_that_stopped_is_counted_and_is_no_read_of_the_place(metrics: Metrics) -> None:
    metrics.passed(report(stopped="the pass on kubernetes/lab stopped"))
    seen = told(metrics)
    assert seen['gpukeeper_passes_failed_total{place="lab",platform="kubernetes"}'] == 1
    assert "gpukeeper_last_pass_timestamp_seconds" not in seen


def test_every_series_is_told_and_every_told_series_is_in_the_list(metrics: Metrics) -> None:
    everything_told(metrics)
    names = {name.partition("{")[0] for name in told(metrics) if name.startswith("gpukeeper_")}
    assert names == set(GAUGES) | set(COUNTERS)


def test_the_page_lists_every_series_in_the_codes_words(metrics: Metrics) -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(gpukeeper_\w+)` \| (gauge|counter) \| [^|]*\| (.+) \|$", page, re.MULTILINE)
    assert rows == [
        *((name, "gauge", words) for name, words in GAUGES.items()),
        *((name, "counter", words) for name, words in COUNTERS.items()),
    ]


def test_the_page_names_the_labels_that_series_have(metrics: Metrics) -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    listed = dict(re.findall(r"^\| `(gpukeeper_\w+)` \| \w+ \| ([^|]*)\|", page, re.MULTILINE))
    everything_told(metrics)
    labels = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name.startswith("gpukeeper_")
    }
    assert {name: {one.strip() for one in words.split(",")} - {""} for name, words in listed.items()} == labels


@pytest.mark.parametrize("file", ["kubernetes/alerts.yaml", "prometheus/ray-alerts.yaml"])
def test_alerts_ask_for_series_that_exist(file: str) -> None:
    rules = YAML(typ="safe").load(ROOT / "examples" / file)
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    names = {name for expression in asked for name in re.findall(r"\bgpukeeper_\w+", expression)}
    assert names
    assert names <= set(GAUGES) | set(COUNTERS)
    assert any("absent(" in expression for expression in asked), "an alert by absence is missing"


# GPUs, acceptance and the fleet database


def gpu_series(*tiles: GpuTile) -> dict[str, float]:
    return {
        f"{sample.name}{dict(sorted(sample.labels.items()))}": sample.value
        for family in machine.of_gpus(tiles, NOW)
        for sample in family.samples
    }


def labels_of(name: str, *tiles: GpuTile) -> list[dict[str, str]]:
    return [one.labels for family in machine.of_gpus(tiles, NOW) if family.name == name for one in family.samples]


def test_a_gpu_has_use_memory_state_and_holder() -> None:
    of_it = {"place": "node-1", "gpu": "gpu-0", "uuid": "GPU-gpu-0"}
    values = {family.name: family.samples for family in machine.of_gpus([tile()], NOW)}
    (use,), (memory,) = values["gpukeeper_gpu_use_ratio"], values["gpukeeper_gpu_memory_used_ratio"]
    assert (use.labels, use.value, memory.value) == (of_it, 0.4, 0.25)
    assert labels_of("gpukeeper_gpu_state", tile()) == [{**of_it, "state": "held"}]
    assert labels_of("gpukeeper_gpu_holder", tile()) == [
        {**of_it, "platform": "docker", "class": "docker", "owner": "ann"}
    ]


@pytest.mark.parametrize("state", GpuState)
def test_every_state_of_a_gpu_is_told(state: GpuState) -> None:
    assert [one["state"] for one in labels_of("gpukeeper_gpu_state", tile(state=state))] == [state.value]
    assert [one["state"] for one in labels_of("gpukeeper_gpus", tile(state=state))] == [state.value]


def test_of_several_holders_the_most_serious_state_is_the_gpus() -> None:
    both = (tile(state=GpuState.IDLE), tile(state=GpuState.OUTSIDE, owner="bob"))
    assert [one["state"] for one in labels_of("gpukeeper_gpu_state", *both)] == ["outside"]
    assert [one["owner"] for one in labels_of("gpukeeper_gpu_holder", *both)] == ["ann", "bob"]


def test_what_was_not_measured_of_a_gpu_is_absent() -> None:
    unknown = Unknown("not measured")
    names = {name.partition("{")[0] for name in gpu_series(tile(use=unknown, memory_used_mib=unknown))}
    assert names == {"gpukeeper_gpus", "gpukeeper_gpu_state", "gpukeeper_gpu_holder"}


def test_a_free_gpu_has_no_holder_and_idle_time_only_an_idle_one() -> None:
    free = tile(state=GpuState.FREE, key="", use=None)
    assert labels_of("gpukeeper_gpu_holder", free) == []
    assert labels_of("gpukeeper_gpu_idle_seconds", free, tile("gpu-1", idle_since=NOW - HOUR)) == []
    (idle,) = [
        value
        for name, value in gpu_series(tile(state=GpuState.IDLE, idle_since=NOW - HOUR)).items()
        if "idle_s" in name
    ]
    assert idle == 3600


def test_beyond_a_bound_gpus_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST_GPUS", 1)
    names = {name.partition("{")[0] for name in gpu_series(tile(), tile("gpu-1"))}
    assert names == {"gpukeeper_gpus"}


def test_the_last_verdict_of_each_gpu_counts() -> None:
    runs = [past("a", Grade.FAIL, NOW - DAY), past("a", Grade.PASS), past("b", Grade.INCONCLUSIVE)]
    verdicts, times = machine.of_acceptance(runs)
    assert [tuple(one.labels.values()) for one in verdicts.samples] == [("a", "PASS"), ("b", "INCONCLUSIVE")]
    assert [one.value for one in times.samples] == [NOW.timestamp()] * 2


def test_without_a_copy_or_a_known_lag_there_is_no_lag() -> None:
    assert [one.name for one in machine.of_machine(MachineFacts(), NOW) if one.name.startswith("gpukeeper_fleet")] == []
    families = {one.name: one.samples for one in machine.of_copy(CopyState(machine="node-1"))}
    assert families["gpukeeper_fleet_copy_lag_seconds"] == []
    assert families["gpukeeper_fleet_copy_connected"][0].value == 0


# Owners


def owner_series(*tiles: GpuTile, cores: dict[str, float] | None = None) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        family.name.removeprefix("gpukeeper_owner_"): {tuple(one.labels.values()): one.value for one in family.samples}
        for family in machine.of_owners(tiles, cores or {})
    }


def test_an_owner_has_gpus_by_state_memory_and_cpu() -> None:
    found = owner_series(
        tile(), tile("gpu-1", GpuState.IDLE), tile("gpu-2", owner="bob"), tile("gpu-3", key="", state=GpuState.FREE),
        cores={"ann": 2.5},
    )  # fmt: skip
    assert found["gpus"] == {("ann", "held"): 1, ("ann", "idle"): 1, ("bob", "held"): 1}
    assert found["gpu_memory_bytes"] == {("ann",): 40 * 1024**2, ("bob",): 20 * 1024**2}
    assert found["cpu_cores"] == {("ann",): 2.5}


def test_a_gpu_of_two_owners_counts_for_both_and_its_memory_once() -> None:
    found = owner_series(tile(), tile(owner="bob"))
    assert found["gpus"] == {("ann", "held"): 1, ("bob", "held"): 1}
    assert sum(found["gpu_memory_bytes"].values()) == 20 * 1024**2


def test_gpus_that_are_only_counted_belong_to_their_owner_and_memory_that_was_not_measured_is_absent() -> None:
    found = owner_series(tile(device="", count=8, memory_used_mib=Unknown("not measured"), owner=Unknown("no label")))
    assert found == {"gpus": {("unknown", "held"): 8}, "gpu_memory_bytes": {}, "cpu_cores": {}}


def test_of_many_owners_those_with_the_most_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST_OWNERS", 1)
    few = [tile("gpu-2", owner="bob"), tile("gpu-3", owner="eve")]
    found = owner_series(tile(), tile("gpu-1"), *few, cores={"ann": 1, "bob": 2, "eve": 3})
    assert found["gpus"] == {("ann", "held"): 2, ("(other)", "held"): 2}
    assert found["cpu_cores"] == {("ann",): 1, ("(other)",): 5}


def test_cpu_of_owners_is_the_newest_measurement_and_an_old_one_is_none() -> None:
    live = LiveState(enabled=True, gpus_only=True)
    state = PlaceState(platform="docker", place="n1", at=NOW, seen=0, running=0)
    for name, owner in (("a", "ann"), ("b", "ann"), ("c", "bob"), ("d", "eve")):
        live.places.setdefault(("docker", "n1"), LivePlace(state))
        view: Any = SimpleNamespace(subject=SimpleNamespace(owner=owner))
        live.places["docker", "n1"].facts[name] = LiveFact(view, decision(name))
    old = NOW - machine.RECENT_CPU
    samples = [
        Sample("a", Signal.CPU, "", NOW - MINUTE, 900.0),
        Sample("a", Signal.CPU, "", NOW, 150.0),
        Sample("b", Signal.CPU, "", NOW, 50.0),
        Sample("b", Signal.GPU, "GPU-0", NOW, 99.0),
        Sample("c", Signal.CPU, "", NOW, Unknown("not measured")),
        Sample("d", Signal.CPU, "", old, 100.0),
    ]
    live.measured(samples)
    assert machine.cores_by_owner(live, NOW) == {"ann": 2.0}
    live.finish(state, [ref("x")], whole=False)
    assert set(live.cpu) == {"a", "b", "c", "d"}
    del live.places["docker", "n1"].facts["a"]
    live.finish(state, [], whole=False)
    assert set(live.cpu) == {"b", "c", "d"}, "bounded by what is there"


def test_the_disk_of_the_ledger_is_told_as_df_does(metrics: Metrics) -> None:
    everything_told(metrics)
    seen = told(metrics)
    assert (seen["gpukeeper_state_disk_free_bytes"], seen["gpukeeper_state_disk_used_ratio"]) == (25, 0.75)
    metrics.machine = MachineFacts()
    assert "gpukeeper_state_disk_used_ratio" not in told(metrics)
