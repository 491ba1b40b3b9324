"""`gpukeeper explain WORKLOAD`: every rule's answer, with the facts it used; why a thing is still there."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import typer

from gpukeeper.interfaces.terminal import options as o

if TYPE_CHECKING:
    from gpukeeper.model.decision import Answer, Decision, View
    from gpukeeper.model.event import Event
    from gpukeeper.wiring import Session

HISTORY = 8


def explain(workload: o.Workload, policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Say what every rule thinks of a workload, and so why it is still there."""
    from gpukeeper.interfaces.terminal.session import opened

    with opened(policy, write=False) as session:
        asyncio.run(_explain(session, workload, json=json))


async def _explain(session: Session, words: str, *, json: bool) -> None:
    from gpukeeper.engine.requests import find
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.lifecycle.decide import answers, decide

    found = await find(session.keeper, session.book, words)
    now = session.keeper.clock.now()
    view = found.view
    decision, said = decide(view, session.book, now), answers(view, session.book, now)
    history = list(await session.keeper.ledger.about(view.subject.ref.uid))[-HISTORY:]
    if json:
        body = {
            "decision": decision,
            "answers": said,
            "subject": view.subject,
            "memory": view.memory,
            "history": history,
        }
        show.as_json("explain", body)
        return
    _print(view, decision, said, history, session)


def _print(view: View, decision: Decision, said: tuple[Answer, ...], history: list[Event], session: Session) -> None:
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.notify.terminals import plain

    subject, now = view.subject, session.keeper.clock.now()
    typer.echo(plain(f"{subject.ref.path}  ({subject.ref.kind}, uid {subject.ref.uid})"))
    due = f", due {show.when(decision.due, now)}" if decision.due else ""
    typer.echo(f"\nDecision: {decision.action} by {decision.rule}{due}\n  {plain(decision.reason)}\n")
    show.table(_facts(view, now), head=("fact", "as seen"))
    typer.echo("")
    suspended = _suspended(said)
    rows = [(_word(a, suspended), a.rule, a.reason, f"due {show.when(a.due, now)}" if a.due else "") for a in said]
    show.table(rows, head=("answer", "rule", "because", ""))
    if history:
        typer.echo("\nFrom the ledger:")
        show.table([_line(one) for one in history])


def _facts(view: View, now: datetime) -> list[tuple[str, str]]:
    """What the rules had to go by; a fact that does not exist is left out, one that is not known says why."""
    subject, memory = view.subject, view.memory
    told: list[tuple[str, object]] = [
        ("state", subject.state),
        ("part of", subject.root),
        ("class", subject.class_),
        ("owner", subject.owner if subject.owner is not None else "nobody known"),
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
        ("first start", memory.first_start),
        ("ran before", memory.ran if memory.ran else None),
        ("times ended", memory.ends_seen or None),
        ("stopped by", memory.stopped.by if memory.stopped else None),
    ]
    told += (("warned", f"{w.rule}, stage {w.stage}, {_when(w.at, now)}") for w in memory.warnings)
    told += (("held by", f"{h.by}, until {_when(h.until, now)}") for h in memory.holds if h.until > now)
    return [(name, _said(value, now)) for name, value in told if value is not None]


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
            return ", ".join(map(str, value))
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


def _line(line: Event) -> tuple[str, ...]:
    words = getattr(line, "reason", "") or getattr(line, "what", "") or getattr(line, "message", "")
    kind = line.__struct_config__.tag
    return (f"{line.at:%Y-%m-%d %H:%M}", str(kind), str(getattr(line, "result", "") or line.by), words)
