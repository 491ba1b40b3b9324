"""The verdict of a report that was read from a file: computed again from what the report contains. Pure.

The verdict field of a file is a claim. Findings, coverage, the machine and what was expected are the evidence, and the
worse of both counts. Evidence that is missing or contradicts itself is a finding of its own (check `report`) and makes
the report INCONCLUSIVE. A report as written by a run, without changes, is returned as it is.

This detects reports that were damaged, cut or edited. It does not detect a report that was forged as a whole: reports
are not signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gpukeeper.acceptance import suite
from gpukeeper.acceptance.check import CheckContext, CheckRun, CheckSize, RunRequest
from gpukeeper.acceptance.checks import environment, health
from gpukeeper.acceptance.judging import verdicts
from gpukeeper.acceptance.record import Finding, GpuSummary, Remedy, Report, Thresholds
from gpukeeper.model.gpu import Gpu, Grade, rank, worst
from gpukeeper.model.unknown import Unknown

NAME = "report"
PASSED = ("-ok", "-exact", "-switched")  # how codes of a PASS end
HARD = frozenset(
    {Remedy.RESET_GPU, Remedy.REBOOT, Remedy.RESEAT_OR_CABLE, Remedy.REPLACE_GPU, Remedy.REPLACE_NIC}
    | {Remedy.CONTACT_VENDOR}
)  # never the remedy of a check that was skipped
ADVICE = "Test the machine again, or copy the report directory from the machine"


def recomputed(report: Report, doubts: Iterable[str] = ()) -> Report:
    """`doubts`: what the reader of the file noticed, a sentence each (the manifest does not match)."""
    wish = wish_of(report)
    request = wish or RunRequest(device=report.device)
    known = _gpus(report)
    gpus = verdicts.wanted(known, request.gpus)
    added = [*_expectations(report, request), *(_doubt("changed", words) for words in doubts)]
    added += [_doubt("incomplete", words) for words in _incomplete(report, wish, gpus)]
    added += [_doubt("contradiction", words) for words in _contradictions(report, wish, known)]
    verdict, reason = verdicts.of_run(request, gpus, (*report.findings, *added), interrupted=report.interrupted)
    if rank(verdict) > rank(report.verdict):
        words = f"the verdict of the report is {report.verdict}, its findings give {verdict}"
        added.append(_doubt("verdict", words))
        verdict, reason = verdicts.of_run(request, gpus, (*report.findings, *added), interrupted=report.interrupted)
    if rank(report.verdict) >= rank(verdict):
        verdict, reason = report.verdict, report.reason
    findings = (*report.findings, *added)
    return msgspec.structs.replace(
        report, verdict=verdict, reason=reason, findings=findings, tallies=_tallies(report, gpus, findings)
    )


def wish_of(report: Report) -> RunRequest | None:
    """None: the report does not contain the request."""
    try:
        return msgspec.convert(report.settings.get("wish"), RunRequest)
    except msgspec.ValidationError:
        return None


def _gpus(report: Report) -> tuple[Gpu, ...]:
    return () if isinstance(report.machine.gpus, Unknown) else report.machine.gpus


def _tallies(report: Report, gpus: Sequence[Gpu], findings: Sequence[Finding]) -> tuple[GpuSummary, ...]:
    """The worse of the stored verdict and the verdict of its findings, for GPUs that the machine lists."""
    stored = {one.gpu: one for one in report.tallies}
    found = []
    for one in verdicts.of_gpus(gpus, findings, {}, 0.0):
        old = stored.get(one.gpu)
        keep = old is not None and rank(old.verdict) >= rank(one.verdict)
        found.append(old if old is not None and keep else msgspec.structs.replace(one, busy=old.busy if old else None))
    return tuple(found)


def _expectations(report: Report, wish: RunRequest) -> Iterator[Finding]:
    """Is this the machine that was expected? The same check that read it during the run reads it again."""
    if report.device != "cuda":
        return
    expected = max((one for one in (report.expected, wish.expected) if one is not None), default=None)
    context = CheckContext(
        wish=msgspec.structs.replace(wish, device=report.device, expected=expected),
        machine=report.machine,
        gpus=_gpus(report),
        limits=lambda *_: Thresholds(),
    )
    there = {one.code for one in report.findings}
    for one in environment.interpret(CheckRun(CheckSize(depth=0, seconds=0, worth=0, what="")), context):
        if rank(one.verdict) > rank(Grade.WARN) and one.code not in there:
            yield one


def _incomplete(report: Report, wish: RunRequest | None, gpus: Sequence[Gpu]) -> Iterator[str]:
    if wish is None:
        yield "it does not contain the request (settings.wish)"
    if not gpus:
        return
    if absent := _absent(report):
        yield f"no record of {', '.join(absent)}: neither a finding nor the reason it did not run"
    for name, index in dict.fromkeys(_gaps(report, gpus)):
        yield f"there is no finding of {name} for GPU {index}"
    figures = {(one.check, one.metric) for one in report.findings}
    for lost in report.power:
        if (lost.check, lost.metric) not in figures:
            yield f"the measurement {lost.check} {lost.metric} is listed and its findings are missing"


def _absent(report: Report) -> list[str]:
    """Of the checks that were to run; a report that does not name its programme must mention every check there is.
    Coverage explains a check without a finding where it did not apply, or where the run ended early."""
    judged = {one.check for one in report.findings}
    early = report.interrupted or worst(one.verdict for one in report.findings) is Grade.FAIL
    judged |= {one.check for one in report.coverage if early or not (report.programme or one.what)}
    planned = report.programme or tuple(check.name for check in suite.CHECKS)
    return [name for name in dict.fromkeys((environment.NAME, health.NAME, *planned)) if name not in judged]


def _gaps(report: Report, gpus: Sequence[Gpu]) -> Iterator[tuple[str, int]]:
    """What passed on one GPU was run on every GPU of its model: each passed, too, or has another result."""
    there = {(one.check, one.metric, one.gpu) for one in report.findings}
    other = {(one.check, one.gpu) for one in report.findings if rank(one.verdict) > rank(Grade.PASS)}
    models = {gpu.uuid: gpu.name for gpu in gpus}
    passed = [one for one in report.findings if one.verdict is Grade.PASS and one.gpu in models]
    for check, metric, model in dict.fromkeys((one.check, one.metric, models[one.gpu or ""]) for one in passed):
        for gpu in gpus:
            if gpu.name == model and (check, metric, gpu.uuid) not in there and (check, gpu.uuid) not in other:
                yield f"{check} {metric}".strip(), gpu.index
    checked = {one.gpu for one in report.findings if one.check == health.NAME}
    if report.device == "cuda" and None not in checked:
        yield from ((health.NAME, gpu.index) for gpu in gpus if gpu.uuid not in checked)


def _contradictions(report: Report, wish: RunRequest | None, gpus: Sequence[Gpu]) -> Iterator[str]:
    known = {gpu.uuid for gpu in gpus}
    strangers = dict.fromkeys(one.gpu for one in report.findings if one.gpu is not None and one.gpu not in known)
    strangers |= dict.fromkeys(one.gpu for one in report.tallies if one.gpu not in known)
    if strangers:
        yield f"it contains GPUs that its machine does not list: {', '.join(str(one) for one in strangers)}"
    if len(known) < len(gpus):
        yield "its machine lists one GPU several times"
    if report.ended < report.started:
        yield "it ended before it started"
    if wish is not None and wish.device != report.device:
        yield f"it ran on {report.device}, {wish.device} was requested"
    if wish is not None and wish.inject:
        yield "faults were injected"
    if wish is not None and wish.expected != report.expected:
        yield f"{_count(wish.expected)} GPUs were requested, and {_count(report.expected)} are expected"
    for one in report.findings:
        if words := _contradicts_itself(one):
            yield f"{one.check} {one.metric}".strip() + f" is {one.verdict}, and {words}"
    for stored in report.tallies:
        own = worst(one.verdict for one in report.findings if one.gpu == stored.gpu)
        if own is not stored.verdict:
            yield f"GPU {stored.gpu} is {stored.verdict}, and its findings give {own}"


def _contradicts_itself(one: Finding) -> str:
    if one.confirm and one.verdict is not Grade.FAIL:
        return "it is marked for confirmation, which is only valid for FAIL"
    if one.verdict is Grade.SKIPPED and one.action in HARD:
        return f"its remedy is {one.action}"
    if one.verdict is not Grade.PASS:
        return ""
    if not one.code.endswith(PASSED) or one.action is not Remedy.NONE:
        return f"its code is {one.code} and its remedy {one.action}"
    if one.value is None:
        return ""
    if one.floor is not None and _worse(one.value, one.floor, one):
        return f"its value {one.value:g} is on the wrong side of its floor {one.floor:g}"
    if one.ceiling is not None and _worse(one.ceiling, one.value, one):
        return f"its value {one.value:g} is better than possible ({one.ceiling:g})"
    return ""


def _worse(value: float, than: float, one: Finding) -> bool:
    return value > than if one.lower_is_better else value < than


def _count(number: int | None) -> str:
    return "no count of" if number is None else str(number)


def _doubt(what: str, words: str) -> Finding:
    return Finding(
        check=NAME,
        metric=what,
        verdict=Grade.INCONCLUSIVE,
        code=f"{NAME}-{what}",
        message=f"{words[:1].upper()}{words[1:]}. {ADVICE}.",
        action=Remedy.RETEST,
    )
