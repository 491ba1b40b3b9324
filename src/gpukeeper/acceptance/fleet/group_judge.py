"""What a job over several nodes shows: findings about ranks, nodes and the network between them. Pure.

Results are interpreted by the checks for one node (every element on every rank, parameters after every step, training
speed), on the ranks of all nodes. Added here: which node a finding is about, and what its network cards carried.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from gpukeeper.acceptance.check import CheckContext, CheckRun, CheckSize, RunRequest
from gpukeeper.acceptance.checks import collectives, ddp, throughput
from gpukeeper.acceptance.fleet.group_jobs import (
    GROUP,
    Fabric,
    Job,
    JobResult,
    Member,
    RankResult,
    blame_for_hang,
    describe_progress,
    labels,
    ranks_of,
)
from gpukeeper.acceptance.judging import judge, replies
from gpukeeper.acceptance.judging.replies import NODE_FACT, as_noted, named_ranks, rank_results
from gpukeeper.acceptance.record import (
    Finding,
    GroupFinding,
    Machine,
    ProbeReply,
    ProbeResult,
    Remedy,
    Thresholds,
    Values,
)
from gpukeeper.model.gpu import NOT_QUERIED, Gpu, Grade

# Of the line. Not a FAIL: a healthy group of 4 nodes shows 68 to 74 %, and the share of each algorithm is not measured.
LEAST_OF_LINE = 0.70
NEAR_LEAST = 0.75
HALF_OF_LINE = 0.50  # of the line: no tuning explains that
MOST_OF_LINE = 1.02  # above the line is no measurement
RATED_FROM_NODES = 3  # two nodes are a special case: healthy ones show 44 to 65 % by this conversion
USUAL_GPUS = 8
_INFINIBAND = {100: "ib-edr", 200: "ib-hdr", 400: "ib-ndr400", 800: "ib-xdr800"}
_TWO_LEVELS = ("tree", "nvls", "collnet", "pat")


@dataclass(frozen=True)
class NicRate:
    """GB/s that each card carried; `way`: how it was computed. `share`: of the line; None: the line is unknown."""

    gbytes: float
    way: str
    share: float | None


# busbw counts what a link of one flat ring would carry; between nodes it is no wire speed. With one card for each
# GPU, k nodes and n ranks, an all-reduce in two levels (tree, NVLS and tree, collnet) sends busbw * (k - 1) / (n - 1)
# through a card; a flat ring sends busbw / (GPUs of a node). So the conversion needs the algorithm, which is reported
# with it.
def nic_rate(
    busbw: float, nodes: int, ranks: int, algorithm: str | None, line_gbits: float | None, cards: int = 0
) -> NicRate | None:
    """None: one node, ranks that are not the same number on every node, or an unknown algorithm.

    `cards` of each node; 0: not known, so one for each GPU. GPUs that share a card add up there.
    """
    if nodes < 2 or ranks % nodes or not algorithm:
        return None
    name = algorithm.lower()
    if name.startswith("ring"):
        rate, way = busbw / (ranks // nodes), "flat ring: busbw / GPUs per node"
    elif name.startswith(_TWO_LEVELS):
        rate, way = busbw * (nodes - 1) / (ranks - 1), "two levels: busbw * (nodes - 1) / (ranks - 1)"
    else:
        return None
    each = ranks // nodes
    if 0 < cards < each:
        rate, way = rate * each / cards, f"{way}, {each} GPUs share {cards} card{'s' if cards > 1 else ''}"
    share = rate * 8 / line_gbits if line_gbits else None
    return NicRate(rate, f"{algorithm}, {way}", share)


def common_fabric(fabrics: Sequence[Fabric]) -> Fabric:
    """The network that all of them have; unknown if they differ."""
    first = fabrics[0] if fabrics else Fabric()
    alike = all(one == first for one in fabrics)
    return first if alike else Fabric()


def fabric_name(fabric: Fabric, transports: Sequence[str], gpus: int = USUAL_GPUS) -> str:
    """As the reference rows name it: ib-hdr, ib-ndr400, ethernet-100g. "unknown": its rows apply to no method.

    `transports`: what NCCL's log shows. Cards for RDMA that NCCL did not use do not count. `gpus` of a node: the rows
    for InfiniBand were measured with eight, each with a card of its own; another layout has a name of its own.
    """
    over = [one.upper() for one in transports if one.upper().startswith("NET")]
    sockets = any("SOCKET" in one for one in over)
    if not fabric.kind or fabric.gbits is None or (sockets and fabric.kind == "infiniband"):
        return "unknown"
    gbits = round(fabric.gbits)
    if fabric.kind == "infiniband":
        name = _INFINIBAND.get(gbits, f"ib-{gbits}")
        usual = gpus == USUAL_GPUS and fabric.cards >= USUAL_GPUS
        return name if usual else f"{name}-{gpus}x{fabric.cards}"
    return f"ethernet-{gbits}g"


Limits = Callable[[Gpu, str, str, str], Thresholds]
INTERPRET: Mapping[str, Callable[[CheckRun, CheckContext], tuple[Finding, ...]]] = {
    "collectives": collectives.CHECK.interpret,
    "ddp": ddp.CHECK.interpret,
    "throughput": throughput.CHECK.interpret,
}
HUNG = ("stalled", "deadline")
FALLS = 0.85  # of the best rate with fewer nodes
_SIZE = CheckSize(depth=0, seconds=0, worth=0, what="")


@dataclass(frozen=True)
class SlowLimits:
    """When a rank's own work, which no other rank delays, is slow: times the median of all, and by how much."""

    warn: float
    fail: float
    excess_ms: float


