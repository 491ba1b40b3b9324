"""`gpukeeper observe`: read everything, change nothing.

--gpus: the holder of each GPU. --waste: unused GPUs. --watch: refresh. Nodes and disks in words, also for `apply`.

Contradictions are reported as findings. Nothing is repaired here; `apply` or a person does that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from gpukeeper.engine.view import FleetSnapshot, observe_fleet
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import opened, span
from gpukeeper.lifecycle.activity import Waste
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.errors import UsageError
from gpukeeper.model.subject import Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, size_in_words
from gpukeeper.views.fleet import (
    DISK,
    FleetView,
    GpusView,
    SubjectChange,
    WasteView,
    bytes_of,
    fleet_view,
    gpus_view,
    one_row_each,
    unseen_everywhere,
    waste_view,
)

if TYPE_CHECKING:
    from gpukeeper.wiring.session import Session


NODES_HEAD = ("kind", "name", "temporary", "disk", "inodes", "sessions", "busy")


def change_in_words(change: SubjectChange, freed: int) -> str:
    """ "ray/lab/worker-1: 35.2 GiB -> 70.0 MiB temporary; disk /: 81% -> 64%; 35.1 GiB freed"."""
    before, after = change
    parts = [] if before.ref.kind == DISK else [f"{_then(before, after, _temporary)} temporary"]
    if before.disk is not None:
        parts.append(f"disk {before.disk.name}: {_then(before, after, _used)}")
    if freed:
        parts.append(f"{size_in_words(freed)} freed")
    where = (before.ref.platform, before.ref.place, before.ref.namespace)
    name = "/".join(part for part in where if part) if before.ref.kind == DISK else before.ref.path
    return f"{name}: {'; '.join(parts)}"


def _then(before: Subject, after: Subject | Unknown | None, words: Callable[[Subject], str]) -> str:
    return f"{words(before)} -> {words(after) if isinstance(after, Subject) else '?'}"


def _temporary(subject: Subject) -> str:
    return _size(subject.size)


def _used(subject: Subject) -> str:
    return "?" if subject.disk is None else _share(subject.disk.used)


def node_row(subject: Subject) -> tuple[str, ...]:
    """One line of the table of nodes and disks."""
    is_disk = subject.ref.kind == DISK
    return (
        subject.ref.kind,
        subject.ref.path,
        "-" if is_disk else _size(subject.size),
        _disk(subject),
        _share(subject.disk.inodes) if subject.disk is not None else "?",
        "-" if is_disk else _sessions(subject),
        "-" if is_disk else busy(subject),
    )


def busy(subject: Subject) -> str:
    if isinstance(subject.busy, Unknown):
        return f"unknown: {subject.busy.why}"
    return "no" if subject.busy is None else subject.busy


def _disk(subject: Subject) -> str:
    disk, size = subject.disk, bytes_of(subject).size
    if disk is None:
        return "?"
    of = "" if size is None else f" of {size_in_words(size)}"
    return f"{disk.used:.0%}{of}" + ("" if subject.ref.kind == DISK else f" ({disk.name})")


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _size(size: int | Unknown) -> str:
    return "?" if isinstance(size, Unknown) else size_in_words(size)


def _sessions(subject: Subject) -> str:
    """ "1 live, 3 dead", if its platform reports them."""
    counts = [(subject.labels.get(f"sessions_{word}"), word) for word in ("live", "dead")]
    return ", ".join(f"{number} {word}" for number, word in counts if number) or "-"


HEAD = ("state", "name", "owner", "class", "gpus", "size", "since")
WASTE_HEAD = ("unused for", "workload", "owner", "class", "gpus")
GPUS_HEAD = ("state", "gpu", "held by", "owner", "since", "use", "next")


@o.with_options
def observe(
    selection: o.Selection,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Show each GPU and slice with its holder, since when, and the next action.")
    ] = False,
    waste: Annotated[
        bool,
        typer.Option(
            "--waste", help="Show running workloads whose GPUs were below 5 % for 30m. A report only: causes no action."
        ),
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every few seconds until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option("--every", metavar="DURATION", help="Interval of --watch.")] = "5s",
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Show workloads, leftovers, GPUs and contradictions. Also what could not be read. Changes nothing."""
    if gpus and waste:
        raise UsageError("--gpus and --waste cannot be combined. Nothing was read.")
    narrow = selection.narrow
    pause = span(every, "--every")
    assert pause is not None
    with opened(selection.policy, write=False, only=selection.platform, quiet=quiet or json) as session:
        while True:
            found = asyncio.run(observe_fleet(session.keeper, session.book))
            view = view_of(session, found, narrow, gpus=gpus, waste=waste)
            if json:
                print_json(view)
            else:
                show.clear(when=watch)
                print_view(view, quiet=quiet)
            if not watch:
                return
            time.sleep(max(1.0, pause.total_seconds()))


