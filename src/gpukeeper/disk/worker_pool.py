"""Large trees are walked and deleted by two worker processes, not by threads: Python's threads gain nothing here.

They are given directories by path below one descriptor, and open them without following links. A worker that has done
its share of a directory returns the rest, so that both have work until the end, whatever the shape of the tree.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from gpukeeper.disk.walk import OUT_OF_TIME, Pending
from gpukeeper.processes import DIRECTORY, environment, module_command

# -P: the directory we were started in is not trusted, and -m would import from it first.
CHILD = module_command("gpukeeper.disk.worker")
HANDS = 2
AHEAD = 2  # lines sent ahead to each, so that none waits for us
JOBS_IN_A_LINE = 64
BYTES_IN_A_LINE = 3500  # of paths: lines sent ahead must fit into a pipe, or both sides wait for each other
GLANCE_SECONDS = 0.1  # at the clock
ENDING_SECONDS = 2.0
MEANWHILE = 1_000  # entries between two checks whether they are ready
ENDED = "lost one of its worker processes"


class WorkerPool:
    """The worker processes, started. They need a while until they are ready, in which the caller can work itself."""

    def __init__(self, work: str, top: int, settings: Mapping[str, Any]) -> None:
        self._start = work, top, settings
        self._hands: list[_Worker] = []
        self._ready = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        try:
            for _ in range(HANDS):
                hand = _Worker(_started(*self._start))
                self._hands.append(hand)
                self._ready.register(hand.output, selectors.EVENT_READ, hand)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ready.close()
        for hand in self._hands:
            hand.end()

    def is_ready(self) -> bool:
        """Or it has a result, such as that it ended."""
        return bool(self._ready.select(0))

    def share_out(
        self, jobs: list[Pending], accept: Callable[[dict[str, Any]], None], is_time_up: Callable[[], bool]
    ) -> str | None:
        """Until all directories are done. None, or why not."""
        waiting = list(jobs)
        while waiting or any(hand.given for hand in self._hands):
            try:
                _give(waiting, self._hands)
            except OSError:
                return ENDED
            if is_time_up():
                return OUT_OF_TIME
            for key, _ in self._ready.select(GLANCE_SECONDS):
                answers = key.data.answers()
                if answers is None:
                    return ENDED
                for answer in answers:
                    waiting += [(path.encode("latin-1"), depth) for path, depth in answer.pop("left_to_do")]
                    accept(answer)
        return None


class _Worker:
    """One worker process. `given`: lines it has not answered yet."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.input, self.output = process, process.stdin, process.stdout
        self.given, self.read, self.is_ready = 0, b"", False

    def give(self, jobs: list[Pending]) -> None:
        line = json.dumps([(path.decode("latin-1"), depth) for path, depth in jobs])
        os.write(self.input.fileno(), line.encode() + b"\n")
        self.given += 1

    def answers(self) -> list[dict[str, Any]] | None:
        """None: it ended."""
        read = os.read(self.output.fileno(), 1 << 20)
        if not read:
            return None
        *lines, self.read = (self.read + read).split(b"\n")
        if lines and not self.is_ready:
            self.is_ready, lines = True, lines[1:]
        self.given -= len(lines)
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """By itself where it can; a process that hangs in the disk is abandoned, since no signal reaches it."""
        with suppress(OSError):
            self.input.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if self.given else ENDING_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING_SECONDS)
        self.output.close()


def _give(waiting: list[Pending], hands: list[_Worker]) -> None:
    for ahead in range(1, AHEAD + 1):
        for hand in hands:
            if waiting and hand.given < ahead:
                # Fewer at a time towards the end, so that both finish together.
                count = max(1, min(JOBS_IN_A_LINE, len(waiting) // (2 * len(hands))))
                hand.give(_line(waiting, count))


def _line(waiting: list[Pending], count: int) -> list[Pending]:
    line = [waiting.pop()]
    size = len(line[0][0])
    while waiting and len(line) < count and size + len(waiting[-1][0]) <= BYTES_IN_A_LINE:
        line.append(waiting.pop())
        size += len(line[-1][0])
    return line


def _started(work: str, top: int, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    memory = os.memfd_create("gpukeeper-settings")
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(json.dumps(settings).encode())
        os.lseek(memory, 0, os.SEEK_SET)
        return subprocess.Popen(
            [*CHILD, work, str(top), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(top, memory),
            env=environment(),
            cwd=DIRECTORY,
        )
    finally:
        os.close(memory)