SLOW = SlowLimits(1.25, 2.0, 1.0)
SLOW_CPU = SlowLimits(4.0, 4.0, 10.0)  # ranks of several nodes may share the cores of one machine


@dataclass(frozen=True)
class Group:
    """Who takes part, and what figures are compared with."""

    members: Mapping[int, Member]
    wish: RunRequest
    limits: Limits
    line_gbits: float = 0.0  # as set by the user; 0: as the nodes report it

    @cached_property
    def labels(self) -> Mapping[int, str]:
        return labels(self.members)

    def nodes(self, members: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.labels[index] for index in dict.fromkeys(members))

    def line(self, job: Job) -> tuple[float | None, int]:
        """Gbit/s of one card, None if it is unknown or differs; and cards of each node, 0 if unknown."""
        found = common_fabric([self.members[index].fabric for index in job.members])
        return self.line_gbits or found.gbits, found.cards

    @property
    def small(self) -> bool:
        return self.wish.device == "cpu"


@dataclass(frozen=True)
class _View:
    """One job and its ranks, as the checks for one node see them."""

    group: Group
    result: JobResult

    @property
    def job(self) -> Job:
        return self.result.job

    @cached_property
    def places(self) -> tuple[tuple[int, str], ...]:
        """By rank: member and device."""
        return tuple((index, device.uuid) for index, device in ranks_of(self.job, self.group.members))

    @cached_property
    def context(self) -> CheckContext:
        gpus = tuple(
            Gpu(
                uuid=f"{index}/{device.uuid}",  # CPUs have the same name on every node
                index=device.index,
                name=device.name or NOT_QUERIED,
                facts={NODE_FACT: self.group.labels[index]},
            )
            for index, device in ranks_of(self.job, self.group.members)
        )
        machine = Machine(node=GROUP, gpus=gpus)
        return CheckContext(wish=self.group.wish, machine=machine, gpus=gpus, limits=self.group.limits)

    @cached_property
    def trial(self) -> CheckRun:
        return CheckRun(_SIZE, {str(one.rank): self._named(one) for one in self.result.ranks}, self.result.seconds)

    def _named(self, one: RankResult) -> ProbeReply:
        """The result with the network between the nodes, which reference values are kept by."""
        if not isinstance(one.reply, ProbeResult) or self.job.probe != "collectives":
            return one.reply
        members = [self.group.members[index].fabric for index in self.job.members]
        transports = one.reply.result.get("transports")
        ways = list(transports) if isinstance(transports, Mapping) else ()
        each = len(self.places) // max(1, len(self.job.members))
        name = fabric_name(common_fabric(members), ways, each)
        return msgspec.structs.replace(one.reply, result={**one.reply.result, "fabric": name})

    def results(self) -> dict[int, Values]:
        return rank_results(self.trial)

    def member_of(self, rank: int) -> int:
        return self.places[rank][0]

    def on(self) -> str:
        return f"on {len(self.job.members)} nodes"


