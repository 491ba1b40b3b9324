"""`gpukeeper explain WORKLOAD`: every rule's answer, with the facts it used; why an object still exists.

Every signal with its threshold, the next actions if nothing changes, and what would change them. With --watch,
live. With --manifest FILE: the resulting TrainJob, from files alone; no cluster is contacted.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from gpukeeper.engine.outlook import Explanation, explained, not_there
from gpukeeper.engine.requests import find
from gpukeeper.engine.view import observe_fleet
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.daemon import query_daemon
from gpukeeper.interfaces.terminal.session import opened, span
from gpukeeper.lifecycle.forecast import NOT_UNATTENDED, UpcomingAction, as_next, coming_in_words
from gpukeeper.model.decision import Answer
from gpukeeper.model.errors import UsageError
from gpukeeper.model.event import Closed, Event
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import Cause, Diagnosis
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, plain, size_in_words
from gpukeeper.views.explain import explain_view, facts, moment, signal_in_words, signal_name, verdicts
from gpukeeper.views.fleet import all_findings

if TYPE_CHECKING:
    from gpukeeper.wiring.session import Session


_NEXT = re.compile(r"^---.*$", re.MULTILINE)


def explain_files(workload: str, files: Sequence[Path], *, json: bool) -> None:
    # Only for --manifest: no other explanation reads YAML.
    from gpukeeper.platforms.kubernetes.kinds.kubeflow import merged_manifest

    found = merged_manifest([one for path in files for one in _objects(path)], workload)
    if json:
        show.as_json("explain-manifest", msgspec.to_builtins(found))
        return
    for line in found.lines():
        typer.echo(plain(line))


def _objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, and of a List those in it."""
    from gpukeeper.config.document import read

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path} could not be read: {problem}. Nothing was explained.") from problem
    found: list[dict[str, Any]] = []
    for part in _NEXT.split(text):
        document = read(part)
        if document.problems:
            raise UsageError(f"{path} is not a valid manifest: {document.problems[0]}. Nothing was explained.")
        tree = document.tree
        items = tree.get("items", [tree]) if isinstance(tree, dict) else []
        found += [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []
    return found


def explain(
    workload: o.Workload,
    policy: o.PolicyFile = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every few seconds until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option("--every", metavar="DURATION", help="Interval of --watch.")] = "5s",
    manifest: Annotated[
        list[Path] | None,
        typer.Option(
            "--manifest",
            metavar="FILE",
            help="Offline: a TrainJob's init containers, merged from these YAML files, and fields that are no TTL.",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Show each rule's verdict on a workload. Also its signals, the next action, and what would change it."""
    if manifest:
        return explain_files(workload, manifest, json=json)
    pause = span(every, "--every")
    assert pause is not None

    while (found := query_daemon(Explanation, "explain", policy, workload=workload)) is not None:
        _show(found, json=json, watch=watch)
        if not watch:
            return None
        time.sleep(max(1.0, pause.total_seconds()))
    with opened(policy, write=False) as session:
        while True:
            _show(asyncio.run(_look(session, workload)), json=json, watch=watch)
            if not watch:
                return None
            time.sleep(max(1.0, pause.total_seconds()))


def _show(found: Explanation, *, json: bool, watch: bool) -> None:
    if json:
        show.as_json("explain", explain_view(found))
    else:
        show.clear(when=watch)
        _print(found)


async def _look(session: Session, words: str) -> Explanation:
    book, keeper = session.book, session.keeper
    try:
        found = await find(keeper, book, words)
    except UsageError as problem:
        lines = await keeper.ledger.about(words)
        raise UsageError(not_there(str(problem), lines, book, keeper.clock.now())) from problem
    history = await keeper.ledger.about(found.view.subject.ref.uid)
    for line in history:  # what a daemon remembers of steps that failed
        if isinstance(line, Closed):
            keeper.back_off.note(line)
    strange = all_findings(await observe_fleet(keeper, book), book, keeper.clock.now())
    return await explained(keeper, book, found, history, strange)


def _print(found: Explanation) -> None:
    subject, decision, now = found.subject, found.decision, found.now
    show.text(plain(f"{subject.ref.path}  ({subject.ref.kind}, uid {subject.ref.uid})"))
    due = f", due {show.when(decision.due, now)}" if decision.due else ""
    show.text(f"\nDecision: {decision.action} by {decision.rule}{due}\n  {plain(decision.reason)}\n")
    if found.mode is Mode.PLAN:
        show.text(f"{NOT_UNATTENDED}\n")
    show.table([(name, _said(value, now)) for name, value in facts(found)], head=("fact", "value"))
    typer.echo("")
    rows = [(word, answer.rule, _because(answer, now)) for word, answer in verdicts(found.answers)]
    show.table(rows, head=("answer", "rule", "reason"))
    _section("Measured:", [(signal_name(one), signal_in_words(one, now)) for one in found.signals])
    coming = as_next(found.ahead, decision, subject.class_, now, would=found.mode is Mode.PLAN)
    if coming.steps:
        show.text(f"\nWhat comes next: {coming_in_words(coming.steps, now)}")
    _section("If nothing changes:", [_ahead_row(one, now) for one in found.ahead])
    _section("What would change it:", [(words,) for words in found.remedies])
    _section("Findings:", [(one.words,) for one in found.findings])
    _print_diagnosis(found.diagnosis or found.undiagnosed)
    _section("From the ledger:", [_line(one) for one in found.history])


def _print_diagnosis(said: Diagnosis | Unknown | None) -> None:
    """As lines, not as a table: the indentation of the tree has a meaning, and a cause is a sentence."""
    if isinstance(said, Unknown):
        show.text(f"\nWhy it still exists could not be determined: {plain(said.why)}")
        return
    if said is None:
        return  # not shown to this user
    if said.tree:
        typer.echo("\nOwner tree:")
        for line in said.tree:
            show.text(f"  {plain(line)}")
    if said.causes:
        typer.echo("\nWhy it still exists:")
        for cause in said.causes:
            show.text("\n".join(_cause_lines(cause)))


def _cause_lines(cause: Cause) -> Sequence[str]:
    told = f"  - {plain(cause.words)}"
    return (told, f"    {plain(cause.remedy)}") if cause.remedy else (told,)


def _section(title: str, rows: Sequence[Sequence[str]]) -> None:
    if rows:
        typer.echo(f"\n{title}")
        show.table(rows)


def _ahead_row(one: UpcomingAction, now: datetime) -> tuple[str, ...]:
    at = "at the next pass" if one.at <= now else moment(one.at, now)
    stage = f" {one.stage}" if one.stage else ""
    return (f"{one.action}{stage}", at, f"by {one.rule}" + (f", if {one.provided}" if one.provided else ""))


def _said(value: object, now: datetime) -> str:
    match value:
        case Unknown():
            return str(value)
        case datetime():
            return moment(value, now)
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


def _because(answer: Answer, now: datetime) -> str:
    return answer.reason + (f"; due {show.when(answer.due, now)}" if answer.due else "")


def _line(line: Event) -> tuple[str, ...]:
    words = getattr(line, "reason", "") or getattr(line, "what", "") or getattr(line, "message", "")
    kind = line.__struct_config__.tag
    return (f"{line.at:%Y-%m-%d %H:%M}", str(kind), str(getattr(line, "result", "") or line.by), words)
