"""The log lines of the older test kits, tag for tag, so that searches for `[RESULT] FAILURE` in logs still work.

Pure: a line for a finding during the run, and the closing ones from the report. C4.2 and C4.6 list the tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpukeeper.acceptance.record import Finding, Report
from gpukeeper.acceptance.reports.records import family, plain
from gpukeeper.acceptance.reports.wording import figure, gpu_words, needs_attention
from gpukeeper.model.grade import Grade, worst

ENV, COMPUTE, TRAIN, DDP, DDP_TRAIN = "ENV", "COMPUTE", "TRAIN", "DDP", "DDP-TRAIN"
RUN, RESULT, SUMMARY = "RUN", "RESULT", "SUMMARY"
DATASET, MODEL, MUL, SHELL = "DATASET", "MODEL", "MUL", "SHELL"  # verbose only
SGEMM, BATCHED, ALL_REDUCE = "COMPUTE/SGEMM", "COMPUTE/BATCHED", "NCCL/AR"
_CHECKS: Mapping[str, str] = {
    **dict.fromkeys(("environment", "health", "topology", "report"), ENV),
    **dict.fromkeys(("gemm", "exact", "memory_pattern", "stress"), COMPUTE),
    **dict.fromkeys(("training", "throughput"), TRAIN),
    "memory_bandwidth": "BW/HBM",
    "copies": "BW",
    "links": "BW/P2P",
    "collectives": DDP,
    "nccl_tests": ALL_REDUCE,
    "ddp": DDP_TRAIN,
}
_METRICS: Mapping[tuple[str, str], str] = {
    ("gemm", "fp32"): SGEMM,
    ("gemm", "sgemm"): SGEMM,
    ("gemm", "batched"): BATCHED,
    ("copies", "h2d"): "BW/H2D",
    ("copies", "d2h"): "BW/D2H",
    ("copies", "d2d"): "BW/D2D",
    ("collectives", "all_reduce"): ALL_REDUCE,
}
# Parameters of a probe in the verbose lines.
_VERBOSE: Mapping[str, str] = {"gemm": MUL, "training": DATASET, "throughput": MODEL, "ddp": DATASET}


def tag(check: str, metric: str = "") -> str:
    """A check that is newer than the tags counts as compute."""
    name = family(check)
    return _METRICS.get((name, plain(metric)), _CHECKS.get(name, COMPUTE))


def tagged(finding: Finding, report: Report | None = None) -> str:
    """One finding, live: `[COMPUTE] PASS GPU 3 gemm.bf16 794.5 TFLOP/s: …`. Without a report GPUs go by their uuid."""
    place = finding.gpu or "" if report is None else gpu_words(report, finding.gpu)
    name = f"{finding.check}.{finding.metric}" if finding.metric else finding.check
    value = "" if finding.value is None else figure(finding.value, finding.unit)
    head = " ".join(word for word in (finding.verdict.value, place, name, value) if word)
    return line(tag(finding.check, finding.metric), f"{head}: {finding.message}")


def running(check: str, what: str = "") -> str:
    return line(RUN, f"{check}: {what}" if what else check)


def started(params: Mapping[str, object], check: str) -> str:
    """The parameters of a probe, under the verbose tag of its kind."""
    settings = " ".join(f"{name}={value}" for name, value in params.items())
    return line(_VERBOSE.get(plain(check), SHELL), f"{check} {settings}".rstrip())


def closing(report: Report, saved: str = "") -> list[str]:
    """[SUMMARY] for every check, then the [RESULT]. `saved`: where the report lies."""
    found = [line(SUMMARY, f"{check}: {grade}") for check, grade in by_check(report.findings).items()]
    if saved:
        found.append(line(SUMMARY, f"report saved: {saved}"))
    return [*found, result(report)]


def result(report: Report) -> str:
    """SUCCESS only for an accepted node. FAILURE with what failed. SKIPPED: it could not be determined, which is no
    success; the older kits have no other word for it."""
    if report.verdict in {Grade.PASS, Grade.WARN}:
        return line(RESULT, "SUCCESS")
    guilty = needs_attention(report)
    failed = _listed(report, [one for one in guilty if one.verdict is Grade.FAIL])
    open_ = _listed(report, [one for one in guilty if one.verdict is Grade.INCONCLUSIVE])
    if failed or report.verdict is Grade.FAIL:
        return line(RESULT, f"FAILURE: {failed or report.reason}")
    return line(RESULT, f"SKIPPED: not accepted, {report.verdict}: {open_ or report.reason}")


def _listed(report: Report, findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(f"{gpu_words(report, one.gpu)} {one.code}" for one in findings))


def by_check(findings: Iterable[Finding]) -> dict[str, Grade]:
    grades: dict[str, list[Grade]] = {}
    for finding in findings:
        grades.setdefault(finding.check, []).append(finding.verdict)
    skipped = {Grade.SKIPPED}
    return {check: Grade.SKIPPED if set(found) == skipped else worst(found) for check, found in grades.items()}


def line(name: str, words: str) -> str:
    """One line, whatever the words hold: a log reader must not see a tag that a GPU's name smuggled in."""
    return f"[{name}] " + " ".join("".join(ch if ch.isprintable() else " " for ch in words).split(" "))
