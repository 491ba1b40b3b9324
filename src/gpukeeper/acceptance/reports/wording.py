"""Wording that all views of a report share: values, GPUs, times, required actions. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from statistics import median

from gpukeeper.acceptance.record import Finding, Machine, Remedy, Report
from gpukeeper.model.gpu import Fact, Gpu, Grade, rank
from gpukeeper.model.unknown import Unknown

NODE = "node"  # in the place of a GPU: a finding about the machine as a whole
SPEEDS, TIMES = frozenset({"TFLOP/s", "GB/s", "samples/s"}), frozenset({"us", "ms", "s"})
LESS_IS_BETTER = TIMES | {"C", "elements", "words", "errors"}  # temperatures, and counts of what is wrong
_SIGNS = {"us": "µs", "C": "°C", "percent": "%", "elements": "wrong elements", "words": "wrong words"}
# The required action, from the mildest to the most severe action.
DUTIES: Mapping[Remedy, tuple[str, str]] = {
    Remedy.NONE: ("", "no action is required"),
    Remedy.WATCH: ("Operator", "watch it, and test it again within a few days"),
    Remedy.RETEST: ("Operator", "test again"),
    Remedy.RESET_SETTING: (
        "Administrator",
        "reset the setting named in the finding with its command, then test again",
    ),
    Remedy.CHECK_CONFIG: ("Administrator", "fix the configuration named in the finding, then test again"),
    Remedy.RESET_GPU: ("Administrator", "reset the GPU, then test again"),
    Remedy.REBOOT: ("Administrator", "reboot the machine, then test again"),
    Remedy.RESEAT_OR_CABLE: ("On-site technician", "reseat the GPU and its cables, then test again"),
    Remedy.REPLACE_NIC: ("Vendor", "replace the network card"),
    Remedy.CONTACT_VENDOR: ("Vendor", "investigate the finding"),
    Remedy.REPLACE_GPU: ("Vendor", "replace the GPU"),
}
_HARDNESS = {remedy: place for place, remedy in enumerate(DUTIES)}


def figure(value: float | None, unit: str = "") -> str:
    """Four digits that count: 794.5, 4.263, 12,345. A share is shown in percent."""
    if value is None:
        return "not measured"
    if not math.isfinite(value):
        return str(value)
    if unit == "share":
        return f"{figure(value * 100)} %"
    digits = 0 if value == 0 or abs(value) >= 1000 else max(0, 3 - math.floor(math.log10(abs(value))))
    words = f"{value:,.{min(digits, 9)}f}"
    if "." in words:
        words = words.rstrip("0").rstrip(".")
    return f"{words} {unit_words(unit)}".rstrip()


def unit_words(unit: str) -> str:
    return _SIGNS.get(unit, unit)


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{share * 100:.{digits}f} %"


def fact(value: Fact) -> str:
    if isinstance(value, Unknown):
        return str(value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return figure(value) if isinstance(value, float) else str(value)


def printable(words: str) -> str:
    """In one line, without control characters: a report may contain untrusted text."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in words)


def identity_of(report: Report, gpu: Gpu) -> str:
    """Its identity in other reports. If neither a serial number nor a uuid identifies it: its place in
    its machine, so that GPUs of two machines are never taken for one."""
    known = report.device == "cuda" and any(sign in "123456789abcdef" for sign in gpu.uuid.lower().removeprefix("gpu-"))
    return gpu.identity if gpu.identity != gpu.uuid or known else f"{report.node}/{gpu.index}"


def moment(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def gpus_of(machine: Machine) -> tuple[Gpu, ...]:
    """Empty if they could not be read; callers that need the difference use the machine itself."""
    return () if isinstance(machine.gpus, Unknown) else machine.gpus


def gpu_of(report: Report, uuid: str | None) -> Gpu | None:
    return next((gpu for gpu in gpus_of(report.machine) if gpu.uuid == uuid), None)


def gpu_words(report: Report, uuid: str | None) -> str:
    """GPU 3; a slice by its profile too; the node; a uuid that the machine does not list as it is."""
    if uuid is None:
        return NODE
    gpu = gpu_of(report, uuid)
    if gpu is None:
        return uuid
    place = "CPU" if report.device == "cpu" else "GPU"
    return f"{place} {gpu.index}" + (f" {gpu.profile}" if gpu.profile else "")


def serial_of(gpu: Gpu | None) -> str:
    return "" if gpu is None or isinstance(gpu.serial, Unknown) else gpu.serial


def metric_words(finding: Finding) -> str:
    return f"{finding.check}.{finding.metric}" if finding.metric else finding.check


def less_is_better(unit: str) -> bool:
    """By its unit; a finding may override it."""
    return unit in LESS_IS_BETTER


def direction(unit: str) -> str:
    """In words; empty for units without a direction, such as shares and watts."""
    if unit in SPEEDS:
        return "higher is better"
    return "lower is better" if less_is_better(unit) else ""


def value_of(finding: Finding) -> float | None:
    """The figure, or the median of its samples."""
    if finding.value is not None:
        return finding.value
    return median(finding.samples) if finding.samples else None


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda one: (-rank(one.verdict), one.check, one.metric, one.gpu or ""))


def needs_attention(report: Report) -> list[Finding]:
    good = {Grade.PASS, Grade.SKIPPED}
    return worst_first(finding for finding in report.findings if finding.verdict not in good)


def hardest(findings: Iterable[Finding]) -> Remedy:
    return max((finding.action for finding in findings), key=_HARDNESS.__getitem__, default=Remedy.NONE)


def duty(report: Report) -> str:
    """One sentence: the required action, by whom, and on which GPU. The most severe action of the worst findings."""
    guilty = [finding for finding in report.findings if finding.verdict is report.verdict]
    remedy = hardest(guilty)
    if remedy is Remedy.NONE and report.verdict in {Grade.FAIL, Grade.INCONCLUSIVE}:
        return "Operator: read the findings, and test again."
    if remedy is Remedy.NONE:
        return "none"
    who, what = DUTIES[remedy]
    places = dict.fromkeys(gpu_words(report, finding.gpu) for finding in guilty if finding.action is remedy)
    return f"{who}: {what} ({', '.join(places)})."


def retest_command(report: Report) -> str:
    """What to type to test again what was found wanting, and nothing else; everything when nothing was."""
    found = [finding for finding in report.findings if finding.verdict in {Grade.FAIL, Grade.INCONCLUSIVE}]
    words = ["gpukeeper", "accept"]
    if report.device != "cuda":
        words += ["--device", report.device]
    if report.profile != "quick":
        words += ["--within", report.profile]
    places = {gpu.index for finding in found if (gpu := gpu_of(report, finding.gpu)) is not None}
    if places and not any(finding.gpu is None for finding in found):
        words += ["--gpus", ",".join(str(place) for place in sorted(places))]
    elif report.expected is not None:
        words += ["--expect", str(report.expected)]
    return " ".join(words)
