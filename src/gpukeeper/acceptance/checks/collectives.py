"""Collectives over all GPUs: every element right on every rank, and as fast as their links allow.

Three of them: as NCCL chooses, over NVLink alone, over the network alone. Speed is reported as by nccl-tests (bus
bandwidth), of the slowest rank, and judged from 1 GiB on: below, healthy fabrics show a fraction of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from gpukeeper.acceptance.check import (
    Check,
    CheckContext,
    CheckRun,
    CheckSize,
    RunMode,
    params_of,
    refuse,
    too_little,
    unknown_words,
)
from gpukeeper.acceptance.judging import judge, replies
from gpukeeper.acceptance.judging.replies import as_noted, interpret_ranks, named_ranks, rank_uuid, with_evidence
from gpukeeper.acceptance.record import Finding, Measurement, ProbeRequest, Remedy, Values
from gpukeeper.model.gpu import Grade

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
MAIN = "all_reduce"
PLATEAU = 2**30
HALF = 0.5  # of what is expected: no tuning explains that
LATENCY_US_MAX = 200.0
NVLS_FROM = 6  # GPUs; with fewer NCCL keeps to rings
DEADLINE_S = 180.0
SIZES = tuple(2**n for n in range(13, 34))  # 8 KiB to 8 GiB


def request(name: str, serving: CheckSize, context: CheckContext) -> ProbeRequest:
    params = params_of(name, serving, context)
    refuse(name, [*unknown_words(params, "ops", OPS), *too_little(params, sizes=SIZES[0], rounds=1)])
    return ProbeRequest(probe="collectives", params=params, deadline_s=DEADLINE_S + 5 * serving.seconds)


def interpret(name: str, trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    return interpret_ranks(name, trial, context, partial(_interpret, name))


def _interpret(name: str, results: Mapping[int, Values], context: CheckContext) -> tuple[Finding, ...]:
    record = results[0]
    merged = merge(results)
    return (
        *_switched(name, record),
        *_data(name, results, context),
        *with_evidence(_speed(name, record, merged, context), _evidence(record, merged)),
        *_latency(name, record, results, context),
        *_left_out(name, merged),
    )


@dataclass(frozen=True)
class Curve:
    """One collective at one size, of all ranks: each round took as long as its slowest rank."""

    op: str
    bytes: int
    busbw: tuple[float, ...]
    left_out: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.busbw) if self.busbw else 0.0


def merge(results: Mapping[int, Values]) -> tuple[Curve, ...]:
    """The slowest rank has the least bandwidth of a round."""
    rows = [list(answer.get("results", ())) for answer in results.values()]
    return tuple(_curve(same) for same in zip(*rows, strict=True))


def _curve(same: Sequence[Values]) -> Curve:
    first = same[0]
    if any("left_out" in one for one in same):
        why = next(str(one["left_out"]) for one in same if "left_out" in one)
        return Curve(str(first["op"]), int(first["bytes"]), (), why)
    rounds = zip(*(replies.figures(one.get("busbw")) for one in same), strict=True)
    return Curve(str(first["op"]), int(first["bytes"]), tuple(min(each) for each in rounds))


def _evidence(record: Values, curves: Sequence[Curve]) -> dict[str, Any]:
    by_size: dict[str, dict[str, float]] = {}
    for curve in curves:
        if curve.busbw:
            by_size.setdefault(curve.op, {})[str(curve.bytes)] = curve.median
    kept = {key: record.get(key) for key in ("algorithm", "algorithms", "transports", "nvls", "variant", "switches")}
    return {**kept, "nccl_version": record.get("nccl_version"), "busbw_by_bytes": by_size}


# Is it right?


def _data(name: str, results: Mapping[int, Values], context: CheckContext) -> tuple[Finding, ...]:
    """No tolerance and no second try: a wrong element once is a wrong gradient once."""
    wrong = {rank: rows for rank, answer in results.items() if (rows := _wrong_rows(answer))}
    if wrong:
        return tuple(_wrong(name, rank, rows, len(wrong), context) for rank, rows in wrong.items())
    rows = [row for answer in results.values() for row in answer.get("results", ()) if "left_out" not in row]
    if not rows:
        return (judge.missing(name, "data", None, "no collective was run"),)
    rounds = sum(int(row["rounds"]) for row in rows) // len(results)
    return (
        Finding(
            check=name,
            metric="data",
            verdict=Grade.PASS,
            code=judge.code_of(name, "exact"),
            message=f"0 wrong elements in {rounds} collectives on {len(results)} ranks.",
        ),
    )


def _wrong_rows(answer: Values) -> list[Values]:
    return [row for row in answer.get("results", ()) if row.get("wrong")]


def _wrong(name: str, rank: int, rows: Sequence[Values], ranks_wrong: int, context: CheckContext) -> Finding:
    first = rows[0]
    count = sum(int(row["wrong"]) for row in rows)
    where = next(iter(first.get("where") or ()), None)
    place = ""
    if where:
        got, want = where["got"], where["want"]
        place = f" Element {where['index']} is {got}, expected {want}, in round {where['round']}."
    alone = " No other rank has wrong elements, so its own links or memory are at fault." if ranks_wrong == 1 else ""
    return Finding(
        check=name,
        metric="data",
        gpu=rank_uuid(rank, context),
        verdict=Grade.FAIL,
        code=judge.code_of(name, "wrong-data"),
        message=f"{named_ranks([rank], context)} has {count} wrong element{'s' if count > 1 else ''}, first after"
        f" {first['op']} of {first['bytes']} bytes.{place}{alone} Take it out of service.",
        action=Remedy.CONTACT_VENDOR,
        evidence={"rows": [{key: row[key] for key in ("op", "bytes", "wrong", "where")} for row in rows]},
    )


# Is it fast?


def _speed(name: str, record: Values, curves: Sequence[Curve], context: CheckContext) -> tuple[Finding, ...]:
    found: list[Finding] = []
    for op in dict.fromkeys(curve.op for curve in curves):
        best = plateau([curve for curve in curves if curve.op == op and curve.busbw])
        if best is None:
            found.append(judge.missing(name, op, None, "no message size fits into memory"))
            continue
        judged = judge.assess([_measurement(name, record, best)], context)
        judged = judged if op == MAIN and name == CHECK.name else as_noted(judged)
        found += [_explained(one, record) for one in judged]
        found += _under_half(name, judged, context)
    return tuple(found)


def plateau(curves: Sequence[Curve]) -> Curve | None:
    """The best of the sizes from 1 GiB on; where none was that large, the largest."""
    large = [curve for curve in curves if curve.bytes >= PLATEAU]
    if large:
        return max(large, key=lambda curve: curve.median)
    return max(curves, key=lambda curve: curve.bytes, default=None)


def _measurement(name: str, record: Values, curve: Curve) -> Measurement:
    size = "plateau" if curve.bytes >= PLATEAU else f"{curve.bytes}B"
    method = f"busbw/{record['backend']}/n{record['world']}/{record.get('dtype')}/{_way(record)}/{size}"
    return Measurement(check=name, metric=curve.op, gpu=None, unit="GB/s", method=method, samples=curve.busbw)


def _way(record: Values) -> object:
    """Over several nodes the network between them counts; within one, the variant."""
    return record.get("fabric") or record.get("variant")


def _explained(finding: Finding, record: Values) -> Finding:
    """A slow all-reduce in a machine with an NVLink switch is usually one without the switch's help."""
    algorithm = (record.get("algorithms") or {}).get(finding.metric)
    words = f" NCCL used {algorithm}." if algorithm else ""
    slow = finding.verdict in (Grade.WARN, Grade.FAIL) and finding.metric == MAIN
    without_nvls = record.get("variant") == "default" and record.get("nvls") is False
    if slow and without_nvls and int(record["world"]) >= NVLS_FROM:
        words += " NVLS is off: check fabric manager and IMEX before the links."
    return msgspec.structs.replace(finding, message=f"{finding.message}{words}")


