"""The report as one page (verdict, required action, problems; then everything else), and the fleet as one. Pure.

Self-contained: no script, nothing from outside. It is read by people who were not present.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpukeeper.acceptance.record import Delta, Finding, Remedy, Report
from gpukeeper.acceptance.reports import plots
from gpukeeper.acceptance.reports.merge import FleetFigure, FleetReport, by_verdict, why_missing
from gpukeeper.acceptance.reports.plots import SYMBOLS, pictures_of_check, pictures_of_gpu
from gpukeeper.acceptance.reports.wording import (
    DUTIES,
    duty,
    fact,
    figure,
    gpu_words,
    gpus_of,
    hardest,
    less_is_better,
    metric_words,
    moment,
    needs_attention,
    percent,
    retest_command,
    serial_of,
    worst_first,
)
from gpukeeper.markup import Child, Markup, document, element, facts, join, section, table
from gpukeeper.model.gpu import Fact, Gpu, Grade, rank, worst
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

MEANING: Mapping[Grade, str] = {
    Grade.PASS: "accepted",
    Grade.WARN: "accepted with warnings",
    Grade.FAIL: "not accepted",
    Grade.INCONCLUSIVE: "not accepted, because not everything could be tested and judged",
    Grade.SKIPPED: "not tested",
}
_AT_FIRST = 6  # findings of a GPU that are shown as they are; the rest unfolds
_FEW = 3  # findings of a check that need no table


def page_of_report(report: Report) -> str:
    sections = (
        _header(report),
        _attention(report),
        _map(report),
        *_checks(report),
        _gpus(report),
        _coverage(report),
        _counters(report),
        _power(report),
        _environment(report),
        _again(report),
        _footer(report),
    )
    return document(f"Acceptance of {report.node}: {report.verdict}", element("main", *sections))


def badge(grade: Grade) -> Markup:
    return element("span", f"{SYMBOLS[grade]} {grade}", class_=f"badge {grade}")


def verdict_box(eyebrow: str, title: str, grade: Grade, reason: str, act: str, known: Mapping[str, str]) -> Markup:
    return element(
        "header",
        element("p", eyebrow, class_="eyebrow"),
        element("h1", title),
        element("p", f"{SYMBOLS[grade]} {grade}: {MEANING[grade]}", class_="word"),
        element("p", reason, class_="reason"),
        element("p", element("strong", "Action required: "), act),
        facts(known),
        class_=f"verdict {grade}",
    )


def _header(report: Report) -> Markup:
    act = duty(report)
    box = verdict_box("GPU acceptance", report.node, report.verdict, report.reason, act, _facts(report))
    links = [("attention", "Needs attention")]
    links += [("map", "GPUs by check"), ("checks", "Checks")] if report.findings else []
    links += [("gpus", "GPUs"), ("coverage", "Not tested"), ("environment", "Environment"), ("again", "Test again")]
    nav = element("nav", *(element("a", words, href=f"#{name}") for name, words in links), aria_label="On this page")
    return join([box, *(element("p", words, class_="note") for words in _caveats(report)), nav])


def _facts(report: Report) -> dict[str, str]:
    gpus = gpus_of(report.machine)
    names = list(dict.fromkeys(fact(gpu.name) for gpu in gpus))
    counted = "unknown" if isinstance(report.machine.gpus, Unknown) else str(len(gpus))
    expected = "--expect not set" if report.expected is None else f"{report.expected} expected"
    busy = [tally.busy for tally in report.tallies if tally.busy is not None]
    return {
        "CPUs instead of GPUs" if report.device == "cpu" else "GPUs": f"{counted} ({expected})",
        "Model": ", ".join(names) or "–",
        "Driver": fact(report.machine.environment.get("driver", "unknown")),
        "Started": moment(report.started),
        "Duration": in_words(report.ended - report.started),
        "Profile": f"{report.profile} (at most {report.within_s:g} s)",
        "GPU busy time": percent(sum(busy) / len(busy), 0) if busy else "not measured",
        "Run": report.run,
    }


def _caveats(report: Report) -> Iterable[str]:
    if report.device == "cpu":
        yield "CPU mode: the checks ran on the CPU as a trial. No GPU was tested or accepted."
    elif report.device != "cuda":
        yield f"Device {report.device}: no value was measured on a real GPU."
    if report.self_test:
        yield "Self-test: faults were injected. The results are not about this machine's GPUs."
    if report.interrupted:
        yield "The run was interrupted. The results until then are below; the rest was not tested."
    if isinstance(report.machine.gpus, Unknown):
        yield f"GPUs: {report.machine.gpus}."
    yield from (f"A GPU does not respond: {why}" for why in report.machine.silent)


def _attention(report: Report) -> Markup:
    """A card for every GPU that something was found on, the worst first."""
    found: dict[str | None, list[Finding]] = {}
    for finding in needs_attention(report):
        found.setdefault(finding.gpu, []).append(finding)
    if not found:
        words = "No problem was found." if report.findings else "Nothing was tested."
        return section("attention", "Needs attention", element("p", words))
    cards = [_card(report, gpu, findings) for gpu, findings in found.items()]
    return section("attention", "Needs attention", element("ul", *cards, class_="findings"))


def _card(report: Report, gpu: str | None, findings: Sequence[Finding]) -> Markup:
    head = element("h3", badge(findings[0].verdict), f"  {gpu_words(report, gpu)}")
    shown = [_details(finding) for finding in findings[:_AT_FIRST]]
    rest = [_details(finding) for finding in findings[_AT_FIRST:]]
    more = element("details", element("summary", f"{len(rest)} more"), *rest) if rest else None
    remedy = hardest(one for one in findings if one.verdict is findings[0].verdict)
    act = element("p", f"Action: {DUTIES[remedy][1]}.", class_="do") if remedy is not Remedy.NONE else None
    return element("li", head, *shown, more, act, class_=findings[0].verdict.value)


def _details(finding: Finding) -> Markup:
    where = element("span", f"{SYMBOLS[finding.verdict]} {metric_words(finding)} · {finding.code}", class_="where")
    against = element("span", _held_against(finding), class_="where") if finding.value is not None else None
    lines = [where, element("br"), finding.message, *((element("br"), against) if against else ())]
    return element("p", *lines, class_="told")


def _held_against(finding: Finding) -> str:
    """The value and every limit it was compared with."""
    parts = [f"measured {figure(finding.value, finding.unit)}"]
    lines = (("floor", finding.floor), ("reference", finding.reference), ("ceiling", finding.ceiling))
    parts += [f"{name} {figure(value, finding.unit)}" for name, value in lines if value is not None]
    if finding.peer_median is not None:
        parts.append(f"median of {finding.peer_n} peers {figure(finding.peer_median, finding.unit)}")
    if finding.baseline is not None:
        parts.append(f"before {figure(finding.baseline, finding.unit)}")
    return " · ".join(parts)


def _map(report: Report) -> Markup | None:
    """GPU by check, as a table: it reads aloud, and prints."""
    checks = list(dict.fromkeys(finding.check for finding in report.findings))
    if not checks:
        return None
    places: list[str | None] = [gpu.uuid for gpu in gpus_of(report.machine)]
    places += [None] if any(finding.gpu is None for finding in report.findings) else []
    lines = [[gpu_words(report, place), *(_mark(report, check, place) for check in checks)] for place in places]
    key = ", ".join(f"{SYMBOLS[grade]} {grade}" for grade in Grade)
    shown = table(["", *checks], lines, f"The worst finding of each check: {key}", class_="scroll map")
    return section("map", "GPUs by check", shown)


def _mark(report: Report, check: str, gpu: str | None) -> Child:
    grades = [one.verdict for one in report.findings if one.check == check and one.gpu == gpu]
    if not grades:
        return element("span", " ", title="no finding")
    grade = Grade.SKIPPED if set(grades) == {Grade.SKIPPED} else worst(grades)
    title = f"{gpu_words(report, gpu)}, {check}: {grade}"
    where = f"#check-{_anchor(check)}"
    return element("a", SYMBOLS[grade], href=where, class_=f"mark {grade}", title=title, aria_label=title)


def _checks(report: Report) -> Iterable[Markup]:
    """Failing ones first."""
    checks = dict.fromkeys(finding.check for finding in report.findings)
    grades = {check: _grade(one.verdict for one in report.findings if one.check == check) for check in checks}
    parts = [_check(report, check, grades[check]) for check in sorted(checks, key=lambda one: -rank(grades[one]))]
    if parts:
        yield section("checks", "Checks", *parts)


def _grade(grades: Iterable[Grade]) -> Grade:
    found = list(grades)
    return Grade.SKIPPED if set(found) == {Grade.SKIPPED} else worst(found)


def _check(report: Report, check: str, grade: Grade) -> Markup:
    findings = worst_first(one for one in report.findings if one.check == check)
    drawn = pictures_of_check(report, check)
    title = element("h3", f"{check}  ", badge(grade), id=f"check-{_anchor(check)}")
    if not drawn and len(findings) <= _FEW:
        return element("div", title, *(element("p", _short(report, one)) for one in findings))
    plots = element("div", *drawn, class_="plots") if drawn else None
    words = f"{len(findings)} finding{'s' if len(findings) != 1 else ''}"
    return element(
        "div", title, plots, element("details", element("summary", words), _findings(report, check, findings))
    )


def _short(report: Report, finding: Finding) -> str:
    metric = f" {finding.metric}" if finding.metric else ""
    return f"{SYMBOLS[finding.verdict]} {gpu_words(report, finding.gpu)}{metric}: {finding.message}"


def _findings(report: Report, check: str, findings: Iterable[Finding]) -> Markup:
    lines = [
        [
            gpu_words(report, one.gpu),
            one.metric or "–",
            badge(one.verdict),
            figure(one.value, one.unit) if one.value is not None else "–",
            percent(one.repeatability, 2),
            one.message,
        ]
        for one in findings
    ]
    head = ("where", "metric", "verdict", "value", "scatter", "finding")
    return table(head, lines, f"All findings of {check}")


def _anchor(check: str) -> str:
    return "".join(ch if ch.isalnum() else "-" for ch in check)


def _gpus(report: Report) -> Markup:
    gpus = gpus_of(report.machine)
    if not gpus:
        return section("gpus", "GPUs", element("p", "No GPU was found."))
    verdicts = {tally.gpu: tally for tally in report.tallies}
    grades = {gpu.uuid: verdicts[gpu.uuid].verdict if gpu.uuid in verdicts else Grade.SKIPPED for gpu in gpus}
    ordered = sorted(gpus, key=lambda gpu: (-rank(grades[gpu.uuid]), gpu.index))
    unfold = len(gpus) <= 2
    parts = []
    for gpu in ordered:
        tally = verdicts.get(gpu.uuid)
        reason = tally.reason if tally else "it was not part of this run"
        parts.append(_gpu(report, gpu, grades[gpu.uuid], reason, unfold=unfold or grades[gpu.uuid] is Grade.FAIL))
    return section("gpus", "GPUs", *parts)


def _gpu(report: Report, gpu: Gpu, grade: Grade, reason: str, *, unfold: bool) -> Markup:
    known: dict[str, Fact] = {"model": gpu.name, "serial": gpu.serial, "uuid": gpu.uuid, "PCI": gpu.pci}
    known |= {"memory": gpu.memory_mib if isinstance(gpu.memory_mib, Unknown) else f"{gpu.memory_mib:,} MiB"}
    known |= {"part of": gpu.part_of, "slice": gpu.profile} if gpu.part_of else {}
    shown = {name: fact(value) for name, value in {**known, **gpu.facts}.items()}
    serial = f", serial {serial_of(gpu)}" if serial_of(gpu) else ""
    summary = element("summary", badge(grade), f"  {gpu_words(report, gpu.uuid)}{serial}")
    drawn = pictures_of_gpu(report, gpu.uuid)
    body = (
        element("p", reason),
        facts(shown),
        element("div", drawn, class_="plots wide") if drawn else None,
        _history(report, gpu),
    )
    return element("details", summary, *body, class_=f"gpu {grade}", open="" if unfold else None)


def _history(report: Report, gpu: Gpu) -> Markup:
    """Its figures against its own earlier ones."""
    past = [one for one in report.findings if one.gpu == gpu.uuid and one.baseline and one.value is not None]
    if not past:
        return element("p", "There is no earlier run of this GPU with the same methods.", class_="muted")
    lines = [
        [
            metric_words(one),
            figure(one.value, one.unit),
            figure(one.baseline, one.unit),
            f"{((one.value or 0.0) / (one.baseline or 1.0) - 1) * 100:+.1f} %",
        ]
        for one in past
    ]
    return table(("metric", "now", "before", "change"), lines, "Compared with earlier runs of this GPU")


def _coverage(report: Report) -> Markup:
    if not report.coverage:
        whole = report.findings and not report.interrupted
        words = "Every check that applies here was run." if whole else "What was skipped is unknown."
        return section("coverage", "Not tested", element("p", words))
    lines = [
        [one.check, one.what or "everything", one.why, f"--within {one.within}" if one.within else "–"]
        for one in report.coverage
    ]
    words = "The following was not tested, so it was not accepted."
    shown = table(("check", "what", "reason", "run it with"), lines, "Skipped in this run")
    return section("coverage", "Not tested", element("p", words), shown)


def _counters(report: Report) -> Markup:
    """A line for every counter of a GPU, with the checks during which it changed."""
    if not report.deltas:
        unchanged = "No error counter that could be read changed while a check ran."
        words = unchanged if report.findings else "No check ran, so no counter was read."
        return section("counters", "Counters", element("p", words))
    grouped: dict[tuple[str, str], list[Delta]] = {}
    for one in report.deltas:
        grouped.setdefault((one.gpu, one.counter), []).append(one)
    lines = [
        [
            gpu_words(report, gpu),
            counter,
            f"{found[0].before:,}",
            f"{found[-1].after:,}",
            _rise(counter, sum(one.after - one.before for one in found)),
            ", ".join(dict.fromkeys(one.check for one in found)),
        ]
        for (gpu, counter), found in grouped.items()
    ]
    head = ("where", "counter", "before", "after", "change", "during")
    return section("counters", "Counters", table(head, lines, "Counters that changed while a check ran"))


def _rise(counter: str, change: int) -> str:
    return f"{change / 1e9:+,.1f} s" if counter.endswith("_ns") else f"{change:+,}"


def _power(report: Report) -> Markup | None:
    if not report.power:
        return None
    held = [one for one in report.power if one.fails_at is not None or one.warns_at is not None]
    lines = [
        [
            f"{one.check}.{one.metric}" if one.metric else one.check,
            "warns only" if one.fails_at is None else f"a loss of {percent(one.fails_at)}",
            "–" if one.warns_at is None else f"a loss of {percent(one.warns_at)}",
            one.by,
        ]
        for one in held
    ]
    words = element("p", "The smallest loss of speed that this run can detect. Smaller losses pass.")
    shown = (
        table(("metric", "fails from", "warns from", "by"), lines, "Smallest detectable loss of speed")
        if held
        else None
    )
    names = [f"{one.check}.{one.metric}" if one.metric else one.check for one in report.power if one not in held]
    rest = element("p", f"No loss can be detected in: {', '.join(names)}.", class_="muted") if names else None
    return section("power", "Detection limits", words, shown, rest)


def _environment(report: Report) -> Markup:
    lines: Sequence[Sequence[Child]] = [
        [name, fact(value)] for name, value in sorted(report.machine.environment.items())
    ]
    shown: Child = element("p", "Unknown.")
    if lines:
        shown = table(("fact", "value"), lines, "State of the machine before the first check")
    return section("environment", "Environment", shown, _topology(report))


def _topology(report: Report) -> Markup | None:
    links = report.machine.topology
    gpus = [gpu for gpu in gpus_of(report.machine) if gpu.uuid in links]
    if len(gpus) < 2:
        return None
    names = [gpu_words(report, gpu.uuid) for gpu in gpus]
    lines = [
        [name, *("–" if other is gpu else links[gpu.uuid].get(other.uuid, "unknown") for other in gpus)]
        for name, gpu in zip(names, gpus, strict=True)
    ]
    return table(["", *names], lines, "Connections between GPUs")


def _again(report: Report) -> Markup:
    words = element("p", "On this machine, after the actions above:")
    return section("again", "Test again", words, element("pre", element("code", retest_command(report))))


def _footer(report: Report) -> Markup:
    words = f"gpukeeper {report.version} · run {report.run} · {report.schema} · {moment(report.ended)}. "
    files = "The same record as JSON: report.json; samples over time: samples.json."
    return element("footer", words, files)


_MOST_NAMES = 16  # the table below has all of them
_MOST_ROWS = 24  # a picture with more of them is less readable


def page_of_fleet(
    fleet: FleetReport, about: Mapping[str, str] | None = None, pages: Mapping[str, str] | None = None
) -> str:
    """`about`: facts of the run (engine, owner, …). `pages`: of nodes, relative to this page."""
    grouped, total = by_verdict(fleet), len(fleet.nodes) + len(fleet.missing)
    facts = {**(about or {})} | {str(grade): f"{len(names)} of {total}" for grade, names in grouped.items()}
    act = "none" if fleet.verdict is Grade.PASS else "see the reports of the nodes, failing ones first"
    sections = (
        verdict_box("GPU acceptance of a fleet", f"{total} nodes", fleet.verdict, fleet.reason, act, facts),
        *(element("p", words, class_="note") for words in _fleet_notes(fleet)),
        _fleet_nodes(fleet, pages or {}),
        _fleet_outliers(fleet),
        _fleet_figures(fleet),
        element("footer", f"{fleet.schema} · merged from {len(fleet.nodes)} reports"),
    )
    return document(f"Acceptance of {total} nodes: {fleet.verdict}", element("main", *sections))


def _fleet_notes(fleet: FleetReport) -> Iterable[str]:
    if fleet.missing:
        some = ", ".join(fleet.missing[:_MOST_NAMES]) + (", …" if len(fleet.missing) > _MOST_NAMES else "")
        yield f"Missing reports: {some}. A node without a report is not accepted."
    if fleet.unexpected:
        yield f"Unexpected nodes: {', '.join(fleet.unexpected)}."
    yield from fleet.replaced
    yield from fleet.doubles


def _fleet_nodes(fleet: FleetReport, pages: Mapping[str, str]) -> Markup:
    head = ("node", "verdict", "GPUs", "tested", "reason", "codes")
    lines = [
        [
            element("a", one.node, href=pages[one.node]) if one.node in pages else one.node,
            badge(one.verdict),
            "unknown" if one.gpus is None else str(one.gpus),
            moment(one.ended),
            one.reason,
            ", ".join(one.worst) or "–",
        ]
        for one in fleet.nodes
    ]
    lines += [
        [name, badge(Grade.INCONCLUSIVE), "unknown", "never", why_missing(fleet, name), "–"] for name in fleet.missing
    ]
    return section("nodes", "Nodes", table(head, lines, "Failing nodes first"))


def _fleet_outliers(fleet: FleetReport) -> Markup:
    found = [(one, out) for one in fleet.figures for out in one.outliers]
    if not found:
        return section("outliers", "Outliers", element("p", "None."))
    lines = [
        [
            f"{out.node} GPU {out.index}",
            badge(out.verdict),
            f"{one.check}.{one.metric}",
            figure(out.value, one.unit),
            figure(one.median, one.unit),
            percent(out.drop),
            out.gpu,
        ]
        for one, out in sorted(found, key=lambda pair: -pair[1].drop)
    ]
    head = ("where", "verdict", "metric", "measured", "median of the fleet", "worse by", "identity")
    return section("outliers", "Outliers", table(head, lines, "Compared with all GPUs of the same model"))


def _fleet_figures(fleet: FleetReport) -> Markup | None:
    if not fleet.figures:
        return None
    return section(
        "figures", "Measurements", element("div", *(_figure_plot(one) for one in fleet.figures), class_="plots")
    )


def _figure_plot(one: FleetFigure) -> Markup:
    """The lowest and highest of all, when they are too many to show each."""
    out = {f"{found.node}/{found.index}": found.verdict for found in one.outliers}
    ordered = sorted(one.values, key=lambda pair: -pair[1] if less_is_better(one.unit) else pair[1])
    shown = ordered if len(ordered) <= _MOST_ROWS else [*ordered[: _MOST_ROWS - 4], *ordered[-4:]]
    lines = [plots.PlotRow(_short_list(name), (), value, out.get(name, Grade.PASS)) for name, value in shown]
    marks = {"median of the fleet": one.median} | ({"reference": one.reference} if one.reference is not None else {})
    left_out = f"; {len(ordered) - len(shown)} in between not drawn" if len(shown) < len(ordered) else ""
    words = f"{one.model}; {one.n} GPUs; {one.unit}; method {one.method}{left_out}"
    name = f"{one.check}.{one.metric}"
    caption = element("figcaption", name, element("span", words))
    return element("figure", caption, plots.strips(name, one.unit, lines, marks))


def _short_list(name: str) -> str:
    return name if len(name) <= 13 else f"…{name[-12:]}"
