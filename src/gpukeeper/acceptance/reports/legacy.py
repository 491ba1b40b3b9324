"""Report files and log lines of the older test kits, tag for tag, for programs that still read them. Pure.

Where the old kits wrote `true` for a figure they had not kept, these files have value, unit and method. LEGACY_FIELDS
is every file and field; docs/reference/acceptance-files.md is compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gpukeeper.acceptance.record import Finding, Report
from gpukeeper.acceptance.reports.formats import (
    COLLECTIVES,
    ProbeRecord,
    broken_words,
    family,
    floats,
    mappings,
    plain,
    probe_records,
    records_over_nodes,
)
from gpukeeper.acceptance.reports.wording import (
    fact,
    figure,
    gpu_of,
    gpu_words,
    gpus_of,
    needs_attention,
    serial_of,
    value_of,
)
from gpukeeper.model import reading
from gpukeeper.model.gpu import Grade, worst

ENV_TAG, COMPUTE_TAG, TRAIN_TAG, DDP_TAG, DDP_TRAIN_TAG = "ENV", "COMPUTE", "TRAIN", "DDP", "DDP-TRAIN"
RUN_TAG, RESULT_TAG, SUMMARY_TAG = "RUN", "RESULT", "SUMMARY"
DATASET_TAG, MODEL_TAG, MUL_TAG, SHELL_TAG = "DATASET", "MODEL", "MUL", "SHELL"  # verbose only
SGEMM_TAG, BATCHED_TAG, ALL_REDUCE_TAG = "COMPUTE/SGEMM", "COMPUTE/BATCHED", "NCCL/AR"
_CHECKS: Mapping[str, str] = {
    **dict.fromkeys(("environment", "health", "topology", "report"), ENV_TAG),
    **dict.fromkeys(("gemm", "exact", "memory_pattern", "stress"), COMPUTE_TAG),
    **dict.fromkeys(("training", "throughput"), TRAIN_TAG),
    "memory_bandwidth": "BW/HBM",
    "copies": "BW",
    "links": "BW/P2P",
    "collectives": DDP_TAG,
    "nccl_tests": ALL_REDUCE_TAG,
    "ddp": DDP_TRAIN_TAG,
}
_METRICS: Mapping[tuple[str, str], str] = {
    ("gemm", "fp32"): SGEMM_TAG,
    ("gemm", "sgemm"): SGEMM_TAG,
    ("gemm", "batched"): BATCHED_TAG,
    ("copies", "h2d"): "BW/H2D",
    ("copies", "d2h"): "BW/D2H",
    ("copies", "d2d"): "BW/D2D",
    ("collectives", "all_reduce"): ALL_REDUCE_TAG,
}
# Parameters of a probe in the verbose lines.
_VERBOSE: Mapping[str, str] = {"gemm": MUL_TAG, "training": DATASET_TAG, "throughput": MODEL_TAG, "ddp": DATASET_TAG}


def tag_of(check: str, metric: str = "") -> str:
    """A check that is newer than the tags counts as compute."""
    name = family(check)
    return _METRICS.get((name, plain(metric)), _CHECKS.get(name, COMPUTE_TAG))


def finding_line(finding: Finding, report: Report | None = None) -> str:
    """One finding, live: `[COMPUTE] PASS GPU 3 gemm.bf16 794.5 TFLOP/s: …`. Without a report GPUs go by their uuid."""
    place = finding.gpu or "" if report is None else gpu_words(report, finding.gpu)
    name = f"{finding.check}.{finding.metric}" if finding.metric else finding.check
    value = "" if finding.value is None else figure(finding.value, finding.unit)
    head = " ".join(word for word in (finding.verdict.value, place, name, value) if word)
    return log_line(tag_of(finding.check, finding.metric), f"{head}: {finding.message}")


def running_line(check: str, what: str = "") -> str:
    return log_line(RUN_TAG, f"{check}: {what}" if what else check)


def parameters_line(params: Mapping[str, object], check: str) -> str:
    """The parameters of a probe, under the verbose tag of its kind."""
    settings = " ".join(f"{name}={value}" for name, value in params.items())
    return log_line(_VERBOSE.get(plain(check), SHELL_TAG), f"{check} {settings}".rstrip())


def closing_lines(report: Report, saved: str = "") -> list[str]:
    """[SUMMARY] for every check, then the [RESULT]. `saved`: where the report lies."""
    found = [log_line(SUMMARY_TAG, f"{check}: {grade}") for check, grade in grade_by_check(report.findings).items()]
    if saved:
        found.append(log_line(SUMMARY_TAG, f"report saved: {saved}"))
    return [*found, result_line(report)]


def result_line(report: Report) -> str:
    """SUCCESS only for an accepted node. FAILURE with what failed. SKIPPED: it could not be determined, which is no
    success; the older kits have no other word for it."""
    if report.verdict in {Grade.PASS, Grade.WARN}:
        return log_line(RESULT_TAG, "SUCCESS")
    guilty = needs_attention(report)
    failed = _listed(report, [one for one in guilty if one.verdict is Grade.FAIL])
    open_ = _listed(report, [one for one in guilty if one.verdict is Grade.INCONCLUSIVE])
    if failed or report.verdict is Grade.FAIL:
        return log_line(RESULT_TAG, f"FAILURE: {failed or report.reason}")
    return log_line(RESULT_TAG, f"SKIPPED: not accepted, {report.verdict}: {open_ or report.reason}")


def _listed(report: Report, findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(f"{gpu_words(report, one.gpu)} {one.code}" for one in findings))


def grade_by_check(findings: Iterable[Finding]) -> dict[str, Grade]:
    grades: dict[str, list[Grade]] = {}
    for finding in findings:
        grades.setdefault(finding.check, []).append(finding.verdict)
    skipped = {Grade.SKIPPED}
    return {check: Grade.SKIPPED if set(found) == skipped else worst(found) for check, found in grades.items()}


def log_line(name: str, words: str) -> str:
    """One line, whatever the words hold: a log reader must not see a tag that a GPU's name smuggled in."""
    return f"[{name}] " + " ".join("".join(ch if ch.isprintable() else " " for ch in words).split(" "))


