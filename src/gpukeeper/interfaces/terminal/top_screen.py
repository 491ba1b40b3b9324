"""`top` on a terminal: the full screen with single keys, resizes and signals, whose mode is restored however the
program ends; and the picture as lines, for any width from 60 columns on: one line for each GPU where it is wide,
else two.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from gpukeeper.interfaces.terminal.messages import colours
from gpukeeper.interfaces.terminal.show import fact
from gpukeeper.lifecycle.claims import ClaimState
from gpukeeper.lifecycle.forecast import act_of, coming_in_brief
from gpukeeper.lifecycle.warnings import without_steps
from gpukeeper.model.policy import Mode
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, plain
from gpukeeper.views.fleet import TopView, ordered
from gpukeeper.views.live import GpuTile

WIDE = 150  # columns from which a GPU and its next step fit into one line
SOON = timedelta(hours=1)
GAP = "  "
HEAD = ("gpu", "use", "mem", "owner", "since", "class")
WIDTHS = (12, 4, 8, 8, 6, 12)  # of HEAD; what is wider is cut
HOLDER = 28  # the column that only wide terminals have
STYLES = {
    ClaimState.FREE: "green",
    ClaimState.UNSURE: "cyan",
    ClaimState.QUARANTINE: "red",
    ClaimState.ORPHAN: "yellow",
    ClaimState.BARE: "yellow",
    ClaimState.HELD: "yellow",
}


class Display(NamedTuple):
    """How it is shown: the order, and the first line."""

    sort: str = "gpu"
    reverse: bool = False
    first: int = 0


class Age(NamedTuple):
    """How old the data is, and for how long the next is being gathered. None: there is none."""

    data: timedelta | None = None
    gathering: timedelta | None = None
    late: bool = False  # longer than it should take
    problem: str = ""


def picture(view: TopView | None, display: Display, age: Age, width: int, height: int) -> Text:
    """Exactly `height` lines or fewer, none wider than `width`."""
    head = [_title(view, age, width)]
    if view is None:
        return _joined([*head, Text("Reading data …", style="dim"), _keys(display)], width)
    now = view.at + (age.data or timedelta())
    head.append(_heading(width, display.sort))
    foot = [*_notes(view, age, width), _keys(display)]
    room = max(1, height - len(head) - len(foot))
    listed = ordered(view.gpus, display.sort, reverse=display.reverse)[display.first :]
    shown, number = _fitting([_block(one, view, now, width) for one in listed[:room]], room)
    left = len(listed) - number
    if not view.gpus:
        shown = [Text("No GPUs found.", style="dim")]
    shown += (Text() for _ in range(room - len(shown)))  # the keys stay at the bottom
    if left or display.first:
        foot[-1].append(f"  {display.first}↑ {left}↓")
    return _joined([*head, *shown, *foot][:height], width)


def scrolled(display: Display, key: str, count: int) -> Display:
    steps = {"up": -1, "down": 1, "page up": -8, "page down": 8, "home": -count}
    return display._replace(first=max(0, min(display.first + steps.get(key, 0), count - 1)))


def _joined(lines: Sequence[Text], width: int) -> Text:
    for line in lines:
        line.no_wrap = True
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, end="").join(lines)


def _title(view: TopView | None, age: Age, width: int) -> Text:
    """What it is, how old it is, and how many GPUs are in which state; the age first where little fits."""
    title = Text("gpukeeper top", style="bold")
    title.append(f"  {_age(age)}", style="bold yellow" if age.late or age.problem else "dim")
    if view is None:
        return title
    if view.mode is Mode.PLAN:
        title.append("  mode plan" if width < WIDE else "  mode plan: dry run", style="yellow")
    if view.paused is not None:
        title.append("  paused", style="yellow")
    counts = ", ".join(f"{number} {how.value}" for how, number in view.counts.most_common())
    return title.append(f"  {counts}", style="not bold")


def _age(age: Age) -> str:
    data = "no data" if age.data is None else f"{in_words(age.data)} old"
    return data + (f", refreshing for {in_words(age.gathering)}" if age.late and age.gathering is not None else "")


def _heading(width: int, sort: str) -> Text:
    names = ("gpu", "use", "memory", "owner")  # as the order is called
    heading = Text(style="bold")
    for number, (name, size) in enumerate(zip(HEAD, WIDTHS, strict=True)):
        is_sorted = number < len(names) and names[number] == sort
        heading.append(set_cell_size(name.upper(), size), style="underline" if is_sorted else "").append(GAP)
    last = Text("NEXT", style="underline" if sort == "next" else "")
    if width < WIDE:
        return heading  # what else there is stands below it
    return heading.append(set_cell_size("HELD BY", HOLDER) + GAP).append(last)


def _keys(display: Display) -> Text:
    return Text(f"q quit  s sort ({display.sort})  r reverse  ↑↓ scroll", style="dim")


def _notes(view: TopView, age: Age, width: int) -> list[Text]:
    """The newest problem, else the first note about unreadable objects or contradictions."""
    notes = [*([age.problem] if age.problem else []), *view.notes]
    if not notes:
        return []
    more = f" (+{len(notes) - 1}: gpukeeper observe)" if len(notes) > 1 else ""
    return [Text(_cut(plain(notes[0]), width - len(more)) + more, style="yellow")]


def _fitting(blocks: Sequence[list[Text]], room: int) -> tuple[list[Text], int]:
    """Lines of the blocks that fit, and how many blocks these are."""
    lines: list[Text] = []
    for number, block in enumerate(blocks):
        if lines and len(lines) + len(block) > room:
            return lines, number
        lines += block[:room]
    return lines, len(blocks)


def _block(line: GpuTile, view: TopView, now: datetime, width: int) -> list[Text]:
    several = len({one.place for one in view.gpus}) > 1
    cells = (
        _name(line, several=several),
        _use(line),
        _memory(line),
        fact(line.owner) if line.holder else "-",
        "-" if line.since is None else in_words(now - line.since),
        fact(line.class_) or "-" if line.holder else line.how.value,
    )
    first = Text()
    for cell, size in zip(cells, WIDTHS, strict=True):
        first.append(_padded(cell, size)).append(GAP)
    first.stylize(STYLES.get(line.how, ""), 0, WIDTHS[0])
    coming = _next(line, now)
    if width >= WIDE:
        return [first.append(_padded(_short(line), HOLDER)).append(GAP).append(coming)]
    if not line.holder and not coming.plain:
        return [first]
    below = Text("  ").append(_cut(_short(line), width // 2), style="bold" if line.holder else "")
    return [first, below.append(": " if line.holder else "").append(coming)]


def _name(line: GpuTile, *, several: bool) -> str:
    """Its own name is the last part; with several places the end of the place is before it."""
    own = line.name.rpartition("/")[2]
    if not several or cell_len(own) >= WIDTHS[0]:
        return own
    room = WIDTHS[0] - cell_len(own) - 1
    return f"{line.place[-room:]}/{own}" if room > 1 else own


def _short(line: GpuTile) -> str:
    """Without platform and place, which are the GPU's."""
    parts = line.holder.split("/", 2)
    return plain(parts[2] if line.key and len(parts) == 3 else line.holder)