View: TypeAlias = "FleetView | GpusView | WasteView"


def view_of(session: Session, found: FleetSnapshot, narrow: Narrow, *, gpus: bool = False, waste: bool = False) -> View:
    view = gpus_view if gpus else waste_view if waste else fleet_view
    return view(found, session.book, narrow, session.keeper.clock.now())


def print_json(view: View) -> None:
    match view:
        case GpusView():
            show.as_json("observe-gpus", view)
        case WasteView():
            show.as_json("observe-waste", view)
        case _:
            show.as_json("observe", view)


def print_view(view: View, *, quiet: bool) -> None:
    number = _print_rows(view)
    if quiet:
        return
    for finding in view.findings:
        print_message(f"finding: {finding.words}")
    for words in unseen_everywhere(view.unseen):
        print_message(words)
    what = "object" if isinstance(view, FleetView) else "row"
    print_message(
        f"{number} {what if number == 1 else f'{what}s'} at {view.at:%Y-%m-%d %H:%M:%S} UTC"
        + (", incomplete: some could not be read" if view.unseen else "")
    )


def _print_rows(view: View) -> int:
    """How many there are."""
    match view:
        case GpusView():
            rows = [show.claim_row(claim, view.at, beside) for claim, beside in one_row_each(view.gpus)]
            show.table(rows, head=GPUS_HEAD)
            return len(rows)
        case WasteView():
            show.table([_waste_row(one, view.at) for one in view.waste], head=WASTE_HEAD)
            return len(view.waste)
        case _:
            _print_subjects(view.subjects)
            return len(view.subjects)


def _print_subjects(subjects: Sequence[Subject]) -> None:
    """Work and what it left, and below that the nodes and disks it is on."""
    things = [subject_row(one) for one in subjects if one.shape is not Shape.NODE]
    below = [node_row(one) for one in subjects if one.shape is Shape.NODE]
    show.table(things, head=HEAD)
    if things and below:
        typer.echo("")
    show.table(below, head=NODES_HEAD)


def _waste_row(one: Waste, now: datetime) -> tuple[str, ...]:
    span = ("at least " if one.at_least else "") + in_words(now - one.since)
    return (span, one.ref.path, show.fact(one.owner), show.fact(one.class_), ", ".join(one.devices))


def subject_row(one: Subject) -> tuple[str, ...]:
    """What is no workload has its shape for a state. Since: its latest known time."""
    path = one.ref.path
    if one.shape is Shape.DEVICE:
        return ("gpu", path, "-", one.labels.get("model") or "-", "-", "-", "-")
    state = one.state if one.shape is Shape.WORKLOAD else one.shape.value
    devices = "?" if isinstance(one.devices, Unknown) else str(len(one.devices) or "-")
    size = "?" if isinstance(one.size, Unknown) else size_in_words(one.size) if one.size else "-"
    times = (one.ended, one.last_used, one.started, one.created)
    # A tree may have been read since its last recorded read: its last use is then ahead.
    since = next((at for at in times if isinstance(at, datetime) and at <= one.seen.at), None)
    facts = (show.fact(one.owner), show.fact(one.class_), devices, size, show.when(since, one.seen.at))
    return (show.fact(state), path, *facts)