def of_job(result: JobResult, group: Group) -> tuple[GroupFinding, ...]:
    """The findings of one job, in one try."""
    view = _View(group, result)
    if result.lost:
        return tuple(_lost(view, int(index), why) for index, why in result.lost.items())
    if result.ended in HUNG:
        return (_hang(view),)
    found = INTERPRET[result.job.probe](view.trial, view.context)
    if group.small:
        found = as_noted(found)
    complete = len(view.results()) == len(view.places)
    more = (*_network(view), *_slow(view)) if complete else ()
    if any(one.finding.metric.startswith("collectives line rate") for one in more):
        found = as_noted(found)  # it is compared with the line instead
    return (*(_about(view, one) for one in found), *more)


def _about(view: _View, finding: Finding) -> GroupFinding:
    """Which node a finding of a check is about, and under the name of this part of the run."""
    rank = next((rank for rank, gpu in enumerate(view.context.gpus) if gpu.uuid == finding.gpu), None)
    named = [int(one) for one in finding.evidence.get("ranks", ())] if rank is None else [rank]
    nodes = view.group.nodes(view.member_of(one) for one in named if one < len(view.places))
    renamed = msgspec.structs.replace(
        finding,
        check=GROUP,
        metric=f"{finding.check} {finding.metric}".strip() + f" {view.on()}",
        code=f"{GROUP}-{finding.code}",
        gpu=None if rank is None else view.places[rank][1],
    )
    return GroupFinding(finding=renamed, nodes=nodes if len(nodes) < len(view.job.members) else (), rank=rank)


# What did not come to an end


def _lost(view: _View, index: int, why: str) -> GroupFinding:
    node = view.group.labels[index]
    finding = Finding(
        check=GROUP,
        metric=f"member {node}",
        verdict=Grade.INCONCLUSIVE,
        code="group-member-lost",
        message=f"{node} was lost while {view.job.probe} ran {view.on()}: {why.rstrip('.')}. The other nodes ended"
        " their ranks. Check whether it was restarted, evicted or out of memory, and its kernel log; then run again.",
        action=Remedy.RETEST,
    )
    return GroupFinding(finding=finding, nodes=(node,))


def _hang(view: _View) -> GroupFinding:
    progress = {one.rank: one.progress for one in view.result.ranks}
    found = blame_for_hang(progress)
    last = {str(rank): describe_progress(one) for rank, one in progress.items()}
    evidence = {"last_steps": last, "progress": {str(rank): msgspec.to_builtins(one) for rank, one in progress.items()}}
    waited = f"no rank began a step for {view.job.stall_s:g} s"
    if view.result.ended != "stalled":
        waited = f"it was not done after {view.job.deadline_s:g} s"
    head = f"{view.job.probe} {view.on()} hung: {waited}, so it was stopped."
    if not found.ranks:
        words = (
            f"{head} {found.why} So no rank is to blame: check the network between the nodes (NCCL_SOCKET_IFNAME,"
            " NCCL_IB_HCA, firewalls, MTU)."
        )
        return GroupFinding(finding=_hang_finding(view, Grade.INCONCLUSIVE, "group-hang", words, None, evidence))
    who = named_ranks(found.ranks, view.context)
    words = f"{head} The cause is {who}. {found.why} Check that GPU and the kernel log of its node for Xids."
    first = found.ranks[0] if len(found.ranks) == 1 else None
    gpu = None if first is None else view.places[first][1]
    finding = _hang_finding(view, Grade.FAIL, "group-hang-rank", words, gpu, evidence)
    return GroupFinding(finding=finding, nodes=view.group.nodes(view.member_of(one) for one in found.ranks), rank=first)


