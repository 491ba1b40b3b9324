"""Reports that were cut, damaged or edited after the run, with a verdict field that says PASS. None may be accepted."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import formats
from gpukeeper.acceptance.reports.store import MANIFEST
from gpukeeper.acceptance.run import RunConfig, accept
from gpukeeper.acceptance.suite import CHECKS

Document = dict[str, Any]
Change = Callable[[Document], object]


def run(gpus: int = 8, within_s: float = 60.0, **faults: Any) -> Report:
    """A whole run on simulated GPUs that calls itself one on real GPUs, so that it can be accepted."""
    bench = SimulatedWorkbench(gpus=gpus, seed=7, **faults)
    wish = RunRequest(device="cuda", within_s=within_s, expected=gpus)
    order = RunConfig(
        run="run-1", version="0", wish=wish, checks=CHECKS, limits=reference.limits, history=lambda gpus: {}
    )
    return asyncio.run(accept(bench, order, bench.clock))


@cache
def good() -> bytes:
    return formats.report_json(run())


@cache
def failed() -> bytes:
    """GPU 2 computes wrong in bf16, and nothing else is wrong."""
    return formats.report_json(run(flip={2: "bf16"}))


def of_check(name: str) -> Callable[[Document], bool]:
    return lambda finding: bool(finding["check"] == name)


def drop(report: Document, which: Callable[[Document], bool]) -> None:
    report["findings"] = [one for one in report["findings"] if not which(one)]


def each(report: Document, **more: Any) -> None:
    for one in report["findings"]:
        one.update(more)


def without_gpus(report: Document, stay: int) -> None:
    """As if the others had never been there."""
    gpus = report["machine"]["gpus"][:stay]
    names = {one["uuid"] for one in gpus}
    report["machine"] |= {"gpus": gpus, "on_bus": stay}
    report["tallies"] = [one for one in report["tallies"] if one["gpu"] in names]
    drop(report, lambda one: one["gpu"] is not None and one["gpu"] not in names)


def with_grade(report: Document, grade: str, which: Callable[[Document], bool]) -> None:
    next(one for one in report["findings"] if which(one))["verdict"] = grade


def passed(report: Document) -> None:
    """Every verdict but those of the findings."""
    report |= {"verdict": "PASS", "reason": "All findings passed."}
    for one in report["tallies"]:
        one["verdict"] = "PASS"


def _wish(**more: Any) -> Change:
    return lambda report: report["settings"]["wish"].update(more)


def _below_floor(report: Document) -> None:
    one = next(one for one in report["findings"] if one["check"] == "gemm" and one["floor"] is not None)
    one["value"] = one["floor"] / 2


def _too_good(report: Document) -> None:
    one = next(one for one in report["findings"] if one["check"] == "gemm" and one["ceiling"] is not None)
    one["value"] = one["ceiling"] * 2


def _without_exact_or_a_programme(report: Document) -> None:
    report["programme"] = []
    drop(report, of_check("exact"))


def _exact_explained_away(report: Document) -> None:
    drop(report, of_check("exact"))
    report["coverage"].append({"check": "exact", "what": "", "why": "skipped on request (--skip)", "within": ""})


def _of_gpu_2(check: str) -> Callable[[Document], bool]:
    return lambda one: one["check"] == check and str(one["gpu"]).endswith("2")


def _is_fail(one: Document) -> bool:
    return bool(one["verdict"] == "FAIL")


GOOD: dict[str, Change] = {
    "no findings": lambda report: report.update(findings=[]),
    "no findings and no tallies": lambda report: report.update(findings=[], tallies=[]),
    "no GPU": lambda report: report["machine"].update(gpus=[]),
    "GPUs that could not be learned": lambda report: report["machine"].update(gpus={"why": "the driver is gone"}),
    "a FAIL inside": lambda report: with_grade(report, "FAIL", of_check("gemm")),
    "an INCONCLUSIVE inside": lambda report: with_grade(report, "INCONCLUSIVE", of_check("gemm")),
    "8 expected and 1 present": lambda report: without_gpus(report, 1),
    "8 expected and 7 present": lambda report: without_gpus(report, 7),
    "only the findings of one GPU": lambda report: drop(report, lambda one: str(one["gpu"])[-1] not in "0e"),
    "everything skipped": lambda report: each(report, verdict="SKIPPED"),
    "no health": lambda report: drop(report, of_check("health")),
    "no environment": lambda report: drop(report, of_check("environment")),
    "a check that left no trace": lambda report: drop(report, of_check("exact")),
    "a check that left no trace, nor did the programme": _without_exact_or_a_programme,
    "a check that was planned and explained away": _exact_explained_away,
    "a check without one GPU": lambda report: drop(report, _of_gpu_2("exact")),
    "health without one GPU": lambda report: drop(report, _of_gpu_2("health")),
    "no samples": lambda report: each(report, samples=[]),
    "interrupted": lambda report: report.update(interrupted=True),
    "on the CPU": lambda report: report.update(device="cpu"),
    "simulated": lambda report: report.update(device="simulated"),
    "a self-test": lambda report: report.update(self_test=True),
    "only one check asked for": _wish(only=["environment"]),
    "only one GPU asked for": _wish(gpus=["0"]),
    "a check left out": _wish(skip=["exact"]),
    "16 asked for": _wish(expected=16),
    "16 expected": lambda report: report.update(expected=16),
    "planted faults": _wish(inject={"exact": {"flip": "bf16"}}),
    "nothing asked for": lambda report: report.update(settings={}),
    "a wish that is none": lambda report: report.update(settings={"wish": 7}),
    "a figure below its floor": _below_floor,
    "a figure too good to be true": _too_good,
    "a GPU that does not answer": lambda report: report["machine"].update(silent=["GPU 8 is silent"]),
    "a GPU that only the bus shows": lambda report: report["machine"].update(on_bus=9),
    "one GPU eight times": lambda report: report["machine"].update(gpus=report["machine"]["gpus"][:1] * 8),
    "findings of other GPUs": lambda report: [one.update(uuid=one["uuid"] + "x") for one in report["machine"]["gpus"]],
    "a tally that failed": lambda report: report["tallies"][3].update(verdict="FAIL"),
    "an end before its beginning": lambda report: report.update(ended="2020-01-01T00:00:00Z"),
    "a pass with the code of a failure": lambda report: report["findings"][0].update(code="gemm-below-floor"),
    "no torch": lambda report: report["machine"]["environment"].pop("torch"),
}
FAILED: dict[str, Change] = {
    "a FAIL that says PASS": passed,
    "a FAIL whose verdict field says WARN": lambda report: report.update(verdict="WARN"),
    "a FAIL whose finding says PASS": lambda report: (passed(report), with_grade(report, "PASS", _is_fail)),
    "a FAIL whose finding says SKIPPED": lambda report: (passed(report), with_grade(report, "SKIPPED", _is_fail)),
    "a FAIL without its finding": lambda report: (passed(report), drop(report, _is_fail)),
    "a FAIL without its check": lambda report: (passed(report), drop(report, of_check("exact"))),
    "a FAIL without its GPU": lambda report: (passed(report), without_gpus(report, 2)),
}
NAMES = (*GOOD, *FAILED)


def altered(name: str) -> bytes:
    text, change = (good(), GOOD[name]) if name in GOOD else (failed(), FAILED[name])
    report = json.loads(text)
    change(report)
    return json.dumps(report).encode()


def put(folder: Path, text: bytes) -> Path:
    """With a manifest that fits, as somebody who edits reports would make it."""
    folder.mkdir()
    (folder / formats.REPORT).write_bytes(text)
    (folder / MANIFEST).write_text(f"{hashlib.sha256(text).hexdigest()}  {formats.REPORT}\n")
    return folder