def _use(line: GpuTile) -> str:
    if line.use is None:
        return "-"
    return "?" if isinstance(line.use, Unknown) else f"{'~' if line.use_is_old else ''}{line.use:.0f}%"


def _memory(line: GpuTile) -> str:
    """ "71/80G": used and all of it, in GiB."""
    if isinstance(line.memory_used_mib, Unknown):
        return "?"
    used = f"{line.memory_used_mib / 1024:.0f}"
    return f"{used}G" if isinstance(line.memory_total_mib, Unknown) else f"{used}/{line.memory_total_mib / 1024:.0f}G"


def _next(line: GpuTile, now: datetime) -> Text:
    """ "if it stays idle, will be warned in 1h, then stopped in 1h30m (idle): idle for 10m, allowed 1h"."""
    if not line.steps:
        return Text(plain(line.reason))
    words = coming_in_brief(line.steps, now)
    act = act_of(line.steps) or line.steps[-1]
    style = "red" if act.at is None or act.at <= now else "yellow" if act.at - now < SOON else "cyan"
    found = Text(f"{words} ({act.rule})", style=style)
    return found.append(f": {plain(without_steps(line.reason))}", style="default")


def _padded(words: str, size: int) -> str:
    return set_cell_size(_cut(plain(words), size), size)


