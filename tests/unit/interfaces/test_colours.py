"""When output has colours: NO_COLOR, then FORCE_COLOR, then TERM=dumb, then whether it is a terminal."""

from __future__ import annotations

import io

import pytest

from gpukeeper.interfaces.terminal.messages import colours, overwrites


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "terminal", "pipe"),
    [
        ({}, True, False),
        ({"TERM": "xterm"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        ({"FORCE_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": "false"}, False, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
    ],
)
def test_colours(environ: dict[str, str], terminal: bool, pipe: bool) -> None:
    assert colours(Terminal(), environ) is terminal
    assert colours(io.StringIO(), environ) is pipe


@pytest.mark.parametrize("environ", [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}])
def test_the_screen_is_cleared_on_a_terminal_with_or_without_colours(environ: dict[str, str]) -> None:
    assert overwrites(Terminal(), environ)
    assert not overwrites(io.StringIO(), environ)
    assert not overwrites(Terminal(), {**environ, "TERM": "dumb"})
