"""The options that plan, apply and observe share are declared once and reach a command as one value."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from gpukeeper.interfaces.terminal import options as o
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.errors import UsageError
from tests.unit.lifecycle.examples import HOUR


def run(*words: str) -> tuple[o.SelectionByClass, bool]:
    given: list[tuple[o.SelectionByClass, bool]] = []
    app = typer.Typer()

    @app.command()
    @o.with_options
    def command(selection: o.SelectionByClass, json: o.Json = False) -> None:
        given.append((selection, json))

    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return given[0]


def test_nothing_given_means_everything() -> None:
    selection, json = run()
    assert (selection, json) == (o.SelectionByClass(), False)
    assert selection.narrow == Narrow()


def test_every_option_narrows_but_the_platform_which_a_session_is_opened_for() -> None:
    selection, json = run("--platform", "docker", "--owner", "bob", "--older-than", "1h", "--class", "api", "--json")
    assert json
    assert selection.platform == "docker"
    assert selection.narrow == Narrow(owner="bob", older_than=HOUR, class_="api")


def test_an_outcome_that_does_not_exist_is_refused() -> None:
    selection, _ = run("--outcome", "fine")
    with pytest.raises(UsageError, match="fine"):
        _ = selection.narrow
