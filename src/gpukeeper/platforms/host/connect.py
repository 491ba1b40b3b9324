"""How this machine is reached: its name, its users, and blocking work that must not stop the loop."""

from __future__ import annotations

import asyncio
import pwd
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias, TypeVar

import msgspec

from gpukeeper.model.decision import Unseen
from gpukeeper.model.subject import Subject

T = TypeVar("T")
Page: TypeAlias = tuple[tuple[Subject, ...], tuple[Unseen, ...]]
PAGE = 500  # subjects
A_MOMENT = timedelta(seconds=5)  # for work that ends by itself at its deadline to say so


class Patience(msgspec.Struct, frozen=True):
    """How long each kind of look may take."""

    gpus: timedelta = timedelta(seconds=10)
    processes: timedelta = timedelta(seconds=30)
    tree: timedelta = timedelta(minutes=5)
    trees: timedelta = timedelta(minutes=15)  # all of one pass; the rest is listed and not measured


def hostname() -> str:
    return socket.gethostname()


def user_name(uid: int) -> str:
    """The number itself when nobody has it any more: `ls` does the same."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


async def in_thread(work: Callable[[], T], deadline: timedelta) -> T:
    """TimeoutError when it takes longer; the thread is then left behind.

    Not asyncio.to_thread: its threads are waited for when the program ends, and a thread inside a dead network
    filesystem never ends.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(give: Callable[[], None]) -> None:
        if not answer.done():
            give()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # it belongs to whoever awaits the answer
            failure = error
            give: Callable[[], None] = lambda: answer.set_exception(failure)  # noqa: E731
        else:
            give = lambda: answer.set_result(result)  # noqa: E731
        try:
            loop.call_soon_threadsafe(tell, give)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    threading.Thread(target=run, name="gpukeeper-host", daemon=True).start()
    async with asyncio.timeout(deadline.total_seconds()):
        return await answer
