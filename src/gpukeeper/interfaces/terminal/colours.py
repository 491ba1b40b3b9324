"""When output has colours, and when lines may be overwritten: by the terminal and by NO_COLOR, FORCE_COLOR and TERM.

The order is that of Python's own tools: NO_COLOR, FORCE_COLOR, TERM=dumb, then whether it is a terminal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

_OFF = ("0", "false")  # FORCE_COLOR=0: without colours, as npm and its kin read it


def colours(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """An empty variable counts as one that is not set."""
    if environ.get("NO_COLOR"):
        return False
    if forced := environ.get("FORCE_COLOR"):
        return forced.lower() not in _OFF
    return environ.get("TERM") != "dumb" and stream.isatty()


def overwrites(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the screen can be cleared and a line be drawn again. Colours have nothing to do with it."""
    return environ.get("TERM") != "dumb" and stream.isatty()