def _under_half(name: str, judged: Sequence[Finding], context: CheckContext) -> list[Finding]:
    return [
        Finding(
            check=name,
            metric=f"{one.metric} share",
            verdict=Grade.FAIL,
            code=judge.code_of(name, "under-half"),
            message=f"{one.metric} reaches {judge.percent(one.value / one.reference)} of the"
            f" {judge.amount(one.reference, one.unit)} measured on such machines; less than half means a"
            " broken link.",
            action=Remedy.RESEAT_OR_CABLE,
            value=one.value / one.reference,
            unit="share",
            method=one.method,
            floor=HALF,
            source=one.source,
            confirm=True,
        )
        for one in judged
        if one.value is not None and one.reference and one.value < HALF * one.reference and not context.small
    ]


def _latency(name: str, record: Values, results: Mapping[int, Values], context: CheckContext) -> tuple[Finding, ...]:
    rounds = list(zip(*(replies.figures(answer.get("latency_us")) for answer in results.values()), strict=True))
    method = f"latency/{record['backend']}/n{record['world']}/{_way(record)}/{record.get('latency_bytes')}B"
    samples = tuple(max(each) for each in rounds)
    measurement = Measurement(
        check=name, metric="latency", gpu=None, unit="us", method=method, samples=samples, lower_is_better=True
    )
    found = as_noted(judge.assess([measurement], context))
    value = statistics.median(samples) if samples else 0.0
    if value <= LATENCY_US_MAX or context.small:
        return found
    flag = Finding(
        check=name,
        metric="latency limit",
        verdict=Grade.WARN,
        code=judge.code_of(name, "high-latency"),
        message=f"A small all-reduce takes {judge.amount(value, 'us')}, more than {LATENCY_US_MAX:g} us: it uses a"
        " slow path. Check which transports and which network NCCL uses (NCCL_SOCKET_IFNAME,"
        " NCCL_IB_DISABLE).",
        action=Remedy.CHECK_CONFIG,
        value=value,
        unit="us",
        method=method,
        floor=LATENCY_US_MAX,
    )
    return (*found, flag)