def _hang_finding(view: _View, verdict: Grade, code: str, message: str, gpu: str | None, evidence: Values) -> Finding:
    return Finding(
        check=GROUP,
        metric=f"{view.job.probe} {view.on()}",
        gpu=gpu,
        verdict=verdict,
        code=code,
        message=message,
        action=Remedy.RETEST if verdict is Grade.INCONCLUSIVE else Remedy.REBOOT,
        evidence=evidence,
        seconds=view.result.seconds,
    )


# The network


def rate_of(result: JobResult, group: Group) -> tuple[float, NicRate | None] | None:
    """Of a complete collectives job: the bus bandwidth of all-reduce, and what a card carried."""
    view = _View(group, result)
    results = view.results()
    if result.job.probe != "collectives" or len(results) != len(view.places) or not results:
        return None
    try:
        curves = [one for one in collectives.merge(results) if one.op == collectives.MAIN and one.busbw]
    except (KeyError, TypeError, ValueError):
        return None  # reported by the check
    best = collectives.plateau(curves)
    if best is None:
        return None
    algorithms = results[0].get("algorithms")
    algorithm = algorithms.get(collectives.MAIN) if isinstance(algorithms, Mapping) else None
    line, cards = group.line(result.job)
    return best.median, nic_rate(best.median, len(result.job.members), len(results), algorithm, line, cards)


def _network(view: _View) -> tuple[GroupFinding, ...]:
    """The share of the line that a card reached. Two nodes are judged by measured references only."""
    rate = rate_of(view.result, view.group)
    if rate is None or view.group.small or len(view.job.members) < RATED_FROM_NODES:
        return ()
    busbw, nic = rate
    if nic is None or nic.share is None:
        return ()
    verdict, what, advice = _line_verdict(nic.share)
    line = view.group.line(view.job)[0] or 0.0
    finding = Finding(
        check=GROUP,
        metric=f"collectives line rate {view.on()}",
        verdict=verdict,
        code=f"group-line-rate-{what}",
        message=f"All-reduce {view.on()}: {judge.amount(busbw, 'GB/s')} bus bandwidth is"
        f" {judge.amount(nic.gbytes, 'GB/s')} through each network card ({nic.way}), {judge.percent(nic.share)} of"
        f" {line:g} Gbit/s.{advice}",
        action=Remedy.CHECK_CONFIG if verdict in (Grade.WARN, Grade.FAIL) else _retest(verdict),
        value=nic.share,
        unit="share",
        method=f"line/{nic.way.partition(',')[0]}/k{len(view.job.members)}",
        samples=(nic.share,),
        floor=HALF_OF_LINE,
        ceiling=MOST_OF_LINE,
        confirm=verdict is Grade.FAIL,
    )
    return (GroupFinding(finding=finding),)


def _retest(verdict: Grade) -> Remedy:
    return Remedy.RETEST if verdict is Grade.INCONCLUSIVE else Remedy.NONE


def _line_verdict(share: float) -> tuple[Grade, str, str]:
    check = " Check GPUDirect RDMA, PCIe of the cards, NCCL_IB_HCA, and congestion control."
    if share > MOST_OF_LINE:
        return Grade.INCONCLUSIVE, "implausible", " More than the line is no measurement: set group.line_gbits."
    if share < HALF_OF_LINE:
        return Grade.FAIL, "under-half", f" Less than half of the line.{check}"
    if share < LEAST_OF_LINE:
        return Grade.WARN, "low", f" At least {judge.percent(LEAST_OF_LINE)} is expected.{check}"
    if share < NEAR_LEAST:
        return Grade.WARN, "near", f" Healthy groups reach {judge.percent(NEAR_LEAST)}."
    return Grade.PASS, "ok", ""


