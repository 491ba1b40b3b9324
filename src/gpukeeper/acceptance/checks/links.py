"""Copies between every pair of GPUs: right, and as fast as between other pairs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode, params_of
from gpukeeper.acceptance.judging import judge, replies
from gpukeeper.acceptance.judging.replies import as_noted, interpret_ranks, rank_gpu, rank_uuid, with_evidence
from gpukeeper.acceptance.record import Finding, Measurement, ProbeRequest, Remedy, Values
from gpukeeper.model.gpu import Grade

NAME = "links"
PAIR_WARNS = 0.95  # of the median of its equals
PAIR_FAILS = 0.90  # two GPUs are innocent of their link, so it takes more than for one GPU
LEAST_PAIRS = 6  # three GPUs: with fewer it is unknown which link is the odd one


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    return ProbeRequest(probe=NAME, params=params_of(NAME, serving, context), deadline_s=180 + 5 * serving.seconds)


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    return interpret_ranks(NAME, trial, context, _interpret)


def _interpret(results: Mapping[int, Values], context: CheckContext) -> Iterable[Finding]:
    """The first rank copies between all GPUs; the others only make the number full."""
    pairs: Sequence[Values] = results[0]["pairs"]
    count = len(context.gpus)
    if len(pairs) < count * (count - 1):
        why = f"{len(pairs)} of {count * (count - 1)} pairs of GPUs were measured"
        yield judge.missing(NAME, "pairs", None, why)
    yield from _data(pairs, context)
    yield from _of_gpus(pairs, context)
    yield from _of_pairs(pairs, context)


def _data(pairs: Sequence[Values], context: CheckContext) -> Iterable[Finding]:
    wrong = [pair for pair in pairs if pair["wrong"]]
    for pair in wrong:
        place = next(iter(pair.get("where") or ()), None)
        at = f" Word {place['index']} is {place['got']}, expected {place['want']}." if place else ""
        yield Finding(
            check=NAME,
            metric=f"data {pair['from']} to {pair['to']}",
            gpu=rank_uuid(int(pair["to"]), context),
            verdict=Grade.FAIL,
            code="links-wrong-data",
            message=f"{pair['wrong']} of the words that {_gpu(pair['from'], context)} sent arrived wrong at"
            f" {_gpu(pair['to'], context)}.{at} One of the two GPUs or their link is at fault: check whether"
            " other pairs are affected.",
            action=Remedy.RESEAT_OR_CABLE,
            evidence={"pair": dict(pair)},
        )
    if not wrong and pairs:
        message = f"0 wrong words between all {len(pairs)} pairs of GPUs."
        yield Finding(check=NAME, metric="data", verdict=Grade.PASS, code="links-data-ok", message=message)


def _of_gpus(pairs: Sequence[Values], context: CheckContext) -> Iterable[Finding]:
    """Each GPU by the middle of its links, so that one slow GPU does not make all the others slow."""
    measurements = [
        Measurement(
            check=NAME,
            metric="p2p",
            gpu=rank_uuid(rank, context),
            unit="GB/s",
            method="p2p/copy",
            samples=_middle([pair for pair in pairs if rank in (pair["from"], pair["to"])]),
        )
        for rank in range(len(context.gpus))
    ]
    matrix: dict[str, Any] = {"matrix": {f"{pair['from']}-{pair['to']}": _median(pair) for pair in pairs}}
    matrix["ways"] = {f"{pair['from']}-{pair['to']}": _way(pair, context) for pair in pairs}
    return with_evidence(as_noted(judge.assess(measurements, context)), matrix)


def _middle(pairs: Sequence[Values]) -> tuple[float, ...]:
    repeats = zip(*(replies.figures(pair["gbps"]) for pair in pairs), strict=True)
    return tuple(statistics.median(each) for each in repeats)


def _of_pairs(pairs: Sequence[Values], context: CheckContext) -> Iterable[Finding]:
    """Every pair against those that are connected alike: one bad link among fifty does not change the median."""
    alike: dict[str, list[Values]] = defaultdict(list)
    for pair in pairs:
        alike[_way(pair, context)].append(pair)
    for way, group in alike.items():
        if len(group) < LEAST_PAIRS:
            continue
        usual = statistics.median(map(_median, group))
        slow = [pair for pair in group if _median(pair) < PAIR_WARNS * usual]
        yield from (_slow(pair, way, usual, len(group), context) for pair in slow)
        if not slow:
            message = (
                f"All {len(group)} pairs over {way} are within the tolerance, median {judge.amount(usual, 'GB/s')}."
            )
            yield Finding(check=NAME, metric=f"pairs {way}", verdict=Grade.PASS, code="links-pairs-ok", message=message)


def _slow(pair: Values, way: str, usual: float, count: int, context: CheckContext) -> Finding:
    value = _median(pair)
    verdict = Grade.FAIL if value < PAIR_FAILS * usual else Grade.WARN
    return Finding(
        check=NAME,
        metric=f"pair {pair['from']} to {pair['to']}",
        verdict=verdict,
        code="links-slow-pair",
        message=f"{_gpu(pair['from'], context)} to {_gpu(pair['to'], context)}: {judge.amount(value, 'GB/s')},"
        f" {judge.percent(1 - value / usual)} below the median of {count} such pairs"
        f" ({judge.amount(usual, 'GB/s')}). If all pairs of one GPU are slow, that GPU is the cause,"
        " otherwise their link.",
        action=Remedy.RESEAT_OR_CABLE if verdict is Grade.FAIL else Remedy.WATCH,
        value=value,
        unit="GB/s",
        method=f"p2p/copy/{way}",
        samples=replies.figures(pair["gbps"]),
        peer_median=usual,
        peer_n=count,
        confirm=verdict is Grade.FAIL,
    )


def _median(pair: Values) -> float:
    samples = replies.figures(pair["gbps"])
    return statistics.median(samples) if samples else 0.0


def _way(pair: Values, context: CheckContext) -> str:
    """The connection of the pair as the driver reports it; "host" if there is no direct access."""
    if not pair.get("p2p"):
        return "host"
    first, second = (rank_uuid(int(pair[end]), context) or "" for end in ("from", "to"))
    return context.machine.topology.get(first, {}).get(second, "p2p")


def _gpu(rank: Any, context: CheckContext) -> str:
    found = rank_gpu(int(rank), context)
    return f"GPU {rank if found is None else found.index}"


CHECK = Check(
    name=NAME,
    title="Links between GPUs",
    proves="Data is not corrupted between any two GPUs, the direct path is used where the machine has one, and no"
    " link is slower than comparable links.",
    cannot="One copy runs at a time, so a switch that fails under full load is detected by collectives, not here.",
    how=RunMode.TOGETHER,
    servings=(
        CheckSize(
            depth=0,
            seconds=10,
            worth=24,
            what="every pair of GPUs, 256 MiB, five times",
            params={"bytes": 2**28, "repeats": 5},
            small={"bytes": 2**20},
        ),
        CheckSize(
            depth=1,
            seconds=25,
            worth=30,
            what="every pair of GPUs, 1 GiB, fifteen times",
            params={"bytes": 2**30, "repeats": 15},
            small={"bytes": 2**20},
        ),
    ),
    request=request,
    interpret=interpret,
    least_gpus=2,
    slices=False,
)
