"""A receiver of messages in a process of its own, as tests read from it."""

from __future__ import annotations

import json
import subprocess
import sys
from queue import Queue
from threading import Thread
from typing import Any

DEADLINE = 180.0  # seconds: a crowded machine needs long to load the plugins, and a message may be sent again


class Receiver:
    def __init__(self, kind: str) -> None:
        command = [sys.executable, "-m", "tests.real.notify.receivers", kind]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: Queue[str] = Queue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = self.next()

    def next(self) -> Any:
        return json.loads(self._lines.get(timeout=DEADLINE))

    def close(self) -> str:
        """What it got and was not read."""
        self.process.terminate()
        self.process.wait(timeout=60)
        self._reader.join(60)
        return "".join(self._lines.queue)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
