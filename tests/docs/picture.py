"""Renders the terminal picture in the README from real output: `python -m tests.docs.picture`. A test compares it.

The commands run on a folder fleet (see `platforms/simulated/folder.py`), whose ages are relative to now, so the output
is the same on every run, but for the clock. One workload of it was measured as idle, one as busy, one not at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import textwrap
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from gpukeeper.ledger.files import LEDGER_FILE
from gpukeeper.ledger.signals import open_signals
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Ref
from tests.docs.markdown import ROOT

PICTURE = ROOT / "docs" / "images" / "plan.svg"
COLUMNS = 116
COMMANDS = (("plan", "--verbose"), ("observe", "--gpus"))
PLACE, IDLE_MINUTES = "node-1", 109  # after the first warning, at one hour of five
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
# name: owner, GPUs, started, ended, outcome; ages from now
FLEET: dict[str, tuple[str, int, timedelta, timedelta | None, str | None]] = {
    "eval-ann": ("ann", 1, 3 * DAY, 2 * DAY, "succeeded"),
    "train-ann": ("ann", 2, 3 * DAY, 2 * DAY, "failed"),
    "sweep-bob": ("bob", 1, 5 * HOUR, None, None),
    "pretrain-eve": ("eve", 2, 20 * HOUR, None, None),
    "notebook-eve": ("eve", 1, 2 * HOUR, None, None),
}
BUSY_UNTIL = {"sweep-bob": IDLE_MINUTES, "pretrain-eve": 0}  # minutes ago
POLICY = """\
preset: shared-host
mode: plan
scope: {docker: {}}
"""
# What depends on the second at which it runs: the time of the snapshot, and ages counted in whole minutes.
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
_CLOCK = {
    re.compile(r"(?<=idle for )1h\d+m(\d+s)?"): "1h49m",
    re.compile(r"\(in 3h1?\dm(\d+s)?\)"): "(in 3h11m)",
    re.compile(r"\(in (1h\d?m?|59m(\d+s)?)\)"): "(in 1h)",
    re.compile(r"\(in (5h\d?m?|4h59m)\)"): "(in 5h)",
    re.compile(r"\(in 1d[45]h\)"): "(in 1d5h)",
    re.compile(r"(?<=was in use )(\d+m ago|just now)"): "just now",
    re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"): "2026-01-01 12:00:00 UTC",
}
_AT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC \(in ((?:\d+[dhm])+)\)")
_FONT = re.compile(r"\s*@font-face \{.*?\}\n", re.DOTALL)
_THEME = TerminalTheme(
    (24, 27, 33),
    (216, 220, 226),
    [
        *[(24, 27, 33), (240, 113, 120), (152, 195, 121), (229, 192, 123)],
        *[(97, 175, 239), (210, 140, 240), (86, 182, 194), (216, 220, 226)],
    ],
)


def picture() -> str:
    """The SVG of what the commands print now."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        _make_fleet(Path(folder))
        for number, command in enumerate(COMMANDS):
            console.print("\n" if number else "", end="")
            console.print(Text.assemble(("$ ", "bold green"), ("gpukeeper " + " ".join(command), "bold")))
            for line in Text.from_ansi(_output(Path(folder), command).rstrip()).split("\n"):
                console.print(_wrapped(line))
    svg = console.export_svg(title="gpukeeper on a simulated GPU server", theme=_THEME)
    return _FONT.sub("\n", svg).rstrip() + "\n"  # no fonts from the network


def _make_fleet(folder: Path) -> None:
    now = datetime.now(UTC)
    (folder / PLACE).mkdir()
    (folder / "policy.yaml").write_text(POLICY)
    number = 0
    for name, (owner, count, started, ended, outcome) in FLEET.items():
        devices = [f"GPU-{number + i}" for i in range(count)]
        number += count
        facts: dict[str, Any] = {"owner": owner, "state": "running" if ended is None else "ended", "devices": devices}
        facts |= {"created": (now - started).isoformat(), "started": (now - started).isoformat()}
        if ended is not None:
            facts |= {"ended": (now - ended).isoformat(), "outcome": outcome}
        file = folder / PLACE / f"{name}.json"
        file.write_text(json.dumps(facts))
        if name in BUSY_UNTIL:
            ref = Ref("docker", PLACE, "container", name, _uid(file))
            asyncio.run(_measure(folder, ref, devices, now, BUSY_UNTIL[name]))


def _uid(file: Path) -> str:
    facts = file.stat()
    return f"{facts.st_dev}:{facts.st_ino}"


async def _measure(folder: Path, ref: Ref, devices: list[str], now: datetime, busy_until: int) -> None:
    """What `gpukeeper serve` would have stored in the last hours."""
    (folder / "state").mkdir(mode=0o700, exist_ok=True)
    signals = open_signals(folder / "state" / LEDGER_FILE, write=True)
    for age in range(IDLE_MINUTES + 60, -1, -1):
        at = now - age * MINUTE
        use = 97.0 if age > busy_until or not busy_until else 0.0
        readings = [(Signal.GPU, device, use) for device in devices]
        readings += [(signal, "", 0.0) for signal in Signal if signal is not Signal.GPU]
        await signals.add([Sample(ref.key, *reading[:2], at, reading[2], since=at - MINUTE) for reading in readings])
    signals.close()


def _output(folder: Path, command: tuple[str, ...]) -> str:
    """What a person sees who types the command: results and messages, in colour."""
    environ = {
        "PATH": os.environ.get("PATH", ""),
        "TERM": "xterm-256color",
        "COLUMNS": "1000",  # ages are fixed first, then lines are wrapped: see `_wrapped`
        "HOME": str(folder),
        "GPUKEEPER_FLEET": f"folder:{folder / PLACE}",
        "GPUKEEPER_STATE": str(folder / "state"),
        "GPUKEEPER_POLICY": "policy.yaml",
    }
    ours, theirs = pty.openpty()
    program = [sys.executable, "-m", "gpukeeper", *command]
    with subprocess.Popen(program, cwd=folder, env=environ, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        printed = b"".join(iter(lambda: _read(ours), b"")).decode()
    os.close(ours)
    assert running.returncode == 0, printed
    printed = printed.replace("\r\n", "\n")
    for changing, fixed in _CLOCK.items():
        printed = changing.sub(fixed, printed)
    return _AT.sub(_at_the_fixed_time, printed)


def _at_the_fixed_time(found: re.Match[str]) -> str:
    """A time and its distance, as seen at NOON."""
    at = NOON + sum(
        (
            int(number) * {"d": DAY, "h": HOUR, "m": MINUTE}[unit]
            for number, unit in re.findall(r"(\d+)([dhm])", found[1])
        ),
        timedelta(),
    )
    return f"{at:%Y-%m-%d %H:%M} UTC (in {found[1]})"


def _wrapped(line: Text) -> Text:
    """The last column of a row wrapped to the width of the picture, as on a terminal of that width."""
    column = line.plain.rfind("  ") + 2
    first, *rest = textwrap.wrap(line.plain[column:], COLUMNS - column, break_on_hyphens=False) or [""]
    folded = line[: column + len(first)]
    return Text("\n").join([folded, *(Text(" " * column + one) for one in rest)])


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux reports the end of a terminal
        return b""


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(f"wrote {PICTURE.relative_to(ROOT)}")
