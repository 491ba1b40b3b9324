"""A missing permission is a sentence with what to do next, never a traceback."""

from __future__ import annotations

import os
import sys

import pytest
import typer

from gpukeeper.interfaces.cli.main import run_app


def refused(problem: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise problem

    monkeypatch.setattr(sys, "argv", ["gpukeeper"])
    assert run_app(app) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (PermissionError(13, os.strerror(13), "/etc/shadow"), "/etc/shadow cannot be used by you (Permission denied)"),
        (PermissionError(13, os.strerror(13), b"/tmp/\xff"), "/tmp/"),
        (PermissionError(1, os.strerror(1)), "cannot be used by you (Operation not permitted)"),
        (BaseExceptionGroup("tasks", [PermissionError(13, os.strerror(13), "/dev/kmsg")]), "/dev/kmsg cannot be used"),
    ],
)
def test_whatever_part_of_a_command_has_not_expected_it(
    problem: BaseException, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    err = refused(problem, capsys, monkeypatch)
    assert said in err
    assert "root with sudo" in err
    assert "Traceback" not in err