def _cut(words: str, size: int) -> str:
    return words if cell_len(words) <= size else set_cell_size(words, max(1, size) - 1) + "…"


QUIT, INTERRUPTED, ENDED, RESIZED = "quit", "interrupted", "ended", "resized"
_SIGNALS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: ENDED, signal.SIGHUP: ENDED, signal.SIGWINCH: RESIZED}
_KEYS = {
    b"q": QUIT,
    b"Q": QUIT,
    b"\x03": INTERRUPTED,
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"j": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b" ": "page down",
    b"\x1b[H": "home",
    b"g": "home",
}


class Screen:
    """Draws, and waits for the next key or signal. `wake` may be called from another thread."""

    def __init__(self) -> None:
        self._console = Console(no_color=not colours(sys.stdout))
        self._live = Live(console=self._console, screen=True, auto_refresh=False, redirect_stdout=False)
        self._in, self._out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def size(self) -> tuple[int, int]:
        return self._console.size.width, self._console.size.height

    def draw(self, picture: RenderableType) -> None:
        self._live.update(picture, refresh=True)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # it is woken anyway
            os.write(self._out, b"\0")

    def wait(self, seconds: float) -> list[str]:
        """Keys and signals since the last call, by name; after that time none."""
        stdin = sys.stdin.fileno()
        ready, _, _ = select.select([stdin, self._in], [], [], max(0.0, seconds))
        events: list[str] = []
        if self._in in ready:
            received = os.read(self._in, 1024)
            events += (name for number, name in _SIGNALS.items() if number in received)
        if stdin in ready:
            keys = _read(stdin)
            events += _named(keys) if keys else [ENDED]  # the terminal is gone
        return events

    @contextmanager
    def opened(self) -> Iterator[Screen]:
        """Without echo and line editing. Ctrl-Z is off: a stopped program would leave the terminal in this mode."""
        stdin = sys.stdin.fileno()
        with ExitStack() as undo:
            undo.callback(os.close, self._in)
            undo.callback(os.close, self._out)
            before = termios.tcgetattr(stdin)
            undo.callback(_restore, stdin, before)
            undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._out, warn_on_full_buffer=False))
            for number in _SIGNALS:
                undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))
            tty.setcbreak(stdin)
            mode = termios.tcgetattr(stdin)
            mode[6][termios.VSUSP] = b"\0"
            termios.tcsetattr(stdin, termios.TCSADRAIN, mode)
            undo.callback(self._leave)
            self._live.start()
            yield self

    def _leave(self) -> None:
        with suppress(OSError):  # a terminal that is gone
            self._live.stop()


def _read(stdin: int) -> bytes:
    try:
        return os.read(stdin, 64)
    except OSError:
        return b""


def _restore(stdin: int, mode: list[Any]) -> None:
    with suppress(termios.error):  # a terminal that is gone
        termios.tcsetattr(stdin, termios.TCSADRAIN, mode)


def _named(keys: bytes) -> list[str]:
    """Of one read: a key that sends several bytes comes whole; others one by one."""
    if keys in _KEYS:
        return [_KEYS[keys]]
    if keys.startswith(b"\x1b"):
        return []
    return [_KEYS.get(bytes([one]), chr(one)) for one in keys]
