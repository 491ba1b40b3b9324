"""`gpukeeper explain WORKLOAD`: every rule's answer, with the facts it used; why a thing is still there.

Every signal against its threshold, what comes when if nothing changes, and what would change it. With --watch, live.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpukeeper.interfaces.terminal import options as o

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpukeeper.engine.explain import Explained
    from gpukeeper.lifecycle.explain import Measured
    from gpukeeper.lifecycle.forecast import Ahead
    from gpukeeper.model.decision import Answer
    from gpukeeper.model.diagnosis import Cause, Diagnosis
    from gpukeeper.model.event import Event
    from gpukeeper.model.memory import Warned
    from gpukeeper.model.subject import Subject
    from gpukeeper.model.unknown import Unknown
    from gpukeeper.wiring import Session

LABELS_MAX, LABEL_MAX = 40, 120  # how many are shown, and how many letters of each


def explain(
    workload: o.Workload,
    policy: o.PolicyFile = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every few seconds until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option("--every", help="How often, with --watch.")] = "5s",
    manifest: Annotated[
        list[Path] | None,
        typer.Option("--manifest", help="Ask no cluster: a TrainJob's init containers, merged from these YAML files."),
    ] = None,
    json: o.Json = False,
) -> None:
    """Say what every rule thinks of a workload, by which signals, what comes next, and what would change that."""
    from gpukeeper.engine.explain import Explained
    from gpukeeper.interfaces.terminal.daemon import from_daemon
    from gpukeeper.interfaces.terminal.session import opened, span

    if manifest:
        from gpukeeper.interfaces.cli.manifest import explain_files

        return explain_files(workload, manifest, json=json)
    pause = span(every, "--every")
    assert pause is not None

    while (found := from_daemon(Explained, "explain", policy, workload=workload)) is not None:
        _show(found, json=json, watch=watch)
        if not watch:
            return None
        asyncio.run(asyncio.sleep(max(1.0, pause.total_seconds())))
    with opened(policy, write=False) as session:
        while True:
            _show(asyncio.run(_look(session, workload)), json=json, watch=watch)
            if not watch:
                return None
            asyncio.run(asyncio.sleep(max(1.0, pause.total_seconds())))


def _show(found: Explained, *, json: bool, watch: bool) -> None:
    from gpukeeper.interfaces.terminal import show

    if json:
        _print_json(found)
    else:
        show.clear(when=watch)
        _print(found)


async def _look(session: Session, words: str) -> Explained:
    from gpukeeper.engine.explain import explained
    from gpukeeper.engine.fleet import observe_fleet
    from gpukeeper.engine.removed import not_there
    from gpukeeper.engine.requests import find
    from gpukeeper.model.errors import UsageError
    from gpukeeper.views.fleet import all_findings

    book, keeper = session.book, session.keeper
    try:
        found = await find(keeper, book, words)
    except UsageError as problem:
        lines = await keeper.ledger.about(words)
        raise UsageError(not_there(str(problem), lines, book, keeper.clock.now())) from problem
    history = await keeper.ledger.about(found.view.subject.ref.uid)
    strange = all_findings(await observe_fleet(keeper, book), book, keeper.clock.now())
    return await explained(keeper, book, found, history, strange)


def _print_json(found: Explained) -> None:
    from gpukeeper.interfaces.terminal import show

    body = {
        "decision": found.decision,
        "answers": found.answers,
        "subject": found.subject,
        "memory": found.memory,
        "history": found.history,
        "signals": found.signals,
        "ahead": found.ahead,
        "would_change_it": found.remedies,
        "findings": [{"kind": one.kind, "words": one.words} for one in found.findings],
        "diagnosis": found.diagnosis or found.undiagnosed,
        "whole": found.whole,
    }
    show.as_json("explain", body)


def _print(found: Explained) -> None:
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.notify.terminals import plain

    subject, decision, now = found.subject, found.decision, found.now
    show.text(plain(f"{subject.ref.path}  ({subject.ref.kind}, uid {subject.ref.uid})"))
    due = f", due {show.when(decision.due, now)}" if decision.due else ""
    show.text(f"\nDecision: {decision.action} by {decision.rule}{due}\n  {plain(decision.reason)}\n")
    show.table(_facts(found), head=("fact", "as seen"))
    typer.echo("")
    suspended = _suspended(found.answers)
    rows = [(_word(a, suspended), a.rule, _because(a, now)) for a in found.answers]
    show.table(rows, head=("answer", "rule", "because"))
    _section("Measured:", [_signal_row(one, now) for one in found.signals])
    _section("If nothing changes:", [_ahead_row(one, now) for one in found.ahead])
    _section("What would change it:", [(words,) for words in found.remedies])
    _section("Findings:", [(one.words,) for one in found.findings])
    _print_diagnosis(found.diagnosis or found.undiagnosed)
    _section("From the ledger:", [_line(one) for one in found.history])


def _print_diagnosis(said: Diagnosis | Unknown | None) -> None:
    """As lines, not as a table: the indentation of the tree has a meaning, and a cause is a sentence."""
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.model.unknown import Unknown
    from gpukeeper.notify.terminals import plain

    if isinstance(said, Unknown):
        show.text(f"\nWhy it is still there could not be looked into: {plain(said.why)}")
        return
    if said is None:
        return  # not for who asks
    if said.tree:
        typer.echo("\nWhat it is part of and made of:")
        for line in said.tree:
            show.text(f"  {plain(line)}")
    if said.causes:
        typer.echo("\nWhy it is still there:")
        for cause in said.causes:
            show.text("\n".join(_cause_lines(cause)))


def _cause_lines(cause: Cause) -> Sequence[str]:
    from gpukeeper.notify.terminals import plain

    told = f"  - {plain(cause.words)}"
    return (told, f"    {plain(cause.remedy)}") if cause.remedy else (told,)


def _section(title: str, rows: Sequence[Sequence[str]]) -> None:
    from gpukeeper.interfaces.terminal import show

    if rows:
        typer.echo(f"\n{title}")
        show.table(rows)


def _signal_row(one: Measured, now: datetime) -> tuple[str, ...]:
    """The newest minute, and the window: its highest minute against the threshold, and since when it was measured."""
    from gpukeeper.lifecycle.explain import amount, threshold_in_words
    from gpukeeper.model.durations import in_words

    name = f"{one.signal} {one.device}".rstrip()
    if one.missing is not None:
        why = "absent by design" if one.missing.by_design else "could not be read"
        return (name, f"{why}: {one.missing.why}")
    if one.newest is None or one.newest_at is None:
        return (name, "not measured")
    newest = f"{amount(one.signal, one.newest)} ({_ago(one.newest_at, now)})"
    most = f"at most {amount(one.signal, one.maximum)}" if one.maximum is not None else "not measured"
    covered = "not measured" if one.since is None else f"measured without a gap for {in_words(now - one.since)}"
    limit = threshold_in_words(one)
    return (name, f"{newest}; {most} in {in_words(one.window)}, in use from {limit}; {covered}")


def _ago(at: datetime, now: datetime) -> str:
    from gpukeeper.model.durations import in_words

    return "just now" if now - at < timedelta(minutes=2) else f"{in_words(now - at)} ago"


def _ahead_row(one: Ahead, now: datetime) -> tuple[str, ...]:
    from gpukeeper.interfaces.terminal import show

    at = "at the next pass" if one.at <= now else f"{one.at:%Y-%m-%d %H:%M} UTC ({show.when(one.at, now)})"
    stage = f" {one.stage}" if one.stage else ""
    return (f"{one.action}{stage}", at, f"by {one.rule}")


def _facts(found: Explained) -> list[tuple[str, str]]:
    """What the rules had to go by; a fact that does not exist is left out, one that is not known says why."""
    subject, memory, now = found.subject, found.memory, found.now
    told: list[tuple[str, object]] = [
        ("state", subject.state),
        ("part of", subject.root),
        ("class", _class(found)),
        ("owner", subject.owner if subject.owner is not None else "nobody known"),
        ("owner because", subject.evidence or None),
        ("environment", subject.environment),
        ("created", subject.created),
        ("started", subject.started),
        ("ended", subject.ended),
        ("outcome", subject.outcome),
        ("GPUs", subject.devices or None if isinstance(subject.devices, tuple) else subject.devices),
        ("living children", subject.live_children if subject.live_children != 0 else None),
        ("own TTL", subject.marks.ttl),
        ("last used", subject.last_used),
        ("in use", subject.in_use if subject.last_used is not None else None),
        ("size", subject.size),
        *_of_a_tree(subject),
        ("keep-alive file", subject.marks.keep_alive),
        ("asks for exemption", subject.marks.asks_exemption),
        *_labels(subject),
        ("removal destroys", subject.loses or None if isinstance(subject.loses, tuple) else subject.loses),
        ("first start", memory.first_start),
        ("ran before", memory.ran if memory.ran else None),
        ("times ended", memory.ends_seen or None),
        ("stopped by", memory.stopped.by if memory.stopped else None),
    ]
    told += (("warned", f"{w.rule}, stage {w.stage}, {_heard(w)}, {_when(w.at, now)}") for w in memory.warnings)
    told += (("held by", f"{h.by}, until {_when(h.until, now)}") for h in memory.holds if h.until > now)
    return [(name, _said(value, now)) for name, value in told if value is not None]


def _class(found: Explained) -> object:
    """Whose limits apply, and by what. What the platform recognised is only where it ends without a match."""
    given, seen = found.decision.class_, found.subject.class_
    return f"{given} (by match in the policy; recognised as {seen})" if given != str(seen) else seen


def _labels(subject: Subject) -> list[tuple[str, object]]:
    """What somebody wrote on it, as it is: data. Only the documented ones mean anything to a rule."""
    from gpukeeper.model.subject import Shape

    if subject.shape is not Shape.WORKLOAD:
        return []
    written = [f"{key}={value}" for key, value in sorted(subject.labels.items())]
    cut = [one if len(one) <= LABEL_MAX else f"{one[:LABEL_MAX]}…" for one in written]
    more = [f"and {len(cut) - LABELS_MAX} more (all of them: --json)"] if len(cut) > LABELS_MAX else []
    return [("label", one) for one in [*cut[:LABELS_MAX], *more]]


def _of_a_tree(subject: Subject) -> list[tuple[str, object]]:
    """What is beside it and below it counts as much as the tree itself."""
    from gpukeeper.model.subject import Shape

    if subject.shape is not Shape.TREE:
        return []
    disk = subject.disk
    inodes = f", {disk.inodes:.0%} of its inodes" if disk is not None and disk.inodes is not None else ""
    return [
        ("category", subject.category.value),
        ("used by", subject.labels.get("held_by") or subject.labels.get("kept_by")),
        ("with its like", subject.together),
        ("kept because", subject.kept),
        ("work beside it", subject.busy if subject.busy is not None else "none"),
        ("disk", None if disk is None else f"{disk.name}, {disk.used:.0%} used{inodes}"),
    ]


def _heard(warned: Warned) -> str:
    return "delivered" if warned.delivered else "undelivered: nobody could be told"


def _said(value: object, now: datetime) -> str:
    from gpukeeper.model.durations import in_words, size_in_words
    from gpukeeper.model.unknown import Unknown

    match value:
        case Unknown():
            return str(value)
        case datetime():
            return _when(value, now)
        case timedelta():
            return in_words(value)
        case bool():
            return "yes" if value else "no"
        case int():
            return size_in_words(value) if value > 1000 else str(value)
        case tuple():
            return "; ".join(map(str, value)) if any(" " in str(one) for one in value) else ", ".join(map(str, value))
        case _:
            return str(value)


def _when(at: datetime, now: datetime) -> str:
    from gpukeeper.interfaces.terminal import show

    return f"{at:%Y-%m-%d %H:%M} UTC ({show.when(at, now)})"


def _suspended(said: tuple[Answer, ...]) -> dict[str, str]:
    """Which rule keeps which other from acting."""
    found: dict[str, str] = {}
    for i, answer in enumerate(said):
        for later in said[i + 1 :]:
            everything = "*" in answer.suspends and later.rule not in answer.spares
            if later.rule in answer.suspends or everything:
                found.setdefault(later.rule, answer.rule)
    return found


def _word(answer: Answer, suspended: dict[str, str]) -> str:
    if answer.rule in suspended and answer.verdict.value in ("due", "wait", "report"):
        return f"suspended by {suspended[answer.rule]}"
    return answer.action.value if answer.verdict.value == "due" else answer.verdict.value


def _because(answer: Answer, now: datetime) -> str:
    from gpukeeper.interfaces.terminal import show

    return answer.reason + (f"; due {show.when(answer.due, now)}" if answer.due else "")


def _line(line: Event) -> tuple[str, ...]:
    words = getattr(line, "reason", "") or getattr(line, "what", "") or getattr(line, "message", "")
    kind = line.__struct_config__.tag
    return (f"{line.at:%Y-%m-%d %H:%M}", str(kind), str(getattr(line, "result", "") or line.by), words)
