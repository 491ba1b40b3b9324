"""A daemon with a dashboard, as tests see it: its address, its log, its web process; and people who log in."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import IO, Any, TypeVar

from playwright.sync_api import Page, expect

SOON = 90_000  # milliseconds, on a crowded machine
DEADLINE = 120.0  # seconds
T = TypeVar("T")


def until(read: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """Read until the answer is true, and return it."""
    ends = time.monotonic() + deadline
    while not (seen := read()):
        assert time.monotonic() < ends, f"not within {deadline:.0f} s: {what} (last seen: {seen!r})"
        time.sleep(0.05)
    return seen


def apart(work: Coroutine[Any, Any, T]) -> T:
    """In a thread: the browser's driver has an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


class Serving:
    """`gpukeeper serve --web 0` that was just started. Its output is read, so that it never waits for us."""

    def __init__(self, daemon: subprocess.Popen[str]) -> None:
        self.daemon, self.log = daemon, list[str]()
        self._readers = [self._collect(pipe) for pipe in (daemon.stdout, daemon.stderr) if pipe is not None]
        try:
            self.url = until(self._address, "the dashboard is served")
        except BaseException:
            self.kill9()
            raise

    @property
    def pid(self) -> int:
        return self.daemon.pid

    def web_pids(self) -> list[int]:
        """Those that serve the pages: one, or none while it is started again."""
        return [pid for pid in _children(self.pid) if b"gpukeeper.interfaces.web" in _read(pid, "cmdline")]

    def end(self) -> None:
        """As an administrator does."""
        self.daemon.terminate()
        self._ended()
        assert self.daemon.returncode == 0, "\n".join(self.log[-20:])

    def kill9(self) -> None:
        self.daemon.kill()
        self._ended()

    def _ended(self) -> None:
        self.daemon.wait(timeout=DEADLINE)
        for reader in self._readers:
            reader.join(DEADLINE)

    def _collect(self, pipe: IO[str]) -> Thread:
        thread = Thread(target=self._read, args=(pipe,), daemon=True)
        thread.start()
        return thread

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self.log.append(line.rstrip())

    def _address(self) -> str:
        assert self.daemon.poll() is None, "\n".join(self.log[-20:])
        return next((found[1] for line in self.log if (found := re.search(r"dashboard on (http://[^/\s]+)", line))), "")


def log_in(page: Page, link: str) -> None:
    page.goto(link, wait_until="domcontentloaded")
    page.get_by_role("button", name="Log in here").click()
    expect(page.get_by_role("button", name="Log out")).to_be_visible(timeout=SOON)


def open_workload(page: Page, url: str, name: str) -> None:
    """From the list, where it is as soon as a pass has seen it."""
    link = page.get_by_role("link", name=re.compile(rf"\b{re.escape(name)}$"))
    until(lambda: page.goto(f"{url}/workloads", wait_until="domcontentloaded") and link.count(), f"{name} is listed")
    link.click()
    expect(page.get_by_role("heading", name="What comes next")).to_be_visible(timeout=SOON)


def reload_until(page: Page, words: str | re.Pattern[str]) -> None:
    """Until the page has these words."""
    until(
        lambda: page.reload(wait_until="domcontentloaded") and page.get_by_text(words).count(),
        f"{page.url} shows {words!r}",
    )


def _children(pid: int) -> list[int]:
    return [int(one.name) for one in Path("/proc").glob("[0-9]*") if _parent(int(one.name)) == pid]


def _parent(pid: int) -> int:
    stat = _read(pid, "stat").rpartition(b")")[2].split()
    return int(stat[1]) if len(stat) > 1 else 0


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # it ended meanwhile