def _left_out(name: str, curves: Sequence[Curve]) -> tuple[Finding, ...]:
    return tuple(
        Finding(
            check=name,
            metric=f"{curve.op} {curve.bytes}",
            verdict=Grade.SKIPPED,
            code=judge.code_of(name, "left-out"),
            message=f"{curve.op} of {curve.bytes} bytes was skipped: {curve.left_out}.",
        )
        for curve in curves
        if curve.left_out
    )


# Did the switch change something?


def _switched(name: str, record: Values) -> tuple[Finding, ...]:
    """A transport that the variant forbids must not be in NCCL's log; otherwise the default was measured."""
    variant = record.get("variant")
    if variant == "default":
        return ()
    transports = record.get("transports")
    if record.get("backend") != "nccl":
        words = f"{record.get('backend')} cannot be restricted to {variant} only, so this check does not apply."
        return (_switch(name, Grade.SKIPPED, "no-switch", words),)
    if transports is None:
        words = f"Whether only {variant} was used is unknown: NCCL's log does not show it."
        return (_switch(name, Grade.INCONCLUSIVE, "switch-not-seen", words),)
    forbidden = sorted(way for way in transports if not way.startswith(_ALLOWED[str(variant)]))
    if forbidden:
        words = (
            f"Only {variant} was allowed, but NCCL also used {', '.join(forbidden)}: the setting had no effect there."
        )
        return (_switch(name, Grade.INCONCLUSIVE, "switch-without-effect", words),)
    return (_switch(name, Grade.PASS, "switched", f"Only {variant} was used: {', '.join(sorted(transports))}."),)


_ALLOWED = {"nvlink": ("P2P", "NVLS"), "network": ("NET",), "no_nvls": ("P2P", "SHM", "NET")}


def _switch(name: str, verdict: Grade, code: str, message: str) -> Finding:
    action = Remedy.CHECK_CONFIG if verdict is Grade.INCONCLUSIVE else Remedy.NONE
    return Finding(
        check=name,
        metric="variant",
        verdict=verdict,
        code=judge.code_of(name, code),
        message=message,
        action=action,
    )


_SMALL = {"sizes": [2**20], "rounds": 4}
_WHOLE = CheckSize(
    depth=0,
    seconds=14,
    worth=72,
    what="five collectives of 1 GiB, two rounds per GPU",
    params={"ops": list(OPS), "sizes": [PLATEAU], "rounds": None},
    small=_SMALL,
)
_SIZES = CheckSize(
    depth=1,
    seconds=40,
    worth=90,
    what="five collectives from 8 KiB to 8 GiB",
    params={"ops": list(OPS), "sizes": [*SIZES[::4], PLATEAU, 2**32], "rounds": None},
    small={**_SMALL, "sizes": [2**13, 2**20]},
)
_EVERY_SIZE = CheckSize(
    depth=2,
    seconds=150,
    worth=102,
    what="five collectives of every power of two from 8 KiB to 8 GiB, 50 rounds",
    params={"ops": list(OPS), "sizes": list(SIZES), "rounds": 50},
    small={**_SMALL, "sizes": [2**13, 2**16, 2**20]},
)

CHECK = Check(
    name="collectives",
    title="Collectives over all GPUs",
    proves="All-reduce, all-gather, reduce-scatter, broadcast and all-to-all give the correct value in every element"
    " on every GPU, and all-reduce is as fast as the links of this machine allow.",
    cannot="Does not identify which of several links is slow (links does), and does not cover other machines.",
    how=RunMode.TOGETHER,
    servings=(_WHOLE, _SIZES, _EVERY_SIZE),
    request=partial(request, "collectives"),
    interpret=partial(interpret, "collectives"),
    least_gpus=2,
    slices=False,
)


def _variant(variant: str, title: str, proves: str, cannot: str) -> Check:
    name = f"collectives_{variant}"
    serving = CheckSize(
        depth=1,
        seconds=16,
        worth=18,
        what=f"all-reduce of 1 GiB, {variant} only",
        params={"ops": [MAIN], "sizes": [PLATEAU], "rounds": 10, "variant": variant},
        small=_SMALL,
    )
    return Check(
        name=name,
        title=title,
        proves=proves,
        cannot=cannot,
        how=RunMode.TOGETHER,
        servings=(serving,),
        request=partial(request, name),
        interpret=partial(interpret, name),
        least_gpus=2,
        slices=False,
    )


NVLINK = _variant(
    "nvlink",
    "Collectives over NVLink only",
    "All GPUs reach each other over NVLink, without shared memory or the network.",
    "Without a value of an earlier run its speed is reported, not judged.",
)
NETWORK = _variant(
    "network",
    "Collectives over the network only",
    "Every GPU can send and receive through a network card without data corruption.",
    "Within one machine it does not show the speed between two machines; without a value of an earlier run the speed"
    " is reported, not judged.",
)