def trend(results: Sequence[JobResult], group: Group) -> tuple[GroupFinding, ...]:
    """Does the rate fall with the number of nodes? By what a card carries: busbw itself depends on the number."""
    rates: dict[int, tuple[float, float]] = {}
    for result in results:
        found = rate_of(result, group)
        if found is not None:
            busbw, nic = found
            rates[len(result.job.members)] = (busbw, nic.gbytes if nic is not None else busbw)
    numbers = sorted(rates)
    if len(numbers) < 2:
        return ()
    shown = ", ".join(f"{count} nodes {judge.amount(rates[count][0], 'GB/s')}" for count in numbers)
    last = numbers[-1]
    best = max(numbers[:-1], key=lambda count: rates[count][1])
    share = rates[last][1] / rates[best][1] if rates[best][1] else 0.0
    evidence = {"busbw_by_nodes": {str(count): rates[count][0] for count in numbers}}
    if group.small:
        words = f"All-reduce by number of nodes: {shown}. Reported, not judged: the nodes may share a CPU."
        return (_trend(Grade.SKIPPED, "noted", words, share, evidence),)
    if share >= FALLS:
        return (
            _trend(Grade.PASS, "ok", f"All-reduce does not fall with the number of nodes: {shown}.", share, evidence),
        )
    words = (
        f"All-reduce falls with the number of nodes: {shown}; a network card carries {judge.percent(share)} of what it"
        f" carries with {best} nodes. Check the uplinks and routing of the switches between them."
    )
    return (_trend(Grade.WARN, "falls", words, share, evidence),)


def _trend(verdict: Grade, what: str, message: str, share: float, evidence: Values) -> GroupFinding:
    finding = Finding(
        check=GROUP,
        metric="collectives by number of nodes",
        verdict=verdict,
        code=f"group-trend-{what}",
        message=message,
        action=Remedy.CHECK_CONFIG if verdict is Grade.WARN else Remedy.NONE,
        value=share,
        unit="share",
        evidence=evidence,
    )
    return GroupFinding(finding=finding)


# Slow ranks


def slowness(times: Mapping[int, Sequence[float]]) -> dict[int, tuple[float, float]]:
    """By rank: the median of its time ÷ the median of all ranks in the same step, and by how many ms it is more.

    Step by step, since steps differ: the first is slower on every rank.
    """
    steps = min((len(one) for one in times.values()), default=0)
    if steps == 0 or len(times) < 2:
        return {}
    middles = [statistics.median_low([one[step] for one in times.values()]) for step in range(steps)]
    found = {}
    for rank, own in times.items():
        ratios = [own[step] / middle for step, middle in enumerate(middles) if middle > 0]
        excess = statistics.median(own[step] - middles[step] for step in range(steps))
        found[rank] = (statistics.median(ratios) if ratios else 1.0, excess)
    return found


def _slow(view: _View) -> tuple[GroupFinding, ...]:
    """A rank whose own work takes longer than that of the others: all of them wait for it in every step."""
    limits = SLOW_CPU if view.group.small else SLOW
    times = {rank: replies.figures(one.get("local_ms")) for rank, one in view.results().items()}
    slow = {
        rank: (ratio, excess)
        for rank, (ratio, excess) in slowness(times).items()
        if ratio >= limits.warn and excess >= limits.excess_ms
    }
    return tuple(_slow_rank(view, rank, ratio, excess, limits) for rank, (ratio, excess) in slow.items())


def _slow_rank(view: _View, rank: int, ratio: float, excess: float, limits: SlowLimits) -> GroupFinding:
    fails = ratio >= limits.fail
    finding = Finding(
        check=GROUP,
        metric=f"{view.job.probe} own work {view.on()}",
        gpu=view.places[rank][1],
        verdict=Grade.FAIL if fails else Grade.WARN,
        code="group-slow-rank",
        message=f"{named_ranks([rank], view.context)} takes {ratio:.1f} times as long as the other ranks for its own"
        f" part of a step ({excess:.1f} ms more), and all wait for it. Check its clocks, power limit, CPU share and"
        " other programs.",
        action=Remedy.CONTACT_VENDOR if fails else Remedy.WATCH,
        value=ratio,
        unit="times",
        method=f"own-work/{view.job.probe}",
        samples=(ratio,),
        lower_is_better=True,
        confirm=fails,
    )
    return GroupFinding(finding=finding, nodes=view.group.nodes((view.member_of(rank),)), rank=rank)
