"""Passes on many servers or nodes, for people and as JSON: a line for each step, a row for each server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import typer

from gpukeeper.interfaces.terminal import show
from gpukeeper.model.words import size_in_words
from gpukeeper.rollout.execute import RECLAIMED, Outcome, ServerResult, steps

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
    show.table([_cells(one) for one in results], ("OUTCOME", "HOST", "MODE", "DUE", "RECLAIMED", "SIZE", "WHY"))
    print_sum(results)


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
    size = size_in_words(sum(place.bytes_back for place in places))
    return (one.outcome.value, one.host, one.passed.mode, str(due), str(done), size, words)


def _row(one: ServerResult) -> dict[str, object]:
    found = one.passed
    return {
        "host": one.host,
        "outcome": one.outcome,
        "words": one.words,
        "mode": found.mode if found else None,
        "exit_code": found.code if found else None,
        "places": found.places if found else None,
    }
