"""Passes on many servers or nodes, for people and as JSON: a line for each step, a row for each server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta

import typer

from gpukeeper.interfaces.terminal import show
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words as span_in_words
from gpukeeper.model.words import size_in_words
from gpukeeper.rollout.execute import RECLAIMED, Figures, NodeChange, Outcome, ServerPass, ServerResult, steps

SOME_FAILED = 3


def finish_passes(results: Sequence[ServerResult], *, json: bool) -> None:
    """Exit code 3: a pass was not complete everywhere."""
    if json:
        show.as_json("fleet-pass", {"hosts": [_row(one) for one in results]})
    else:
        print_passes(results)
    if not all(one.good for one in results):
        raise typer.Exit(SOME_FAILED)


def print_passes(results: Sequence[ServerResult]) -> None:
    lines = [
        (step.word, one.host, step.path, step.action, step.reason)
        for one in results
        for place in (one.passed.places if one.passed else ())
        for step in steps(place)
    ]
    if lines:
        show.table(lines, ("STEP", "HOST", "WORKLOAD", "ACTION", "REASON"))
        show.text("")
    changes = [row for one in results if one.passed is not None for row in _changes(one.host, one.passed)]
    if changes:
        show.table(changes, ("HOST", "WHAT", "BEFORE", "AFTER", "FREED", "DURATION"))
        show.text("")
    show.table([_cells(one) for one in results], ("OUTCOME", "HOST", "MODE", "DUE", "RECLAIMED", "SIZE", "WHY"))
    print_sum(results)


def _changes(host: str, found: ServerPass) -> Iterator[tuple[str, ...]]:
    """Each disk and each node, the GPUs, and the whole pass; nothing for a plan, after which nothing is read again."""
    if not any(place.outcomes for place in found.places) and found.gpus_after is None:
        return
    for change in (node for place in found.places for node in place.nodes):
        before, after = (_figures(change, one) for one in (change.before, change.after))
        yield host, f"{change.kind} {change.name}", before, after, _freed(change), ""
    if found.gpus_before is not None:
        before, after = (f"{one.free} of {one.number}" if one else "?" for one in (found.gpus_before, found.gpus_after))
        yield host, "free GPUs", before, after, str(found.gpus_back), ""
    took = "?" if found.seconds is None else span_in_words(timedelta(seconds=found.seconds))
    yield host, "pass", "", "", size_in_words(found.bytes_back), took


def _figures(change: NodeChange, found: Figures | None) -> str:
    if found is None:
        return "?"
    if change.kind != "disk":
        return "?" if isinstance(found.bytes, Unknown) else size_in_words(found.bytes)
    size = f" of {size_in_words(found.disk_size)}" if found.disk_size is not None else ""
    return "?" if found.disk is None else f"{found.disk.used:.0%}{size}"


def _freed(change: NodeChange) -> str:
    """As measured before and after, whoever freed it."""
    before, after = change.before.bytes, change.after.bytes if change.after is not None else Unknown("not read again")
    if isinstance(before, Unknown) or isinstance(after, Unknown):
        return "?"
    return size_in_words(max(0, before - after))


def print_sum(results: Sequence[ServerResult]) -> None:
    counted = Counter(one.outcome for one in results)
    parts = ", ".join(f"{counted[outcome]} {outcome}" for outcome in Outcome if counted[outcome])
    show.text(f"\n{in_words(len(results))}: {parts}.")


def in_words(number: int) -> str:
    return f"{number} server{'s' if number != 1 else ''}"


def _cells(one: ServerResult) -> tuple[str, ...]:
    words = "; ".join(one.words)
    if one.passed is None or one.passed.problem:
        return (one.outcome.value, one.host, "?", "?", "?", "?", words)
    places = one.passed.places
    due = sum(len(place.steps) for place in places)
    done = sum(step.result == RECLAIMED for place in places for step in place.outcomes)
    size = size_in_words(one.passed.bytes_back)
    return (one.outcome.value, one.host, one.passed.mode, str(due), str(done), size, words)


def _row(one: ServerResult) -> dict[str, object]:
    found = one.passed
    return {
        "host": one.host,
        "outcome": one.outcome,
        "words": one.words,
        "mode": found.mode if found else None,
        "exit_code": found.code if found else None,
        "seconds": found.seconds if found else None,
        "bytes_back": found.bytes_back if found else None,
        "gpus_back": found.gpus_back if found else None,
        "gpus_before": found.gpus_before if found else None,
        "gpus_after": found.gpus_after if found else None,
        "places": found.places if found else None,
    }