SUMMARY = "summary.json"
GPU_TESTS, DDP_TESTS, DDP_TRAINING = "gpu_tests_result.json", "ddp_tests_result.json", "ddp_training_result.json"
THROUGHPUT = "results.json"
HOST = "gpu_accept_<node>.json"
SKIPPED: Mapping[str, str] = {
    GPU_TESTS: "gpu_tests_skipped.json",
    DDP_TESTS: "ddp_tests_skipped.json",
    DDP_TRAINING: "ddp_training_skipped.json",
    THROUGHPUT: "throughput_skipped.json",
}
_SKIP_FIELDS = {"skipped": "always true", "reason": "why it did not run"}
LEGACY_FIELDS: Mapping[str, Mapping[str, str]] = {
    SUMMARY: {
        "env": "what the tests ran on",
        "env.cuda_available": "whether a GPU was found",
        "env.cuda_device_count": "how many; null if unknown",
        "env.torch": "version of PyTorch; null if not installed",
        "gpu_tests": "results of single GPUs; null if none ran",
        "gpu_tests.returncode": "0 accepted, 2 not",
        "gpu_tests.stdout": "its lines, with the old tags",
        "gpu_tests.stderr": "errors while measuring",
        "ddp_tests": "collectives, as above; null if they did not run",
        "ddp_tests.returncode": "0 accepted, 3 not",
        "ddp_tests.stdout": "as above",
        "ddp_tests.stderr": "as above",
        "ddp_train": "training over all GPUs, as above; null if it did not run",
        "ddp_train.returncode": "0 accepted, 3 not",
        "ddp_train.stdout": "as above",
        "ddp_train.stderr": "as above",
    },
    GPU_TESTS: {
        "env": "what the tests ran on",
        "env.cuda_available": "whether a GPU was found",
        "env.cuda_device_count": "how many; null if unknown",
        "env.torch": "version of PyTorch; null if not installed",
        "env.python": "version of Python; null if unknown",
        "env.nvidia_smi": "one line per GPU, as printed by nvidia-smi -L",
        "compute": "a list: gpu, metric, value, unit, method, verdict of every measurement; empty if there is none",
        "training": "a list: gpu, loss_start, loss_end, improved of every GPU; only if nothing failed",
        "failures": "sentences, instead of training if something failed or could not be tested",
    },
    DDP_TESTS: {
        "world": "number of ranks",
        "iters": "rounds, each with fresh buffers",
        "numel": "elements of the largest all-reduce",
        "time": "seconds of its rounds; null if not measured",
        "ok": "true only if every element on every rank was correct and the check passed",
    },
    DDP_TRAINING: {
        "world": "number of ranks",
        "epochs": "passes over the data",
        "batch_size": "per rank",
        "steps": "steps taken",
        "loss_start": "before the first step",
        "loss_end": "after the last one",
        "improved": "true only if the loss fell by the required amount on every rank",
    },
    THROUGHPUT: {
        "model": "resnet50, resnet18 or transformer",
        "world_size": "number of ranks",
        "batch_size_per_gpu": "samples per step on one GPU",
        "global_batch_size": "on all GPUs",
        "total_time_seconds": "of the measured steps",
        "average_step_time_seconds": "mean of them",
        "throughput_samples_per_second": "of all ranks together, counted once",
        "total_samples": "of all ranks together",
        "device": "cuda or cpu",
        "backend": "nccl or gloo",
        "nccl_overhead_ms": "time of a step in collectives; null if not measured",
        "gpu_utilization_pct": "null if not measured",
        "avg_step_time_ms": "mean step time in milliseconds",
    },
    HOST: {
        "node": "name of the machine",
        "verdict": "PASS, WARN, FAIL or INCONCLUSIVE",
        "reason": "a sentence",
        "started": "when",
        "ended": "when",
        "gpus": "a list: index, uuid, serial, name, verdict",
        "results": "a list: tag, gpu, check, metric, value, unit, method, verdict, message of every finding",
    },
    **dict.fromkeys(SKIPPED.values(), _SKIP_FIELDS),
}
# The older kits ended with these: 0 also without any GPU, 2 for a GPU, 3 for a collective; torchrun made 1 of that.
ACCEPTED, GPU_FAILED, COLLECTIVE_FAILED = 0, 2, 3
_COLLECTIVE = frozenset({"collectives", "nccl_tests", "links"})
_TOGETHER = _COLLECTIVE | {"ddp"}
_GROUP = "group"  # several nodes as one run: its findings name the probe in their metric
_BYTES = {"fp64": 8, "int64": 8, "fp32": 4, "int32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "uint8": 1}


def is_ours(name: str, content: bytes) -> bool:
    """Whether a file of that name was written by us or by an older kit: an object with documented fields and no others.
    `results.json` is a common name, and no other file may be replaced."""
    fields = _SKIP_FIELDS if name in SKIPPED.values() else LEGACY_FIELDS.get(name, LEGACY_FIELDS[SUMMARY])
    try:
        found = reading.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return bool(found) and found.keys() <= {field.partition(".")[0] for field in fields}


def files(report: Report, summary: str = SUMMARY) -> dict[str, str]:
    """By name. What did not run has a `…_skipped.json` with the reason instead."""
    written: dict[str, Any] = {summary: _summary(report)}
    makers: Mapping[str, Callable[[Report], dict[str, Any] | None]] = {
        GPU_TESTS: _gpu_tests,
        DDP_TESTS: _ddp_tests,
        DDP_TRAINING: _ddp_training,
        THROUGHPUT: _throughput,
    }
    for name, make in makers.items():
        made = make(report)
        if made is None:
            written[SKIPPED[name]] = {"skipped": True, "reason": _why_not(report, _BEHIND[name])}
        else:
            written[name] = made
    written[host_file(report.node)] = _host(report)
    return {
        name: msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n"
        for name, content in written.items()
    }


def host_file(node: str) -> str:
    return HOST.replace("<node>", re.sub(r"[^A-Za-z0-9._-]", "_", node) or "node")


_BEHIND: Mapping[str, frozenset[str]] = {
    GPU_TESTS: frozenset(),
    DDP_TESTS: _COLLECTIVE,
    DDP_TRAINING: frozenset({"ddp"}),
    THROUGHPUT: frozenset({"throughput"}),
}


def _summary(report: Report) -> dict[str, Any]:
    collective = [finding for finding in report.findings if _kind(finding) in _COLLECTIVE]
    together = [finding for finding in report.findings if _kind(finding) == "ddp"]
    single = [finding for finding in report.findings if _kind(finding) not in _TOGETHER]
    return {
        "env": _env(report),
        "gpu_tests": _part(report, single, GPU_FAILED),
        "ddp_tests": _part(report, collective, COLLECTIVE_FAILED),
        "ddp_train": _part(report, together, COLLECTIVE_FAILED),
    }


def _part(report: Report, findings: Sequence[Finding], failed: int) -> dict[str, Any] | None:
    ran = [finding for finding in findings if finding.verdict is not Grade.SKIPPED]
    if not ran:
        return None
    checks = dict.fromkeys(finding.check for finding in ran)
    accepted = report.device == "cuda" and worst(one.verdict for one in ran) in {Grade.PASS, Grade.WARN}
    return {
        "returncode": ACCEPTED if accepted else failed,
        "stdout": "\n".join(finding_line(finding, report) for finding in ran),
        "stderr": "\n".join(words for check in checks for words in broken_words(report, check)),
    }


def _kind(finding: Finding) -> str:
    """Training over several nodes counts as training; all else of a group as its collectives."""
    if finding.check != _GROUP:
        return family(finding.check)
    return "ddp" if (finding.metric or "").startswith("ddp") else COLLECTIVES


def _env(report: Report) -> dict[str, Any]:
    count = None if not isinstance(report.machine.gpus, tuple) else len(report.machine.gpus)
    if report.device == "cpu":
        count = 0
    return {
        "cuda_available": bool(count),
        "cuda_device_count": count,
        "torch": _version(report, "torch"),
    }


def _version(report: Report, name: str) -> str | None:
    known = report.machine.environment.get(name)
    return known if isinstance(known, str) else None


def _gpu_tests(report: Report) -> dict[str, Any] | None:
    ran = [one for one in report.findings if _kind(one) not in _TOGETHER and one.verdict is not Grade.SKIPPED]
    if not ran:
        return None
    listed = [f"GPU {gpu.index}: {fact(gpu.name)} (UUID: {gpu.uuid})" for gpu in gpus_of(report.machine)]
    env = {**_env(report), "python": _version(report, "python"), "nvidia_smi": "\n".join(listed) or "no GPU"}
    failures = [f"{gpu_words(report, one.gpu)}: {one.message}" for one in needs_attention(report) if _failed(one)]
    compute = [_figure(report, one) for one in ran if value_of(one) is not None]
    ending = {"failures": failures} if failures else {"training": _trainings(report)}
    return {"env": env, "compute": compute, **ending}


def _failed(finding: Finding) -> bool:
    return finding.verdict is not Grade.WARN and _kind(finding) not in _TOGETHER


def _figure(report: Report, finding: Finding) -> dict[str, Any]:
    return {
        "gpu": gpu_words(report, finding.gpu),
        "metric": f"{finding.check}.{finding.metric}" if finding.metric else finding.check,
        "value": value_of(finding),
        "unit": finding.unit,
        "method": finding.method,
        "verdict": finding.verdict,
    }


def _trainings(report: Report) -> list[dict[str, Any]]:
    found = []
    for one in probe_records(report, "training"):
        for run in mappings(one.result.get("runs"))[:1]:
            figures = {name: run.get(name) for name in ("loss_start", "loss_end")}
            found.append({"gpu": gpu_words(report, one.by), **figures, "improved": _passed(report, "training", one.by)})
    return found


def _passed(report: Report, check: str, gpu: str | None = None) -> bool:
    """Every finding of it, on this GPU or on any."""
    mine = [one for one in report.findings if _kind(one) == check and (gpu is None or one.gpu in {gpu, None})]
    return worst(finding.verdict for finding in mine) in {Grade.PASS, Grade.WARN}


def _ddp_tests(report: Report) -> dict[str, Any] | None:
    ranks = records_over_nodes(report, COLLECTIVES) or probe_records(report, COLLECTIVES)
    reduced = [_all_reduce(one) for one in ranks]
    if not reduced:
        return None
    first = reduced[0]
    right = all(one.get("wrong") == 0 for one in _entries(ranks))
    size = _BYTES.get(str(ranks[0].result.get("dtype", "fp32")), 4)
    counted = first.get("bytes")
    return {
        "world": ranks[0].result.get("world"),
        "iters": first.get("rounds"),
        "numel": first.get("numel", counted // size if isinstance(counted, int) else None),
        "time": sum(spans) if (spans := floats(first.get("seconds", []))) else None,
        "ok": right and _complete(report, ranks, COLLECTIVES) and _passed(report, COLLECTIVES),
    }


def _entries(ranks: Sequence[ProbeRecord]) -> list[Mapping[str, Any]]:
    """Those that ran: sizes that did not fit into memory are only named."""
    return [one for rank in ranks for one in mappings(rank.result.get("results")) if "left_out" not in one]


def _all_reduce(rank: ProbeRecord) -> Mapping[str, Any]:
    """The largest; an empty one when this rank did none."""
    found = [one for one in _entries([rank]) if one.get("op") == "all_reduce"]
    return max(found, key=lambda one: int(one.get("bytes", 0)), default={})


def _ddp_training(report: Report) -> dict[str, Any] | None:
    ranks = records_over_nodes(report, "ddp") or probe_records(report, "ddp")
    if not ranks:
        return None
    first = ranks[0].result
    fields = {name: first.get(name) for name in LEGACY_FIELDS[DDP_TRAINING] if name != "improved"}
    return {**fields, "improved": _complete(report, ranks, "ddp") and _passed(report, "ddp")}


def _complete(report: Report, ranks: Sequence[ProbeRecord], probe: str) -> bool:
    """Every rank has a result. Those of a group's other nodes are in their reports: its findings are about all."""
    if records_over_nodes(report, probe):
        found = [one for one in report.findings if one.check == _GROUP and _kind(one) == probe]
        return any(one.verdict is Grade.PASS for one in found)
    return len(ranks) == ranks[0].result.get("world")


def _throughput(report: Report) -> dict[str, Any] | None:
    ranks = probe_records(report, "throughput")
    return {name: ranks[0].result.get(name) for name in LEGACY_FIELDS[THROUGHPUT]} if ranks else None


def _why_not(report: Report, checks: frozenset[str]) -> str:
    """The messages of the run, else that nothing of it ran."""
    messages = [one.message for one in report.findings if _kind(one) in checks]
    messages += [one.why for one in report.coverage if family(one.check) in checks]
    return (
        messages[0]
        if messages
        else ("no_gpu" if not gpus_of(report.machine) else f"not part of this run: {report.reason}")
    )


def _host(report: Report) -> dict[str, Any]:
    verdicts = {tally.gpu: tally.verdict for tally in report.tallies}
    return {
        "node": report.node,
        "verdict": report.verdict,
        "reason": report.reason,
        "started": report.started,
        "ended": report.ended,
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "serial": serial_of(gpu) or None,
                "name": fact(gpu.name),
                "verdict": verdicts.get(gpu.uuid),
            }
            for gpu in gpus_of(report.machine)
        ],
        "results": [_host_line(report, finding) for finding in report.findings],
    }


def _host_line(report: Report, finding: Finding) -> dict[str, Any]:
    gpu = gpu_of(report, finding.gpu)
    return {
        "tag": f"[{tag_of(finding.check, finding.metric)}]",
        "gpu": None if gpu is None else gpu.index,
        "check": finding.check,
        "metric": finding.metric,
        "value": value_of(finding),
        "unit": finding.unit,
        "method": finding.method,
        "verdict": finding.verdict,
        "message": finding.message,
    }
