"""How `explain` shows its platform's own view: the tree keeps its indentation, each cause has its remedy below it."""

from __future__ import annotations

import pytest

from gpukeeper.interfaces.cli.explain import _print_diagnosis
from gpukeeper.model.subject import Cause, Diagnosis
from gpukeeper.model.unknown import Unknown


def test_the_tree_and_every_cause_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    tree = ("trainjob/run-7  succeeded 2h ago", "  jobset/run-7  not finished")
    causes = (Cause("a TrainJob has no TTL", "Give it one"), Cause("Event, 1m ago: \x1b[2Jcleared"))
    _print_diagnosis(Diagnosis(tree, causes))
    assert capsys.readouterr().out.splitlines() == [
        "",
        "Owner tree:",
        "  trainjob/run-7  succeeded 2h ago",
        "    jobset/run-7  not finished",
        "",
        "Why it still exists:",
        "  - a TrainJob has no TTL",
        "    Give it one",
        "  - Event, 1m ago: \N{REPLACEMENT CHARACTER}[2Jcleared",
    ]


def test_nothing_to_say_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _print_diagnosis(Diagnosis())
    assert not capsys.readouterr().out


def test_what_could_not_be_queried_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    _print_diagnosis(Unknown("the cluster did not answer"))
    assert "could not be determined: the cluster did not answer" in capsys.readouterr().out
